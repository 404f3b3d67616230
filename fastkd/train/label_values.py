"""What stands in a column of labels, as a name or as a number."""

from typing import Any

import torch

LARGEST = float(torch.finfo(torch.float32).max)


def as_number(label: Any) -> float | None:
    """``label`` as a number that float32 holds, if it is one."""
    if isinstance(label, bool) or label is None or "_" in str(label):  # Python reads 1_0 as 10
        return None
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def as_name(label: Any) -> str:
    """``label`` as the name of a class."""
    return label.strip() if isinstance(label, str) else str(label)
