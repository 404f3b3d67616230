"""Language models' terms from hidden states and heads, against those from all logits."""

import copy
import warnings

import pytest
import torch
import transformers as t
from torch.utils._python_dispatch import TorchDispatchMode

from fastkd import soft_target_loss
from fastkd.distill import FCD, Distiller, Several, SoftTargets, offload, student_from_teacher
from fastkd.lm import linear_soft_targets
from fastkd.models.batch import _one_row
from fastkd.models.hooks import Offload, on_device
from tests.distill import draws, support
from tests.distill.models import config_of, recipe, step


def of_llama(method, **options):
    """A Distiller of language models in float64."""
    teacher = support.model_of("llama", "next word").double()
    return Distiller(teacher, student_from_teacher(teacher, [1, 3]), method, **options).eval()


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_no_unread_terms_are_computed(monkeypatch):
    """Entropy and accuracy cost a pass over all logits, which test_adapters.py counts."""
    monkeypatch.setattr(linear_soft_targets, "entropy_and_accuracy", None)
    of_llama(SoftTargets())(**support.data_of("llama", "next word"))


def test_several_methods_with_different_terms():
    class Own(SoftTargets):
        def soft(self, step):
            return step.student.logits.sub(step.teacher.logits).square().mean()

    data = support.data_of("llama", "next word")
    both = (of_llama(Several(SoftTargets(), Own()), keep_logits=keep) for keep in (False, True))
    (out, gradients), (expected, wanted) = (step(x, data) for x in both)
    assert out.logits is not None
    assert_same((out.terms, gradients), (expected.terms, wanted))


@pytest.mark.thorough  # compiles for seconds
def test_logits_that_a_hook_changes_are_used_in_a_graph():
    """Uncompiled: among the random steps."""
    both = [of_llama(SoftTargets(), keep_logits=keep) for keep in (False, True)]
    for model in (x for distiller in both for x in (distiller.teacher, distiller.student)):
        model.register_forward_hook(lambda module, args, out: draws.halved(out))
    torch.compiler.reset()
    graph = torch.compile(both[0], backend="eager", fullgraph=True)
    data = support.data_of("llama", "next word")
    assert_same(graph(**data).terms, both[1](**data).terms)


class Operands(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.largest = max(self.largest, *(x.numel() for x in args if torch.is_tensor(x)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["soft_targets", "fcd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_is_read_once_for_all_rows(dtype, method):
    """A frozen teacher's head was copied for each row of the batch, 1.5 GB for 32 rows of BERT."""
    config = config_of("bert", vocab_size=500)
    teacher = t.BertForMaskedLM(config).eval()
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), recipe(method))
    distiller.requires_grad_(False).eval()
    data = support.data_of("bert", "masked words")
    with Operands() as seen, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        distiller(**data)
    assert seen.largest <= config.vocab_size * config.hidden_size


def test_an_offloaded_teacher_is_moved_and_copied(monkeypatch):
    """Its steps and caches: among the random steps."""
    data, teacher = support.data_of("bert", "sequence"), support.model_of("bert", "sequence").eval()
    student = student_from_teacher(teacher, [1, 3])
    expected = Distiller(copy.deepcopy(teacher), student, FCD()).eval()(**data).terms
    monkeypatch.setattr(Offload, "leave", draws.leave)
    size = sum(x.nbytes for x in (*teacher.parameters(), *teacher.buffers()))
    assert offload(teacher, "cpu") == size and next(teacher.parameters()).isnan().all()
    distiller = Distiller(teacher, student, FCD()).eval().to(torch.float32)
    assert_same(copy.deepcopy(distiller)(**data).terms, expected)
    with on_device(teacher):
        assert not next(teacher.parameters()).isnan().any()
    assert next(teacher.parameters()).isnan().all()


@pytest.mark.parametrize("head", ["next word", "masked words", "sequence"])
def test_a_dynamically_quantised_teacher(head, tmp_path):
    """Its head multiplies by more than a weight, so its own logits are the targets."""
    family = "llama" if head == "next word" else "bert"
    data, teacher = support.data_of(family, head), support.model_of(family, head).eval()
    student = student_from_teacher(teacher, [1, 3]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's own
        teacher = torch.ao.quantization.quantize_dynamic(teacher, {torch.nn.Linear})
    distiller = Distiller(teacher, student, FCD(soft_weight=1.0))
    out = distiller.eval()(**data)
    inputs = {name: x for name, x in data.items() if name != "labels"}
    logits = [model(**inputs).logits for model in (student, teacher)]
    mask = None if head == "sequence" else data["labels"] != -100
    if head == "next word":
        logits, mask = [x[:, :-1] for x in logits], mask[:, 1:]
    soft = soft_target_loss(*logits, temperature=distiller.method.temperature, mask=mask)
    torch.testing.assert_close(out.terms["soft"], soft, rtol=1e-4, atol=1e-6)
    cache = distiller.cache_teacher([data], tmp_path / "cache")
    stored = Distiller(cache, student, distiller.method).eval()(**data)
    torch.testing.assert_close(stored.terms, out.terms)


def test_vectors_in_place_of_no_row_show_what_follows_the_head():
    """Each process decides by its first batch whether logits are the head's; zeros agree always."""
    row = _one_row({"inputs_embeds": torch.zeros(0, 3, 4), "attention_mask": torch.zeros(0, 3)})
    assert row["inputs_embeds"].std(-1).all() and row["attention_mask"].all()
