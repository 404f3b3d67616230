"""Teacher, student and method as one module."""

import copy
import random
import warnings

import pytest
import torch
import transformers as t
from torch.nn.utils.rnn import pad_sequence

from fastkd.distill import FCD, Distiller, method_by_name, student_from_teacher
from fastkd.distill.verify import taken
from tests.distill import models, support
from tests.distill.models import batch, classifier, padded_left, pair, ready, set_dropout, step
from tests.support.compare import raises
from tests.support.draw import FIRST

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss", "ignore:LRCBERT")


def make(name, **options):
    return ready(classifier("bert"), classifier("bert", layers=2), name, **options)


def test_state_dict_holds_student_and_method_without_the_teacher():
    distiller, other = make("lrkd"), make("lrkd")
    state, teacher = distiller.state_dict(), copy.deepcopy(other.teacher.state_dict())
    assert {key.partition(".")[0] for key in state} == {"student", "method"}
    other.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    assert all(torch.equal(v, teacher[k]) for k, v in other.teacher.state_dict().items())
    fewer = {k: v for k, v in state.items() if k != "student.classifier.bias"}
    raises("classifier", other.load_state_dict, fewer, error=RuntimeError)

    distiller.method.teacher = torch.nn.Linear(2, 2)  # not the teacher
    raises(r"method\.teacher\.bias", distiller.load_state_dict, state, error=RuntimeError)


def test_unit_gradient_runs_the_teacher_once_and_only_in_training():
    distiller, data, calls = make("lrc_bert"), batch(), []
    distiller.teacher.register_forward_pre_hook(lambda *_: calls.append("teacher"))
    distiller.student.register_forward_pre_hook(lambda *_: calls.append("student"))
    distiller.train()(**data)
    assert sorted(calls) == ["student", "student", "teacher"]
    distiller.eval()(**data)
    with torch.no_grad():
        distiller.train()(**data)
    assert sorted(calls[3:]) == ["student"] * 2 + ["teacher"] * 2
    # One sample and no label terms: nothing to contrast with, so the gradient is zero.
    distiller = make("lrc_bert", beta=0.0, gamma=0.0).train()
    out, gradients = step(distiller, batch(rows=1, padding=0))
    assert out.loss.isfinite() and all(g.isfinite().all() for g in gradients.values())


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


VOCABULARIES = [
    (family, head) for family in support.FAMILIES for head in support.heads(family)
    if head in ("masked words", "next word") and family != "bart"
]  # fmt: skip


@pytest.mark.parametrize(("family", "head"), random.Random(FIRST).sample(VOCABULARIES, 7))
def test_logits_are_not_computed_if_no_term_reads_them(family, head):
    teacher, data = support.model_of(family, head), support.data_of(family, head)
    student = student_from_teacher(teacher, [1, 3])
    method = FCD(task_weight=0.5, soft_weight=0.0)
    distiller = Distiller(teacher, student, method, keep_logits=True).eval()
    rows = set()
    vocabulary = teacher.get_output_embeddings()
    vocabulary.register_forward_hook(lambda module, args, out: rows.add(out.shape[:-1].numel()))
    assert distiller(**data).loss > 0
    # MobileBERT multiplies by its head itself; ProphetNet predicts from two streams.
    expected = {"mobilebert": set(), "prophetnet": {8}}.get(family, {4})
    assert rows == expected


