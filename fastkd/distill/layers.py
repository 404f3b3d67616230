"""MC3KD's choice of teacher layers from data."""

import torch
from torch import nn

from fastkd._core import check
from fastkd.analysis import adjacent_layer_cca
from fastkd.models.backbone import Backbone
from fastkd.models.inputs import Batches
from fastkd.models.student import check_enough


def select_layers(
    teacher: nn.Module, batches: Batches, student_layers: int, *, last_layer: bool = True
) -> list[int]:
    """Teacher layers that differ most from the layer before them (MC3KD, Algorithm 1).

    These are the ``student_layers`` layers with the smallest C(l) = CCA(T_{l-1}, T_l) (eqs. 2-3),
    in the teacher's order. See `fastkd.analysis.adjacent_layer_cca`.

    Args:
        teacher: a transformers encoder or decoder.
        batches: dicts of the teacher's inputs, as in training; a few thousand tokens suffice.
        student_layers: number of layers to choose.
        last_layer: whether the last layer may be chosen, as in section 5.1; Algorithm 1 ends at
            N − 1.

    Returns:
        Layer numbers counted from 1, increasing.

    Raises:
        ValueError: more student layers than teacher layers, or no data.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids = torch.arange(48).view(4, 12)
    >>> len(select_layers(BertModel(config), [{"input_ids": ids}], 2))
    2
    """
    check.positive_int("student_layers", student_layers)
    layers = Backbone(teacher, "teacher").num_layers
    check_enough(layers - (not last_layer), student_layers)
    correlation = adjacent_layer_cca(teacher, batches)
    if len(correlation) != layers:
        raise ValueError(
            f"teacher: it returns {len(correlation)} hidden states for {layers} layers; pass a "
            "list of layers"
        )
    kept = correlation if last_layer else correlation[:-1]
    smallest = torch.argsort(kept, stable=True)[:student_layers]
    return sorted(int(i) + 1 for i in smallest)
