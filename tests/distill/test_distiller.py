"""Teacher, student and method as one module."""

import copy
import warnings

import pytest
import torch
import transformers as t
from torch.nn import functional as F

from fastkd.distill import (
    FCD,
    LRCBERT,
    LRKD,
    METHODS,
    AttentionMSE,
    Distiller,
    IntraClassKNN,
    SoftTargets,
    method_by_name,
    methods,
    student_from_teacher,
)
from fastkd.distill.step import unit_gradients
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import replaced_embeddings
from tests.distill import support
from tests.distill.models import (
    FAMILIES,
    batch,
    batch_for,
    classifier,
    eager,
    gradients_of,
    model,
    pair,
    ready,
    set_dropout,
    step,
)
from tests.distill.support import FAMILIES as SUPPORTED
from tests.support.compare import raises

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss", "ignore:LRCBERT")


def make(name="fcd", family="bert", teacher_layers=4, **options):
    num_labels = options.pop("num_labels", 3)
    teacher = classifier(family, layers=teacher_layers, num_labels=num_labels)
    student = classifier(family, layers=2, num_labels=num_labels)
    return ready(teacher, student, name, **options)


# tests/distill/test_support.py takes a step of every family by every method.
@pytest.mark.parametrize(("family", "name"), [
    *(("bert", name) for name in METHODS),
    *((family, list(METHODS)[i % len(METHODS)]) for i, family in enumerate(FAMILIES[1:], 1)),
])  # fmt: skip
def test_every_family_and_every_method_learns(family, name):
    distiller = make(name, family).train()
    teacher = {k: v.clone() for k, v in distiller.teacher.state_dict().items()}
    out = distiller(**batch_for(family))
    out.loss.backward()
    assert out.loss.dim() == 0 and out.loss.isfinite() and out.logits.shape == (6, 3)
    assert all(not value.requires_grad for value in out.terms.values())
    assert out.terms["total"] == out.loss.detach()

    assert not distiller.teacher.training and distiller.student.training
    assert all(p.grad is None and not p.requires_grad for p in distiller.teacher.parameters())
    reached = {n for n, p in distiller.student.named_parameters() if p.grad is not None}
    unused = {n for n, _ in distiller.student.named_parameters()} - reached
    # XLNet's mask embedding, second stream and segment embeddings serve other inputs.
    assert all(
        family == "xlnet" and n.endswith(("mask_emb", "seg_embed", "r_s_bias")) for n in unused
    )
    for parameter in distiller.method.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0

    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=0.1)
    before = [p.clone() for p in distiller.method.parameters()]
    optimizer.step()
    after = list(distiller.method.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    for key, value in distiller.teacher.state_dict().items():
        assert torch.equal(value, teacher[key])


def test_only_the_needed_layers_are_kept():
    seen = {}
    for distiller, theirs, ours in (
        (make("fcd", layers=[1, 3]), [1, 3], [1, 2]), (make("soft_targets"), [], [])
    ):  # fmt: skip
        distiller.method.register_forward_pre_hook(lambda module, args: seen.update(step=args[0]))
        distiller(**batch())
        teacher, student = seen["step"].teacher.hidden, seen["step"].student.hidden
        assert (sorted(teacher), sorted(student)) == (theirs, ours)
        assert not any(x.requires_grad for x in teacher.values())


def test_state_dict_holds_student_and_method_without_the_teacher(tmp_path):
    distiller, other = make("lrkd"), make("lrkd")
    state, teacher = distiller.state_dict(), copy.deepcopy(other.teacher.state_dict())
    assert {key.partition(".")[0] for key in state} == {"student", "method"}
    result = other.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert all(torch.equal(v, teacher[k]) for k, v in other.teacher.state_dict().items())
    fewer = {k: v for k, v in state.items() if k != "student.classifier.bias"}
    raises("classifier", other.load_state_dict, fewer, error=RuntimeError)

    distiller.method.teacher = torch.nn.Linear(2, 2)  # not the teacher
    raises(r"method\.teacher\.bias", distiller.load_state_dict, state, error=RuntimeError)

    distiller.student.save_pretrained(tmp_path)
    again = t.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.state_dict().keys() == distiller.student.state_dict().keys()
    assert again(batch()["input_ids"]).logits.isfinite().all()


def test_a_copied_distiller_works_by_itself():
    distiller = make("lrc_bert")
    twin = copy.deepcopy(distiller)
    with torch.no_grad():
        for p in distiller.parameters():
            p.zero_()
    out = twin.train()(**batch())
    out.loss.backward()
    assert out.loss.isfinite() and next(distiller.parameters()).grad is None


# LRC-BERT's schedule and perturbation


def test_unit_gradient_moves_each_samples_embeddings_by_the_normalised_gradient():
    """Eqs. 7-8 by hand: embeddings computed apart, fed in as inputs_embeds of a dropout-free
    BERT, gradient by autograd, then a second forward pass."""
    teacher, student = classifier("bert"), classifier("bert", layers=2)
    set_dropout(student)
    distiller = ready(teacher, student, "lrc_bert").eval()
    data, backbone = batch(), Backbone(student)
    with replaced_embeddings(backbone, lambda emb: emb.detach().requires_grad_()) as seen:
        distiller(**data).loss.backward()
    g, emb = seen[0].grad, seen[0].detach()
    unit = g / g.flatten(1).norm(dim=1)[:, None, None]
    with replaced_embeddings(backbone, lambda emb: emb + unit):
        expected, gradients = step(distiller, data)

    inputs = []
    student.bert.encoder.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    out, found = step(distiller.train(), data)
    assert len(inputs) == 2
    torch.testing.assert_close(inputs[0], emb)
    torch.testing.assert_close(inputs[1].detach(), emb + unit)
    torch.testing.assert_close(out.loss, expected.loss)
    assert out.loss > distiller.eval()(**data).loss
    torch.testing.assert_close(found, gradients)


@pytest.fixture
def shifts(monkeypatch):
    found = []

    def noted(*run, **options):
        shifts = unit_gradients(*run, **options)
        found.extend(shifts)
        return shifts

    monkeypatch.setattr("fastkd.distill.distiller.unit_gradients", noted)
    return found


@pytest.mark.parametrize("family", ["xlnet", "gpt2", "albert", "llama", "bert"])
def test_unit_gradient_is_per_sample_in_every_layout(family, shifts):
    """Of BERT a weak loss: unscaled, its float16 gradients at the embeddings would all be zero."""
    weak = dict.fromkeys(("alpha", "beta", "gamma"), 1e-6) if family == "bert" else {}
    distiller = make("lrc_bert", family, **weak).train()
    with torch.autocast("cpu", torch.float16, enabled=family == "bert"):
        assert distiller(**batch_for(family)).loss.isfinite()
    shift = shifts[0].transpose(0, Backbone(distiller.student).batch_dim).float()
    tolerance = {"atol": 1e-2, "rtol": 0} if weak else {}
    torch.testing.assert_close(shift.flatten(1).norm(dim=1), torch.ones(6), **tolerance)


def test_unit_gradient_runs_the_teacher_once_and_only_in_training():
    distiller, data, calls = make("lrc_bert"), batch(), []
    for name in ("teacher", "student"):
        model = getattr(distiller, name)
        model.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    distiller.train()(**data)
    assert sorted(calls) == ["student", "student", "teacher"]
    distiller.eval()(**data)
    with torch.no_grad():
        distiller.train()(**data)
    assert sorted(calls[3:]) == ["student"] * 2 + ["teacher"] * 2
    make("lrc_bert", perturb=False).train()(**data).loss.backward()


def test_unit_gradient_without_a_gradient_moves_nothing():
    """One sample and no label terms: nothing to contrast with, so the gradient is zero."""
    distiller = make("lrc_bert", beta=0.0, gamma=0.0).train()
    out, gradients = step(distiller, batch(rows=1, padding=0))
    assert out.loss.isfinite() and all(g.isfinite().all() for g in gradients.values())


LANGUAGE_HEADS = ("masked words", "next word")
VOCABULARIES = [(f, h) for f in support.FAMILIES for h in support.heads(f) if h in LANGUAGE_HEADS]
VOCABULARIES = [(f, h) for f, h in VOCABULARIES if h in ("masked words", "next word")]


@pytest.mark.parametrize(("family", "head"), [x for x in VOCABULARIES if x[0] != "bart"])
def test_logits_are_not_computed_if_no_term_reads_them(family, head):
    teacher, data = support.model_of(family, head), support.data_of(family, head)
    student = student_from_teacher(teacher, [1, 3])
    method = FCD(task_weight=0.5, soft_weight=0.0)
    distiller = Distiller(teacher, student, method, keep_logits=True).eval()
    rows = set()
    vocabulary = teacher.get_output_embeddings()
    vocabulary.register_forward_hook(lambda module, args, out: rows.add(out.shape[:-1].numel()))
    loss = distiller(**data).loss
    # MobileBERT multiplies by its head itself; ProphetNet predicts from two streams.
    expected = {"mobilebert": set(), "prophetnet": {8}}.get(family, {4})
    assert rows == expected
    reads = Distiller(teacher, student, Reads(task_weight=0.5)).eval()
    assert torch.equal(reads(**data).loss, loss)


class Reads(FCD):
    """Has a term on the teacher's logits."""

    def weights(self, progress):
        return {**super().weights(progress), "soft": 1.0}

    def soft(self, step):
        assert step.teacher.logits.shape == (4, 10, 60)
        return step.student.hidden[1].new_zeros(())


class ReadsUndeclared(Reads):
    logit_terms = ("task",)

    def soft(self, step):
        return FCD.soft(self, step)


def test_a_schedule_without_progress_warns_once():
    method = method_by_name("lrc_bert", preset="paper")
    distiller = Distiller(classifier("bert"), classifier("bert", layers=2), method).train()
    with pytest.warns(UserWarning, match="call distiller.set_progress"):
        out = distiller(**batch())
    assert set(out.terms) == {"cos_nce", "total"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distiller(**batch())
    for bad in (-0.1, 1.5, float("nan")):
        raises("progress", distiller.set_progress, bad)


# Heads of other kinds


def causal_batch():
    ids = torch.randint(5, 60, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100  # a prompt
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    "family, head", [("gpt2", t.GPT2LMHeadModel), ("llama", t.LlamaForCausalLM)]
)
def test_causal_language_models_compare_positions_with_a_next_label(family, head):
    teacher, student = pair(family, head=head)
    data = causal_batch()
    distiller = Distiller(teacher, student, SoftTargets(alpha=0.5, temperature=2.0)).eval()
    out = distiller(**data)
    torch.testing.assert_close(out.terms["task"], student(**data).loss)
    with torch.no_grad():
        q, p = (model(**data).logits[:, :-1].div(2).softmax(-1) for model in (student, teacher))
    kl = (p * (p / q).log()).sum(-1)[data["labels"][:, 1:] != -100]
    torch.testing.assert_close(out.terms["soft"], 4 * kl.mean())
    for nothing in (0, torch.tensor(0.0)):  # an accumulation step with prompts only
        data["labels"][:] = -100
        out, gradients = step(distiller, {**data, "num_items": nothing})
        assert out.loss == 0 and not any(g.any() for g in gradients.values())


def test_masked_language_models_compare_labelled_positions():
    teacher, student = pair("bert", head=t.BertForMaskedLM)
    data = causal_batch()
    data["labels"][:, ::3] = -100
    out = Distiller(teacher, student, SoftTargets(temperature=1.0)).eval()(**data)
    with torch.no_grad():
        q, p = (model(**data).logits.softmax(-1) for model in (student, teacher))
    torch.testing.assert_close(out.terms["task"], student(**data).loss)
    kl = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(out.terms["soft"], kl[data["labels"] != -100].mean())
    del data["labels"]
    unlabelled = Distiller(teacher, student, SoftTargets(alpha=1.0, temperature=1.0)).eval()(**data)
    torch.testing.assert_close(unlabelled.loss, kl[data["attention_mask"].bool()].mean())


def test_token_classification():
    teacher, student = pair("bert", head=t.BertForTokenClassification, num_labels=5)
    data = causal_batch()
    data["labels"] = data["labels"].clamp(max=4)
    out = Distiller(teacher, student, LRKD()).eval()(**data)
    torch.testing.assert_close(out.terms["task"], student(**data).loss)
    data["labels"][:] = -100
    assert Distiller(teacher, student, SoftTargets()).eval()(**data).loss == 0


def test_multi_label_heads_compare_each_label_by_itself():
    """Task term of transformers; soft targets the mean KL of the labels' yes and no."""
    for problem in ("multi_label_classification", None):  # None: the labels' dtype decides
        teacher, student = (classifier("bert", n, problem_type=problem) for n in (4, 2))
        data = {**batch(), "labels": torch.randint(0, 2, (6, 3)).float()}
        out = Distiller(teacher, student, SoftTargets(alpha=0.5, temperature=3.0)).eval()(**data)
        p, q = ((out_of(m, data).logits / 3).sigmoid() for m in (teacher, student))
        kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        torch.testing.assert_close(out.terms["soft"], 9 * kl.mean())
        torch.testing.assert_close(out.terms["task"], student(**data).loss.detach())


def assert_left_out(distiller, data, left_out, labels):
    kept = [i for i in range(6) if i not in left_out]
    for name in labels:
        data[name][left_out] = -100
    distiller.method.alpha = 0.0  # the task only: soft targets count every row
    expected = step(distiller.eval(), {name: x[kept] for name, x in data.items()})
    assert_same_step(distiller, data, expected, tolerance=1e-6)


def test_rows_without_labels_or_answers_are_left_out():
    models = (classifier("bert", n, problem_type="multi_label_classification") for n in (4, 2))
    distiller = Distiller(*models, SoftTargets())
    data = {**batch(), "labels": torch.randint(0, 2, (6, 3)).float()}
    assert_left_out(distiller, dict(data), [1, 4], ["labels"])
    data["labels"][2, 0] = torch.nan  # one label of a row
    out, gradients = step(distiller, data)
    z, y = out_of(distiller.student, data).logits, data["labels"]
    known = ~y.isnan() & (y != -100)
    expected = F.binary_cross_entropy_with_logits(z[known], y[known])
    torch.testing.assert_close(out.loss.detach(), expected)
    assert all(g.isfinite().all() for g in gradients.values())

    teacher, student, data = question_answering()
    spans = ["start_positions", "end_positions"]
    assert_left_out(Distiller(teacher, student, SoftTargets()), data, [2], spans)


def out_of(model, data):
    names = ("input_ids", "attention_mask")
    with torch.no_grad():
        return model.eval()(**{name: data[name] for name in names})


@pytest.mark.parametrize("cached", [False, True])
def test_a_student_has_its_teachers_problem_type(cached, tmp_path):
    teacher, student = classifier("bert"), classifier("bert", layers=2)
    teacher.config.problem_type = "multi_label_classification"
    data, method = batch(), SoftTargets(alpha=1.0, temperature=1.0)
    distiller = Distiller(teacher, student, method)
    if cached:
        distiller = Distiller(distiller.cache_teacher([data], tmp_path), student, method)
    del data["labels"]
    soft = distiller.eval()(**data).terms["soft"]
    p, z = out_of(teacher, data).logits.sigmoid(), out_of(student, data).logits
    entropy = F.binary_cross_entropy(p, p)
    torch.testing.assert_close(soft, F.binary_cross_entropy_with_logits(z, p) - entropy)

    distiller = Distiller(teacher, student, SoftTargets())
    raises(r"labels have shape \(6,\) but", distiller, **data, labels=torch.zeros(6))
    student.config.problem_type = "regression"
    words = "problem_type is regression and the teacher's multi_lab"
    raises(words, Distiller, teacher, student, SoftTargets())


def test_multiple_choice_compares_the_choices_of_a_question():
    teacher, student = pair("bert", head=t.BertForMultipleChoice)
    ids = torch.randint(5, 60, (3, 4, 7))
    mask = torch.ones_like(ids)
    mask[0, :, 5:] = 0
    data = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 3, 1])}
    out = Distiller(teacher, student, SoftTargets(temperature=1.0)).eval()(**data)
    z_t, z_s = (out_of(m, data).logits for m in (teacher, student))
    assert out.logits.shape == (3, 4)
    torch.testing.assert_close(out.terms["task"], F.cross_entropy(z_s, data["labels"]))
    torch.testing.assert_close(out.terms["soft"], F.kl_div(
        z_s.log_softmax(-1), z_t.log_softmax(-1), reduction="batchmean", log_target=True
    ))  # fmt: skip
    for name in ("fcd", "lrc_bert", "lrkd", "mc3kd"):
        ready(teacher, student, name)(**data).loss.backward()
    raises("got 3 labels for 12 samples", Distiller(teacher, student, IntraClassKNN()), **data)


