"""Our policy and Ray Serve's default on the same traces, simulated: late requests, replicas created, memory held.

python -m tests.simulation                                # tables
python -m tests.simulation --docs docs/autoscaling.md     # also write them there

With measured figures; no GPU, no cluster, seconds. Serve's policy is the one in the installed Ray.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.simulation import systems, tables


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the traces")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write settings and figures there"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="write the tables there, between the file's marks"
    )
    asked = parser.parse_args(arguments)
    rows = systems.compare(asked.seed)
    for line in tables.text(rows):
        print(line)
    if asked.json is not None:
        found = json.dumps(systems.as_json(rows, asked.seed), indent=2)
        asked.json.write_text(found + "\n", encoding="utf-8")
    if asked.docs is not None:
        changed = tables.write_into(asked.docs, rows, asked.seed)
        print(f"{asked.docs}: {'written' if changed else 'up to date'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
