"""Writes the README's measured table from results, so that it cannot drift from them.

python docs/results/table.py            # rewrite the README
python docs/results/table.py --check    # exit 1 if it would change
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
README = RESULTS.parents[1] / "README.md"
RUN = RESULTS / "2026-11-21_h200"
_BLOCK = re.compile(r"(<!-- measured: .*? -->\n).*?(<!-- /measured -->)", re.DOTALL)


def table(result: dict[str, Any], http: dict[str, Any]) -> str:
    def ms(name: str, of: dict[str, Any] = result) -> str:
        found = of[name]
        return f"{1e3 * found['median']:.1f} ms ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"

    gb = result["weights_bytes"] / 1e9
    rate = result["gb_per_s"]["median"]
    mapped = (result["weights_bytes"] + result["kv_bytes"]) / 2**30
    asleep = result["asleep_bytes"]["median"] / 2**30
    rows = [
        ("first token of a sleeping replica", ms("ttft_asleep_s")),
        ("the same over HTTP, through Ray Serve", ms("ttft_asleep_s", http)),
        (f"the link's own time for the {gb:.2f} GB, at {rate:.1f} GB/s", ms("link_s")),
        ("first token of an awake replica", ms("ttft_awake_s")),
        ("the same over HTTP", ms("ttft_awake_s", http)),
        ("going to sleep", ms("sleep_s")),
        (f"left on the card asleep, of {mapped:.1f} GiB weights and KV cache", f"{asleep:.2f} GiB"),
        ("image for the first replica: page cache to object store", f"{result['image_s']:.1f} s"),
        ("image for a second replica of the node", f"{result['second_image_s']:.2f} s"),
        (
            f"wrong answers in {result['cycles'] + http['cycles']} cycles",
            str(result["wrong"] + http["wrong"]),
        ),
    ]
    head = f"7B shape, bf16, one {result['device']}; in the replica's process"
    lines = [f"| {head} | median (min-max) |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    wake, http = (json.loads((RUN / name).read_text()) for name in ("wake.json", "http.json"))
    text = table(wake, http)
    after = _BLOCK.sub(lambda found: found[1] + text + found[2], before)
    if arguments.check:
        return int(after != before)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
