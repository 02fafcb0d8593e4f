"""The seam between an arena and the memory it stands on."""

from typing import Protocol

import torch


class MemoryDriver(Protocol):
    """Reserves address ranges and puts physical memory behind them.

    Addresses never change between `reserve` and `release`, so tensors on a range stay valid objects
    while it is unmapped; touching their elements then is a bug of the caller (CUDA: an illegal
    address; CPU: zeroes).
    """

    device: torch.device
    granularity: int  # bytes; ranges and their parts are multiples of it

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses; nothing is mapped yet.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    def map(self, address: int, size: int) -> None:
        """Put zeroed or undefined physical memory behind a part of a reservation.

        Raises:
            DeviceMemoryError: the driver refused; the part is left unmapped.
        """

    def unmap(self, address: int, size: int) -> None:
        """Give the physical memory of a mapped part back.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    def release(self, address: int, size: int) -> None:
        """End a reservation. Its tensors must be gone."""

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """The range as a flat uint8 tensor, without touching its memory."""

    def copy_from_host(self, address: int, host: memoryview) -> None:
        """Copy host bytes to a mapped part; returns when they have arrived."""
