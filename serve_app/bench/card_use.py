"""How busy a card is while something is measured, by its driver."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_EVERY_MS = 500  # the driver looks back over a sixth of a second to a second
_END_S = 10.0


@contextmanager
def shares_busy(card: str) -> Iterator[Sequence[float]]:
    """Shares of the time in which a kernel ran on the card, one for each half second; there when the block ends.

    Args:
        card: as `nvidia-smi -L` has it. Of anything else, like a CPU, and where the driver does not tell,
            there are none.
    """
    shares: list[float] = []
    if not card.startswith("GPU-"):
        yield shares
        return
    asked = ["nvidia-smi", f"--id={card}", "--query-gpu=utilization.gpu"]
    form = ["--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
    with subprocess.Popen(
        asked + form, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield shares
        finally:
            process.terminate()
            told, _ = process.communicate(timeout=_END_S)
            shares += [int(line) / 100 for line in told.splitlines() if line.isdigit()]
