"""Language models' terms from hidden states and heads, against those from all logits."""

import copy
import warnings

import pytest
import torch
import transformers as t
from torch.utils._python_dispatch import TorchDispatchMode

from fastkd import soft_target_loss
from fastkd.distill import FCD, Distiller, Several, SoftTargets, offload, student_from_teacher
from fastkd.distill.verify import taken
from fastkd.lm import linear_soft_targets
from fastkd.models.hooks import Offload, on_device
from tests.distill import support
from tests.distill.models import batch, recipe, step
from tests.distill.models import model as model_of


def both(family, head, method, layers=(1, 3)):
    """A distiller by heads, and one by all logits."""
    teacher = support.model_of(family, head).double()
    teacher = student_from_teacher(teacher, range(1, max(layers) + 1)).eval()
    student = student_from_teacher(teacher, layers)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.1 * torch.randn_like(p))
    found = []
    for keep_logits in (False, True):
        torch.manual_seed(2)
        made = recipe(method) if isinstance(method, str) else copy.deepcopy(method)
        distiller = Distiller(teacher, copy.deepcopy(student), made, keep_logits=keep_logits)
        distiller.set_progress(1.0)
        found.append(distiller.eval())
    return found


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_no_logits_of_all_tokens_and_no_unread_terms_are_computed(monkeypatch):
    by_head, data = both("llama", "next word", "lrkd")[0], support.data_of("llama", "next word")
    rows = []
    for model in (by_head.teacher, by_head.student):
        model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    by_head(**data).loss.backward()
    assert rows == [1, 1]

    def read(*rows):
        raise AssertionError("entropy and accuracy cost a pass over all logits")

    monkeypatch.setattr(linear_soft_targets, "entropy_and_accuracy", read)
    by_head, _ = both("llama", "next word", SoftTargets())
    assert set(by_head(**data).terms) == {"soft", "task", "total"}


def test_logits_that_are_changed_are_perturbed():
    """The perturbation uses the second run of a model whose logits a hook changes."""
    found, data = [], support.data_of("llama", "next word")
    for distiller in both("llama", "next word", "lrc_bert"):
        distiller.train().method.perturb = True
        distiller.student.lm_head.register_forward_hook(lambda module, args, out: out / 2)
        found.append(taken(distiller, [data]))
    assert_same(*found)


def test_several_methods_with_different_terms():
    class Own(SoftTargets):
        def soft(self, step):
            return step.student.logits.square().mean()

    data = support.data_of("llama", "next word")
    by_head, by_logits = both("llama", "next word", Several(SoftTargets(), Own()))
    (out, gradients), (expected, wanted) = (step(x, data) for x in (by_head, by_logits))
    assert out.logits is not None
    assert_same((out.terms, gradients), (expected.terms, wanted))


@pytest.mark.parametrize(
    ("where", "compiled"),
    [
        ("output layer", False),
        ("model", False),
        ("class", False),
        pytest.param("model", True, marks=pytest.mark.thorough),  # compiles for seconds
    ],
)
def test_logits_changed_after_the_output_layer_are_used(where, compiled):
    class Unknown(t.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return halved(self, args, super().forward(*args, **kwargs))

    def halved(module, args, out):
        if torch.is_tensor(out):
            return out / 2
        out.logits = out.logits / 2
        return out

    by_head, by_logits = both("llama", "next word", SoftTargets(), layers=(1,))
    for model in (x for d in (by_head, by_logits) for x in (d.student, d.teacher)):
        if where == "class":
            model.__class__ = Unknown
        else:
            hooked = model.lm_head if where == "output layer" else model
            hooked._forward_hooks.clear()  # both distillers have one teacher
            hooked.register_forward_hook(halved)
    data = support.data_of("llama", "next word")
    if compiled:
        torch.compiler.reset()
        graph = torch.compile(by_head, backend="eager", fullgraph=True)
        assert_same(graph(**data).terms, by_logits(**data).terms)
        return
    (out, gradients), (expected, wanted) = (step(x, data) for x in (by_head, by_logits))
    assert_same((out.terms, gradients), (expected.terms, wanted))
    assert out.logits is not None and by_head.student_model.other_head


def test_a_head_under_autocast():
    data = support.data_of("llama", "next word")
    teacher = t.LlamaForCausalLM(support.FAMILIES["llama"]).eval()
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), SoftTargets())
    with torch.autocast("cpu", torch.bfloat16):
        out = distiller(**data)
    out.loss.backward()
    assert out.loss.isfinite() and distiller.student.lm_head.weight.grad.dtype == torch.float32


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
    config = copy.deepcopy(support.FAMILIES["bert"])
    config.vocab_size = 500
    teacher = t.BertForMaskedLM(config).eval()
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), recipe(method))
    distiller.requires_grad_(False).eval()
    data = support.data_of("bert", "masked words")
    with Operands() as seen, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        distiller(**data)
    assert seen.largest <= config.vocab_size * config.hidden_size


