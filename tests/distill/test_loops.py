"""A Distiller inside the loops of frameworks and users: silent errors of the past."""

import random

import pytest
import torch
import transformers as t
from torch._subclasses.fake_tensor import FakeTensorMode

from fastkd.distill import FCD, METHODS, Distiller, student_from_teacher
from fastkd.models.backbone import Backbone
from fastkd.models.outputs import LayerRequest, model_outputs
from tests.distill.models import batch, classifier, eager, pair, recipe
from tests.distill.support import data_of, method_of, model_of
from tests.support.compare import counted, raises
from tests.support.draw import FIRST


def test_a_new_distiller_trains_whatever_mode_its_models_were_in():
    teacher, student = pair()
    assert not student.training
    distiller = Distiller(teacher.train(), student, FCD())
    assert distiller.training and all(module.training for module in student.modules())
    assert not any(module.training for module in teacher.modules())
    data = batch()
    assert not torch.equal(distiller(**data).loss, distiller(**data).loss)  # dropout
    student.eval()
    assert not distiller.training
    assert torch.equal(distiller(**data).loss, distiller(**data).loss)
    distiller.train()
    assert student.training and distiller.training and not teacher.training
    assert not distiller.eval().training and not student.training


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_a_replaced_model_is_an_error(name):
    distiller = Distiller(*pair(), FCD())
    setattr(distiller, name, torch.nn.Sequential(getattr(distiller, name)))  # as wrappers do
    distiller(**batch())
    setattr(distiller, name, classifier("bert", len(distiller.student_model.blocks)))
    raises(f"the {name} was replaced .* make a new Distiller", distiller, **batch())
    copied = distiller._replicate_for_data_parallel()
    raises("DataParallel runs copies of the models", copied, **batch())


def test_the_last_layer_is_the_heads_input():
    """Vision models end their list of hidden states before the final norm."""
    teacher, data = model_of("vit", "image").eval(), data_of("vit", "image")
    backbone, without_hooks = Backbone(teacher), Backbone(teacher)
    without_hooks._hooks_reach = False
    inputs, wanted = {"pixel_values": data["pixel_values"]}, LayerRequest((2, 3))
    expected = model_outputs(backbone, inputs, wanted).hidden
    torch.testing.assert_close(model_outputs(without_hooks, inputs, wanted).hidden, expected)


def test_hidden_states_of_other_layers_are_an_error():
    """Mamba shows none of the embeddings, so that state l is that of layer l + 1."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 3}
    teacher = t.MambaModel(t.MambaConfig(**sizes))
    student = student_from_teacher(teacher, [1, 3])
    data, method = {"input_ids": torch.randint(5, 60, (4, 6))}, FCD(task_weight=0)
    compiled = torch.compile(teacher, backend="eager")
    words = r"teacher \(MambaModel\) is compiled.* states 1 are not the outputs"
    raises(words, Distiller(compiled, student, method), **data)
    # Nor an uncompiled model whose blocks call no hooks.
    distiller = Distiller(teacher, student, method)
    distiller.student_model._hooks_reach = False
    raises(r"student .* doesn't call its blocks as modules", distiller, **data)
    assert all("forward" not in vars(block) for block in student.layers)


@pytest.mark.parametrize("name", [
    "fcd", *(pytest.param(x, marks=pytest.mark.thorough) for x in METHODS if x != "fcd")
])  # fmt: skip
def test_a_compiled_distiller_is_the_plain_one_in_one_graph(name):
    """Hooks and closures of one call must not serve the next, and an eager step changes nothing.

    A language model's graph: test_lm_head.py.
    """
    head = "sequence" if name == "knn" else "tokens"
    method = recipe(name, **({"perturb": False} if name == "lrc_bert" else {}))
    data, teacher = data_of("distilbert", head), model_of("distilbert", head)
    teacher = student_from_teacher(teacher, [3])  # a layer takes a second
    distiller = Distiller(teacher, student_from_teacher(teacher, [1]), method).eval()
    distiller.set_progress(1.0)
    compiled, graphs = counted(distiller)
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in distiller.modules()]
    left = {key: x if x.dim() == 1 else x.flip(1) for key, x in data.items()}
    for rows in (data, left, {key: x[:3] for key, x in data.items()}):
        for x in rows.values():
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(**rows).loss, distiller(**rows).loss)
    assert len(graphs) == 1
    for module, (before, after) in zip(distiller.modules(), hooks, strict=True):
        assert module._forward_pre_hooks is before and module._forward_hooks is after
        assert not before and not after


def test_a_step_reads_no_value():
    """Fake tensors have no values: a step that reads one on the host raises; of one method."""
    teacher, data = model_of("bert", "sequence"), data_of("bert", "sequence")
    models = eager((teacher, student_from_teacher(teacher, [1, 3])))
    name = random.Random(FIRST).choice([*METHODS, "attention"])
    distiller = Distiller(*models, method_of(name, "sequence"))
    distiller.prepare([data])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = distiller(**{key: mode.from_tensor(x) for key, x in data.items()})
        out.loss.backward()
