"""How busy a card is while something is measured, and how full, by its driver."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_EVERY_MS = 500  # the driver looks back over a sixth of a second to a second
_END_S = 10.0
_MIB = 2**20


@dataclass(slots=True)
class CardUse:
    """One of each for each half second; there when the block ends.

    Attributes:
        busy: shares of the time in which a kernel ran.
        used_bytes: of the card, by all processes.
    """

    busy: list[float] = field(default_factory=list)
    used_bytes: list[int] = field(default_factory=list)


@contextmanager
def card_use(card: str) -> Iterator[CardUse]:
    """What the driver says of a card meanwhile.

    Args:
        card: as `nvidia-smi -L` has it. Of anything else, like a CPU, and where the driver does not tell,
            there is nothing.
    """
    use = CardUse()
    if not card.startswith("GPU-"):
        yield use
        return
    asked = ["nvidia-smi", f"--id={card}", "--query-gpu=utilization.gpu,memory.used"]
    form = ["--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
    with subprocess.Popen(
        asked + form, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield use
        finally:
            process.terminate()
            told, _ = process.communicate(timeout=_END_S)
            for line in told.splitlines():
                busy, _, used = line.partition(",")
                if busy.strip().isdigit():
                    use.busy.append(int(busy) / 100)
                if used.strip().isdigit():
                    use.used_bytes.append(int(used) * _MIB)
