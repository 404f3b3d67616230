"""Arithmetic of launches, in plain Python."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own function takes half the time of a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n > 0."""
    return 1 << (n - 1).bit_length()
