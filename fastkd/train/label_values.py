"""Values of a label column, as text or as a number."""

import math
from decimal import Decimal
from typing import Any

import torch

from fastkd.train.errors import InputError
from fastkd.train.input_columns import field, whole

LARGEST = float(torch.finfo(torch.float32).max)


def as_number(label: Any) -> float | None:
    """``label`` as a number within the range of float32; None if it is not one."""
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


def label_text(record: dict[str, Any], name: str, where: str) -> str:
    """The label in column ``name`` as text, whatever its type in the file."""
    label = whole(field(record, name, where), name, where)
    if label is None or label == "":
        raise InputError(f"{where}: the label is empty")
    if not isinstance(label, str | int | float | Decimal):
        raise InputError(f"{where}: label {label!r:.40} is no word or number")
    if isinstance(label, float) and not math.isfinite(label):
        raise InputError(f"{where}: label {label} is not finite")
    try:
        text = as_name(label)
    except ValueError:  # of too many digits
        raise InputError(f"{where}: the label has too many digits") from None
    if not text:
        raise InputError(f"{where}: the label is empty")
    return text
