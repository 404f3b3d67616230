"""Names of classes: their meanings, and their order in a head."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastkd.train.errors import InputError
from fastkd.train.label_values import as_number

MOST_CLASSES_SHOWN = 20


def class_names(config: Any) -> list[str]:
    """Class names of a head, from its configuration."""
    return [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels)]


def whole_numbers(names: Iterable[str]) -> bool:
    """Whether all ``names`` are whole numbers."""
    return all(re.fullmatch(r"-?\d{1,18}", name) for name in names)


def read_as_ids(labels: Mapping[int, str], names: Sequence[str], where: str) -> str:
    """A line that prints how numbered ``labels`` are read as the classes ``names`` of a head.

    Raises:
        InputError: such classes usually have the opposite numbers.
    """
    if not labels or all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ""
    place = {meaning(name): i for i, name in enumerate(names)}
    for low, high in USUAL_ORDER:
        if place.get(low, -1) > place.get(high, len(names)):
            raise InputError(
                f"{where}: label {place[high]} is the model's class {names[place[high]]!r} by its "
                f"number, and {names[place[low]]!r} as such labels are usually numbered; pass "
                f"--label-order with the data's labels in the model's order ({', '.join(names)})"
            )
    shown = [f"{label} is {names[i]!r}" for i, label in labels.items()][:MOST_CLASSES_SHOWN]
    return f"labels are read as numbers of the model's classes: {', '.join(shown)}"


# Pairs of meanings; the first has the smaller number in GLUE and on any scale.
USUAL_ORDER = (
    ("negative", "positive"),
    ("no", "yes"),
    ("unacceptable", "acceptable"),
    ("notequivalent", "equivalent"),
    ("entailment", "notentailment"),
    ("entailment", "contradiction"),
)
# The word of a class by each of its synonyms.
SYNONYMS = {
    word: group[0]
    for group in (
        ("negative", "neg"),
        ("positive", "pos"),
        ("yes", "true"),
        ("no", "false"),
        ("entailment", "entail", "entails"),
        ("contradiction", "contradict", "contradicts"),
        ("notentailment", "nonentailment"),
        ("equivalent", "paraphrase"),
        ("notequivalent", "notparaphrase"),
        ("acceptable", "grammatical"),
        ("unacceptable", "ungrammatical"),
    )
    for word in group
}


def meaning(name: str) -> str:
    """The name of a class without case, gaps and synonyms; the value of a number."""
    number = as_number(name)
    if number is not None:
        return str(number)
    word = re.sub(r"[\s._-]+", "", name).casefold()
    return SYNONYMS.get(word, word) or name


def label_order(given: str, names: list[str], whose: str) -> list[str]:
    """The class names in --label-order, which must be each of ``names`` once."""
    order = [name.strip() for name in given.split(",")]
    if sorted(order) != sorted(names):
        raise InputError(
            f"--label-order {given}: must name each class of {whose} once, "
            f"and they are {', '.join(names)}"
        )
    return order


def by_names(names: list[str], head: list[str]) -> list[str] | None:
    """``names`` in the order of a ``head`` with these classes or meanings; else None."""
    if sorted(head) == sorted(names):
        return head
    ours = {meaning(name): name for name in names}
    meant = [meaning(name) for name in head]
    if len(ours) == len(names) and sorted(meant) == sorted(ours):
        return [ours[name] for name in meant]
    return None