@pytest.mark.parametrize("method", [SoftTargets, lambda: FCD(soft_weight=1.0)])
@pytest.mark.parametrize("where", ["cpu", "disk", "head"])
def test_a_teacher_that_accelerate_has_offloaded(method, where, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    teacher = model_of(t.LlamaForCausalLM, "llama", 2)
    data = batch(rows=4)
    data["labels"] = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    student = student_from_teacher(teacher, [2])
    expected = Distiller(copy.deepcopy(teacher), student, method()).eval()(**data)
    if where == "cpu":
        accelerate.cpu_offload(teacher, torch.device("cpu"))
    elif where == "disk":
        accelerate.disk_offload(teacher, tmp_path, torch.device("cpu"))
    else:
        accelerate.dispatch_model(
            teacher, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path
        )
    assert teacher.lm_head.weight.is_meta
    out = Distiller(teacher, student, method()).eval()(**data)
    torch.testing.assert_close(out.terms, expected.terms)


@pytest.mark.parametrize("method", [SoftTargets, FCD])
@pytest.mark.parametrize(("family", "head"), [("llama", "next word"), ("bert", "sequence")])
def test_an_offloaded_teacher_is_read_while_it_runs_only(
    family, head, method, tmp_path, monkeypatch
):
    """Outside of a pass its weights are NaN here, and elsewhere on another device."""

    def leave(self):
        self.runs -= 1
        for tensor, host in self.stored if not self.runs else ():
            tensor.data = torch.full_like(host, torch.nan) if host.is_floating_point() else host

    monkeypatch.setattr(Offload, "leave", leave)
    data, teacher = support.data_of(family, head), support.model_of(family, head).eval()
    student = student_from_teacher(teacher, [1, 3]).eval()
    distiller = Distiller(copy.deepcopy(teacher), student, method())
    expected, wanted = step(distiller.eval(), data)
    size = sum(x.nbytes for x in (*teacher.parameters(), *teacher.buffers()))
    assert offload(teacher, "cpu") == size and next(teacher.parameters()).isnan().all()
    distiller = Distiller(teacher, student, method()).eval().to(torch.float32)
    out, gradients = step(distiller, data)
    assert_same((out.terms, gradients), (expected.terms, wanted))
    cache = distiller.cache_teacher([data], tmp_path / "cache")
    assert_same(Distiller(cache, student, method()).eval()(**data).terms, expected.terms)
    assert_same(copy.deepcopy(distiller)(**data).terms, expected.terms)
    with on_device(teacher):
        assert not next(teacher.parameters()).isnan().any()
    assert next(teacher.parameters()).isnan().all()


@pytest.mark.parametrize("method", [SoftTargets, FCD])
@pytest.mark.parametrize(
    ("family", "head"), [("llama", "next word"), ("bert", "masked words"), ("bert", "sequence")]
)
def test_a_dynamically_quantised_teacher(family, head, method, tmp_path):
    """Its head multiplies by more than a weight, so its own logits are the targets."""
    data, teacher = support.data_of(family, head), support.model_of(family, head).eval()
    student = student_from_teacher(teacher, [1, 3]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's own
        teacher = torch.ao.quantization.quantize_dynamic(teacher, {torch.nn.Linear})
    distiller = Distiller(teacher, student, method(soft_weight=1.0) if method is FCD else method())
    out = distiller.eval()(**data)
    inputs = {name: x for name, x in data.items() if name != "labels"}
    logits = [model(**inputs).logits for model in (student, teacher)]
    mask = None
    if head != "sequence":
        mask = data["labels"] != -100
    if head == "next word":
        logits, mask = [x[:, :-1] for x in logits], mask[:, 1:]
    soft = soft_target_loss(*logits, temperature=distiller.method.temperature, mask=mask)
    torch.testing.assert_close(out.terms["soft"], soft, rtol=1e-4, atol=1e-6)
    cache = distiller.cache_teacher([data], tmp_path / "cache")
    stored = Distiller(cache, student, distiller.method).eval()(**data)
    torch.testing.assert_close(stored.terms, out.terms)
