"""Tags of words: reading, scores, and every command."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastkd.train.data import Encoder
from fastkd.train.errors import InputError
from fastkd.train.scoring import score
from fastkd.train.tasks.token_classification import TASK
from tests.train.tasks.through import rows_of


def test_labels_of_words_and_scores_of_those_cut_off(tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "teacher")
    rows = rows_of(tmp_path / "a.conll", TASK, "good-film B-GOOD\nis O\n")
    encoded = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))(rows)
    # [CLS] good - film is [SEP]
    assert encoded[0]["labels"] == [-100, 0, -100, -100, 1, -100]
    assert encoded.evaluation_columns[0]["words"] == [-1, 0, -1, -1, 1, -1]
    rows = rows_of(tmp_path / "a.conll", TASK, "good B-GOOD\nfilm B-FILM\nis O\n")
    task = TASK(("B-FILM", "B-GOOD", "O"))
    encoded = Encoder(tokenizer, 3, task)(rows)
    assert task.predictions([[0, 1, 0]], encoded) == [{"labels": ["B-GOOD", "", ""]}]
    scores = task.scores(("precision", "recall", "f1", "accuracy"), [[0, 1, 0]], encoded)
    assert scores["precision"] == 1 and scores["recall"] == 0.5
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert np.isnan(score(task, ("f1",), [[0, np.nan, 0]], encoded)["f1"])


def test_words_of_a_tokenizer_that_wants_blanks_before_them(tmp_path):
    rows, encode = rows_of(tmp_path / "a.conll", TASK, "good B-GOOD\nfilm O\n"), {}
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for blank in (False, True):
        made = Tokenizer(models.BPE(letters, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, add_prefix_space=blank)
        encode[blank] = Encoder(tokenizer, 16, TASK(("B-GOOD", "O")))
    with pytest.raises(InputError, match="load it with add_prefix_space=True"):
        encode[False](rows)
    assert encode[True](rows)[0]["labels"] == [0, *[-100] * 4, 1, *[-100] * 4]
