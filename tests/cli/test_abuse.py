"""Malformed options and files, generated: one sentence each, which names option, file or row."""

import json
import random
import re
import shutil
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fastkd.cli import main
from fastkd.train.errors import InputError
from fastkd.train.processes import Computation
from fastkd.train.trained_model import TrainedModel
from tests.support.draw import FIRST
from tests.support.runs import made
from tests.support.tiny import usual, words_of

COMMANDS = [name for name in main.COMMANDS if name not in ("doctor", "study")]
BAD_NUMBERS = ("nan", "-inf", "1e999", "-1", "abc", "", "1,5", "0x10", "9" * 400)
BAD_WORDS = ("", "nonsense", "\x1b[31m", "a" * 5000, "--", "../..", "\N{PILE OF POO}")
BAD_PATHS = ("{file}/below", "{folder}/" + "x" * 300, "{file}\0", "{folder}/none/none.tsv", "")
# Options that accept every value, or whose values only the hub can reject.
FREE = {
    "data", "data_config", "train_split", "eval_split", "label_order", "text_column",
    "text_pair_column", "label_column", "options", "set", "only", "report_to", "tokenizer",
    "sentence",
}  # fmt: skip
# A path to write may be new; one to read may not.
WRITTEN = {"out", "log_json", "plot"}


@pytest.fixture
def invoke(tiny, tmp_path, monkeypatch):
    """Result of a command; an error is one sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("good film\nbad film\n")
    rows = usual(tiny, tmp_path, learning_rate=None, epochs=None, batch_size=None)
    answer = {"model": tiny / "teacher", "data": tiny / "dev.tsv"}
    basis = {
        "distill": {**rows, "batch_size": 8, "max_train_rows": 8},
        "cache": rows,
        "verify": {**rows, "out": None},
        "evaluate": answer,
        "predict": answer,
        "augment": {
            "data": answer["data"],
            "mlm": answer["model"],
            "out": "a.tsv",
            "device": "cpu",
        },
        "demo": {"out": "out", "fast": True},
        "analyze": {"model": answer["model"], "text": "text.txt", "out": "out", "max_length": 16},
    }

    def call(command, *words, **changes):
        listed = [*words_of(command, **{**basis[command], **changes}), *map(str, words)]
        result = CliRunner().invoke(main.app, listed)
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


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the teacher."""
    return lambda name="model": shutil.copytree(tiny / "teacher", tmp_path / name)


def bad_options():
    """(command, flag, value) that must be refused."""
    for command in COMMANDS:
        for name, meta in main.options_for(command).items():
            kind, choices = meta.kind, meta.choices() if callable(meta.choices) else meta.choices
            values: tuple[str, ...] = ()
            if {int, float} & {kind, *typing.get_args(kind)}:
                values = BAD_NUMBERS
            elif Path in {kind, *typing.get_args(kind)}:
                values = BAD_PATHS[:3] if name in WRITTEN else BAD_PATHS
            elif choices or (kind is not bool and name not in FREE and name != "set"):
                values = BAD_WORDS
            for value in values:
                yield command, meta.flag, value


def test_malformed_options(invoke, tiny):
    """Every flag once, of a command and with a value that are drawn anew each time."""
    cases = [*bad_options()]
    random.Random(FIRST).shuffle(cases)
    for command, flag, value in {case[1]: case for case in cases}.values():
        value = value.format(file=tiny / "dev.tsv", folder=tiny) if "{" in value else value
        result = invoke(command, **{flag.removeprefix("--").replace("-", "_"): value})
        case = (command, flag, value[:40], result.output[-300:])
        assert result.exit_code, case
        assert flag in result.stderr or (value and value in result.stderr), case


CPU = Computation(torch.device("cpu"), "fp32", 8)


@pytest.fixture
def given(tiny):
    return {"train": tiny / "train.tsv", "eval": tiny / "dev.tsv", "max_length": 16}


