"""Labels: their values in a column, and names of classes, their meanings and order in a head."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch

from fastkd.train.errors import EmptyLabel, InputError
from fastkd.train.files import field

LARGEST = float(torch.finfo(torch.float32).max)
MOST_CLASSES_SHOWN = 20
# Two digits of three classes may miss 1 by this much.
SUM_TOLERANCE = 0.0101


def as_number(label: Any) -> float | None:
    """``label`` as a number within the range of float32; None if it is not one."""
    if isinstance(label, bool) or label is None or "_" in str(label):  # Python reads 1_0 as 10
        return None
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def score_of(value: Any, where: str) -> float:
    """``value`` as a score, a finite number."""
    found = as_number(value)
    if found is None or not math.isfinite(found):
        raise InputError(f"{where}: score {value!r:.40} is not a finite number")
    return found


def read_distribution(text: str) -> dict[str, float] | list[float] | None:
    """The distribution over classes in a label's JSON; None for the name of a class."""
    if text[:1] not in ("{", "["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def label_text(record: dict[str, Any], name: str, where: str) -> str:
    """The label in column ``name`` as text, whatever its type in the file."""
    label = field(record, name, where)
    if label is None or label == "":
        raise EmptyLabel(f"{where}: the label is empty")
    if not isinstance(label, str | int | float | Decimal):
        raise InputError(f"{where}: label {label!r:.40} is no word or number")
    if isinstance(label, float) and not math.isfinite(label):
        raise InputError(f"{where}: label {label} is not finite")
    try:
        text = str(label).strip()
    except ValueError:  # of too many digits
        raise InputError(f"{where}: the label has too many digits") from None
    if not text:
        raise EmptyLabel(f"{where}: the label is empty")
    return text


def class_names(config: Any) -> list[str]:
    """Class names of a head, from its configuration."""
    return [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels)]


def are_default_names(names: Sequence[str]) -> bool:
    """Whether ``names`` are transformers' for the classes of a head without names."""
    return [*names] == [f"LABEL_{i}" for i in range(len(names))]


def whole_numbers(names: Iterable[str]) -> bool:
    """Whether all ``names`` are whole numbers."""
    return all(re.fullmatch(r"-?\d{1,18}", name) for name in names)


def in_order(names: Iterable[str]) -> list[str]:
    """Class names in numeric order if all are whole numbers, else in alphabetical order."""
    found = sorted(names)  # 1 and 01 are two names of one number
    return sorted(found, key=int) if whole_numbers(found) else found


def read_as_ids(labels: Mapping[int, str], names: Sequence[str], where: str) -> str:
    """A line that prints how numbered ``labels`` are read as the classes ``names`` of a head.

    Raises:
        InputError: such classes usually have the opposite numbers.
    """
    if not labels or are_default_names(names):
        return ""
    index = {meaning(name): i for i, name in enumerate(names)}
    for low, high in USUAL_ORDER:
        if index.get(low, -1) > index.get(high, len(names)):
            raise InputError(
                f"{where}: label {index[high]} is the model's class {names[index[high]]!r} by its "
                f"number, and {names[index[low]]!r} as such labels are usually numbered; pass "
                f"--label-order with the data's labels in the model's order ({', '.join(names)})"
            )
    shown = [f"{label} is {names[i]!r}" for i, label in labels.items()][:MOST_CLASSES_SHOWN]
    return f"labels are read as numbers of the model's classes: {', '.join(shown)}"


# Pairs of meanings; the first has the smaller number in GLUE and on any scale.
USUAL_ORDER = (
    ("negative", "positive"),
    ("neg", "pos"),
    ("no", "yes"),
    ("false", "true"),
    ("unacceptable", "acceptable"),
    ("notequivalent", "equivalent"),
    ("entailment", "notentailment"),
    ("entailment", "contradiction"),
)


def meaning(name: str) -> str:
    """The name of a class without case and gaps; the value of a number."""
    number = as_number(name)
    if number is not None:
        return str(number)
    return re.sub(r"[\s._-]+", "", name).casefold() or name


def label_order(given: str, names: list[str], whose: str) -> list[str]:
    """The class names in --label-order, which must be each of ``names`` once."""
    order = [name.strip() for name in given.split(",")]
    if sorted(order) != sorted(names):
        raise InputError(
            f"--label-order {given}: must name each class of {whose} once, "
            f"and they are {', '.join(names)}"
        )
    return order


def classes_by_name(names: Sequence[str]) -> Callable[[str], int | None]:
    """A function from a name to the id of its class, or of the only class with its meaning."""
    exact = {name: i for i, name in enumerate(names)}
    meanings = [meaning(name) for name in names]
    meant = {word: i for i, word in enumerate(meanings) if meanings.count(word) == 1}
    return lambda name: exact.get(name, meant.get(meaning(name)))


def are_numbers_of(names: Sequence[str], head: Sequence[str]) -> bool:
    """Whether ``names`` are numbers of classes of a ``head`` whose own names are others."""
    numbers = {str(i) for i in range(len(head))}
    return bool(names) and not whole_numbers(head) and numbers.issuperset(names)


def with_classes_of(names: list[str], head: Sequence[str]) -> list[str]:
    """All classes of a ``head`` in its order, by the ``names`` that the data has for some of them.

    Data may name the classes, in several spellings, or number them. Where it has another class, or
    all of them once, the result is ``names``.
    """
    class_of = classes_by_name(head)
    ids = [class_of(name) for name in names]
    found = list(head)
    if are_numbers_of(names, head) and any(i is None for i in ids):
        ids, found = [int(name) for name in names], [str(i) for i in range(len(head))]
    if None in ids or (len(names) >= len(head) and len({*ids}) == len(ids)):
        return names
    for i, name in zip(ids, names, strict=True):
        if ids.count(i) == 1:
            found[i or 0] = name
    return found


def by_names(names: list[str], head: list[str]) -> list[str] | None:
    """``names`` in the order of a ``head`` with these classes or meanings; else None."""
    class_of = classes_by_name(names)
    ids = [class_of(name) for name in head]
    alike = len(head) == len(names) and {*ids} == {*range(len(names))}
    return [names[i] for i in ids if i is not None] if alike else None
