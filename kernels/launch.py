"""Arithmetic of launches, in plain Python, the GPU that they are for, and its precision."""

import torch


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own function takes half the time of a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n > 0."""
    return 1 << (n - 1).bit_length()


def capability(device: torch.device) -> int:
    """Major compute capability of a GPU; that of Hopper where Triton interprets."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def multiplies_in_float32() -> bool:
    """Whether products of float32 matrices may not be rounded to tf32 or bfloat16.

    torch 2.9 has two interfaces, and `torch.get_float32_matmul_precision` raises where the newer
    one was written, as transformers' ``TrainingArguments(tf32=True)`` does.
    """
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision in ("ieee", "none")
    return torch.get_float32_matmul_precision() == "highest"
