"""Errors that tests and executed kernels may have."""

import torch

# Allowed error relative to the oracle's norm, above the reference's own error in that dtype.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}