@pytest.mark.parametrize("family", ["bert", "deberta_v2", "gpt2"])
def test_regression_heads_use_squared_errors(family):
    distiller = make("soft_targets", family, num_labels=1, alpha=0.25).eval()
    data = batch(num_labels=1)
    out = distiller(**{**data, "labels": data["labels"].round().long()})
    with pytest.raises(ValueError, match=r"labels have shape \(1,\) but the student's logits"):
        distiller(**{**data, "labels": data["labels"][:1]})
    z_s, z_t = (out_of(m, data).logits for m in (distiller.student, distiller.teacher))
    task = F.mse_loss(z_s[:, 0], data["labels"].round())
    torch.testing.assert_close(out.loss, 0.75 * task + 0.25 * F.mse_loss(z_s, z_t))


def question_answering():
    data = batch()
    data.pop("labels")
    # The last answer lies beyond the text and doesn't count.
    spans = {"start_positions": [1, 2, 3, 4, 5, 10], "end_positions": [2, 2, 4, 6, 6, 11]}
    data.update({name: torch.tensor(ends) for name, ends in spans.items()})
    return *pair("bert", head=t.BertForQuestionAnswering), data


def test_question_answering_compares_starts_and_ends():
    teacher, student, data = question_answering()
    out = Distiller(teacher, student, SoftTargets(alpha=0.5, temperature=2.0)).eval()(**data)
    mask = data["attention_mask"].bool()
    hard = {}  # among the real tokens, which transformers has padding compete with
    for end in ("start", "end"):
        z = getattr(out_of(student, data), f"{end}_logits").masked_fill(~mask, -torch.inf)
        hard[end] = F.cross_entropy(z[:5], data[f"{end}_positions"][:5])
    torch.testing.assert_close(out.terms["task"], (hard["start"] + hard["end"]) / 2)
    kls = []
    for end in ("start_logits", "end_logits"):
        z_t, z_s = (getattr(out_of(m, data), end) / 2 for m in (teacher, student))
        for b in range(6):
            p, q = (z[b, mask[b]].softmax(-1) for z in (z_t, z_s))
            kls.append((p * (p / q).log()).sum())
    torch.testing.assert_close(out.terms["soft"], 4 * torch.stack(kls).mean())
    assert [x.shape for x in out.logits] == [(6, 10), (6, 10)]
    with pytest.raises(ValueError, match="takes start_positions and end_positions"):
        Distiller(teacher, student, FCD())(
            input_ids=data["input_ids"], labels=data["start_positions"]
        )
    wider = {n: F.pad(x, (0, 3)) if x.dim() == 2 else x for n, x in data.items()}
    again = Distiller(teacher, student, SoftTargets(alpha=0.5, temperature=2.0)).eval()(**wider)
    torch.testing.assert_close(again.loss, out.loss)
    lrc = Distiller(teacher, student, LRCBERT(perturb=True)).train()
    lrc(**data).loss.backward()
    means = []  # eq. 5, over what is there
    for end in ("start", "end"):
        losses = []
        for b, z in enumerate(getattr(out_of(student, data), f"{end}_logits")):
            place = data[f"{end}_positions"][b]
            if place < 10 and mask[b, place]:
                target = (F.one_hot(place, 10)[mask[b]] / 1.1).softmax(-1)
                losses.append(-(target * z[mask[b]].log_softmax(-1)).sum())
        means.append(torch.stack(losses).mean())
    torch.testing.assert_close(lrc.eval()(**data).terms["task"], torch.stack(means).mean())


