"""Wrong options and files, listed or generated: one sentence each names option, file or row."""

import json
import random
import re
import shutil
import typing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from fastkd.cli import main
from fastkd.train.errors import InputError
from fastkd.train.processes import Computation
from fastkd.train.trained_model import TrainedModel
from tests.support.draw import FIRST
from tests.support.runs import made
from tests.support.tiny import make_teacher, run, usual, words_of, write_tsv
from tests.train.tasks.through import make_bare, make_chat_teacher, write_chats, write_lines

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


def refused(command, **options):
    """The one sentence with which a command ends."""
    result = CliRunner().invoke(main.app, words_of(command, **options))
    told = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    if result.exit_code not in (1, 2) or len(told) != 1 or "Traceback" in result.output:
        raise AssertionError((command, options, result.output)) from result.exception
    return result.stderr


CHAT = {"task": "chat", "method": "soft_targets", **dict.fromkeys(("train", "eval"), "chats.jsonl")}
CHAT["teacher"] = "chat"
OWN = {**CHAT, "on_policy": 0.5}
LORA = {**CHAT, "lora": "r=2"}
MASKED = {"task": "masked-lm", **dict.fromkeys(("train", "eval"), "texts.txt"), "lora": "r=2"}
ALONE = {"train": None, "eval": "texts.txt", "unlabelled": "texts.txt", "method": "soft_targets"}
NAMED = {"teacher": "named", **dict.fromkeys(("train", "eval"), "named.tsv")}
SERVER = {"glue": "new", "data": "index.tsv", "model": "rte"}
#: Options of a command on the files of `place`, and words of the sentence, or a pattern.
#: Malformed rows: tests/train/tasks/test_mistakes.py.
DISTILL = [
    ({"train_split": "test"}, "--train and --train-split exclude each other"),
    ({"eval_split": "test"}, "--train and --eval-split exclude each other"),
    ({"data": "imdb"}, "--train and --data exclude each other"),
    ({"train": None, "eval": None, "task": "sst2", "data": "imdb"}, "--task and --data exclude"),
    ({"data_config": "x"}, "--data-config"),
    ({"student": "./s", "teacher_layers": "top"}, "--student and --teacher-layers"),
    ({"teacher_learning_rate": 1e-3}, "needs --finetune-teacher"),
    ({"train": None, "eval": None}, "--task .*--train"),
    ({"task": "sts-b"}, "--task .*did you mean 'stsb'"),
    ({"preset": "paper"}, "--preset needs --method NAME"),
    ({"set": "alpha=1"}, "--set needs --method NAME"),
    ({"set": "alhpa=1", "method": "mc3kd"}, "--set alhpa.*did you mean 'alpha'"),
    ({"teacher": "./nowhere"}, "--teacher ./nowhere.*no such directory"),
    ({"teacher": "runs/nope"}, r"runs/nope: no such directory, and the hub doesn't give it \("),
    ({"student_layers": 5}, "Error: --student-layers 5.*only 4"),
    ({"teacher_layers": "2,9"}, "--teacher-layers .*1 to 4"),
    ({"teacher_layers": "unifrom"}, "Error: --teacher-layers 'unifrom'.*mean 'uniform'"),
    ({"teacher_layers": "1,2,3", "student_layers": 2}, "layers names 3.*--student-layers is 2"),
    ({"student": "./s", "student_config": "hidden_size=8"}, "--student and --student-config excl"),
    ({"student_config": "hidden=8"}, "--student-config.*has no size 'hidden'"),
    ({"student_config": "hidden_size=8,4"}, "--student-config '4'.*name=value"),
    ({"student_config": "head_dim=8,head_dim=4"}, "head_dim is given twice"),
    ({"student_config": "num_hidden_layers=2"}, "num_hidden_layers: give --student-layers"),
    ({"student_weights": "random", "teacher_layers": "top"}, "layers and --student-weights random"),
    ({"precision": "fp16"}, "fp16 needs a CUDA device"),
    ({"text_column": "sentense"}, "'sentense'.*did you mean 'sentence'"),
    ({"accumulate": 9}, "--accumulate 9: a step of 8 rows"),
    ({"resume": True}, "--resume: --out out does not exist"),
    ({"fsdp": True}, "--fsdp: shards models over processes, but there is one"),
    ({"fsdp": True, "precision": "fp16"}, "--fsdp and --precision fp16 exclude each other"),
    ({"fsdp": True, "teacher_layers": "select"}, "--fsdp and --teacher-layers select exclude each"),
    ({"fsdp": True, "gather": True, "on_policy": 0.5, "task": "causal-lm"}, "--fsdp, --gather and"),
    ({"log_json": "out/student/log"}, "--log-json"),
    ({"log_json": "out/unfinished/log"}, "--log-json"),
    ({"log_json": "train.tsv"}, "--log-json"),
    ({"log_json": "link.jsonl"}, "--log-json"),
    ({"train": "empty.tsv"}, "the label is empty, as in 20 rows; write -100.*--unlabelled"),
    ({**NAMED, "student": "swapped"},
     "its head's classes are pos, neg and the teacher's neg, pos"),
    ({**ALONE, "eval": None}, "--eval is missing"),
    ({**ALONE, "finetune_teacher": 1}, "text alone needs a teacher with a finished head"),
    ({**ALONE, "metric": "f1"}, "no column 'label', which --metric f1 compares"),
    ({**ALONE, "method": "labels"}, "--unlabelled and --method labels exclude each other"),
    ({**OWN, "teacher": None, "teacher_cache": "."}, "--on-policy and --teacher-cache exclude"),
    ({**OWN, "method": "knn"},
     "--method knn: compares rows of one class, but rows of --task chat"),
    ({**OWN, "method": "gold"}, "--method gold: compares language models of two tokenizers"),
    ({**OWN, "method": "labels"}, "--on-policy: Labels trains on labels alone"),
    ({**OWN, "on_policy": 2}, "--on-policy must be at most 1, got 2"),
    ({**MASKED, "task": "causal-lm", "lora": None, "teacher": "chat", "max_new_tokens": 2},
     "--max-new-tokens: models of --task causal-lm don't"),
    ({**LORA, "lora": "rank=4"}, "--lora rank: known: r, alpha, targets, dropout"),
    ({**LORA, "lora": "r=0"}, "--lora r=0: must be a whole number above 0"),
    ({**LORA, "lora": "r=4,alpha=x"}, "--lora alpha=x: must be a number, at least 0"),
    ({**LORA, "lora": "dropout=1"},
     "--lora dropout=1: must be a number, at least 0 and below 1"),
    ({**MASKED, "teacher": "masked", "student": "bare"},
     r"it has no language model head \(cls\..*adapters alone learn"),
    ({**LORA, "student_weights": "random"}, "--lora and --student-weights random"),
    ({**LORA, "lora": "targets=nothing"}, "--lora: Target modules"),
    ({**LORA, "finetune_teacher": 1, "teacher_lora": "r=0"}, "--teacher-lora r=0"),
    ({**LORA, "teacher_lora": "r=2"}, "--teacher-lora needs --finetune-teacher EPOCHS"),
]  # fmt: skip
EVALUATE = [
    ({"model": "./none"}, "--model ./none: no such directory"),
    ({"model": "runs"}, "did you mean runs/student?"),
    ({"model": "bare"}, "no classification head"),
    ({"max_length": 99}, "--max-length 99"),
    ({"data": "unknown.tsv"}, "unknown.tsv: the tokenizer knows no word"),
    ({"metric": "mse"}, "--metric mse"),
    ({"metric": "agreement"}, "agreement compares with the teacher, and there is none"),
    ({"label_order": "1"}, "--label-order 1: must name the data's label for each class"),
    ({"out": "dev.tsv/x.tsv"}, "--out"),
    ({"out": "x.doc"}, "--out x.doc"),
    ({"task": "regression", "data": "dev.tsv"},
     "named: it has 2 outputs, and --task regression 1"),
    ({"data": "bare.csv", "no_header": True, "text_column": 1}, "--label-column"),
]  # fmt: skip
PREDICT = [
    ({**SERVER, "task": "sst2"}, "class 'entailment' is no label of SST-2"),
    (SERVER, "needs --task NAME"),
    ({**SERVER, "model": None, "task": "sst2"}, "--model is missing"),
    ({"data": None}, "--data is missing"),
    ({"task": "ax"}, "--task 'ax'"),
    ({"model": None, "data": None, "glue_zip": ".", "out": "a.zip"}, "no files of `--glue`"),
    ({"model": None, "data": None, "glue_zip": "."}, "needs --out"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    """Models and files of the lists."""
    path = tmp_path_factory.mktemp("place") / "files"
    shutil.copytree(tiny, path)
    make_teacher(path / "named", ("neg", "pos"))
    make_teacher(path / "swapped", ("pos", "neg"))
    shutil.copytree(path / "named", path / "runs/student")
    make_teacher(path / "rte", ("entailment", "not_entailment"), 1)
    for name in ("bare", "masked"):
        make_bare(path / name)
    BertForMaskedLM(BertConfig.from_pretrained(path / "masked")).save_pretrained(path / "masked")
    make_chat_teacher(path / "chat")
    write_chats(path / "chats.jsonl", 12)
    write_lines(path / "texts.txt")
    write_tsv(path / "named.tsv", label=lambda y: ("neg", "pos")[y])
    write_tsv(path / "empty.tsv", label=lambda y: (0, "")[y])
    for name, text in {
        "unknown.tsv": "text\tlabel\n" + "zzz zzz\tneg\n" * 8,
        "bare.csv": "7,good film\n8,bad film\n", "index.tsv": "index\tsentence\n0\ta film\n",
    }.items():  # fmt: skip
        (path / name).write_text(text)
    (path / "link.jsonl").symlink_to("train.tsv")
    return path


def test_bad_input_is_one_sentence_before_any_work(place, monkeypatch):
    monkeypatch.chdir(place)
    answer = {"model": "named", "data": "named.tsv"}
    train = usual(Path(), Path())
    for command, given, rows in (
        ("distill", train, DISTILL), ("evaluate", answer, EVALUATE), ("predict", answer, PREDICT)
    ):  # fmt: skip
        for options, words in rows:
            error = run(command, **{**given, **options}, expect=2)
            assert words in error or re.search(words, error), (options, error)
    assert "--eval is given twice" in run("distill", "--eval", "dev.tsv", **train, expect=2)
    for name, value in (("ACCELERATE_USE_CPU", "True"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    error = run("distill", **train, expect=2)
    assert "accelerate launch has started one process" in error and "torchrun" in error
    assert not Path("out").exists()


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
            elif choices or (kind is not bool and name not in FREE):
                values = BAD_WORDS
            for value in values:
                yield command, meta.flag, value


def test_malformed_options(tiny, tmp_path, monkeypatch):
    """Every flag once, of a command and with a value that are drawn anew each time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("good film\nbad film\n")
    rows = usual(tiny, tmp_path, learning_rate=None, epochs=None, batch_size=None)
    model, data = tiny / "teacher", tiny / "dev.tsv"
    basis = {
        "distill": {**rows, "batch_size": 8, "max_train_rows": 8}, "cache": rows,
        "verify": {**rows, "out": None}, "demo": {"out": "out", "fast": True},
        **{name: {"model": model, "data": data} for name in ("evaluate", "predict")},
        "augment": {"data": data, "mlm": model, "out": "a.tsv", "device": "cpu"},
        "analyze": {"model": model, "text": "text.txt", "out": "out", "max_length": 16},
    }  # fmt: skip
    cases = [*bad_options()]
    random.Random(FIRST).shuffle(cases)
    for command, flag, value in {case[1]: case for case in cases}.values():
        value = value.format(file=tiny / "dev.tsv", folder=tiny) if "{" in value else value
        name = flag.removeprefix("--").replace("-", "_")
        said = refused(command, **{**basis[command], name: value})
        assert flag in said or (value and value in said), (command, flag, value[:40], said)


CPU = Computation(torch.device("cpu"), "fp32", 8)


@pytest.fixture
def given(tiny):
    return {"train": tiny / "train.tsv", "eval": tiny / "dev.tsv", "max_length": 16}


@pytest.mark.parametrize("value", [float("nan"), 1e38, None])
def test_weights_that_give_no_outputs(tiny, tmp_path, copy, value):
    model = copy()
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "query.weight" in name)
    weights[name] = weights[name].clone()
    if value is None:
        del weights[name]
    else:
        weights[name].fill_(value)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for command, option, given in (
        ("distill", "teacher", usual(tiny, tmp_path)),
        *((command, "model", {"data": tiny / "dev.tsv"}) for command in ("evaluate", "predict")),
        *[("distill", "student", usual(tiny, tmp_path))] * (value is None),
    ):
        said = refused(command, **{**given, option: model})
        assert f"--{option}" in said and ("missing" if value is None else "not finite") in said


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


def test_damaged_model_files(copy, given):
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
    rows = {"train": given["train"], "eval": given["eval"], "out": model / "out"}
    for command, options in (("distill", {"teacher": model, **rows}), ("evaluate", {
        "model": model, "data": given["eval"]})):  # fmt: skip
        assert "tokenizer" in run(command, **options, expect=2)
    # Classes that a head does not name are none.
    odd = copy("odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "5": "b"}}))
    run("predict", model=odd, data=given["eval"])
    made(**given, teacher=odd)
