"""Each paper's total loss, against the paper's formulas written out here in float64."""

import inspect
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from fastkd import FCDLoss, distill
from fastkd.distill import (
    FCD,
    LRKD,
    MC3KD,
    METHODS,
    Distiller,
    IntraClassKNN,
    SoftTargets,
    method_by_name,
    methods,
    select_layers,
    student_from_teacher,
)
from fastkd.distill.baselines import BASELINES
from tests.distill.models import batch, classifier, model
from tests.losses.relation import relation
from tests.support.compare import raises

TEACHER_LAYERS = [2, 4]
DESIGN = (Path(__file__).parents[2] / "docs/design.md").read_text()


@pytest.fixture(params=["bert", "gpt2"])
def family(request):
    return request.param


def pair(family, num_labels=3, student_layers=2):
    torch.manual_seed(0)
    teacher = classifier(family, num_labels=num_labels).double()
    torch.manual_seed(1)
    return teacher, classifier(family, layers=student_layers, num_labels=num_labels).double()


def outputs(model, inputs):
    names = ("input_ids", "attention_mask")
    out = model(**{n: inputs[n] for n in names}, output_hidden_states=True)
    return out.logits, out.hidden_states


def both(teacher, student, inputs):
    with torch.no_grad():
        return outputs(teacher, inputs), outputs(student, inputs)


def total(teacher, student, method, inputs, progress=0.0):
    distiller = Distiller(teacher, student, method).eval()
    distiller.set_progress(progress)
    with torch.no_grad():
        return distiller(**inputs)


def kl(z_t, z_s, temperature):
    p = (z_t / temperature).softmax(-1)
    return (p * (p.log() - (z_s / temperature).softmax(-1).log())).sum(-1).mean()


def read_token(family, hidden, mask):
    """First token for BERT, last real token for GPT-2."""
    if family == "bert":
        return hidden[:, 0]
    return torch.stack([h[m.nonzero().max()] for h, m in zip(hidden, mask, strict=True)])


def test_soft_targets(family):
    teacher, student = pair(family)
    inputs = batch()
    (z_t, _), (z_s, _) = both(teacher, student, inputs)
    out = total(teacher, student, SoftTargets(alpha=0.3, temperature=3.0), inputs)
    task = F.cross_entropy(z_s, inputs["labels"])
    torch.testing.assert_close(out.loss, 0.7 * task + 0.3 * 9 * kl(z_t, z_s, 3.0))
    torch.testing.assert_close(out.logits, z_s)
    torch.testing.assert_close(out.terms["task"], task)


def test_fcd_is_equation_10(family):
    teacher, student = pair(family)
    inputs = batch()
    mask = inputs["attention_mask"].bool()
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    l_t, l_s = (
        torch.stack(
            [
                relation(h_s[i], h_t[j], mask, over, "l2", "pearson", 1.0, 1e-8)
                for i, j in zip((1, 2), TEACHER_LAYERS, strict=True)
            ]
        ).mean()
        for over in ("tokens", "samples")
    )
    out = total(teacher, student, FCD(alpha=0.4, beta=0.2, soft_weight=0.0), inputs)
    expected = F.cross_entropy(z_s, inputs["labels"]) + 0.4 * l_t + 0.2 * l_s
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.terms["tokens"], l_t, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.terms["samples"], l_s, rtol=1e-5, atol=1e-6)
    assert set(out.terms) == {"task", "tokens", "samples", "total"}

    out = total(
        teacher, student, FCD(alpha=0.4, beta=0.2, soft_weight=0.3, temperature=3.0), inputs
    )
    soft = 9 * kl(z_t, z_s, 3.0)
    torch.testing.assert_close(out.terms["soft"], soft, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss, expected + 0.3 * soft, rtol=1e-5, atol=1e-6)
    assert FCD(task_weight=0.5).soft_weight == 0.5 and FCD(task_weight=0.0).soft_weight == 0.0


def test_both_terms_of_fcd_are_computed_in_one_pass(monkeypatch):
    calls = []
    one_pass = FCDLoss.forward
    monkeypatch.setattr(
        FCDLoss, "forward", lambda *args, **named: calls.append(1) or one_pass(*args, **named)
    )
    models, inputs = pair("bert"), batch()
    total(*models, FCD(alpha=0.4, beta=0.2), inputs)
    assert len(calls) == 1