def test_return_dict_changes_no_term():
    distiller, data = make("fcd").eval(), batch()
    expected = distiller(**data).terms
    distiller.student.config.return_dict = distiller.teacher.config.return_dict = False
    for out in (distiller(**data), distiller(**data, return_dict=False)):
        torch.testing.assert_close(out.terms, expected, rtol=0, atol=0)


def test_a_head_without_logits_is_an_error_with_its_outputs():
    teacher, student = pair("bert", head=t.BertForPreTraining)
    data = {name: x for name, x in batch().items() if name != "labels"}
    words = r"task term needs logits.*prediction_logits"
    raises(words, Distiller(teacher, student, FCD()), **data)
    Distiller(teacher, student, FCD(task_weight=0.0))(**data).loss.backward()
    distiller = Distiller(teacher, student, SoftTargets(alpha=1.0))
    raises(r"soft term needs logits, but the student", distiller, **data)


def test_models_without_a_head_learn_from_features_only():
    teacher, student = pair("bert", head=t.BertModel)
    data = batch()
    out = Distiller(teacher, student, FCD(task_weight=0.0))(**data)
    assert set(out.terms) == {"tokens", "samples", "total"} and out.logits is None
    labels = data.pop("labels")
    for method in (LRKD(alpha=None), methods.MC3KD(alpha=None, layers="top")):
        Distiller(teacher, student, method)(**data).loss.backward()
    distiller = Distiller(teacher, student, IntraClassKNN(alpha2=0.0, alpha3=0.0))
    raises("labels must be passed, one per sample", distiller, **data)
    distiller(**data, labels=labels).loss.backward()
    words = r"SoftTargets has terms .*\(task, soft\).* no head"
    raises(words, Distiller, teacher, student, SoftTargets())
    raises("pass alpha=None", Distiller, teacher, student, LRKD())