def test_a_schedule_without_progress_warns_once():
    method = method_by_name("lrc_bert", preset="paper")
    distiller = Distiller(classifier("bert"), classifier("bert", layers=2), method).train()
    with pytest.warns(UserWarning, match="call distiller.set_progress"):
        out = distiller(**batch())
    assert set(out.terms) == {"cos_nce", "total"}
    again = Distiller(distiller.teacher, distiller.student, method)
    with pytest.warns(UserWarning, match="call distiller.set_progress"):
        next(again.accumulate([batch()]))
    raises("batches: none given", next, again.accumulate([]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distiller(**batch())
    raises("progress", distiller.set_progress, 1.5)
    losses = []
    for loss_of in (lambda x: distiller(**x), lambda x: next(distiller.accumulate([x]))):
        torch.manual_seed(0)
        losses.append(loss_of(batch()).loss)
    assert torch.equal(*losses)


def test_one_row_of_positions_gives_those_of_each_column():
    teacher = support.model_of("gpt2", "next word").double()
    distiller = ready(teacher, student_from_teacher(teacher, [1, 3]), "fcd").eval()
    data = padded_left(support.data_of("gpt2", "next word"))
    one, each = torch.arange(10)[None], torch.arange(10).expand(4, 10)
    found, expected = (taken(distiller, {**data, "position_ids": x}) for x in (one, each))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a_head_that_reads_the_last_position_keeps_its_side():
    """XLNet's tokenizer pads left; a decoder without a mask needs positions."""
    torch.manual_seed(0)
    teacher, student = pair("xlnet")
    distiller, data = Distiller(teacher, student, FCD()).eval(), batch(left=True)
    inputs = {name: data[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(distiller(**data).logits, student(**inputs).logits)
    raises(r"XLNetFor.* reads the last position .*; pad on the left", distiller, **batch())
    teacher, student = (x.double() for x in pair("gpt2"))
    distiller, right = Distiller(teacher, student, FCD()).eval(), batch()
    left = padded_left(right)
    left["inputs_embeds"] = torch.randn(6, 10, 16, dtype=torch.float64)
    del left["input_ids"]
    raises(r"GPT2ForSequenceClassification .*; pass position_ids", distiller, **left)
    left["position_ids"] = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    inputs = {name: x for name, x in left.items() if name != "labels"}
    torch.testing.assert_close(distiller(**left).logits, student(**inputs).logits)


def decoders(head=t.LlamaForCausalLM, layers=(2, 4)):
    torch.manual_seed(0)
    models = pair("llama", layers, head, num_hidden_layers=max(layers))
    return [model.double() for model in models]


def documents(lengths=(5, 3, 6, 1, 4)):
    return [torch.randint(5, 60, (length,)) for length in lengths]


def padded(texts):
    ids, labels = (pad_sequence(texts, batch_first=True, padding_value=x) for x in (0, -100))
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def packed(texts, how="position_ids", labels=True):
    """As transformers' DataCollatorWithFlattening packs them."""
    ids, positions = torch.cat(texts), torch.cat([torch.arange(len(x)) for x in texts])
    data = {"input_ids": ids, "position_ids": positions}
    if labels:
        data["labels"] = ids.masked_fill(positions == 0, -100)
    if how == "segments":
        data[how] = (positions == 0).cumsum(0) - 1
    return {name: x[None] for name, x in data.items()}


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


@pytest.mark.parametrize("how", ["embeddings", "teacher"])
def test_models_that_mix_packed_documents_are_an_error(how):
    teacher, student = decoders()
    data, words = packed(documents(), "segments"), r"which the student \(\w+\) reads as one; give"
    if how == "embeddings":
        teacher, student = pair("bert", head=t.BertForMaskedLM)
        data["inputs_embeds"] = torch.randn(*data.pop("input_ids").shape, 16)
    else:
        teacher = t.OPTForCausalLM(models.config_of("opt")).double()
        words = words.replace("student", "teacher")
    distiller = Distiller(teacher, student, FCD())
    raises(words, distiller, **data)
    assert student.training and not teacher.training
    data["segments"] = torch.zeros_like(data["segments"])
    assert distiller(**data).loss.isfinite()


@pytest.mark.parametrize("family", ["bert", "opt", "t5"])
def test_new_weights_that_mix_documents_are_an_error(family):
    """Of weights of 0.02 attention says little, and less than rounding in bfloat16."""
    kind = t.T5EncoderModel if family == "t5" else t.AutoModel.from_config
    teacher, student = (kind(models.config_of(family, initializer_range=0.02)) for _ in range(2))
    data = packed(documents(), "segments", labels=False)
    del data["position_ids"]
    for dtype in (torch.float32, torch.bfloat16):
        distiller = Distiller(teacher.to(dtype), student.to(dtype), FCD(task_weight=0))
        raises(r"which the student \(\w+\) reads as one", distiller, **data)