@pytest.mark.parametrize("k", [1, 3])
def test_intra_class_knn_is_the_papers_loop(family, k):
    teacher, student = pair(family)
    inputs = batch(rows=8)
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    r_t, r_s = (read_token(family, h[-1], inputs["attention_mask"]) for h in (h_t, h_s))
    hidden = 0.0
    for x in range(8):
        same = [j for j in range(8) if inputs["labels"][j] == inputs["labels"][x]]
        distances = sorted(float((r_t[j] - r_s[x]).square().sum()) for j in same)
        hidden += sum(distances[:k]) / r_s.shape[1]
    method = IntraClassKNN(alpha1=0.1, k=k)
    out = total(teacher, student, method, inputs)
    assert method.hyperparameters()["temperature"] == 5.0
    task = F.cross_entropy(z_s, inputs["labels"])
    expected = 0.1 * hidden + 0.5 * 25 * kl(z_t, z_s, 5.0) + 0.5 * task
    torch.testing.assert_close(out.loss, expected)
    assert math.isclose(out.terms["knn"].item(), hidden, rel_tol=1e-7)


def test_knn_matches_regression_targets_within_the_tolerance():
    teacher, student = pair("bert", num_labels=1)
    inputs = {**batch(rows=4, num_labels=1), "labels": torch.tensor([0.0, 0.4, 0.8, 3.0])}
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    r_t, r_s = h_t[-1][:, 0], h_s[-1][:, 0]
    near = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2], 3: [3]}
    hidden = sum(min(float((r_t[j] - r_s[x]).square().mean()) for j in near[x]) for x in range(4))
    out = total(teacher, student, IntraClassKNN(tolerance=0.5), inputs)
    assert math.isclose(out.terms["knn"].item(), hidden, rel_tol=1e-6)
    mse = (z_s[:, 0] - inputs["labels"]).square().mean()
    expected = 0.01 * hidden + 0.5 * (z_s - z_t).square().mean() + 0.5 * mse
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("method", [IntraClassKNN, SoftTargets])
def test_nan_labels_are_in_no_term(method):
    teacher, student = pair("bert", num_labels=1)
    labels = torch.tensor([0.0, float("nan"), 0.4, float("nan")])
    inputs = {**batch(rows=4, num_labels=1), "labels": labels}
    known = {k: v[[0, 2]] for k, v in inputs.items()}
    all_rows = Distiller(teacher, student, method()).eval()
    out, of_known = all_rows(**inputs), all_rows(**known)
    for name in out.terms.keys() - {"soft", "total"}:
        torch.testing.assert_close(out.terms[name], of_known.terms[name])
    (z_t, _), (z_s, _) = both(teacher, student, inputs)
    torch.testing.assert_close(out.terms["soft"], (z_s - z_t).square().mean())
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in student.parameters() if p.grad is not None)
    none = all_rows(**{**inputs, "labels": torch.full((4,), float("nan"))})
    assert none.terms["task"] == 0


@pytest.mark.parametrize("progress", [0.0, 0.79, 0.8, 1.0])
def test_lrc_bert_is_equations_1_to_6_in_two_stages(family, progress):
    teacher, student = pair(family)
    inputs = batch(rows=4)
    mask = inputs["attention_mask"].bool()
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    method = method_by_name("lrc_bert", preset="paper")
    out = total(teacher, student, method, inputs, progress)
    W = method.loss.W.weight.T.detach()

    def g(x, y):
        return 1 - F.cosine_similarity(x, y, dim=0)

    contrast = 0.0
    for i, j in zip((1, 2), TEACHER_LAYERS, strict=True):
        losses = []
        for b, n in mask.nonzero().tolist():
            z, positive = h_s[i][b, n] @ W, h_t[j][b, n]
            others = [h_t[j][o, n] for o in range(4) if o != b and mask[o, n]]
            if not others:
                continue
            terms = [2 - (g(x, z) - g(positive, z)) for x in others]
            losses.append(sum(terms) / (2 * len(others)) + g(positive, z))
        contrast += sum(losses) / len(losses)
    one_hot = F.one_hot(inputs["labels"], 3).double()
    hard = -((one_hot / 1.1).softmax(-1) * z_s.softmax(-1).log()).sum(-1).mean()
    if progress < 0.8:
        expected = contrast
        assert set(out.terms) == {"cos_nce", "total"}
    else:
        expected = contrast + kl(z_t, z_s, 1.1) + 3 * hard
        torch.testing.assert_close(out.terms["task"], hard)
    torch.testing.assert_close(out.loss, expected)


def test_lrc_bert_warns_of_many_classes():
    teacher, student = (classifier("bert", layers, num_labels=150) for layers in (4, 2))
    with pytest.warns(UserWarning, match="the right one of 150 classes 0.02 of the target"):
        Distiller(teacher, student, distill.LRCBERT())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Distiller(teacher, student, distill.LRCBERT(temperature=0.2))
        Distiller(teacher, student, distill.LRCBERT(gamma=0.0))
        Distiller(*pair("bert"), distill.LRCBERT())


