"""Malformed options and files, generated: one sentence each, which names option, file or row."""

import dataclasses
import itertools
import json
import random
import shutil
import typing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastkd.app.cli import app
from fastkd.app.errors import TrainingFailed
from fastkd.app.options import options_of
from fastkd.app.settings import (
    AnalyzeSettings,
    BenchSettings,
    CacheSettings,
    DemoSettings,
    EvaluateSettings,
    ExportSettings,
    Settings,
    UseSettings,
    VerifySettings,
)
from tests.tiny import make_teacher, write_tsv

COMMANDS = {
    "distill": Settings,
    "cache": CacheSettings,
    "verify": VerifySettings,
    "evaluate": EvaluateSettings,
    "predict": UseSettings,
    "export": ExportSettings,
    "demo": DemoSettings,
    "bench": BenchSettings,
    "analyze": AnalyzeSettings,
}
BAD_NUMBERS = ("nan", "-inf", "1e999", "-1", "abc", "", "1,5", "0x10", "9" * 400)
BAD_WORDS = ("", "nonsense", "\x1b[31m", "a" * 5000, "--", "../..", "\N{PILE OF POO}")
BAD_PATHS = ("{file}/below", "{folder}/" + "x" * 300, "{file}\0", "{folder}/none/none.tsv", "")
# Options whose every value means something, or is only told to be wrong by the hub.
FREE = {
    "data", "data_config", "train_split", "eval_split", "label_order", "text_column",
    "text_pair_column", "label_column", "options", "set", "only", "report_to", "tokenizer",
}  # fmt: skip
# A path to write may be new; one to read may not.
WRITTEN = {"out", "log_json", "plot"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("abuse")
    make_teacher(path / "teacher")
    write_tsv(path / "train.tsv")
    write_tsv(path / "dev.tsv", 20, seed=1)
    (path / "text.txt").write_text("good film\nbad film\n")
    return path


@pytest.fixture
def invoke(folder, tmp_path, monkeypatch):
    """The one sentence of a command that must fail; nothing is trained or timed."""

    def trains(*args, **kwargs):
        raise TrainingFailed("reached the training")

    monkeypatch.setattr("fastkd.app.run.train", trains)
    monkeypatch.setattr("fastkd.app.cache._batches", trains)
    monkeypatch.setattr("fastkd.distill.verify.verify", trains)
    monkeypatch.setattr("fastkd.bench.runner.run_cases", trains)
    monkeypatch.chdir(tmp_path)
    teacher, dev = folder / "teacher", folder / "dev.tsv"
    out = tmp_path / "out"
    usual = {
        "distill": {
            "--teacher": teacher, "--train": folder / "train.tsv", "--eval": dev, "--out": out,
            "--max-length": 16, "--device": "cpu", "--batch-size": 8,
        },
        "cache": {
            "--teacher": teacher, "--train": folder / "train.tsv", "--eval": dev, "--out": out,
            "--max-length": 16, "--device": "cpu",
        },
        "verify": {
            "--teacher": teacher, "--train": folder / "train.tsv", "--eval": dev,
            "--max-length": 16, "--device": "cpu",
        },
        "evaluate": {"--model": teacher, "--data": dev},
        "predict": {"--model": teacher, "--data": dev},
        "export": {"--model": teacher, "--out": out / "model.onnx"},
        "demo": {"--out": out, "--fast": None},
        "bench": {"--out": out, "--only": "knn", "--set": "cpu"},
        "analyze": {
            "--model": teacher, "--text": folder / "text.txt", "--out": out, "--max-length": 16,
        },
    }  # fmt: skip

    def call(command, *words, **changes):
        options = {**usual[command], **changes}
        listed = [
            str(part)
            for name, value in options.items()
            for part in ((name,) if value is None else (name, value))
        ]
        result = CliRunner().invoke(app, [command, *listed, *map(str, words)])
        if result.exit_code not in (0, 1, 2):
            raise AssertionError(f"{listed}: {result.output}") from result.exception
        error = result.exception
        assert error is None or isinstance(error, SystemExit), (listed, repr(error))
        assert "Traceback" not in result.output
        if result.exit_code:
            lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
            assert len(lines) == 1, (listed, result.stderr)
        return result

    return call


def bad_options():
    """(command, flag, value) that must be refused."""
    for command, cls in COMMANDS.items():
        kinds = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            meta, kind = options_of(cls)[field.name], kinds[field.name]
            choices = meta.choices() if callable(meta.choices) else meta.choices
            values: tuple[str, ...] = ()
            if {int, float} & {kind, *typing.get_args(kind)}:
                values = BAD_NUMBERS
            elif Path in {kind, *typing.get_args(kind)}:
                values = BAD_PATHS[:3] if field.name in WRITTEN else BAD_PATHS
            elif choices or (kind is not bool and field.name not in FREE and field.name != "set"):
                values = BAD_WORDS
            for value in values:
                yield command, meta.flag, value


def sample(cases, size, seed=0):
    """Every flag at least once, and some more."""
    cases = list(cases)
    random.Random(seed).shuffle(cases)
    first = {case[:2]: case for case in cases}
    rest = [case for case in cases if case not in set(first.values())]
    return [*first.values(), *rest][: max(size, len(first))]


OPTIONS = sample(bad_options(), 200)


@pytest.mark.parametrize("part", range(4))
def test_malformed_options(invoke, folder, part):
    for command, flag, value in OPTIONS[part::4]:
        value = value.format(file=folder / "dev.tsv", folder=folder) if "{" in value else value
        result = invoke(command, **{flag: value})
        case = (command, flag, value[:40], result.output[-300:])
        assert result.exit_code, case
        assert "reached the training" not in result.stderr, case
        assert flag in result.stderr or (value and value in result.stderr), case


ROWS = [("good film", "1"), ("bad film", "0"), ("fine film", "1"), ("dull film", "0")] * 3
BROKEN = {
    "tsv": {
        "cut": "good film", "wide": "a\tb\tc", "empty label": "good film\t",
        "empty text": "\t1", "nan": "good film\tnan", "unseen": "good film\t7\t",
        "latin": "f\xfcr\t1".encode("latin-1"), "quote": 'good "film',
    },
    "csv": {
        "quote": '"good film,1', "cut": "good film", "wide": "a,b,c", "empty": ",1",
        "after": '"good"film,1', "label": "good film,", "null": "good film,NULL",
        "latin": "f\xfcr,1".encode("latin-1"), "field": "x" * 200_000 + ",1",
    },
    "jsonl": {
        "cut": '{"text": "a"', "array": '["a", 1]', "number": "5", "null": "null",
        "no label": '{"text": "a"}', "no text": '{"label": 1}', "text": '{"text": 5, "label": 1}',
        "list": '{"text": "a", "label": [1]}', "nan": '{"text": "a", "label": NaN}',
        "object": '{"text": "a", "label": {}}', "deep": "[" * 100_000, "word": "text",
        "infinite": '{"text": "a", "label": 1e999}', "none": '{"text": null, "label": 1}',
        "empty": '{"text": " ", "label": 1}', "empty label": '{"text": "a", "label": ""}',
    },
}  # fmt: skip
SEPARATORS = {"tsv": "\t", "csv": ","}


def content(kind, broken, place):
    if kind == "jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    else:
        separator = SEPARATORS[kind]
        lines = [separator.join(row) for row in [("text", "label"), *ROWS]]
    made = [line.encode() for line in lines]
    made.insert(place, broken if isinstance(broken, bytes) else broken.encode())
    return b"\n".join(made) + b"\n"


@pytest.mark.parametrize("kind", BROKEN)
def test_malformed_rows_are_named(invoke, tmp_path, kind):
    for (name, broken), place in itertools.product(BROKEN[kind].items(), (2, 7)):
        path = tmp_path / f"broken.{kind}"
        path.write_bytes(content(kind, broken, place))
        for changes in ({"--train": path}, {"--eval": path, "--train": tmp_path / f"good.{kind}"}):
            (tmp_path / f"good.{kind}").write_bytes(content(kind, b"", 0).lstrip())
            result = invoke("distill", **changes)
            case = (kind, name, place, result.output[-300:])
            assert result.exit_code == 2, case
            assert f"broken.{kind}, row {place + 1}: " in result.stderr, case


@pytest.mark.parametrize("word", [
    "alpha", "=1", "alpha=", "alpha=nan", "alpha=inf", "alpha=-1", "alpha=[1]", "alpha=1e999",
    "alpha={}", "alpha=lambda: 1", "alpha=" + "(" * 500, "layers=9", "layers=[0]", "layers=[9,1]",
    "layers=1.5", "layers=true", "layers=none", "layers=x", "normalize=5", "normalize=l3",
    "distance=", "no=1", "\0=1", "task_weight=none", "beta=0x", "beta='", "beta=1_",
])  # fmt: skip
def test_malformed_hyperparameters(invoke, word):
    result = invoke("distill", "--set", word)
    assert result.exit_code == 2, result.output
    assert "--set" in result.stderr or "--method fcd" in result.stderr


DAMAGES = {
    "config.json": (b"", b"{", b"[]", b'{"model_type": "bert"}', b'{"model_type": 5}', b"\xff"),
    "model.safetensors": (b"", b"x", b"\xff" * 100, None),
    "tokenizer.json": (b"", b"{}", b"[1]", b"\xff"),
    "tokenizer_config.json": (b"", b"[]", b"{"),
}


@pytest.mark.parametrize("file", DAMAGES)
def test_damaged_model_files(invoke, folder, tmp_path, file):
    for i, damage in enumerate(DAMAGES[file]):
        model = shutil.copytree(folder / "teacher", tmp_path / f"model{i}")
        whole = (model / file).read_bytes()
        (model / file).write_bytes(whole[: len(whole) // 2] if damage is None else damage)
        for command, flag in (("distill", "--teacher"), ("evaluate", "--model")):
            result = invoke(command, **{flag: model})
            if result.exit_code:  # some damage to a tokenizer's options is none
                assert flag in result.stderr, (file, damage, result.stderr)
            else:
                assert file.startswith("tokenizer"), (file, damage)


def test_a_truncated_result_file(invoke, tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"rows": [')
    from fastkd.bench.runner import WrongChoice, _kept_rows

    with pytest.raises(WrongChoice, match=r"results\.json is damaged"):
        _kept_rows(path, {})


def test_the_number_of_cases():
    rows = sum(2 * 2 * len(broken) for broken in BROKEN.values())
    damages = sum(2 * len(found) for found in DAMAGES.values())
    assert len(OPTIONS) + rows + damages >= 300
