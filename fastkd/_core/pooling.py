"""Pooling of token features to one row per sample."""

import torch
from torch import Tensor

from fastkd._core.numerics import working_dtype, zero_padding


def pool_tokens(x: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """Rows (B, D) from (B, N, D): the first real token (``"cls"``) or the mean (``"mean"``).

    ``mask`` (B, N) is bool. A sample without a real token gives zeros. The mean is in the working
    dtype: half precision would round it.
    """
    dtype = working_dtype(x) if how == "mean" else x.dtype
    if x.shape[1] == 0:
        return x.sum(1, dtype=dtype)
    if mask is None:
        return x[:, 0] if how == "cls" else x.mean(1, dtype=dtype)
    if how == "cls":
        # With left padding the first real token is not at position 0.
        first = mask.to(torch.uint8).argmax(1)  # (B,)
        rows = x.gather(1, first[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
        return torch.where(mask.any(1, keepdim=True), rows, 0)
    count = mask.sum(1, keepdim=True).clamp_min(1)  # (B, 1)
    return zero_padding(x, mask).sum(1, dtype=dtype) / count