@pytest.mark.parametrize("pool", ["tokens", "cls"])
def test_mc3kd_is_equations_1_to_8(family, pool):
    teacher, student = pair(family)
    inputs = batch(rows=12)
    mask = inputs["attention_mask"].bool()
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)

    def root(a):
        values, vectors = torch.linalg.eigh(a)
        return vectors @ torch.diag(values**-0.5) @ vectors.T

    ridge, corr = 1e-3, 0.0
    for i, j in zip((1, 2), [1, 3], strict=True):
        if pool == "tokens":
            s, t = h_s[i][mask], h_t[j][mask]
        else:
            s, t = (read_token(family, h, mask) for h in (h_s[i], h_t[j]))
        s, t = s - s.mean(0), t - t.mean(0)
        m, eye = len(s), torch.eye(16, dtype=torch.float64)
        whitened = root(t.T @ t / (m - 1) + ridge * eye) @ (t.T @ s / (m - 1))
        whitened = whitened @ root(s.T @ s / (m - 1) + ridge * eye)
        corr += torch.linalg.svdvals(whitened).sum()
    method = MC3KD(layers=[1, 3], ridge=ridge, beta=0.1, alpha=0.7, pool=pool)
    out = total(teacher, student, method, inputs)
    task = F.cross_entropy(z_s, inputs["labels"])
    expected = 0.7 * 400 * kl(z_t, z_s, 20.0) + 0.3 * task - 0.1 * corr
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-6)


def test_mc3kd_chooses_its_layers_from_data():
    teacher, student = pair("bert")
    method = MC3KD()
    distiller = Distiller(teacher, student, method)
    words = r"call distiller.prepare\(batches\)"
    raises(words, distiller, error=RuntimeError, **batch())
    batches = [batch(rows=16) for _ in range(3)]
    distiller.prepare(iter(batches))
    assert method.teacher_layers == select_layers(teacher, batches, 2)
    assert "cca" in distiller(**batch()).terms

    again = Distiller(*pair("bert"), MC3KD())
    again.load_state_dict(distiller.state_dict())
    assert again.method.teacher_layers == method.teacher_layers


def test_mc3kd_chooses_from_the_teachers_inputs():
    torch.manual_seed(2)
    teacher, data = classifier("bert"), batch(rows=16)
    students = {"input_ids": torch.full((16, 10), 5)}  # of another tokenizer
    layers = select_layers(teacher, [data], 2)
    assert layers != select_layers(teacher, [students], 2)
    distiller = Distiller(teacher, student_from_teacher(teacher, [2, 4]), MC3KD())
    distiller.prepare([{**students, **{f"teacher_{name}": x for name, x in data.items()}}])
    assert distiller.method.teacher_layers == layers


def test_lrkd_is_equations_1_to_13(family):
    teacher, student = pair(family)
    inputs = batch()
    mask = inputs["attention_mask"].double()[..., None]
    (z_t, h_t), (z_s, h_s) = both(teacher, student, inputs)
    method = LRKD(alpha=0.9, beta=15.0, temperature=4.0, scale_by_t2=False)
    distiller = Distiller(teacher, student, method).eval()
    projections = method.loss.student_projection, method.loss.teacher_projection
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
        out = distiller(**inputs)
        p_s, p_t = (p.weight.double() for p in projections)
    for p in (p_s, p_t):
        torch.testing.assert_close(p @ p.T, torch.eye(16, dtype=torch.float64))
    pooled_s, pooled_t = ((h[-1] * mask).sum(1) / mask.sum(1) for h in (h_s, h_t))

    def norm(x):
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-5
        ).sqrt()

    spl = (norm(pooled_s @ p_s) - norm(pooled_t)).square().mean() / 2
    tpl = (norm(pooled_t @ p_t) - norm(pooled_s)).square().mean() / 2
    task = F.cross_entropy(z_s, inputs["labels"])
    expected = 0.9 * task + 0.1 * kl(z_t, z_s, 4.0) + 15 * (0.3 * spl + 0.7 * tpl)
    torch.testing.assert_close(out.loss, expected)


def test_every_method_has_a_name_and_is_public():
    """Except methods on attention maps, which need eager attention."""
    found = {
        kind
        for kind in vars(methods).values()
        if inspect.isclass(kind)
        and issubclass(kind, methods.Method)
        and kind.__module__ == methods.__name__
        and not kind.__name__.startswith("_")
    }
    for kind in found - set(METHODS.values()):  # what most tests go through
        maps = "step.attentions(" in inspect.getsource(kind)
        assert maps, f"METHODS has no name for {kind.__name__}"
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        assert Path(__file__).with_name(f"test_{name}.py").exists(), f"there is no test_{name}.py"
    for kind in found:
        assert kind.__name__ in distill.__all__, f"fastkd.distill lacks {kind.__name__}"
        assert f"`{kind.__name__}`" in DESIGN, f"docs/design.md has no {kind.__name__}"
    assert set(distill.__all__) <= set(dir(distill))


