"""Fixed maps from student layers to teacher layers."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from fastkd._core import check

SCHEMES = ("uniform", "top", "bottom")


def layer_map(scheme: str, teacher_layers: int, student_layers: int) -> list[int]:
    """Teacher layer, counted from 1, of each student layer (FCD, Table 3).

    ``"uniform"`` chooses every (teacher_layers / student_layers)-th layer up to the last, ``"top"``
    the last layers, ``"bottom"`` the first layers.

    Args:
        scheme: "uniform", "top" or "bottom".
        teacher_layers, student_layers: their numbers; the student has at most as many.

    Returns:
        One teacher layer per student layer, increasing.

    Raises:
        ValueError: an unknown scheme, or more student layers than teacher layers.

    >>> layer_map("uniform", 12, 6)
    [2, 4, 6, 8, 10, 12]
    """
    check.choice("scheme", scheme, SCHEMES)
    check.positive_int("teacher_layers", teacher_layers)
    check.positive_int("student_layers", student_layers)
    check_enough(teacher_layers, student_layers)
    if scheme == "uniform":
        return [i * teacher_layers // student_layers for i in range(1, student_layers + 1)]
    start = teacher_layers - student_layers if scheme == "top" else 0
    return list(range(start + 1, start + student_layers + 1))


def spread_layers(kinds: Sequence[str], count: int) -> list[int]:
    """``count`` layers, evenly spread, with each of the ``kinds`` of all layers in its share.

    Shares are rounded by Sainte-Laguë's method, each to at least 1. With one kind the layers are
    those of ``layer_map("uniform", ...)``.

    >>> spread_layers(["conv", "conv", "attention"] * 4, 4)
    [2, 5, 9, 11]
    """
    total = Counter(kinds)
    quota = Counter(total.keys())
    while quota.total() < count:
        quota[max(total, key=lambda kind: total[kind] / (2 * quota[kind] + 1))] += 1
    layers: list[int] = []
    for even in layer_map("uniform", len(kinds), count):
        # The kind that is furthest behind its part of the layers so far, and its nearest layer.
        due = quota - Counter(kinds[layer - 1] for layer in layers)
        passed = Counter(kinds[:even])
        kind = max(due, key=lambda kind: due[kind] + (passed[kind] / total[kind] - 1) * quota[kind])
        own = (i for i, each in enumerate(kinds, 1) if each == kind and i not in layers)
        layers.append(min(own, key=lambda i: abs(i - even)))
    return sorted(layers)


def resolve_layers(
    layers: str | Sequence[int], teacher_layers: int, student_layers: int
) -> list[int]:
    """Teacher layer of each student layer, by the name of a scheme or from a checked list."""
    if isinstance(layers, str):
        return layer_map(layers, teacher_layers, student_layers)
    chosen = check_layers(layers, teacher_layers)
    if len(chosen) != student_layers:
        raise ValueError(
            f"layers: {chosen} has {len(chosen)} teacher layers for {student_layers} student "
            "layers; pass one for each"
        )
    return chosen


def check_layers(layers: Sequence[int], teacher_layers: int) -> list[int]:
    """``layers`` as a list; raise unless its entries are increasing numbers of teacher layers."""
    chosen = list(layers) if isinstance(layers, Iterable) else []
    valid = all(isinstance(i, int) and not isinstance(i, bool) for i in chosen) and all(
        1 <= i <= teacher_layers for i in chosen
    )
    if not valid or not chosen or any(a >= b for a, b in itertools.pairwise(chosen)):
        raise ValueError(
            f"layers must be increasing numbers from 1 to {teacher_layers} "
            f"(the teacher's layers), got {chosen or layers!r}"
        )
    return chosen


def check_enough(teacher_layers: int, student_layers: int) -> None:
    if student_layers > teacher_layers:
        raise ValueError(
            f"student_layers: the student has {student_layers} layers but the teacher only "
            f"{teacher_layers}; use a student with at most {teacher_layers} layers"
        )
