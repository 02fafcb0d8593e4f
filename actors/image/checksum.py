"""A checksum that CPU and GPU compute alike, at the speed of the memory it reads.

Of 64-bit words x_i, modulo 2^64: the sum of x_i, and the sum of (i + 1) x_i. A Fletcher-like pair
(Fletcher 1982): the first sum changes with any changed bit, the second with words that swapped places.
"""

from collections.abc import Callable

import torch

from actors.image.layout import Checksum

_CHUNK_WORDS = 1 << 17  # 1 MiB: temporaries stay in a CPU's cache


class Checksums:
    """The checksums of several pieces of a device's memory, begun one by one and read together.

    On a card they are computed on a stream of their own, in no memory but their results, so that a
    wake's segments can be checked while later ones still travel.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        """Make room for `count` results, and get the kernel ready."""
        self._sums = torch.zeros((count, 2), dtype=torch.int64, device=device)
        self._begun = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.begin(torch.zeros(16, dtype=torch.uint8, device=device))
            self.read()

    def begin(self, data: torch.Tensor, gate: Callable[[], None] = lambda: None) -> None:
        """Compute the next checksum; on a card, behind the caller's back.

        Args:
            data: contiguous, a multiple of 8 bytes, 8-byte aligned; it must stay until `read`.
            gate: has the current stream wait until the data are there.
        """
        index, self._begun = self._begun, self._begun + 1
        words = data.view(torch.int64)
        if self._stream is None:
            gate()
            found = checksum(data)
            self._sums[index] = torch.tensor([found.plain, found.weighted])
            return
        from actors.image.checksum_kernel import sum_words  # Triton is there where a GPU is

        with torch.cuda.stream(self._stream):
            gate()
            sum_words(words, self._sums[index].zero_())

    def read(self) -> list[Checksum]:
        """What was begun since the last call, in its order. Waits for it.

        Raises:
            RuntimeError: torch's, for any CUDA error.
        """
        count, self._begun = self._begun, 0
        with torch.cuda.stream(self._stream):
            sums = self._sums[:count].cpu()
        return [Checksum(plain, weighted) for plain, weighted in sums.tolist()]


def checksum(data: torch.Tensor) -> Checksum:
    """Of host memory, in temporaries of 2 MiB.

    Args:
        data: contiguous, a multiple of 8 bytes, 8-byte aligned.
    """
    words = data.view(torch.int64)
    weights = torch.arange(1, min(_CHUNK_WORDS, words.numel()) + 1)
    plain = torch.zeros((), dtype=torch.int64)
    weighted = torch.zeros_like(plain)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        total = part.sum()
        plain += total
        weighted += (part * weights[: part.numel()]).sum() + start * total
    return Checksum(int(plain), int(weighted))
