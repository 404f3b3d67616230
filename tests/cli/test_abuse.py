"""Wrong options and files, listed or generated: one sentence each names option, file or row."""

import json
import math
import random
import re
import shutil
import typing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from fastkd.cli import main
from tests.support.draw import FIRST
from tests.support.tiny import make_teacher, run, usual, words_of, write_tsv
from tests.train.tasks.through import make_bare, make_chat_teacher, write_chats, write_lines

COMMANDS = [name for name in main.COMMANDS if name not in ("doctor", "study")]
BAD_NUMBERS = ("nan", "-inf", "1e999", "-1", "abc", "", "1,5", "0x10", "9" * 400)
BAD_WORDS = ("", "nonsense", "\x1b[31m", "a" * 5000, "--", "../..", "\N{PILE OF POO}")
BAD_PATHS = ("{file}/below", "{folder}/" + "x" * 300, "{file}\0", "{folder}/none/none.tsv", "")
# Options that accept every value, or whose values only the hub can reject.
FREE = {
    "data", "data_config", "train_split", "eval_split", "label_order", "text_column", "sentence",
    "text_pair_column", "label_column", "options", "set", "only", "report_to", "tokenizer",
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


CHAT = {"task": "chat", "method": "soft_targets", "teacher": "chat",
        **dict.fromkeys(("train", "eval"), "chats.jsonl")}  # fmt: skip
OWN = {**CHAT, "on_policy": 0.5}
LORA = {**CHAT, "lora": "r=2"}
MASKED = {"task": "masked-lm", "teacher": "masked", "lora": "r=2",
          **dict.fromkeys(("train", "eval"), "texts.txt")}  # fmt: skip
ALONE = {"train": None, "eval": "texts.txt", "unlabelled": "texts.txt", "method": "soft_targets"}
NAMED = {"teacher": "named", **dict.fromkeys(("train", "eval"), "named.tsv")}
SERVER = {"glue": "new", "data": "index.tsv", "model": "rte"}
#: Damaged models: a file, and its bytes or another field of the configuration.
DAMAGES = {
    "empty": ("config.json", b""), "list": ("config.json", b"[]"),
    "bytes": ("config.json", b"\xff"), "typeless": ("config.json", b'{"model_type": 5}'),
    "cut": ("model.safetensors", b"x"), "wordless": ("tokenizer.json", b"{}"),
    **{name: ("config.json", {name: value}) for name, value in {
        "hidden_size": 15, "num_attention_heads": 0, "vocab_size": 3, "id2label": 5,
        "max_position_embeddings": 8, "model_type": "none", "hidden_act": "none",
        "pad_token_id": 99999, "layer_norm_eps": "x", "dtype": "float99",
    }.items()},
    **{f"layers {n}": ("config.json", {"num_hidden_layers": n}) for n in (0, -1)},
}  # fmt: skip
#: By the content of a file --trainer-args: words of its sentence.
TRAINER_ARGS = {
    "learning_rate: 1": "is what --learning-rate sets", "optm: adafactor": "did you mean 'optim'",
    "fsdp: full_shard": "is what --fsdp sets", "eval_steps: 3": "is settled by fastkd itself",
    "max_grad_norm: 1e0x": "max_grad_norm must be float, got '1e0x'",
    "lr_scheduler_type: constand": "constand", "lr_scheduler_type: cosine_with_min_lr": "min_lr",
    "optim: adamw_8bit": "bitsandbytes", "adam_beta1: 1.5": "Invalid beta parameter",
    "gradient_accumulation_steps: 0": "must be at least 1",
    "dataloader_num_workers: -1": "must be at least 0",
    "torch_compile_backend: none": "not a valid DynamoBackend",
    "dataloader_persistent_workers: true": "needs dataloader_num_workers",
    "train_sampling_strategy: sequential": "must be random or group_by_length",
    "- a": "one 'name: value' a line", "a: [": "can't be read",
}  # fmt: skip
#: Options of a command on the files of `place`, and words of the sentence, or a pattern.
#: Malformed rows: tests/train/tasks/test_mistakes.py.
DISTILL = [
    ({"train_split": "test"}, "--train and --train-split exclude each other"),
    ({"data": "imdb"}, "--train and --data exclude each other"),
    ({"train": None, "eval": None, "task": "sst2", "data": "imdb"}, "--task and --data exclude"),
    ({"data_config": "x"}, "--data-config"), ({"train": None, "eval": None}, "--task .*--train"),
    ({"student": "./s", "teacher_layers": "top"}, "--student and --teacher-layers"),
    ({"teacher_learning_rate": 1e-3}, "needs --finetune-teacher"),
    ({"task": "sts-b"}, "mean 'stsb'"), ({"preset": "paper"}, "--preset needs --method NAME"),
    ({"set": "alhpa=1", "method": "mc3kd"}, "--set alhpa.*did you mean 'alpha'"),
    *(({"set": word, "method": "fcd"}, "^Error: (--set|--method fcd)") for word in (
        "alpha", "=1", "alpha=", "alpha=nan", "alpha=-1", "alpha=[1]", "alpha=1e999", "alpha={}",
        "alpha=lambda: 1", "alpha=" + "(" * 500, "layers=9", "layers=[0]", "layers=1.5",
        "layers=true", "layers=x", "normalize=5", "distance=", "no=1", "\0=1", "task_weight=none",
        "beta=0x", "beta='", "beta=1_",
    )),
    ({"teacher": "runs/nope"}, r"runs/nope: no such directory, and the hub doesn't give it \("),
    *(({"teacher": name}, "--teacher|--student-layers") for name in DAMAGES),
    *(({"trainer_args": f"{i}.yaml"}, f"--trainer-args {i}.yaml: .*{words}")
      for i, words in enumerate(TRAINER_ARGS.values())),
    ({"unlabelled": "none.txt"}, "--unlabelled none.txt: no such file"),
    ({"label_column": "stars"}, r"column 'stars' \(--label-column\); known: sentence, label"),
    ({"teacher_layers": "2,9"}, "--teacher-layers .*1 to 4"),
    ({"teacher_layers": "unifrom"}, "Error: --teacher-layers 'unifrom'.*mean 'uniform'"),
    ({"teacher_layers": "1,2,3", "student_layers": 2}, "layers names 3.*--student-layers is 2"),
    ({"student_config": "hidden=8"}, "--student-config.*has no size 'hidden'"),
    ({"student_config": "hidden_size=8,4"}, "--student-config '4'.*name=value"),
    ({"student_config": "head_dim=8,head_dim=4"}, "head_dim is given twice"),
    ({"student_config": "num_hidden_layers=2"}, "num_hidden_layers: give --student-layers"),
    ({"student_weights": "random", "teacher_layers": "top"}, "layers and --student-weights random"),
    ({"precision": "fp16"}, "needs a CUDA device"), ({"accumulate": 9}, "9: a step of 8 rows"),
    ({"resume": True}, "--resume: --out out does not exist"),
    ({"fsdp": True}, "--fsdp: shards models over processes, but there is one"),
    ({"fsdp": True, "precision": "fp16"}, "--fsdp and --precision fp16 exclude each other"),
    ({"fsdp": True, "teacher_layers": "select"}, "--fsdp and --teacher-layers select exclude each"),
    ({"fsdp": True, "gather": True, "on_policy": 0.5, "task": "causal-lm"}, "--fsdp, --gather and"),
    *(({"log_json": name}, "--log-json") for name in ("out/unfinished/log", "link.jsonl")),
    ({"train": "empty.tsv"}, "the label is empty, as in 20 rows; write -100.*--unlabelled"),
    ({**NAMED, "student": "swapped"}, "head's classes are pos, neg and the teacher's neg, pos"),
    ({**ALONE, "eval": None}, "--eval is missing"),
    ({**ALONE, "finetune_teacher": 1}, "text alone needs a teacher with a finished head"),
    ({**ALONE, "metric": "f1"}, "no column 'label', which --metric f1 compares"),
    ({**ALONE, "method": "labels"}, "--unlabelled and --method labels exclude each other"),
    ({**OWN, "teacher": None, "teacher_cache": "."}, "--on-policy and --teacher-cache exclude"),
    ({**OWN, "method": "knn"}, "knn: compares rows of one class, but rows of --task chat"),
    ({**OWN, "method": "gold"}, "--method gold: compares language models of two tokenizers"),
    ({**OWN, "method": "labels"}, "--on-policy: Labels trains on labels alone"),
    ({"task": "causal-lm", "max_new_tokens": 2}, "--max-new-tokens: models of --task causal-lm"),
    ({**LORA, "lora": "rank=4"}, "--lora rank: known: r, alpha, targets, dropout"),
    ({**LORA, "lora": "r=4,alpha=x"}, "--lora alpha=x: must be a number, at least 0"),
    ({**LORA, "lora": "dropout=1"}, "dropout=1: must be a number, at least 0 and below 1"),
    ({**MASKED, "student": "bare"}, r"no language model head \(cls\..*adapters alone learn"),
    ({**LORA, "student_weights": "random"}, "--lora and --student-weights random"),
    ({**LORA, "lora": "targets=nothing"}, "--lora: Target modules"),
    ({**LORA, "finetune_teacher": 1, "teacher_lora": "r=0"}, "a r=0: must be a whole number above"),
    ({**LORA, "teacher_lora": "r=2"}, "--teacher-lora needs --finetune-teacher EPOCHS"),
]  # fmt: skip
EVALUATE = [
    ({"model": "./none"}, "./none: no such directory"), ({"model": "runs"}, "mean runs/student?"),
    ({"model": "bare"}, "no classification head"), ({"metric": "mse"}, "--metric mse"),
    *(({"model": name}, "--model") for name in DAMAGES if "layers" not in name),
    ({"max_length": 99}, "--max-length 99: the model reads at most 32"),
    ({"data": "unknown.tsv"}, "unknown.tsv: the tokenizer knows no word"),
    ({"metric": "agreement"}, "agreement compares with the teacher, and there is none"),
    ({"label_order": "1"}, "--label-order 1: must name the data's label for each class"),
    ({"out": "dev.tsv/x.tsv"}, "--out"), ({"out": "x.doc"}, "--out x.doc"),
    ({"task": "regression", "data": "dev.tsv"}, "named: it has 2 outputs, and --task regression 1"),
]  # fmt: skip
PREDICT = [
    ({**SERVER, "task": "sst2"}, "class 'entailment' is no label of SST-2"),
    (SERVER, "needs --task NAME"), ({"data": None}, "--data is missing"),
    ({**SERVER, "model": None, "task": "sst2"}, "--model is missing"), ({"task": "ax"}, "k 'ax'"),
    ({"model": None, "data": None, "glue_zip": ".", "out": "a.zip"}, "no files of `--glue`"),
    ({"model": None, "data": None, "glue_zip": "."}, "needs --out"),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    path = shutil.copytree(tiny, tmp_path_factory.mktemp("place") / "files")
    make_teacher(path / "named", ("neg", "pos"))
    make_teacher(path / "swapped", ("pos", "neg"))
    shutil.copytree(path / "named", path / "runs/student")
    make_teacher(path / "rte", ("entailment", "not_entailment"), 1)
    config = BertConfig.from_pretrained(make_bare(path / "bare"))
    shutil.copytree(path / "bare", path / "masked")
    BertForMaskedLM(config).save_pretrained(path / "masked")
    for name, (file, content) in DAMAGES.items():
        whole = shutil.copytree(path / "named", path / name) / file
        if isinstance(content, dict):
            content = json.dumps({**json.loads(whole.read_text()), **content}).encode()
        whole.write_bytes(content)
    make_chat_teacher(path / "chat")
    write_chats(path / "chats.jsonl", 12)
    write_lines(path / "texts.txt")
    write_tsv(path / "named.tsv", label=lambda y: ("neg", "pos")[y])
    write_tsv(path / "empty.tsv", label=lambda y: (0, "")[y])
    (path / "unknown.tsv").write_text("text\tlabel\n" + "zzz zzz\tneg\n" * 8)
    (path / "index.tsv").write_text("index\tsentence\n0\ta film\n")
    for i, text in enumerate(TRAINER_ARGS):
        (path / f"{i}.yaml").write_text(text)
    (path / "link.jsonl").symlink_to("train.tsv")
    return path


def test_bad_input_is_one_sentence_before_any_work(place, monkeypatch):
    monkeypatch.chdir(place)
    answer, train = {"model": "named", "data": "named.tsv"}, usual(Path(), Path())
    for command, given, rows in (
        ("distill", train, DISTILL), ("evaluate", answer, EVALUATE), ("predict", answer, PREDICT)
    ):  # fmt: skip
        for options, words in rows:
            error = run(command, **{**given, **options}, expect=2)
            assert words in error or re.search(words, error), (options, error)
    assert "--eval is given twice" in run("distill", "--eval", "dev.tsv", **train, expect=2)
    tests = "--test", "dev.tsv", "--test", "runs/dev.tsv"
    assert "--test: two files have the same name" in run("distill", *tests, **train, expect=2)
    for name, value in (("ACCELERATE_USE_CPU", "True"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    error = run("distill", **train, expect=2)
    assert "accelerate launch has started one process" in error and "torchrun" in error
    assert not Path("out").exists()


def bad_values(name, meta):
    kinds = {meta.kind, *typing.get_args(meta.kind)}
    if {int, float} & kinds:
        return BAD_NUMBERS
    if Path in kinds:
        return BAD_PATHS[:3] if name in WRITTEN else BAD_PATHS
    return BAD_WORDS if meta.choices or (meta.kind is not bool and name not in FREE) else ()


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
    cases = [
        (command, meta.flag, value)
        for command in COMMANDS
        for name, meta in main.options_for(command).items()
        for value in bad_values(name, meta)
    ]
    random.Random(FIRST).shuffle(cases)
    for command, flag, value in {case[1]: case for case in cases}.values():
        value = value.format(file=tiny / "dev.tsv", folder=tiny) if "{" in value else value
        name = flag.removeprefix("--").replace("-", "_")
        said = refused(command, **{**basis[command], name: value})
        assert flag in said or (value and value in said), (command, flag, value[:40], said)


def test_weights_that_give_no_outputs(tiny, tmp_path):
    infinite = make_teacher(tmp_path / "infinite", initializer_range=math.inf)
    missing = shutil.copytree(tiny / "teacher", tmp_path / "missing")
    weights = load_file(file := missing / "model.safetensors")
    some = {name: x for name, x in weights.items() if "query.weight" not in name}
    save_file(some, file, metadata={"format": "pt"})
    for model, words in ((missing, "missing"), (infinite, "not finite")):
        answer, train = {"data": tiny / "dev.tsv"}, usual(tiny, tmp_path)
        for command, option, given in (
            ("evaluate", "model", answer), ("predict", "model", answer),
            ("distill", "teacher", train), *[("distill", "student", train)] * (model == missing),
        ):  # fmt: skip
            said = refused(command, **{**given, option: model})
            assert f"--{option}" in said and words in said
