"""Masked language models: masked tokens, scores, every command, and the student's next task."""

import math

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.errors import InputError
from fastkd.train.tasks.masked_lm import TASK
from tests.support.runs import made
from tests.support.tiny import usual
from tests.train.tasks.through import (
    encoded,
    killed_and_resumed,
    loss_of,
    make_bare,
    make_decoder,
    through,
    write_text,
)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "teacher")


def test_every_command_takes_it_and_the_student_goes_on(tiny, tmp_path):
    report = through(tmp_path, "masked-lm", 24)
    assert set(report["student"]) == {"masked_perplexity"}
    assert 1 < report["student"]["masked_perplexity"] < 40
    assert all(row["hidden"] >= 1 and row["masked_perplexity"] > 1 for row in report["told"])
    assert "fill-mask" in report["card"]
    student = tmp_path / "run/student"
    _, models = made(**usual(tiny, tmp_path, student=student, max_train_rows=8))
    assert "ForSequenceClassification" in type(models.student).__name__


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    teacher = make_bare(tmp_path / "bert")
    BertForMaskedLM(BertConfig.from_pretrained(teacher)).save_pretrained(teacher)
    train, evals = (write_text(tmp_path / f"{i}.txt", 30, i) for i in range(2))
    options = {"teacher": teacher, "train": train, "eval": evals, "method": "lrkd"}
    killed_and_resumed(tmp_path, **options, task="masked-lm")


def test_a_row_is_hidden_by_itself_and_anew_in_each_epoch(tmp_path, tokenizer):
    rows = encoded(write_text(tmp_path / "a.txt", 40), TASK(), tokenizer, 12)
    assert {ids[0] for ids in rows.tokens["input_ids"]} == {tokenizer.cls_token_id}
    assert {ids[-1] for ids in rows.tokens["input_ids"]} == {tokenizer.sep_token_id}
    assert max(rows.lengths) == 12
    hide, number = TASK().collator(tokenizer), range(len(rows))
    batch = hide([rows[i] for i in number])
    for i in number:
        alone = hide([rows[i]])
        assert all(torch.equal(alone[k][0], batch[k][i][: rows.lengths[i]]) for k in alone)
        hidden = alone["labels"][0] != UNLABELLED
        ids = torch.tensor(rows[i]["input_ids"])
        assert hidden.any() and torch.equal(alone["labels"][0][hidden], ids[hidden])
        assert torch.equal(alone["input_ids"][0][~hidden], ids[~hidden])
        special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        assert not hidden[torch.tensor(special).bool()].any()
    labels = [
        hide.for_epoch((0, epoch))([rows[i] for i in number])["labels"] for epoch in (0, 1, 1)
    ]
    assert not torch.equal(labels[0], labels[1]) and torch.equal(labels[1], labels[2])
    share = sum((x != UNLABELLED).sum().item() for x in labels[:2]) / (2 * sum(rows.lengths - 2))
    assert 0.1 < share < 0.3


def test_scores_are_those_of_the_hidden_tokens(tmp_path, tokenizer):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=17, intermediate_size=16, **shape)).eval()
    task = TASK()
    tokens = encoded(write_text(tmp_path / "a.txt", 12), task, tokenizer, 12)
    answers, expected = loss_of(task, model, tokenizer, tokens)
    found = task.scores(("masked_perplexity",), answers, tokens)["masked_perplexity"]
    assert found == pytest.approx(math.exp(expected), rel=1e-5)
    without = AutoTokenizer.from_pretrained(make_decoder(tmp_path / "gpt2"), mask_token=None)
    with pytest.raises(InputError, match=r"a tokenizer with a mask token, and .* has none"):
        task.collator(without)
