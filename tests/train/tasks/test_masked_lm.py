"""Masked language models: the tokens that are masked."""

import pytest
import torch
from transformers import AutoTokenizer

from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.errors import InputError
from fastkd.train.tasks.masked_lm import TASK
from tests.train.tasks.through import (
    encoded,
    make_decoder,
    write_text,
)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "teacher")


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
    without = AutoTokenizer.from_pretrained(make_decoder(tmp_path / "gpt2"), mask_token=None)
    with pytest.raises(InputError, match=r"a tokenizer with a mask token, and .* has none"):
        TASK().collator(without)