# Packed rows and padding sides


def decoders(head=t.LlamaForCausalLM, layers=(2, 4)):
    torch.manual_seed(0)
    models = pair("llama", layers, head, num_hidden_layers=max(layers))
    return [model.double() for model in models]


def documents(lengths=(5, 3, 6, 1, 4)):
    return [torch.randint(5, 60, (length,)) for length in lengths]


def padded(texts, left=False, labels=True):
    N = max(map(len, texts))
    data = {name: [] for name in ("input_ids", "attention_mask", "labels")}
    for ids in texts:
        none = N - len(ids)
        pad = (none, 0) if left else (0, none)
        data["input_ids"].append(F.pad(ids, pad))
        data["attention_mask"].append(F.pad(torch.ones_like(ids), pad))
        data["labels"].append(F.pad(ids, pad, value=-100))
    data = {name: torch.stack(rows) for name, rows in data.items()}
    return data if labels else {**data, "labels": None}


def packed(texts, how="position_ids", labels=True):
    """As transformers' DataCollatorWithFlattening packs them."""
    ids = torch.cat(texts)[None]
    positions = torch.cat([torch.arange(len(x)) for x in texts])[None]
    number = torch.cat([torch.full((len(x),), i) for i, x in enumerate(texts)])[None]
    data = {"input_ids": ids, "position_ids": positions}
    if labels:
        data["labels"] = ids.masked_fill(positions == 0, -100)
    if how in ("segments", "seq_idx"):
        data[how] = number
    elif how == "labels at starts":
        data["labels"] = ids
    elif how == "cu_seq_lens_q":
        data[how] = F.pad(torch.tensor([len(x) for x in texts]).cumsum(0), (1, 0)).int()
    return data


