"""Which cards the engine computes on. No torch."""

import shutil
from collections.abc import Sequence
from pathlib import Path

MIN_CAPABILITY = (8, 0)


def has_nvidia_driver() -> bool:
    """Whether there is a driver, and so a card, on this machine; it is not asked."""
    return Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))


def card_problem(capability: Sequence[int]) -> str | None:
    """Why nothing can be served on a card of this compute capability, in one line; None if it can.

    Before 8.0 (Ampere) torch's flash kernel refuses half precision
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), and Triton, whose kernels check
    each wake, sample and decode, does not support the card (its README, 3.7).
    """
    if tuple(capability) >= MIN_CAPABILITY:
        return None
    found, needed = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
    return f"a card of compute capability {found}; the attention and Triton kernels need {needed} (Ampere)"
