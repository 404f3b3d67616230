"""Rows in Arrow files: read once for all processes; larger than memory; JSON arrays."""

import json
import multiprocessing
import os
import re
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastkd.train import arrow_rows, data, files
from fastkd.train.data import Encoder
from fastkd.train.errors import InputError, SaveFailed
from fastkd.train.files import records
from fastkd.train.fitting import save_model
from fastkd.train.tasks import Columns
from fastkd.train.tasks.regression import Regression
from tests.support.tiny import write_tsv

COLUMNS = Columns("sentence")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path)
    return path


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "teacher")


def read(path):
    return Regression().read_labels(data.read_file(path, COLUMNS, "--train")).rows


def test_a_file_is_read_once_until_it_changes(tmp_path, cache, monkeypatch):
    reads = []
    monkeypatch.setattr(files, "records", lambda *x: reads.append(x[0].name) or records(*x))
    path = write_tsv(tmp_path / "a.tsv")
    first, second = read(path), read(path)
    assert reads == ["a.tsv"] and first.texts == second.texts
    before = path.stat()
    path.write_text(path.read_text().replace("film", "mlif"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(path).texts == [text.replace("film", "mlif") for text in first.texts]
    assert reads == ["a.tsv"] * 2
    # Whatever it is called; other columns of it are other rows.
    path.rename(tmp_path / "b.tsv")
    read(tmp_path / "b.tsv")
    assert len(reads) == 2
    data.read_file(tmp_path / "b.tsv", Columns("label", None, None), "--train")
    assert len(reads) == 3


def test_a_saved_tokenizer_does_not_depend_on_the_cache_of_rows(tmp_path, cache, tokenizer):
    rows = read(write_tsv(tmp_path / "a.tsv"))
    model = AutoModelForSequenceClassification.from_pretrained(tokenizer.name_or_path)
    for name in ("encoded", "read"):
        Encoder(tokenizer, 8, Regression())(rows)
        save_model(tmp_path / name, model, tokenizer, {}, Regression())
    encoded, found = (tmp_path / name / "tokenizer.json" for name in ("encoded", "read"))
    assert encoded.read_bytes() == found.read_bytes()


def test_tokens_are_made_once_for_a_tokenizer_and_a_length(tmp_path, cache, tokenizer):
    found = read(write_tsv(tmp_path / "a.tsv"))

    def files_after(*encoders):
        for encoder in encoders:
            tokens = encoder(found)
            lists = tokenizer(found.texts, truncation=True, max_length=encoder.max_length)
            assert list(tokens.tokens["input_ids"]) == lists["input_ids"]
            assert tokens.lengths.tolist() == [len(ids) for ids in lists["input_ids"]]
            item = tokens.__getitems__([3, 1])[0]
            assert item == tokens[3]
            assert item == {**{k: v[3] for k, v in lists.items()}, "labels": found.labels[3]}
        return len(list(cache.rglob("cache-*.arrow")))

    # The same tokenizer, though it was used.
    for _ in range(2):
        assert files_after(Encoder(tokenizer, 16, Regression())) == 1
    assert files_after(Encoder(tokenizer, 5, Regression())) == 2
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert files_after(Encoder(other, 16, Regression())) == 2
    other.add_tokens(["goo"])
    Encoder(other, 16, Regression())(found)
    assert len(list(cache.rglob("cache-*.arrow"))) == 3


def work(path, cache, tokenizer, out):
    datasets.config.HF_DATASETS_CACHE = cache
    made, call = [], type(tokenizer).__call__
    type(tokenizer).__call__ = lambda *args, **options: made.append(1) or call(*args, **options)
    files.records = lambda *args: made.append(1) or records(*args)
    tokens = Encoder(tokenizer, 16, Regression())(read(path))
    out.write_text(json.dumps([len(made), sum(map(sum, tokens.tokens["input_ids"]))]))


def test_processes_share_what_one_of_them_made(tmp_path, cache, tokenizer):
    path = write_tsv(tmp_path / "a.tsv", 500)
    fork = multiprocessing.get_context("fork")
    outs = [tmp_path / f"out{i}" for i in range(3)]
    started = [fork.Process(target=work, args=(path, cache, tokenizer, out)) for out in outs]
    for process in started:
        process.start()
    for process in started:
        process.join()
    calls, sums = zip(*(json.loads(out.read_text()) for out in outs), strict=True)
    batches = -(-500 // arrow_rows.BATCH)
    assert sorted(calls) == [0, 0, 1 + batches] or sum(calls) == 1 + batches
    assert len(set(sums)) == 1
    assert not list(cache.rglob("*.incomplete"))


def test_a_cache_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, cache, tokenizer):
    path = write_tsv(tmp_path / "a.tsv")
    arrow = Path(read(path).data.cache_files[0]["filename"])
    whole = arrow.read_bytes()
    for find_damage in (b"", whole[: len(whole) // 2], b"x" * len(whole)):
        arrow.write_bytes(find_damage)
        with pytest.raises(InputError, match=rf"a\.tsv: .*damaged.*{re.escape(str(cache))}"):
            read(path)
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", blocked)
    with pytest.raises(InputError, match=r"a\.tsv: .*HF_DATASETS_CACHE"):
        read(path)


def test_a_full_temporary_directory_is_one_sentence(tokenizer, monkeypatch):
    def full(self, folder):
        raise Exception("No space left on device (os error 28)")  # as tokenizers has it

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(SaveFailed, match="No space left"):
        Encoder(tokenizer, 16, Regression())


def test_a_corpus_larger_than_the_memory_it_may_take(tmp_path, cache, tokenizer):
    """What Python and Arrow allocate at most, while a file is read and encoded."""
    path, peaks, usual = tmp_path / "a.tsv", [], pyarrow.default_memory_pool()
    for rows in (192, 640):
        lines = (f"good {'x' * 6000}\t{i % 2}.5" for i in range(rows))
        path.write_text("\n".join(["sentence\tlabel", *lines]))
        pool = pyarrow.proxy_memory_pool(usual)
        pyarrow.set_memory_pool(pool)
        tracemalloc.start()
        tokens = Encoder(tokenizer, 8, Regression())(read(path))
        peaks.append(tracemalloc.get_traced_memory()[1] + pool.max_memory())
        tracemalloc.stop()
        pyarrow.set_memory_pool(usual)
        assert len(tokens) == rows
    assert peaks[1] < 1.2 * peaks[0] < path.stat().st_size
