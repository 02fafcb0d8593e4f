"""Writes the README's measured table from a result, so that it cannot drift from it.

python docs/results/table.py docs/results/demo_cpu.json          # rewrite the README
python docs/results/table.py docs/results/demo_cpu.json --check  # exit 1 if it would change
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"(<!-- measured: .*? -->\n).*?(<!-- /measured -->)", re.DOTALL)


def table(result: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        spread = result[name]
        return (
            f"{1e3 * spread['median']:.1f} ms ({1e3 * spread['min']:.1f}-{1e3 * spread['max']:.1f})"
        )

    def mib(size: float) -> str:
        return f"{size / 2**20:.0f} MiB"

    held = mib(result["weights_bytes"] + result["kv_bytes"])
    rows = [
        ("wake (map, copy the image, resume)", ms("wake_s")),
        ("sleep (pause, unmap)", ms("sleep_s")),
        ("TTFT over HTTP, replica awake", ms("ttft_awake_s")),
        ("TTFT over HTTP, replica asleep", ms("ttft_asleep_s")),
        (f"memory given back asleep, of {held} mapped awake", mib(result["released_bytes"])),
    ]
    weights = mib(result["weights_bytes"])
    head = f"{result['model']} model, {weights} of weights; {result['hardware']}"
    lines = [f"| {head} | median (min-max) of {result['cycles']} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    text = table(json.loads(arguments.result.read_text()))
    after = _BLOCK.sub(lambda found: found[1] + text + found[2], before)
    if arguments.check:
        return int(after != before)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