def assert_same_step(distiller, data, expected, tolerance=1e-12):
    out, gradients = step(distiller, data)
    for term, value in expected[0].terms.items():
        torch.testing.assert_close(out.terms[term], value, atol=tolerance, rtol=tolerance)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max() + 1e-3
        torch.testing.assert_close(
            gradients[name] / scale, gradient / scale, atol=100 * tolerance, rtol=0
        )


UNSUPERVISED_BY_CLASS = [name for name in METHODS if name != "knn"]
HOW_PACKED = ("position_ids", "segments", "cu_seq_lens_q", "seq_idx", "labels at starts")


def test_packed_rows_are_found_in_a_graph_of_changing_sizes():
    """Dynamo's `in` finds no size that changes, so documents were read as one."""
    torch.compiler.reset()
    distiller = ready(*decoders(layers=(1,)), "soft_targets")

    def read(data):
        return distiller.reader.read(data).document_ids

    compiled = torch.compile(read, backend="eager")
    batches = [padded(documents((10, 7, 3, 4)))]
    for how in ("position_ids", "segments"):
        rows = [packed(documents(lengths), how) for lengths in ((5, 3, 8), (2, 6, 8))]
        both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        batches.append({**both, "attention_mask": torch.ones_like(both["input_ids"])})
    for data in batches:
        torch.testing.assert_close(compiled(data), read(data))


