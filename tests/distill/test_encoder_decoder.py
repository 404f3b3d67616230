"""Models that read a text or a sound and write another: what of them is compared."""

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
    SoftTargets,
    student_from_teacher,
)
from fastkd.distill.verify import verify
from fastkd.models.backbone import Backbone
from tests.distill.models import eager, pair, recipe, set_dropout, step
from tests.distill.support import data_of, model_of
from tests.support.compare import raises

FAMILIES = {"t5": "written words", "bart": "written words", "whisper": "transcripts"}
SPEAKING = pytest.mark.parametrize("family", FAMILIES)


def models(family, layers=(1, 3)):
    teacher = model_of(family, FAMILIES[family]).eval()
    student = student_from_teacher(teacher, layers)
    set_dropout(student)
    student.config.dropout = 0.0
    for module in student.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return teacher, student


def distiller_of(family, name):
    teacher, student = models(family)
    if name == "attention":
        eager([teacher, student])
    method = AttentionMSE() if name == "attention" else recipe(name)
    distiller = Distiller(teacher.double(), student.double(), method)
    distiller.set_progress(1.0)
    return distiller


def doubled(data):
    return {name: x.double() if x.is_floating_point() else x for name, x in data.items()}


@SPEAKING
def test_only_the_decoder_of_a_student_is_cut(family, tmp_path):
    teacher, student = models(family)
    ours, theirs = Backbone(student), Backbone(teacher)
    assert (ours.num_layers, theirs.num_layers) == (2, 3)
    assert "decoder" in ours.blocks_name and ours.blocks_name == theirs.blocks_name
    cut = theirs.blocks[2].state_dict()
    assert all(torch.equal(x, cut[name]) for name, x in ours.blocks[1].state_dict().items())
    encoders = [model.get_encoder().state_dict() for model in (teacher, student)]
    assert all(torch.equal(encoders[1][name], x) for name, x in encoders[0].items())
    student.eval().save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path)
    data = data_of(family, FAMILIES[family])
    torch.testing.assert_close(again(**data).loss, student(**data).loss)


@SPEAKING
def test_the_task_loss_is_the_models_loss(family):
    distiller = distiller_of(family, "labels")
    data = doubled(data_of(family, FAMILIES[family]))
    torch.testing.assert_close(distiller(**data).loss, distiller.student(**data).loss)


OF_TOKENS = [*(name for name in METHODS if name != "knn"), "attention"]


# Every method with one family, and each other family with what reads most of the decoder.
@pytest.mark.parametrize(("family", "name"), [
    *(("t5", name) for name in OF_TOKENS),
    *((family, name) for family in FAMILIES if family != "t5" for name in ("fcd", "attention")),
])  # fmt: skip
def test_padded_labels_change_nothing(family, name):
    """More padding, and whatever the decoder reads there."""
    distiller = distiller_of(family, name)
    data = doubled(data_of(family, FAMILIES[family]))
    out, gradients = step(distiller, data)
    labels = F.pad(data["labels"], (0, 3), value=-100)
    read = distiller.student_model.with_decoder_inputs({}, labels)["decoder_input_ids"]
    behind = F.pad(labels, (1, 0), value=0)[:, :-1] == -100
    read = torch.where(behind, 7, read)
    for more in ({"labels": labels}, {"labels": labels, "decoder_input_ids": read}):
        wide, found = step(distiller, {**data, **more})
        torch.testing.assert_close(wide.terms, out.terms)
        torch.testing.assert_close(found, gradients)


def test_the_same_step_in_every_way():
    distiller, data = distiller_of("t5", "fcd"), data_of("t5", "written words")
    checks = {x.name: x for x in verify(distiller, data, ranks=0, compile_backend=None)}
    assert checks["Distiller.accumulate"].verdict == "equal"
    assert all(check.ok for check in checks.values()), checks
    assert int(distiller.count_items(data)) == int((data["labels"] != -100).sum())


@pytest.mark.parametrize("method", ["fcd", "soft_targets"])
def test_a_cache_equals_its_teacher(tmp_path, method):
    """The same samples in another order, with more padding on both sides."""
    distiller = distiller_of("t5", method)
    data = data_of("t5", "written words")
    cache = distiller.cache_teacher([data], tmp_path)
    order = torch.tensor([2, 0, 3, 1])
    wide = {name: F.pad(x[order], (0, 2), value=0) for name, x in data.items()}
    wide["labels"] = F.pad(data["labels"][order], (0, 2), value=-100)
    expected, gradients = step(distiller, wide)
    twin = Distiller(cache, distiller.student, distiller.method)
    distiller.zero_grad()
    found, others = step(twin, wide)
    torch.testing.assert_close(found.terms, expected.terms)
    torch.testing.assert_close(others, gradients)
    wide["labels"][0, 0] += 1  # a word that the decoder reads
    keys = twin.sample_keys(wide)
    assert keys[0] not in cache and all(key in cache for key in keys[1:])


def test_wrong_arguments_are_errors():
    (teacher, student), (reads, _) = models("t5"), pair("bert", head=t.BertForMaskedLM)
    data = data_of("t5", "written words")
    distiller, labels = Distiller(teacher, student, SoftTargets()), data.pop("labels")
    raises(r"student \(T5For\w+\) is an encoder-decoder; pass labels", distiller, **data)
    packed = {**data, "labels": labels, "segments": torch.zeros_like(labels)}
    raises("a decoder's row is one", distiller, **packed)
    words = r"student \(T5\w+\) is an encoder-decoder, the teacher"
    raises(words, Distiller, reads, student, LRKD())
    words = r"teacher \(T5\w+\) is an encoder-decoder, the student"
    raises(words, Distiller, teacher, reads, FCD())