@pytest.mark.parametrize("value", [float("nan"), 1e38, None])
def test_weights_that_give_no_outputs(invoke, copy, value):
    model = copy()
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "query.weight" in name)
    weights[name] = weights[name].clone()
    if value is None:
        del weights[name]
    else:
        weights[name].fill_(value)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    said = "missing" if value is None else "not finite"
    asked = [("distill", "teacher"), ("evaluate", "model"), ("predict", "model")]
    for command, name in [*asked, ("distill", "student")] if value is None else asked:
        result = invoke(command, **{name: model})
        assert result.exit_code in (1, 2), result.output
        assert f"--{name}" in result.stderr and said in result.stderr


def test_malformed_hyperparameters(given, tiny):
    """Where they are read, or where the method is made."""
    for word in (
        "alpha", "=1", "alpha=", "alpha=nan", "alpha=inf", "alpha=-1", "alpha=[1]", "alpha=1e999",
        "alpha={}", "alpha=lambda: 1", "alpha=" + "(" * 500, "layers=9", "layers=[0]",
        "layers=1.5", "layers=true", "layers=none", "layers=x", "normalize=5", "normalize=l3",
        "distance=", "no=1", "\0=1", "task_weight=none", "beta=0x", "beta='", "beta=1_",
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"^options|--set|--method fcd"):
            made(**given, teacher=tiny / "teacher", method="fcd", options=word)


LAYERLESS = ({"num_hidden_layers": 0}, {"num_hidden_layers": -1})
# Files of a model: other bytes, or other fields of the configuration; None cuts off a half.
DAMAGES = {
    "config.json": (
        b"", b"{", b"[]", b'{"model_type": "bert"}', b'{"model_type": 5}', b"\xff",
        *LAYERLESS, {"num_hidden_layers": "x"},
        {"hidden_size": 15}, {"hidden_size": 32}, {"num_attention_heads": 0}, {"vocab_size": 3},
        {"vocab_size": 0}, {"vocab_size": "a"}, {"max_position_embeddings": 8}, {"id2label": 5},
        {"id2label": {"x": "a"}}, {"dtype": "float99"}, {"model_type": "none"},
        {"hidden_act": "none"}, {"hidden_dropout_prob": 5}, {"pad_token_id": 99999},
        {"layer_norm_eps": "x"},
    ),
    "model.safetensors": (b"", b"x", b"\xff" * 100, None),
    "tokenizer.json": (b"", b"{}", b"[1]", b"\xff"),
    "tokenizer_config.json": (b"", b"[]", b"{"),
}  # fmt: skip


def test_damaged_model_files(invoke, copy, given):
    """Also without tokenizer files, for which transformers makes an empty tokenizer.

    Of the damages a third in a run.
    """
    cases = [(file, content) for file, contents in DAMAGES.items() for content in contents]
    for i, (file, content) in enumerate(random.Random(FIRST).sample(cases, len(cases) // 3)):
        model = copy(f"model{i}")
        whole = (model / file).read_bytes()
        # A model without layers can be read, but not taught by.
        harmless = file.startswith("tokenizer") or content in LAYERLESS
        if isinstance(content, dict):
            content = json.dumps({**json.loads(whole), **content}).encode()
        (model / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
        for flag, read, options in (
            ("--teacher|--student-layers", made, {**given, "teacher": model}),
            ("--model", TrainedModel, {"name": str(model), "computation": CPU, "remote_code": 0}),
        ):
            try:
                read(**options)
            except InputError as error:
                assert re.search(flag, str(error)), (file, content)
            else:  # some damage to a tokenizer's options is none
                assert harmless, (file, content)
    model = copy("bare")
    for path in [*model.glob("tokenizer*"), *model.glob("vocab*")]:
        path.unlink()
    for command, name in (("distill", "teacher"), ("evaluate", "model")):
        result = invoke(command, **{name: model})
        assert result.exit_code == 2 and "tokenizer" in result.stderr, result.output
    # Classes that a head does not name are none.
    odd = copy("odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "5": "b"}}))
    assert invoke("predict", model=odd).exit_code == 0
    made(**given, teacher=odd)
