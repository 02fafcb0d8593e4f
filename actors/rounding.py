"""Whole numbers, rounded up.

Also for hosts that launch kernels: Triton's functions of the first and the last name may be called in kernels, too, and
take a host some microseconds each.
"""


def cdiv(n: int, parts_of: int) -> int:
    """How many parts of that size hold `n`."""
    return -(-n // parts_of)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is `n` or more."""
    return cdiv(n, multiple) * multiple


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is `n` or more, of 1 or more."""
    return 1 << (n - 1).bit_length()