@pytest.mark.parametrize(("name", "how"), [
    *((name, "position_ids") for name in UNSUPERVISED_BY_CLASS),
    *(("fcd", how) for how in HOW_PACKED[1:]),
])  # fmt: skip
def test_packed_rows_equal_padded_rows(name, how):
    distiller, texts = ready(*decoders(), name), documents()
    assert_same_step(distiller, packed(texts, how), step(distiller, padded(texts)))


# Samples are documents in the relations of FCD, and in the means of LRKD.
@pytest.mark.parametrize("name", ["fcd", "lrkd"])
def test_packed_rows_may_be_padded(name):
    """transformers takes a row with an attention_mask for one document, so models get none."""
    distiller = ready(*decoders(), name)
    texts = documents((5, 3, 6, 1, 4, 2))
    expected = step(distiller, padded(texts))
    rows = [packed(texts[:3]), packed(texts[3:])]
    data = {
        key: torch.stack([F.pad(row[key][0], (0, 14 - row[key].shape[1])) for row in rows])
        for key in rows[0]
    }
    data["attention_mask"] = torch.arange(14) < torch.tensor([[14], [7]])
    assert_same_step(distiller, data, expected)


def test_left_padding_of_packed_rows_changes_nothing():
    """Also if positions continue from the first document."""
    distiller = ready(*decoders(), "soft_targets")
    texts = documents((5, 3))
    expected = step(distiller, padded(texts))
    data = {name: F.pad(x, (3, 0)) for name, x in packed(texts).items()}
    data["labels"][:, :3] = -100
    data["attention_mask"] = (torch.arange(11) >= 3)[None]
    for shift, before in ((0, [0, 0, 0]), (0, [1, 1, 1]), (1, [0, 0, 0]), (3, [0, 1, 2])):
        given = data["position_ids"].clone()
        given[:, 3:8] = torch.arange(5) + shift
        given[:, :3] = torch.tensor(before)
        # Angles of other positions are rounded otherwise, to float32.
        data["position_ids"] = given
        assert_same_step(distiller, data, expected, tolerance=1e-7 if shift else 1e-12)


