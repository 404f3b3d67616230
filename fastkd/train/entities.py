"""Entities in tagged words, and their precision, recall and F1, as conlleval counts them."""

import re
from collections.abc import Iterable, Sequence

OUTSIDE = "O"
# Begin, inside, middle; end, last; single, unit: IOB1, IOB2, IOBES, BMES, BILOU. The type may be
# missing.
MARKED = re.compile(r"([BIMELSU])(?:-(.+))?", re.DOTALL)

# Marks after which an entity may continue, and marks that continue it.
INNER, FOLLOWING = ("B", "I", "M"), ("I", "M", "E", "L")

Entity = tuple[int, int, str]


def is_marked(tag: str) -> bool:
    """Whether ``tag`` is a mark and a type, such as ``B-LOC``."""
    return "-" in tag and MARKED.fullmatch(tag) is not None


def _parts(tag: str) -> tuple[str, str]:
    """Mark and type; a tag without a mark is inside of its own type."""
    if tag == OUTSIDE:
        return "", ""
    match = MARKED.fullmatch(tag)
    return (match[1], match[2] or "") if match else ("I", tag)


def entities(tags: Iterable[str]) -> set[Entity]:
    """First word, end and type of each entity, as conlleval and seqeval find them in any scheme.

    Equal tags without a mark in a row are one entity: ``LOC LOC O``.
    """
    found, start, mark, kind = set(), 0, "", ""
    for at, tag in enumerate((*tags, OUTSIDE)):
        now, type_now = _parts(tag)
        if not (mark in INNER and now in FOLLOWING and kind == type_now):
            if mark:
                found.add((start, at, kind))
            start = at
        mark, kind = now, type_now
    return found


def precision_recall_f1(
    found: Iterable[Sequence[str]], true: Iterable[Sequence[str]]
) -> tuple[float, float, float]:
    """Precision, recall and F1 of the entities of all rows; 0 where a divisor is 0."""
    right = predicted = expected = 0
    for tags, true_tags in zip(found, true, strict=True):
        ours, theirs = entities(tags), entities(true_tags)
        right += len(ours & theirs)
        predicted += len(ours)
        expected += len(theirs)
    f1 = 2 * right / max(1, predicted + expected)
    return right / max(1, predicted), right / max(1, expected), f1
