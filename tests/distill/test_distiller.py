"""Teacher, student and method as one module."""

import copy
import warnings

import pytest
import torch
import transformers as t
from torch.nn import functional as F

from fastkd.distill import (
    FCD,
    LRKD,
    METHODS,
    AttentionMSE,
    Distiller,
    IntraClassKNN,
    SoftTargets,
    method_by_name,
    student_from_teacher,
)
from tests.distill import support
from tests.distill.models import (
    batch,
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


def test_an_optimizer_trains_student_and_method_and_leaves_the_teacher():
    distiller = make("lrkd").train()
    teacher = copy.deepcopy(distiller.teacher.state_dict())
    learning = dict(distiller.named_parameters())
    learning = {n: p for n, p in learning.items() if not n.startswith("teacher.")}
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=0.1)
    before = {n: p.clone() for n, p in learning.items()}
    out = distiller(**batch())
    out.loss.backward()
    optimizer.step()
    assert all(not value.requires_grad for value in out.terms.values())
    assert not distiller.teacher.training and distiller.student.training
    assert not any(p.requires_grad for p in distiller.teacher.parameters())
    assert not [n for n, p in learning.items() if torch.equal(p, before[n])]
    assert all(torch.equal(x, teacher[n]) for n, x in distiller.teacher.state_dict().items())


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


def test_a_weak_loss_perturbs_as_a_strong_one_under_autocast():
    """Unscaled, its float16 gradients at the embeddings would all be zero."""
    models, losses = (classifier("bert"), classifier("bert", 2)), []
    set_dropout(models[1])
    for weight, perturb in ((1.0, True), (1e-6, True), (1.0, False)):
        weights = dict.fromkeys(("alpha", "beta", "gamma"), weight)
        torch.manual_seed(0)
        distiller = ready(*models, "lrc_bert", perturb=perturb, **weights).train()
        with torch.autocast("cpu", torch.float16):
            losses.append(float(distiller(**batch()).loss) / weight)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[2] < 0.99 * losses[0]


def test_unit_gradient_without_a_gradient_moves_nothing():
    """One sample and no label terms: nothing to contrast with, so the gradient is zero."""
    distiller = make("lrc_bert", beta=0.0, gamma=0.0).train()
    out, gradients = step(distiller, batch(rows=1, padding=0))
    assert out.loss.isfinite() and all(g.isfinite().all() for g in gradients.values())


VOCABULARIES = [
    (family, head) for family in support.FAMILIES for head in support.heads(family)
    if head in ("masked words", "next word") and family != "bart"
]  # fmt: skip


@pytest.mark.parametrize(("family", "head"), VOCABULARIES)
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


def test_a_regressions_labels_may_be_whole_numbers():
    distiller, data = make("soft_targets", num_labels=1).eval(), batch(num_labels=1)
    numbers = data.pop("labels").round()
    out = distiller(**data, labels=numbers.long())
    z = out_of(distiller.student, data).logits[:, 0]
    torch.testing.assert_close(out.terms["task"], F.mse_loss(z, numbers))
    raises(r"labels have shape \(1,\) but the stud", distiller, **data, labels=numbers[:1])


def out_of(model, data):
    names = ("input_ids", "attention_mask")
    with torch.no_grad():
        return model.eval()(**{name: data[name] for name in names})


def test_labels_that_a_head_does_not_take_are_errors():
    teacher, student = pair()
    teacher.config.problem_type = "multi_label_classification"
    distiller = Distiller(teacher, student, SoftTargets())
    raises(r"labels have shape \(6,\) but", distiller, **{**batch(), "labels": torch.zeros(6)})
    student.config.problem_type = "regression"
    words = "problem_type is regression and the teacher's multi_lab"
    raises(words, Distiller, teacher, student, SoftTargets())
    ids, data = torch.randint(5, 60, (3, 4, 7)), batch()
    choices = Distiller(*pair("bert", head=t.BertForMultipleChoice), IntraClassKNN())
    raises("got 3 labels for 12 samples", choices, input_ids=ids, labels=torch.tensor([0, 3, 1]))
    answers = Distiller(*pair("bert", head=t.BertForQuestionAnswering), FCD())
    raises("takes start_positions and end_positions", answers, **data)


