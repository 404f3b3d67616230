"""Rows in Arrow files: read and tokenized once."""

import os
import re
from pathlib import Path
from unittest import mock

import datasets
import pytest
from transformers import AutoTokenizer

from fastkd.train import data, files
from fastkd.train.data import Encoder
from fastkd.train.errors import InputError, SaveFailed
from fastkd.train.files import records
from fastkd.train.tasks import Columns
from fastkd.train.tasks.regression import Regression
from tests.support.tiny import write_tsv


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path)
    return path


def read(path):
    return Regression().read_labels(data.read_file(path, Columns("sentence"), "--train")).rows


def test_a_file_is_read_once_until_it_changes(tmp_path, cache, monkeypatch):
    reads = []
    monkeypatch.setattr(files, "records", lambda *x: reads.append(x[0].name) or records(*x))
    path, other = write_tsv(tmp_path / "a.tsv"), tmp_path / "b.tsv"
    first, second, before = read(path), read(path), path.stat()
    assert reads == ["a.tsv"] and first.texts == second.texts
    path.write_text(path.read_text().replace("film", "mlif"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(path).texts == [text.replace("film", "mlif") for text in first.texts]
    # Whatever it is called; other columns of it are other rows.
    read(path.rename(other))
    data.read_file(other, Columns("label", None, None), "--train")
    assert reads == ["a.tsv", "a.tsv", "b.tsv"]


def test_tokens_are_made_once_for_a_tokenizer_and_a_length(tiny, tmp_path, cache):
    rows = read(write_tsv(tmp_path / "a.tsv"))
    tokenizer, same, other = (AutoTokenizer.from_pretrained(tiny / "teacher") for _ in range(3))
    other.add_tokens(["goo"])
    # The first tokenizer is the same though it was used.
    given = (tokenizer, 16, 1), (tokenizer, 16, 1), (tokenizer, 5, 2), (same, 16, 2), (other, 16, 3)
    for words, length, made in given:
        tokens = Encoder(words, length, Regression())(rows)
        lists = words(rows.texts, truncation=True, max_length=length)
        assert list(tokens.tokens["input_ids"]) == lists["input_ids"]
        assert tokens.lengths.tolist() == [len(ids) for ids in lists["input_ids"]]
        item = {**{name: x[3] for name, x in lists.items()}, "labels": rows.labels[3]}
        assert tokens[3] == tokens.__getitems__([3, 1])[0] == item
        assert len([*cache.rglob("cache-*.arrow")]) == made


def test_a_cache_that_cannot_be_used_is_one_sentence(tiny, tmp_path, monkeypatch, cache):
    path, blocked = write_tsv(tmp_path / "a.tsv"), tmp_path / "file"
    arrow = Path(read(path).data.cache_files[0]["filename"])
    whole = arrow.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"x" * len(whole)):
        arrow.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"a\.tsv: .*damaged.*{re.escape(str(cache))}"):
            read(path)
    blocked.touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", blocked)
    with pytest.raises(InputError, match=r"a\.tsv: .*HF_DATASETS_CACHE"):
        read(path)

    tokenizer = AutoTokenizer.from_pretrained(tiny / "teacher")
    full = Exception("No space left on device (os error 28)")  # as tokenizers has it
    monkeypatch.setattr(type(tokenizer), "save_pretrained", mock.Mock(side_effect=full))
    with pytest.raises(SaveFailed, match="No space left"):
        Encoder(tokenizer, 16, Regression())