def opt(layers):
    config = copy.deepcopy(SUPPORTED["opt"])
    config.update({"num_hidden_layers": layers, "init_std": 0.2})
    return t.OPTForCausalLM(config).double()


@pytest.mark.parametrize(
    "how", ["encoder", "embeddings", "decoder", "teacher", "no positions", "compiled"]
)
def test_models_that_mix_packed_documents_are_an_error(how):
    teacher, student = decoders(layers=(1,) if how == "compiled" else (2, 4))
    data, side, hint = packed(documents(), "segments"), "student", "give each document"
    if how in ("encoder", "embeddings"):
        teacher, student = pair("bert", head=t.BertForMaskedLM)
    elif how == "decoder":
        student = opt(2)
    elif how == "teacher":
        teacher, side = opt(4), how
    else:  # no positions
        hint = "pass position_ids that start again, give"
        del data["position_ids"]
    if how == "embeddings":
        data["inputs_embeds"] = torch.randn(*data.pop("input_ids").shape, 16)
    distiller = Distiller(teacher, student, FCD())
    if how == "compiled":
        distiller = torch.compile(distiller, backend="eager")
    raises(rf"which the {side} \(\w+\) reads as one; {hint}", distiller, **data)
    assert student.training and not teacher.training
    if how == "compiled":
        return
    data["segments"] = torch.zeros_like(data["segments"])
    assert distiller(**data).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "opt", "t5", "llama"])
def test_new_weights_that_mix_documents_are_an_error(family, dtype):
    """Of weights of 0.02 attention says little, and less than rounding in bfloat16."""
    kind = t.T5EncoderModel if family == "t5" else t.AutoModel.from_config
    teacher, student = (kind(copy.deepcopy(SUPPORTED[family])).to(dtype) for _ in range(2))
    distiller = Distiller(teacher, student, FCD(task_weight=0))
    data = packed(documents(), "segments", labels=False)
    if family == "llama":
        assert distiller(**data).loss.isfinite()
        return
    del data["position_ids"]
    raises(r"which the student \(\w+\) reads as one", distiller, **data)


@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
def test_each_packed_document_is_a_sample_of_its_class(pool):
    method = IntraClassKNN(alpha2=0.0, alpha3=0.0, pool=pool, k=2)
    distiller = Distiller(*decoders(t.LlamaModel), method).eval()
    texts, labels = documents(), torch.tensor([0, 1, 0, 1, 1])
    expected = step(distiller, {**padded(texts), "labels": labels})
    data = {**packed(texts), "labels": labels}
    assert_same_step(distiller, data, expected)
    raises("got 4 labels for 5 samples", distiller, **{**data, "labels": labels[:4]})


def test_unlabelled_packed_rows_compare_no_distribution_across_documents():
    distiller = Distiller(*decoders(), SoftTargets(alpha=1.0)).eval()
    texts = documents()
    expected = step(distiller, padded(texts, labels=False))
    assert_same_step(distiller, packed(texts, labels=False), expected)
    distiller = Distiller(*pair("llama"), SoftTargets())  # with one prediction per row
    data = {**packed(texts), "labels": torch.tensor([0])}
    raises("rows are packed with several documents", distiller, **data)
    words = r"segments must have the tokens' shape \(6, 10\)"
    raises(words, distiller, **batch(), segments=torch.zeros(6, 9))


# Mixed precision, accumulation, several processes


@pytest.mark.parametrize(
    ("family", "name"), [*(("bert", name) for name in METHODS), ("gpt2", "fcd"), ("gpt2", "knn")]
)
def test_autocast_is_close_to_full_precision(family, name):
    distiller, data = make(name, family).eval(), batch(rows=16)
    plain, gradients = distiller(**data), []
    for backward_inside in (False, True):
        distiller.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = distiller(**data)
            if backward_inside:
                mixed.loss.backward()
        if not backward_inside:
            mixed.loss.backward()
        gradients.append(gradients_of(distiller))
    assert mixed.loss.dtype == torch.float32
    for key, value in plain.terms.items():
        torch.testing.assert_close(mixed.terms[key].float(), value, atol=0.05, rtol=0.1)
    assert all(x.dtype == torch.float32 for x in gradients[0].values())
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", list(METHODS))
def test_half_precision_models(name):
    for dtype in (torch.float32, torch.bfloat16):
        teacher = classifier("bert").to(torch.bfloat16)
        distiller = ready(teacher, classifier("bert", layers=2).to(dtype), name)
        out = distiller(**batch())
        out.loss.backward()
        assert out.loss.isfinite() and out.loss.dtype == torch.float32
        assert all(p.grad is not None for p in distiller.parameters() if p.requires_grad)


