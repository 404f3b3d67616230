"""Choice of teacher layers: fixed maps, and MC3KD's choice from data."""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fastkd._core.checks import check_choice, check_positive_int
from fastkd.analysis import adjacent_layer_cca
from fastkd.analysis.model_inputs import Batches
from fastkd.distill.backbone import Backbone

SCHEMES = ("uniform", "top", "bottom")


def layer_map(scheme: str, teacher_layers: int, student_layers: int) -> list[int]:
    """Teacher layer, counted from 1, of each student layer (FCD, Table 3).

    ``"uniform"`` chooses every (teacher_layers / student_layers)-th layer up to the last, ``"top"``
    the last layers, ``"bottom"`` the first layers.

    Args:
        scheme: "uniform", "top" or "bottom".
        teacher_layers: number of teacher layers.
        student_layers: number of student layers, at most ``teacher_layers``.

    Returns:
        One teacher layer per student layer, increasing.

    Raises:
        ValueError: an unknown scheme, or more student layers than teacher layers.

    Example:
        >>> layer_map("uniform", 12, 6)
        [2, 4, 6, 8, 10, 12]
    """
    check_choice("scheme", scheme, SCHEMES)
    check_positive_int("teacher_layers", teacher_layers)
    check_positive_int("student_layers", student_layers)
    _check_enough(teacher_layers, student_layers)
    if scheme == "uniform":
        return [i * teacher_layers // student_layers for i in range(1, student_layers + 1)]
    start = teacher_layers - student_layers if scheme == "top" else 0
    return list(range(start + 1, start + student_layers + 1))


def select_layers(teacher: nn.Module, batches: Batches, student_layers: int) -> list[int]:
    """Teacher layers that differ most from the layer before them (MC3KD, Algorithm 1).

    These are the ``student_layers`` layers with the smallest C(l) = CCA(T_{l-1}, T_l) (eqs. 2-3),
    in the teacher's order. See `fastkd.analysis.adjacent_layer_cca`.

    Args:
        teacher: a transformers encoder or decoder.
        batches: dicts of the teacher's inputs, as in training; a few thousand tokens suffice.
        student_layers: number of layers to choose.

    Returns:
        Layer numbers counted from 1, increasing.

    Raises:
        ValueError: more student layers than teacher layers, or no data.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> ids = torch.arange(48).view(4, 12)
        >>> len(select_layers(BertModel(config), [{"input_ids": ids}], 2))
        2
    """
    check_positive_int("student_layers", student_layers)
    layers = Backbone(teacher, "teacher").num_layers
    _check_enough(layers, student_layers)
    correlation = adjacent_layer_cca(teacher, batches)
    if len(correlation) != layers:
        raise ValueError(
            f"teacher: it returns {len(correlation)} hidden states for {layers} layers; pass a "
            "list of layers"
        )
    smallest = torch.argsort(correlation, stable=True)[:student_layers]
    return sorted(int(i) + 1 for i in smallest)


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


def _check_enough(teacher_layers: int, student_layers: int) -> None:
    if student_layers > teacher_layers:
        raise ValueError(
            f"student_layers: the student has {student_layers} layers but the teacher only "
            f"{teacher_layers}; use a student with at most {teacher_layers} layers"
        )