def test_hyperparameters_override_a_preset():
    assert method_by_name("lrc_bert").first_stage < 0.8
    assert method_by_name("lrc_bert", preset="paper", gamma=2.0).gamma == 2.0
    # Other values of the papers: tests/train/test_recipes.py.
    scaled = [method_by_name(name, preset="paper").scale_by_t2 for name in ("mc3kd", "lrc_bert")]
    assert scaled == [True, False]
    for kind in METHODS.values():
        assert kind.paper.items() <= kind(**kind.paper).hyperparameters().items()
        assert not kind.paper.items() & kind().hyperparameters().items(), "the same as the default"
    raises("did you mean 'paper'", method_by_name, "fcd", preset="papers")


@pytest.mark.parametrize("kind", [*METHODS.values(), *BASELINES.values()])
def test_hyperparameters_rebuild_the_method(kind):
    method = kind()
    assert kind(**method.hyperparameters()).hyperparameters() == method.hyperparameters()
    assert kind.__name__ in repr(method)


@pytest.mark.parametrize("name, options, message", [
    ("fdc", {}, "did you mean 'fcd'"),
    ("fcd", {"alhpa": 1.0}, "did you mean 'alpha'"),
    ("fcd", {"alpha": -1.0}, "alpha must be at least 0"),
    ("fcd", {"distance": "person"}, "did you mean 'pearson'"),
    ("soft_targets", {"alpha": 1.5}, "alpha must be at most 1"),
    ("soft_targets", {"temperature": 0.0}, "temperature must be greater than 0"),
    ("soft_targets", {"divergence": "kl"}, "divergence must be one of"),
    ("knn", {"k": 0}, "k must be at least 1"),
    ("knn", {"tolerance": -0.1}, "tolerance must be at least 0"),
    ("lrc_bert", {"first_stage": 2.0}, "first_stage must be at most 1"),
    ("mc3kd", {"beta": float("nan")}, "beta must be finite"),
    ("mc3kd", {"pool": "token"}, "did you mean 'tokens'"),
    ("lrkd", {"gamma": 1.1}, "gamma must be at most 1"),
    ("lrkd", {"projection_layers": 0}, "projection_layers must be at least 1"),
])  # fmt: skip
def test_wrong_options_are_errors(name, options, message):
    raises(message, method_by_name, name, **options)


def test_a_teacher_with_too_few_layers_is_an_error():
    teacher, student = classifier("bert", layers=2), classifier("bert", layers=3)
    for name in ("fcd", "lrc_bert", "mc3kd"):
        with pytest.raises(ValueError, match="student has 3 layers but the teacher only 2"):
            Distiller(teacher, student, method_by_name(name))
    deep = classifier("bert", layers=4)
    raises("2 teacher layers for 3 student layers", Distiller, deep, student, FCD(layers=[1, 2]))


def test_a_method_serves_models_of_one_size():
    method, teacher = LRKD(), classifier("bert")
    first = Distiller(teacher, student_from_teacher(teacher, [2]), method)
    weights = {k: v.clone() for k, v in first.method.state_dict().items()}
    Distiller(teacher, student_from_teacher(teacher, [2]), method)
    assert all(torch.equal(v, weights[k]) for k, v in method.state_dict().items())
    deeper = student_from_teacher(teacher, [2, 4])
    raises("built for models of other sizes", Distiller, teacher, deeper, method)


def test_a_method_of_its_name_computes_a_term_of_the_base_class():
    class Constant(FCD):
        def samples(self, step):
            return step.student.hidden[1].new_full((), 7.0)

    out = Distiller(*pair("bert"), Constant()).eval()(**batch())
    terms = [out.terms[name] for name in ("task", "soft", "tokens", "samples")]
    assert terms[-1] == 7 and terms[-2] > 0
    torch.testing.assert_close(out.loss.detach(), torch.stack(terms).sum())


def test_the_package_of_a_method_does_not_matter():
    """A subclass that reads no logits itself needs none, whichever module defines it."""
    teacher = model(GPT2LMHeadModel, "gpt2")
    student = student_from_teacher(teacher, [1])

    class Own(FCD):
        def soft(self, step):
            return super().soft(step)

    assert Distiller(teacher, student, type("Mine", (FCD,), {})()).uses_lm_head
    assert not Distiller(teacher, student, Own()).uses_lm_head
    assert Distiller(teacher, student, Own(soft_weight=0.0)).uses_lm_head
