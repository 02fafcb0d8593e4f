"""Noise without state: the same (seed, position, token id) gives the same number anywhere.

A sequence's random choices then depend on its own seed and length alone: not on its neighbours in
the batch, not on the row it sits in, not on how often it was frozen and started over.

The numbers are those of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014; constants of https://prng.di.unimi.it/splitmix64.c), which can be entered
at any index: output i of the stream `seed` is mix(seed + (i + 1) * GAMMA). A sequence's seed opens a
stream whose output `position` opens the stream whose output `token id` is the noise.

int64 stands for the reference's uint64: sums and products wrap alike, shifts need a mask.
"""

# B sequences, V vocabulary

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def gumbel(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V], float32, finite.

    `argmax(logits + gumbel)` is a draw from `softmax(logits)` (Gumbel 1954; Maddison, Tarlow,
    Minka: A* Sampling, 2014). No host synchronisation and no shape that depends on data, so it may
    be captured in a CUDA graph.

    Args:
        seed_B: int64, any value.
        position_B: int64, the number of tokens generated before the one to draw.
        vocab_size: V.
    """
    key_B = splitmix64(splitmix64(seed_B, torch.zeros_like(seed_B)), position_B)
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=seed_B.device)
    bits_BV = splitmix64(key_B[:, None], token_V[None, :])
    # u from the upper 32 bits. An event of probability p is an exponential -log(1 - u) below about
    # p, and float32 is finest there; the other end only has to stay below 1.
    u_BV = ((bits_BV >> 32) & 0xFFFFFFFF).to(torch.float32)
    u_BV.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_BELOW_ONE)
    return u_BV.neg_().log1p_().neg_().log_().neg_()


def splitmix64(seed: Tensor, index: Tensor) -> Tensor:
    """Output `index` of the SplitMix64 stream `seed`; int64, broadcast over both."""
    x = seed + (index + 1) * GAMMA
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        x.bitwise_xor_(_shift_right(x, shift)).mul_(multiplier)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
