"""Layer maps, and MC3KD's choice of layers from data."""

import torch
from torch import nn
from transformers import GPT2LMHeadModel

from fastkd.analysis import adjacent_layer_cca
from fastkd.distill import MC3KD, Distiller, layer_map, select_layers, student_from_teacher
from fastkd.models.layer_map import check_layers, resolve_layers
from tests.distill.models import batch, classifier, model
from tests.support.compare import raises


def test_layer_map_is_table_3():
    assert layer_map("uniform", 12, 6) == [2, 4, 6, 8, 10, 12]
    assert layer_map("top", 12, 6) == [7, 8, 9, 10, 11, 12]
    assert layer_map("bottom", 12, 6) == [1, 2, 3, 4, 5, 6]
    for teacher, student in ((12, 4), (12, 5), (7, 7), (24, 6), (3, 1)):
        layers = layer_map("uniform", teacher, student)
        assert len(set(layers)) == student and layers == sorted(layers)
        assert layers[-1] == teacher and layers[0] >= 1


def test_wrong_maps_are_errors():
    raises("did you mean 'uniform'", layer_map, "uniforn", 12, 6)
    raises("student has 6 layers but the teacher only 4", layer_map, "top", 4, 6)
    raises("student_layers must be at least 1", layer_map, "top", 4, 0)
    raises("increasing numbers from 1 to 4", check_layers, [0, 2], 4)
    for layers in ([2, 2], []):
        raises("increasing", check_layers, layers, 4)
    raises("2 teacher layers for 3 student layers", resolve_layers, [1, 2], 4, 3)
    teacher = classifier("bert", layers=2)
    raises("student has 3 layers", select_layers, teacher, [batch()], 3)
    raises("at least two real tokens", select_layers, teacher, [], 1)
    raises("transformers model", select_layers, nn.Linear(2, 2), [batch()], 1, error=TypeError)


def test_select_layers_finds_the_layers_that_change_most():
    """A model in which only two blocks change their input; all others end in zero weights."""
    teacher = classifier("gpt2", layers=5)
    for number, block in enumerate(teacher.transformer.h, start=1):
        with torch.no_grad():
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight.mul_(30 if number in (2, 4) else 0)
    batches = [batch(rows=16) for _ in range(4)]
    assert select_layers(teacher, batches, 2) == [2, 4]
    assert select_layers(teacher, batches, 5) == [1, 2, 3, 4, 5]


def test_select_layers_minimises_the_correlation_with_the_previous_layer():
    teacher = classifier("bert", layers=4)
    batches = [batch(rows=32) for _ in range(3)]
    order = adjacent_layer_cca(teacher, batches).argsort() + 1
    for m in (1, 2, 3):
        assert select_layers(teacher, batches, m) == sorted(order[:m].tolist())


def test_packed_rows_give_the_layers_of_their_documents():
    """Teachers whose choice from whole rows is another one."""
    differ = 0
    for seed in range(6):
        torch.manual_seed(seed)
        teacher = model(GPT2LMHeadModel, "gpt2", layers=4).double()
        documents = torch.randint(1, 60, (12, 5))
        ids = documents.view(4, 15)
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        positions = torch.arange(5).repeat(3).expand(4, 15)
        segments = torch.arange(3).repeat_interleave(5).expand(4, 15)
        expected = select_layers(teacher, [{"input_ids": documents}], 2)
        own = {**rows, "position_ids": positions}
        student = student_from_teacher(teacher, [2, 4])
        for batches in (
            [own],
            [{**own, "segments": segments}],
            [{f"teacher_{name}": x for name, x in own.items()} | own],
        ):
            distiller = Distiller(teacher, student, MC3KD(alpha=None))
            distiller.prepare([{**batches[0], "labels": ids}])
            assert distiller.method.teacher_layers == expected
        assert select_layers(teacher, [own], 2) == expected
        differ += select_layers(teacher, [rows], 2) != expected
    assert differ
