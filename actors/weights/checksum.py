"""A checksum that CPU and GPU compute alike, at the speed of the memory it reads."""

import torch

from actors.weights.layout import Checksum

_CHUNK_WORDS = 1 << 17  # 1 MiB: temporaries stay in a CPU's cache
_CUDA_CHUNK_WORDS = 1 << 25  # 256 MiB: few kernels
_LEAST_WORDS = 1 << 17  # where memory is short


def checksum(data: torch.Tensor) -> Checksum:
    """Of 64-bit words x_i, modulo 2^64: the sum of x_i, and the sum of (i + 1) x_i.

    A Fletcher-like pair (Fletcher 1982): the first sum changes with any changed bit, the second with
    words that swapped places. Reads the memory once and waits for the result. Where there is
    little memory left beside the weights, in smaller parts.

    Args:
        data: contiguous, a multiple of 8 bytes, 8-byte aligned.

    Raises:
        torch.OutOfMemoryError: there are not even 2 MiB.
    """
    words = data.view(torch.int64)
    step = _CUDA_CHUNK_WORDS if data.is_cuda else _CHUNK_WORDS
    while True:
        try:
            return _checksum(words, step)
        except torch.OutOfMemoryError:
            if step <= _LEAST_WORDS:
                raise
            if data.is_cuda:
                torch.cuda.empty_cache()
            step = max(step // 16, _LEAST_WORDS)


def _checksum(words: torch.Tensor, step: int) -> Checksum:
    weights = torch.arange(1, min(step, words.numel()) + 1, device=words.device)
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        total = part.sum()
        plain += total
        weighted += (part * weights[: part.numel()]).sum() + start * total
    return Checksum(int(plain), int(weighted))
