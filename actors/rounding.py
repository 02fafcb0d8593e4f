"""Whole numbers, rounded up.

For hosts that launch kernels: Triton's functions of these names may be called in kernels, too, and take a host some
ten microseconds each.
"""


def cdiv(n: int, parts_of: int) -> int:
    """How many parts of that size hold `n`."""
    return -(-n // parts_of)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is `n` or more, of 1 or more."""
    return 1 << (n - 1).bit_length()
