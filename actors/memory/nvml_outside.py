"""A card's used memory by a process of its own: NVML blocks in one whose CUDA is suspended (driver 580)."""

import logging
import subprocess
import sys

logger = logging.getLogger(__name__)

_LIMIT_S = 10.0  # it takes a tenth of a second
_ASK = """
import sys, pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])).used)
"""


def used_bytes(uuid: str) -> int | None:
    """What everybody holds of a card; None where NVML cannot tell.

    Args:
        uuid: the card's, without the prefix "GPU-" or "MIG-".
    """
    for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
        try:
            asked = subprocess.run(
                [sys.executable, "-c", _ASK, name],
                capture_output=True,
                text=True,
                check=True,
                timeout=_LIMIT_S,
            )
            return int(asked.stdout)
        except (subprocess.SubprocessError, ValueError) as exc:
            why = getattr(exc, "stderr", None) or exc
            logger.info("NVML tells nothing of %s: %s", name, why)
    return None
