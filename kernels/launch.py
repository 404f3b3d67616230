"""Arithmetic of launches, in plain Python, and the GPU that they are for."""

import torch


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own function takes half the time of a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n > 0."""
    return 1 << (n - 1).bit_length()


def capability(device: torch.device) -> int:
    """Major compute capability of a GPU; that of Hopper where Triton interprets.

    Consumer Blackwell (12) has the instructions and shared memory of sm_89: 8.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return 8 if major == 12 else major


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H100 where Triton interprets."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