def test_terms_that_a_model_does_not_give_are_errors(monkeypatch):
    """Of undeclared logits, logits without labels, hidden attention maps, given embeddings."""
    teacher = model(t.AutoModelForCausalLM, "llama")
    distiller = Distiller(teacher, student_from_teacher(teacher, [1, 3]), ReadsUndeclared())
    words = r"the teacher's logits, .* add it to logit_terms"
    raises(words, distiller, **support.data_of("llama", "next word"))
    models = pair("electra", head=t.ElectraForPreTraining)  # a logit for each token
    words = r"soft term needs logits of 2 labels.* \(6, 10\)"
    raises(words, Distiller(*models, SoftTargets(alpha=1.0)), **batch())
    distiller = Distiller(*eager(pair("bert")), AttentionMSE())
    distiller.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    raises("use_reentrant=True cuts the gradient", distiller, **batch())
    assert distiller.eval()(**batch()).terms["maps"] > 0
    monkeypatch.setattr(Distiller, "losses", lambda self, step: (step.student.logits.sum(), {}))
    data = {"inputs_embeds": torch.randn(6, 10, 16), "labels": batch()["labels"]}
    words = "pass input_ids, or set perturb=False"
    raises(words, make("lrc_bert", "gpt2").train(), **data)


def test_backward_twice_and_upstream_gradient():
    distiller = make("fcd").eval()
    loss = distiller(**batch()).loss
    loss.backward(retain_graph=True)
    once = gradients_of(distiller)
    (2 * loss).backward()
    torch.testing.assert_close(gradients_of(distiller), {n: 3 * g for n, g in once.items()})


# Mistakes


def test_wrong_arguments_are_errors():
    teacher, student = classifier("bert"), classifier("bert", layers=2)
    for given, hint in (
        ("fcd", r"got 'fcd'; .* fastkd.distill.method_by_name\('fcd'\)"),
        (FCD, r"got the class FCD; pass an instance, FCD\(\)"),
        (4, "got int"),
    ):
        words = rf"method must be a fastkd.distill method, {hint}"
        raises(words, Distiller, teacher, student, given, error=TypeError)
    words, linear = "student must be a transformers model, got Linear", torch.nn.Linear(2, 2)
    raises(words, Distiller, teacher, linear, FCD(), error=TypeError)
    for both in ((teacher, teacher), (student, copy.copy(student))):
        raises("student: shares parameters with the teacher", Distiller, *both, FCD())
    assert all(p.requires_grad for p in teacher.parameters())

    other_labels = classifier("bert", layers=2, num_labels=4)
    turned = classifier("bert", layers=2, id2label={0: "LABEL_2", 1: "LABEL_1", 2: "LABEL_0"})
    big, small = (model(t.GPT2LMHeadModel, "gpt2", 2, vocab_size=size) for size in (1100, 50))
    for theirs, ours, words in (
        (teacher, other_labels, r"student has 4 labels or vocabulary entries.* teacher 3"),
        (teacher, turned, r"classes are LABEL_2, LABEL_1, LABEL_0 .* one order"),
        (big, small, r"50 labels or vocabulary entries.* teacher 1100"),
    ):
        raises(words, Distiller, theirs, ours, SoftTargets())
    Distiller(teacher, other_labels, FCD(soft_weight=0.0))(**batch())
    raises("teacher has no head", Distiller, teacher.bert, classifier("bert", layers=2), LRKD())


def test_wrong_batches_are_errors():
    for label in (3, 7, -1):
        data = batch()
        data["labels"][2] = label
        words = rf"labels: {label} is none of the 3 classes of the stud"
        raises(words, Distiller(*pair(), SoftTargets()), **data)
    distiller, data = make("fcd"), batch()
    labels = data.pop("labels")
    raises("task term needs labels in the batch", distiller, **data)
    make("fcd", task_weight=0.0)(**data).loss.backward()
    words = Distiller(*pair("gpt2", head=t.GPT2LMHeadModel), IntraClassKNN())
    raises("one per sample", words, **causal_batch())
    raises(r"labels have shape \(5,\)", distiller, **data, labels=labels[:5])
    square = {**data, "attention_mask": torch.ones(6, 1, 10, 10)}
    raises(r"attention_mask must be \(B, N\)", distiller, **square, labels=labels)
    nothing = {"alpha": 0.0, "beta": 0.0, "task_weight": 0.0}
    raises("all weights of FCD are zero", lambda: make("fcd", **nothing)(**data))
