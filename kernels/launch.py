"""Arithmetic of launches, in plain Python."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own function takes half of a launch's time for it."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least that is no smaller than a positive n."""
    return 1 << (n - 1).bit_length()