def test_a_head_without_logits_is_an_error_with_its_outputs():
    teacher, student = pair("bert", head=t.BertForPreTraining)
    data = {name: x for name, x in batch().items() if name != "labels"}
    words = r"task term needs logits.*prediction_logits"
    raises(words, Distiller(teacher, student, FCD()), **data)
    Distiller(teacher, student, FCD(task_weight=0.0))(**data).loss.backward()
    distiller = Distiller(teacher, student, SoftTargets(alpha=1.0))
    raises(r"soft term needs logits, but the student", distiller, **data)


def test_models_without_a_head_have_no_task():
    teacher, student = pair("bert", head=t.BertModel)
    data = {name: x for name, x in batch().items() if name != "labels"}
    distiller = Distiller(teacher, student, IntraClassKNN(alpha2=0.0, alpha3=0.0))
    raises("labels must be passed, one per sample", distiller, **data)
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
    if how == "segments":
        data[how] = number
    return data


@pytest.mark.thorough
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


def opt(layers):
    config = copy.deepcopy(SUPPORTED["opt"])
    config.update({"num_hidden_layers": layers, "init_std": 0.2})
    return t.OPTForCausalLM(config).double()


@pytest.mark.parametrize("how", [
    "encoder", "embeddings", "decoder", "teacher", "no positions",
    pytest.param("compiled", marks=pytest.mark.thorough),
])  # fmt: skip
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


def test_wrong_packed_rows_are_errors():
    knn = Distiller(*decoders(t.LlamaModel), IntraClassKNN(alpha2=0.0, alpha3=0.0))
    data = packed(documents(), labels=False)
    raises("got 4 labels for 5 samples", knn, **data, labels=torch.tensor([0, 1, 0, 1]))
    distiller = Distiller(*pair("llama"), SoftTargets())  # with one prediction per row
    raises("rows are packed with several documents", distiller, **data, labels=torch.tensor([0]))
    words = r"segments must have the tokens' shape \(6, 10\)"
    raises(words, distiller, **batch(), segments=torch.zeros(6, 9))


# Mixed precision, accumulation, several processes


@pytest.mark.parametrize(
    ("family", "name"), [("bert", "fcd"), ("bert", "lrc_bert"), ("bert", "mc3kd"), ("gpt2", "knn")]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_models(dtype):
    teacher = classifier("bert").to(torch.bfloat16)
    for name in METHODS:
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


def test_wrong_uses_of_encoder_decoders_are_errors():
    reads, _ = pair("bert", head=t.BertForMaskedLM)
    teacher = support.model_of("t5", "written words")
    student, data = student_from_teacher(teacher, (1, 3)), support.data_of("t5", "written words")
    distiller, labels = Distiller(teacher, student, SoftTargets()), data.pop("labels")
    raises(r"student \(T5For\w+\) is an encoder-decoder; pass labels", distiller, **data)
    packed = {**data, "labels": labels, "segments": torch.zeros_like(labels)}
    raises("a decoder's row is one", distiller, **packed)
    words = r"student \(T5\w+\) is an encoder-decoder, the teacher"
    raises(words, Distiller, reads, student, LRKD())
    words = r"teacher \(T5\w+\) is an encoder-decoder, the student"
    raises(words, Distiller, teacher, reads, FCD())


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


def test_wrong_weights_of_tokens_are_errors():
    distiller, data = Distiller(*pair("bert", head=t.BertForMaskedLM), SoftTargets()), batch()
    data["labels"] = data["input_ids"]
    for wrong, error, words in (
        (torch.ones(6, 7), ValueError, "loss_weights must have shape"),
        (torch.ones(6, 10).long(), TypeError, "loss_weights must be bfloat16"),
        (torch.ones(6, 10, requires_grad=True), ValueError, "loss_weights requires grad"),
    ):
        raises(words, distiller, error=error, **data, loss_weights=wrong)
    words = "gives one prediction a row; leave them out"
    raises(words, make("fcd"), **batch(), loss_weights=torch.ones(6, 10))


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
    raises("one per sample", words, **data, labels=data["input_ids"])
    raises(r"labels have shape \(5,\)", distiller, **data, labels=labels[:5])
    square = {**data, "attention_mask": torch.ones(6, 1, 10, 10)}
    raises(r"attention_mask must be \(B, N\)", distiller, **square, labels=labels)
    nothing = {"alpha": 0.0, "beta": 0.0, "task_weight": 0.0}
    raises("all weights of FCD are zero", lambda: make("fcd", **nothing)(**data))
