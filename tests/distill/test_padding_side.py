"""Rows padded on the left take the same step as rows padded on the right, without position_ids."""

import pytest
import torch
import transformers as t

from fastkd.distill import FCD, Distiller, student_from_teacher
from fastkd.distill.trainer import DistillationTrainer
from fastkd.distill.verify import taken
from fastkd.models.batch import pad_right, rotate
from tests.distill.models import batch, pair, ready, split
from tests.distill.support import data_of, model_of
from tests.support.compare import raises


def padded_left(data):
    mask = data["attention_mask"]
    lengths = mask.sum(1, keepdim=True)
    return {n: rotate(x, lengths, 1) if x.shape == mask.shape else x for n, x in data.items()}


def test_one_row_of_positions_gives_those_of_each_column():
    teacher = model_of("gpt2", "next word").double()
    distiller = ready(teacher, student_from_teacher(teacher, [1, 3]), "fcd").eval()
    data = padded_left(data_of("gpt2", "next word"))
    one, each = torch.arange(10)[None], torch.arange(10).expand(4, 10)
    found, expected = (taken(distiller, {**data, "position_ids": x}) for x in (one, each))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_rows_with_unknown_padding():
    """In a graph every row is rotated, some by 0."""
    right = data_of("bert", "tokens")
    del right["labels"]
    left, rotated = padded_left(right), torch.compile(pad_right, backend="eager", fullgraph=True)
    for data in (right, left):
        found, first = rotated(data)
        torch.testing.assert_close(found, right)
        assert torch.equal(first, data["attention_mask"].argmax(1, keepdim=True))


def test_the_trainer_evaluates_as_it_trains(tmp_path):
    teacher = model_of("gpt2", "tokens")
    args = t.TrainingArguments(str(tmp_path), report_to="none", per_device_eval_batch_size=2)
    trainer = DistillationTrainer(teacher, student_from_teacher(teacher, [1, 3]), FCD(), args=args)
    right = data_of("gpt2", "tokens")
    left = padded_left(right)
    expected, found = (trainer.predict(split(data)) for data in (right, left))
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-6)
    assert (torch.tensor(found.label_ids) == left["labels"]).all()
    mask = right["attention_mask"]
    moved = rotate(torch.tensor(found.predictions), 10 - mask.sum(1, keepdim=True), 1)
    torch.testing.assert_close(moved[mask.bool()], torch.tensor(expected.predictions)[mask.bool()])


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
