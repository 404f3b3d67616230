"""`fastkd distill` from its command line: every method, bad input, interruptions, resuming."""

import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

import fastkd
from fastkd import __main__ as entry
from fastkd._core.extras import MissingExtra, require
from fastkd.analysis.similarity_measures import MEASURES
from fastkd.cli import command_settings
from fastkd.cli.main import app
from fastkd.distill import METHODS, Method, baselines, labelled_order
from fastkd.models.backbone import Backbone
from fastkd.train import config, fitting, saving
from fastkd.train.config import Config
from fastkd.train.data import describe, load
from fastkd.train.errors import InputError, SaveFailed
from fastkd.train.loading import in_order_of_head
from fastkd.train.models import check_same_tokens
from fastkd.train.options import as_json, assignments, options_of
from fastkd.train.saving import MANIFEST, find_damage, recover_directory, replace_directory
from tests.support.tiny import make_teacher, read_otherwise, run, source, write_tsv


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("models") / "teacher")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_tsv(folder / "train.tsv"), write_tsv(folder / "dev.tsv", 20, seed=1)


@pytest.fixture
def distill(teacher, files, tmp_path):
    """Run `fastkd distill` on the tiny data; options given here replace the usual ones."""

    def call(*flags, **options):
        usual = {
            "teacher": teacher, "train": files[0], "eval": files[1], "out": tmp_path / "out",
            "epochs": 1, "batch_size": 8, "max_length": 16, "device": "cpu", "learning_rate": 1e-3,
        }  # fmt: skip
        return run("distill", *flags, **{**usual, **options})

    return call


@pytest.fixture
def interrupted(distill, monkeypatch):
    def call(step, how, *flags, expect=130, **options):
        with monkeypatch.context() as patch:
            stop_at(patch, step, how)
            return distill(*flags, expect=expect, **options)

    return call


@pytest.fixture
def begun(request, files, tmp_path):
    """A copy of the initial folder that all cases of a test share, made by the first case."""

    def call(name, make):
        kept = files[0].parent / request.node.originalname / name
        if not kept.exists():
            make(kept)
        shutil.copytree(kept, tmp_path / name)

    return call


def report_of(out):
    return json.loads((out / "student" / "fastkd.json").read_text())


def weights_of(out):
    return load_file(out / "student" / "model.safetensors")


def visible(directory):
    return sorted(path.name for path in directory.iterdir())


def same_weights(a, b):
    a, b = weights_of(a), weights_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# tests/cli/test_demo.py trains by every method.
def test_labels_alone_train_and_save(distill, tmp_path):
    output, out = distill(method="labels", student_layers=2), tmp_path / "out"
    report = report_of(out)
    assert report["complete"] and report["settings"]["method"] == "labels"
    assert set(report["teacher"]) == set(report["student"]) == {"accuracy"}
    assert f"{report['student']['accuracy']:.4f}" in output
    assert set(report["best"]["losses"]) == {"loss", "task"}
    assert report["seconds"]["total"] >= report["seconds"]["training"] > 0
    student = t.AutoModelForSequenceClassification.from_pretrained(out / "student")
    assert student.config.num_hidden_layers == 2
    assert student.config.id2label == {0: "0", 1: "1"}
    assert report["parameters"]["student"] == sum(p.numel() for p in student.parameters())
    tokens = t.AutoTokenizer.from_pretrained(out / "student")("good film")
    assert len(tokens["input_ids"]) == 4 and visible(out) == ["student"]
    assert "on the labels alone" in (out / "student" / "README.md").read_text()


class Halved(Method):
    uses_teacher = False

    def __init__(self, *, share: float = 0.5, name: str = "") -> None:
        super().__init__()
        self.share = share

    def weights(self, progress):
        return {"task": self.share}


def test_a_method_of_ones_own(distill, tmp_path):
    distill("--set", "share=0.25", "--set", "name=x", method="tests.cli.test_cli:Halved")
    report = report_of(tmp_path / "out")
    assert set(report["best"]["losses"]) == {"loss", "task"}
    assert report["settings"]["options"] == {"share": 0.25, "name": "x"}
    wrong = {"out": tmp_path / "x", "expect": 2}
    error = distill(method="tests.cli.test_cli:Halved", set="shar=1", **wrong)
    assert "did you mean 'share'" in error
    for name in ("tests.cli.test_cli:Nothing", "no.such:Method", "tests.cli.test_cli:WORDS"):
        assert f"method '{name}'" in distill(method=name, **wrong)
    own = {"method": "tests.distill.own_method:HiddenAndAttention", "out": tmp_path / "own"}
    error = distill(expect=2, **own)
    assert "compares attention maps" in error and error.endswith("; pass --attention eager\n")
    distill(attention="eager", **own)
    assert report_of(tmp_path / "own")["history"][-1]["losses"]["maps"] > 0
    words = ["a=1,2", "b=true", "c=1e-3", "d=None", "e=cls", "f=[4]"]
    values = {"a": [1, 2], "b": True, "c": 1e-3, "d": None, "e": "cls", "f": [4]}
    assert assignments("--set", words) == values


def test_finetunes_a_teacher_without_a_head(distill, tmp_path):
    bare = make_teacher(tmp_path / "bare", head=False)
    # --label-order helps no head that isn't there.
    named = write_tsv(tmp_path / "named.tsv", label=lambda y: ("bad", "good")[y])
    error = distill(teacher=bare, train=named, eval=named, expect=2)
    assert f"--teacher {bare}: it has no classification head" in error
    assert "pass --finetune-teacher" in error and "--label-order" not in error
    distill(teacher=bare, finetune_teacher=8, teacher_learning_rate=5e-3, method="soft_targets")
    report = report_of(tmp_path / "out")
    assert report["teacher"]["accuracy"] > 0.9
    distill(teacher=tmp_path / "out" / "teacher", out=tmp_path / "again")
    assert report_of(tmp_path / "again")["teacher"] == report["teacher"]


def test_regression_and_string_labels(distill, tmp_path):
    """Whatever problem type a teacher's earlier task left in its configuration."""
    real, out = write_tsv(tmp_path / "real.tsv", label=lambda y: y + 0.5), tmp_path / "mse"
    first = make_teacher(tmp_path / "first", problem_type="single_label_classification")
    distill(teacher=first, train=real, eval=real, finetune_teacher=1, metric="mse", out=out)
    report = report_of(out)
    assert report["student"]["mse"] == min(h["scores"]["mse"] for h in report["history"])
    config = json.loads((out / "student" / "config.json").read_text())
    assert config["problem_type"] == "regression"
    distill(teacher=out / "teacher", finetune_teacher=1, out=tmp_path / "again")

    named, out = write_tsv(tmp_path / "b.tsv", label=lambda y: ("no", "yes")[y]), tmp_path / "named"
    error = distill(train=named, eval=named, out=out, expect=2)
    assert "LABEL_0, LABEL_1, the data no, yes; pass --label-order" in error
    distill(train=named, eval=named, out=out, label_order="no,yes")
    student = t.AutoModelForSequenceClassification.from_pretrained(out / "student")
    assert student.config.label2id == {"no": 0, "yes": 1}


def test_classes_are_matched_by_name_or_refused(distill, tmp_path):
    """A head named POSITIVE, NEGATIVE was matched to negative, positive by position: swapped."""
    names = {0: "POSITIVE", 1: "NEGATIVE"}
    head = make_teacher(tmp_path / "head", id2label=names, label2id={"POSITIVE": 0, "NEGATIVE": 1})

    def rows(*words):
        return write_tsv(tmp_path / "rows.tsv", label=lambda y: words[y])

    def names_of(*words, order=None, fresh_head=False):
        path = rows(*words)
        given = Config.of(
            teacher=str(head), train=path, evals=path, label_order=order,
            finetune_teacher=float(fresh_head),
        )  # fmt: skip
        return in_order_of_head(given, load(given)).names

    path = rows("Negative", "positive")
    options = {"teacher": head, "train": path, "eval": path, "test": path}
    distill(**options)
    report = report_of(tmp_path / "out")
    assert report["labels"] == ["positive", "Negative"]
    # The order holds for the test rows as well.
    assert report["test"] == {name: report[name] for name in ("teacher", "student")}
    # The data has another order of classes, and is the same.
    assert "already complete" in distill("--resume", **options)
    assert names_of("bad", "good", order="good, bad") == ["good", "bad"]
    assert names_of("bad", "good", fresh_head=True) == ["bad", "good"]
    for words, order, said in (
        # 1 is positive nearly everywhere.
        (("0", "1"), None, "label 0 is the model's class 'POSITIVE' by its number, and 'NEGATIVE'"),
        (("bad", "good"), None, "POSITIVE, NEGATIVE, the data bad, good; pass --label-order"),
        (("bad", "good"), "good,evil", "--label-order good,evil.*bad, good"),
    ):
        with pytest.raises(InputError, match=said):
            names_of(*words, order=order)


def test_f1_is_of_the_second_class_of_the_data(distill, tmp_path):
    names = {0: "POSITIVE", 1: "NEGATIVE"}
    head = make_teacher(tmp_path / "head", id2label=names, label2id={"POSITIVE": 0, "NEGATIVE": 1})
    rows = write_tsv(tmp_path / "rows.tsv", 33, label=lambda y: ("negative", "positive")[y])
    options = {"teacher": head, "train": rows, "eval": rows, "metric": "f1"}
    output = distill(**options, epochs=5, learning_rate=3e-3)
    assert "f1 is that of class 'positive'" in output
    student = tmp_path / "out" / "student"
    lines = run("predict", model=student, data=rows).splitlines()[1:]
    answers = [line.split("\t")[2] == "positive" for line in lines]
    truth = [line.endswith("positive") for line in rows.read_text().splitlines()[1:]]
    hits = sum(a and b for a, b in zip(answers, truth, strict=True))
    expected = 2 * hits / (sum(answers) + sum(truth))
    assert report_of(tmp_path / "out")["student"]["f1"] == pytest.approx(expected)
    said = run("evaluate", model=student, data=rows, metric="f1")
    assert f"f1 {expected:.4g} " in said and "f1 is that of class 'positive'" in said


def test_a_student_learns_in_32_bits_whatever_its_teacher_has(distill, tmp_path):
    """A student's weights stay float32: bfloat16 would round small steps away."""
    head = make_teacher(tmp_path / "head")
    model = t.AutoModelForSequenceClassification.from_pretrained(head).bfloat16()
    model.save_pretrained(head)
    output, sizes = distill(teacher=head), report_of(tmp_path / "out")["parameters"]
    assert f"{sizes['teacher'] / sizes['student']:.1f} times smaller" in output  # not in bytes
    distill(teacher=head, student=head, finetune_teacher=0.2, out=tmp_path / "tuned")
    for model in ("out/student", "tuned/student", "tuned/teacher"):
        weights = load_file(tmp_path / model / "model.safetensors").values()
        assert {weight.dtype for weight in weights} == {torch.float32}, model


def test_answers_that_are_worth_nothing_are_told(distill, tmp_path):
    bent = make_teacher(tmp_path / "bent")
    model = t.AutoModelForSequenceClassification.from_pretrained(bent)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([0.0, 5.0])
    model.save_pretrained(bent)
    output = distill(teacher=bent, method="soft_targets", learning_rate=1e-5)
    for who in ("teacher", "student"):
        assert f"warning: the {who}'s answers to the 20 evaluation rows are all '1'" in output
    words = {"train": tmp_path / "a.tsv", "eval": tmp_path / "a.tsv", "teacher": bent}
    write_tsv(words["train"])
    said = run("cache", out=tmp_path / "cache", max_length=16, **words)
    assert "warning: the teacher's answers to the 40 evaluation rows are all '1'" in said


def test_what_the_rows_hold_is_told(files, tmp_path):
    odd = tmp_path / "odd.tsv"
    odd.write_text(files[0].read_text().replace("\t0", "\tneg").replace("\t1", "\tpos"))
    odd.write_text(odd.read_text() + "good film\tpso\n")
    dev = write_tsv(tmp_path / "dev.tsv", label=lambda y: ("neg", "pos")[y])
    said = "\n".join(describe(load(source(train=odd, evals=dev))))
    assert "classes, training/evaluation rows: neg 20/20, pos 20/20, pso 1/0" in said
    assert "class 'pso' has a single training row, row 42; is it 'pos', misspelled?" in said
    assert "40 of the 40 evaluation rows are training rows too" in said


def test_code_of_a_model_is_not_run_unasked(distill, teacher, tmp_path):
    own = shutil.copytree(teacher, tmp_path / "own")
    (own / "code.py").write_text("raise SystemExit('ran')")
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.T", None]}
    config["model_type"] = "unheard_of"
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": config["auto_map"], "tokenizer_class": "T"})
    )
    assert "--trust-remote-code" in distill(teacher=own, expect=2)


def test_student_from_a_path(distill, tmp_path):
    small = make_teacher(tmp_path / "small", layers=1, hidden_size=8)
    distill(student=small, method="lrkd")
    assert report_of(tmp_path / "out")["parameters"]["student"] < 3000
    error = distill(student=small, method="fcd", student_layers=1, expect=2, out=tmp_path / "x")
    assert "--student" in error and "exclude each other" in error
    other = make_teacher(tmp_path / "other", vocab_size=99)
    assert "vocabulary has 99" in distill(student=other, expect=2, out=tmp_path / "y")
    read_otherwise(small)
    tokenizer = t.AutoTokenizer.from_pretrained(other)
    words = "--student .*: 'so' is token 5 of its tokenizer and 16 of the teacher's"
    with pytest.raises(InputError, match=words):
        check_same_tokens("--student", str(small), tokenizer, False)
    error = distill(student=small, method="fcd", expect=2, out=tmp_path / "z")
    assert "compares tokens, and the student has others than the teacher" in error


def family(path, teacher, kind):
    """A classifier with four unlike layers, and the teacher's tokenizer."""
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = {
        "bert": t.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32),
        "gpt2": t.GPT2Config(vocab_size=17, n_embd=16, n_layer=4, n_head=2, n_positions=32),
    }[kind]
    shutil.copytree(teacher, path)
    torch.manual_seed(2)
    model = t.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"\.[03]\.", name) and weight.dim() == 2:
                weight.mul_(40)  # layers 1 and 4 change what comes in
    model.save_pretrained(path)
    return path


# An encoder is selected from below, and every family's blocks are found in tests/distill.
def test_selected_layers_make_the_student_and_are_compared(
    distill, interrupted, teacher, tmp_path, monkeypatch
):
    large = family(tmp_path / "gpt2", teacher, "gpt2")
    options = {"teacher": large, "teacher_layers": "select", "learning_rate": 1e-8}
    interrupted(3, terminate, expect=143, method="mc3kd", **options)
    # Selected layers are not selected again.
    monkeypatch.setattr("fastkd.train.assembling.select_layers", None)
    output = distill("--resume", method="mc3kd", **options)
    report = report_of(tmp_path / "out")
    assert report["teacher_layers"] == report["compared_layers"] == [1, 4], output
    blocks, student = (
        Backbone(t.AutoModelForSequenceClassification.from_pretrained(path), "model").blocks
        for path in (large, tmp_path / "out/student")
    )
    for i, block in enumerate(student):
        for name, weight in block.named_parameters():
            original = blocks[(0, 3)[i]].get_parameter(name)
            torch.testing.assert_close(weight, original, rtol=1e-4, atol=1e-4)


def test_selected_layers_elsewhere(distill, teacher, files, tmp_path):
    """After the teacher's fine-tuning, from a cache, and with a map that --set names."""
    large = family(tmp_path / "bert", teacher, "bert")
    selecting = {"teacher": large, "teacher_layers": "select", "method": "mc3kd"}
    # What methods make of two widths is tested in tests/distill/test_width.py.
    sizes = "hidden_size=12,num_attention_heads=2,intermediate_size=8"
    narrow = {"student_config": sizes, "precision": "bf16"}
    distill(finetune_teacher=0.2, out=tmp_path / "tuned", **narrow, **selecting)
    report = report_of(tmp_path / "tuned")
    assert report["teacher_layers"] == report["compared_layers"] == [1, 4]
    assert report["settings"]["student_config"]["hidden_size"] == 12
    weights = weights_of(tmp_path / "tuned")
    assert weights["bert.encoder.layer.1.intermediate.dense.weight"].shape == (8, 12)
    distill(set="layers=top", out=tmp_path / "top", **selecting)
    report = report_of(tmp_path / "top")
    assert report["teacher_layers"] == [1, 4] and report["compared_layers"] == [3, 4]
    cache = tmp_path / "cache"
    run("cache", out=cache, max_length=16, train=files[0], eval=files[1], **selecting)
    distill(teacher=None, teacher_cache=cache, method="mc3kd", out=tmp_path / "cached")
    assert report_of(tmp_path / "cached")["compared_layers"] == [1, 4]
    assert "only 4" in distill(student_layers=5, out=tmp_path / "x", expect=2, **selecting)


def test_the_default_length_is_what_the_models_read(distill, teacher, files, tmp_path, monkeypatch):
    short = make_teacher(tmp_path / "short", max_position_embeddings=16)
    said = distill(max_length=None, student=short)
    assert "--max-length 32: the teacher reads no more" in said
    assert "--max-length 16: the student reads no more" in said
    words = {"train": files[0], "eval": files[1], "device": "cpu"}
    run("cache", out=tmp_path / "cache", teacher=teacher, max_length=20, **words)
    words |= {"teacher_cache": tmp_path / "cache", "epochs": 1}
    run("distill", out=tmp_path / "cached", **words)  # texts are as long as in the cache
    for name in ("plot_layer_panels", "plot_sentence"):
        monkeypatch.setattr(f"fastkd.cli.analyze_command.{name}", lambda *args, **options: None)
    said = run("analyze", model=teacher, student=short, data=files[1], out=tmp_path / "layers")
    assert "--max-length 16: the models read no more tokens" in said


def test_a_decoder_without_padding_token_and_a_student_without_segments(distill, teacher, tmp_path):
    gpt2, out = shutil.copytree(teacher, tmp_path / "gpt2"), tmp_path / "out"
    config = t.GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    t.GPT2ForSequenceClassification(config).save_pretrained(gpt2)
    distill(teacher=gpt2, method="lrkd")
    student = t.AutoModelForSequenceClassification.from_pretrained(out / "student")
    assert (student.config.num_hidden_layers, student.config.pad_token_id) == (1, 0)
    config = t.DistilBertConfig(vocab_size=17, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    t.DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "student")
    distill("--overwrite", student=tmp_path / "student", method="knn")
    assert report_of(out)["student"]["accuracy"] >= 0


def test_a_random_student_and_one_that_goes_on(distill, interrupted, tmp_path):
    sizes = {"student_config": "num_attention_heads=4", "student_layers": 6}
    random = {"student_weights": "random", "method": "soft_targets", **sizes}
    distill(**random)
    report = report_of(tmp_path / "out")
    assert report["layers"] == 6 and report["teacher_layers"] is None
    again = tmp_path / "again"
    interrupted(3, terminate, expect=143, out=again, **random)
    other = {**random, "student_config": "num_attention_heads=8"}
    error = distill("--resume", out=again, expect=2, **other)
    assert "was started with student_config = {'num_attention_heads': 4}" in error
    distill("--resume", out=again, **random)
    assert same_weights(tmp_path / "out", again)


# Messages of rejected options; malformed values of every option: test_abuse.py.
BAD = [
    ({"train_split": "test"}, "--train and --train-split exclude each other"),
    ({"eval_split": "test"}, "--train and --eval-split exclude each other"),
    ({"data": "imdb"}, "--train and --data exclude each other"),
    ({"data_config": "x"}, "--data-config"),
    ({"student": "./s", "teacher_layers": "top"}, "--student and --teacher-layers"),
    ({"teacher_learning_rate": 1e-3}, "needs --finetune-teacher"),
    ({"train": None, "eval": None}, "--task .*--train"),
    ({"method": "fdc"}, "--method .*did you mean 'fcd'"),
    ({"task": "sts-b"}, "--task .*did you mean 'stsb'"),
    ({"set": "alhpa=1", "method": "mc3kd"}, "--set alhpa.*did you mean 'alpha'"),
    ({"set": "alpha"}, "--set .*name=value"),
    ({"teacher": "./nowhere"}, "--teacher ./nowhere.*no such directory"),
    ({"teacher": "nowhere"}, "nowhere: no such directory, and the hub"),
    ({"teacher": "runs/nope"}, r"runs/nope: no such directory, and the hub doesn't give it \("),
    ({"student_layers": 5}, "Error: --student-layers 5.*only 4"),
    ({"teacher_layers": "2,9"}, "--teacher-layers .*1 to 4"),
    ({"teacher_layers": "unifrom"}, "Error: --teacher-layers 'unifrom'.*mean 'uniform'"),
    ({"teacher_layers": "1,2,3", "student_layers": 2}, "layers names 3.*--student-layers is 2"),
    ({"student": "./s", "student_config": "hidden_size=8"}, "--student and --student-config excl"),
    ({"student_config": "hidden=8"}, "--student-config.*has no size 'hidden'"),
    ({"student_config": "hidden_size=15"}, "hidden_size: 15 is no multiple of num_attention_heads"),
    ({"student_config": "hidden_size=8,4"}, "--student-config '4'.*name=value"),
    ({"student_config": "head_dim=8,head_dim=4"}, "head_dim is given twice"),
    ({"student_config": "hidden_size=32"}, "32 is more than the teacher's 16"),
    ({"student_config": "num_hidden_layers=2"}, "num_hidden_layers: give --student-layers"),
    ({"student_weights": "new"}, "--student-weights 'new'.*cut, random"),
    ({"student_weights": "random", "teacher_layers": "top"}, "layers and --student-weights random"),
    ({"precision": "fp16"}, "fp16 needs a CUDA device"),
    ({"max_length": 64}, "--max-length 64.*at most 32"),
    ({"text_column": "sentense"}, "'sentense'.*did you mean 'sentence'"),
]


def test_bad_input_is_one_sentence_before_any_work(distill, tmp_path):
    for given, said in BAD:
        error = distill(expect=2, **given)
        assert re.search(said, error), (given, error)
        assert not (tmp_path / "out").exists()


def test_trainer_args_reach_the_trainer(distill, tmp_path):
    """And a step whose parts are compared within themselves only is warned of."""
    file = tmp_path / "args.yaml"
    file.write_text(
        "gradient_accumulation_steps: 2\nlr_scheduler_type: constant\nlogging_steps: 99\n"
        "torch_compile_backend: null\n"
    )
    options = {"trainer_args": file, "epochs": 1.5, "checkpoint_every": 3, "method": "fcd"}
    output = " ".join(distill(**options).split())
    assert "compares samples (samples) within each accumulated batch only" in output
    assert "--batch-size 16 --accumulate 2 compares all rows of a step" in output
    report = report_of(tmp_path / "out")
    # 40 rows in batches of 8, two batches a step
    assert [entry["step"] for entry in report["history"]] == [3, 5]
    assert all(entry["losses"]["loss"] > 0 for entry in report["history"])
    assert report["settings"]["trainer_args"]["lr_scheduler_type"] == "constant"
    assert "compares the" not in distill(trainer_args=file, out=tmp_path / "b")
    assert "exclude each other" in distill(accumulate=2, trainer_args=file, expect=2)
    file.write_text("max_grad_norm: 0.5\n")
    error = distill("--resume", **options, expect=2)
    assert "started with trainer_args = {'gradient_accumulation_steps': 2" in error


def test_micro_batches_give_the_step_of_the_whole_batch(distill, tmp_path):
    """Batches of 8 rows in parts of 3, 3 and 2, the last one of 2 rows in two."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    options = {
        "teacher": make_teacher(tmp_path / "still", **still), "method": "fcd",
        "finetune_teacher": 1, "max_train_rows": 26,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    distill(out=whole, **options)
    distill(out=parts, accumulate=3, **options)
    for name in ("teacher", "student"):
        a, b = (load_file(out / name / "model.safetensors") for out in (whole, parts))
        for key in a:
            if not key.endswith("key.bias"):  # whose gradient is rounding
                assert (a[key] - b[key]).abs().max() <= 1e-5, (name, key)
    losses = [report_of(out)["history"][-1]["losses"] for out in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("text", "said"), [
    ("learning_rate: 1", "learning_rate is what --learning-rate sets"),
    ("optm: adafactor", "did you mean 'optim'"),
    ("fsdp: full_shard", "fsdp is what --fsdp sets"),
    ("eval_steps: 3", "eval_steps is settled by fastkd itself"),
    ("max_grad_norm: 1e0x", "max_grad_norm must be float, got '1e0x'"),
    ("max_grad_norm: true", "max_grad_norm must be float"),
    ("lr_scheduler_type: constand", "constand"),
    ("optim: adamw_8bit", "bitsandbytes"),
    ("adam_beta1: 1.5", "Invalid beta parameter"),
    ("dataloader_num_workers: -1", "dataloader_num_workers must be at least 0"),
    ("torch_compile_backend: no", "must be"),
    ("torch_compile_backend: none", "not a valid DynamoBackend"),
    ("lr_scheduler_type: cosine_with_min_lr", "min_lr"),
    ("gradient_accumulation_steps: 0", "at least 1"),
    ("dataloader_persistent_workers: true", "needs dataloader_num_workers"),
    ("- a", "one 'name: value' a line"),
    ("a: [", "can't be read"),
])  # fmt: skip
def test_wrong_trainer_args_are_one_sentence(distill, tmp_path, text, said):
    file = tmp_path / "args.yaml"
    file.write_text(text)
    error = distill(trainer_args=file, expect=2)
    assert said in error and f"--trainer-args {file}" in error
    assert not (tmp_path / "out").exists()


def test_options_that_are_given_twice_or_do_not_fit_the_rows(distill, files, tmp_path):
    assert "--eval is given twice" in distill("--eval", files[1], expect=2)
    group = get_command(app)
    _, typed, _ = group.resolve_command(group.make_context("fastkd", ["distill"]), ["distill"])
    assert typed.make_context("distill", ["--eval", "a", "--eval", "b"], resilient_parsing=True)
    hub = {"train": None, "eval": None, "task": "sst2"}
    assert "--task and --data exclude" in distill(data="imdb", expect=2, **hub)
    real = write_tsv(tmp_path / "real.tsv", label=lambda y: y + 0.5)
    error = distill(train=real, eval=real, finetune_teacher=1, label_order="a,b", expect=2)
    assert "the labels are numbers, not classes" in error
    three = write_tsv(tmp_path / "three.tsv", label=lambda y: y)
    three.write_text(three.read_text() + "dull film\t2\n")
    error = distill(train=three, expect=2)
    assert "no head for 3 labels" in error and "--finetune-teacher" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["student", "unfinished"])
def test_a_marker_of_something_else(distill, tmp_path, where):
    folder = tmp_path / "out" / where
    folder.mkdir(parents=True)
    for manifest in ("[1]", '{"files": {}}', '{"run": 5, "settings": [], "fingerprints": {}}'):
        (folder / MANIFEST).write_text(manifest)
        error = distill("--resume", expect=2)
        assert f"{folder}" in error and MANIFEST in error
    # Only what lies below a marker is its own.
    (tmp_path / "mine").write_text("")
    (folder / MANIFEST).write_text('{"files": {"../../mine": "", "%s": ""}}' % (tmp_path / "mine"))
    saving.discard(folder)
    assert (tmp_path / "mine").exists() and not folder.exists()


def test_links_and_logs_among_the_results(distill, files, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    for place in (files[0], out / "student" / "log", out / "unfinished" / "log"):
        assert "--log-json" in distill(log_json=place, expect=2)
    out.mkdir()
    (out / "unfinished").symlink_to(mine)
    assert "fastkd did not write" in distill(expect=2)
    (out / "unfinished").unlink()
    (out / "unfinished").write_text("")
    assert "fastkd did not write" in distill("--overwrite", expect=2)
    # The target of a link is neither replaced nor removed.
    (mine / "below").mkdir(parents=True)
    (mine / "below" / "thesis.txt").write_text("mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "x").symlink_to(mine)
    (linked / "y").symlink_to(mine / "below")
    listed = {"x/below/thesis.txt": digest, "y/thesis.txt": None, "y/../below/thesis.txt": digest}
    (linked / MANIFEST).write_text(json.dumps({"files": listed}))
    saving.discard(linked)
    assert (mine / "below" / "thesis.txt").read_text() == "mine"
    shutil.rmtree(mine)
    shutil.copytree(make_teacher(tmp_path / "model"), mine)
    saving.write_manifest(mine, {})
    (out / "student").symlink_to(mine)
    saving.replace_directory(out / "student", lambda directory: {})
    assert visible(out) == ["student", "unfinished"] and not (out / "student").is_symlink()
    assert find_damage(mine) is None


def test_an_existing_student_is_not_replaced_unasked(distill, tmp_path):
    """Nor is a file of it that was changed ever deleted."""
    distill(seed=1)
    student, kept = tmp_path / "out" / "student", tmp_path / "out" / "student.old"
    first = weights_of(tmp_path / "out")
    assert "--overwrite" in distill(seed=2, expect=2)
    assert "already complete" in distill("--resume", seed=1)
    error = distill("--resume", seed=2, expect=2)
    assert "seed = 1" in error and "now it is 2" in error
    (student / "README.md").write_text("a card of my own")
    distill("--overwrite", seed=2)
    assert report_of(tmp_path / "out")["settings"]["seed"] == 2
    assert any(not torch.equal(x, first[name]) for name, x in weights_of(tmp_path / "out").items())
    assert find_damage(student) is None and visible(kept) == ["README.md"]
    assert (kept / "README.md").read_text() == "a card of my own"


def test_a_plain_run_never_touches_unfinished_work(distill, interrupted, tmp_path):
    options = {"finetune_teacher": 1, "epochs": 2}
    interrupted(7, press_ctrl_c, **options)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    error = distill(expect=2, **options)
    assert "unfinished run" in error and "--resume" in error and "--overwrite" in error
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_only_own_files_are_deleted(distill, interrupted, tmp_path):
    out = tmp_path / "out"
    for name in ("checkpoints", "teacher-checkpoints"):
        (out / name).mkdir(parents=True)
        (out / name / "mine.txt").write_text("mine")
    distill()
    distill("--overwrite")
    distill("--resume")
    assert (out / "checkpoints" / "mine.txt").exists()
    assert (out / "teacher-checkpoints" / "mine.txt").exists()

    (out / "student" / "notes.txt").write_text("mine")
    error = distill("--overwrite", expect=2)
    assert "student holds notes.txt" in error and "move it away" in error
    (out / "student" / "notes.txt").unlink()
    # Put there while the new run trains.
    interrupted(
        3, lambda: (out / "student" / "notes.txt").write_text("mine"), "--overwrite", expect=0
    )
    assert (out / "student.old" / "notes.txt").read_text() == "mine"

    (tmp_path / "new" / "unfinished").mkdir(parents=True)
    (tmp_path / "new" / "unfinished" / "mine.txt").write_text("mine")
    for flag in ("--resume", "--overwrite", "--no-header"):
        assert "fastkd did not write" in distill(flag, out=tmp_path / "new", expect=2)
    (tmp_path / "other" / "student").mkdir(parents=True)
    (tmp_path / "other" / "student" / "model.safetensors").write_text("mine")
    assert "fastkd did not write" in distill("--overwrite", out=tmp_path / "other", expect=2)


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_files_put_into_an_unfinished_run_stay(distill, interrupted, tmp_path, flag):
    interrupted(7, press_ctrl_c, epochs=2)
    work = tmp_path / "out" / "unfinished"
    folders = (work, work / "checkpoints", work / "checkpoints" / "checkpoint-7", work / "student")
    for i, folder in enumerate(folders):
        (folder / "notes.txt").write_text(f"mine {i}")
    output = distill(flag, epochs=2)
    found = [path.read_text() for path in (tmp_path / "out").rglob("notes.txt")]
    assert sorted(found) == [f"mine {i}" for i in range(4)]
    assert f"{work}-2: files that fastkd did not write" in " ".join(output.split())
    assert {p.name for p in (work.parent / "unfinished-2").rglob("*") if p.is_file()} == {
        "notes.txt"
    }
    assert find_damage(work.parent / "student") is None
    assert "already complete" in distill("--resume", epochs=2)


def test_a_second_run_says_who_holds_the_output(distill, tmp_path, monkeypatch):
    fork, seen = multiprocessing.get_context("fork"), []

    def second():
        theirs, ours = fork.Pipe(duplex=False)
        process = fork.Process(target=lambda: ours.send(distill("--overwrite", expect=2)))
        process.start()
        seen.append(theirs.recv())
        process.join()

    stop_at(monkeypatch, 3, second)
    distill()
    assert f"in use by process {os.getpid()}" in seen[0]
    assert report_of(tmp_path / "out")["complete"] and visible(tmp_path / "out") == ["student"]


def test_the_lock_goes_with_its_process(tmp_path):
    def hold():
        with saving.locked(tmp_path / "out"):
            ours.send("held")
            time.sleep(60)

    fork = multiprocessing.get_context("fork")
    theirs, ours = fork.Pipe(duplex=False)
    holder = fork.Process(target=hold)
    holder.start()
    assert theirs.recv() == "held"
    with pytest.raises(InputError, match=f"in use by process {holder.pid} on"):
        saving.locked(tmp_path / "out").__enter__()
    holder.kill()
    holder.join()
    with saving.locked(tmp_path / "out"):
        pass
    assert visible(tmp_path / "out") == []


def test_too_little_room_is_told_before_any_training(distill, tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    error = distill(expect=2)
    assert re.search(r"--out .*this run writes up to \d+ KiB, and the disk has 49 KiB left", error)
    assert not (tmp_path / "out").exists()


def test_a_nan_loss_stops_with_the_best_student_kept(distill, tmp_path):
    error = distill(epochs=40, learning_rate=1e20, warmup=0, expect=1)
    assert "loss became nan" in error and "learning rate" in error
    assert "--precision" not in error  # it is fp32 already


def stop_at(monkeypatch, step, how):
    original = fitting.TrainingCallback.on_step_end

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == step:
            how()
        return original(self, args, state, control, **rest)

    monkeypatch.setattr(fitting.TrainingCallback, "on_step_end", on_step_end)


def crash():
    raise KeyboardInterrupt


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def hang_up():
    os.kill(os.getpid(), signal.SIGHUP)


# 40 rows in batches of 8: 5 steps an epoch. Every way to end, once; test_kills.py has every place.
@pytest.mark.parametrize(("method", "epochs", "step", "how", "every"), [
    ("soft_targets", 1, 7, press_ctrl_c, None),  # in the teacher's fine-tuning
    ("lrkd", 2, 8, crash, 3),
    ("knn", 2, 10, hang_up, None),
    ("mc3kd", 1.6, 8, terminate, 8),  # the last step, in the middle of an epoch
])  # fmt: skip
def test_resuming_gives_the_uninterrupted_result(
    distill, interrupted, tmp_path, method, epochs, step, how, every
):
    rarely = tmp_path / "args.yaml"
    rarely.write_text("logging_steps: 99\n")
    options = {
        "method": method, "epochs": epochs, "checkpoint_every": every, "trainer_args": rarely
    }  # fmt: skip
    checkpoints = tmp_path / "out" / "unfinished" / "checkpoints"
    if method == "soft_targets":
        options["finetune_teacher"] = 2
        checkpoints = checkpoints.with_name("teacher-checkpoints")
    distill(out=tmp_path / "whole", **options)
    code = {terminate: 143, hang_up: 129}.get(how, 130)
    assert "--resume" in interrupted(step, how, expect=code, **options)
    steps = [int(path.name.split("-")[1]) for path in checkpoints.glob("checkpoint-*")]
    newest = max(steps, default=None)
    # Ctrl-C saves a checkpoint at once; a crash leaves the last one.
    assert newest == (6 if how is crash else step)
    distill("--resume", **options)
    assert same_weights(tmp_path / "out", tmp_path / "whole")
    resumed, whole = report_of(tmp_path / "out"), report_of(tmp_path / "whole")
    for name in ("student", "compared_layers"):
        assert resumed[name] == whole[name]
    assert resumed["seconds"]["training"] <= resumed["seconds"]["total"]
    for a, b in zip(resumed["history"], whole["history"], strict=True):
        assert (a["step"], a["scores"], a["best"]) == (b["step"], b["scores"], b["best"])
        assert a["losses"] == pytest.approx(b["losses"]) and "loss" in b["losses"]


@pytest.mark.parametrize(
    "harm", [MANIFEST, "flip model.safetensors", "cut off", "older", "best student"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    distill, interrupted, begun, tmp_path, harm
):
    """Without the best student the training starts again."""
    options = {"epochs": 2, "method": "lrkd"}
    begun("whole", lambda out: distill(out=out, **options))
    begun("out", lambda out: interrupted(7, press_ctrl_c, out=out, **options))
    work = tmp_path / "out" / "unfinished"
    assert visible(work / "checkpoints") == ["checkpoint-5", "checkpoint-7"]
    newest = work / "checkpoints" / "checkpoint-7"
    (newest.parent / "checkpoint-mine").mkdir()
    for name in (
        "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "method.pt",
        "trainer_state.json",
    ):  # fmt: skip
        (newest / name).rename(tmp_path / name)
        assert name in find_damage(newest)
        (tmp_path / name).rename(newest / name)
    if harm == "cut off":
        newest = newest.with_name("checkpoint-8")
        newest.mkdir()
        (newest / "trainer_state.json").write_text('{"global_step":')
    elif harm == "older":  # as they were when the teacher's trainer was another
        (newest / "method.pt").unlink()
        saving.write_manifest(newest, saving.read_manifest(newest))
    elif harm == "best student":
        (work / "student" / "model.safetensors").write_bytes(b"")
    elif harm.startswith("flip"):
        path = newest / harm.split()[1]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        (newest / harm).unlink()
    output = distill("--resume", **options)
    if harm == "best student":
        assert "student is damaged" in output and "starts again" in output
    else:
        assert f"{newest.name}: cannot be used (" in output and "the one before it" in output
        assert {"cut off": "incomplete", "older": "an older"}.get(harm, harm.split()[-1]) in output
    assert same_weights(tmp_path / "out", tmp_path / "whole")


def test_resume_wants_the_same_data_models_and_settings(
    distill, interrupted, files, teacher, tmp_path
):
    own = shutil.copytree(teacher, tmp_path / "own")
    train = shutil.copy(files[0], tmp_path / "train.tsv")
    options = {"epochs": 2, "teacher": own, "train": train}
    interrupted(7, press_ctrl_c, **options)
    train.write_text(train.read_text().replace("film", "a film", 1))
    assert "started with other training rows" in distill("--resume", expect=2, **options)
    shutil.copy(files[0], train)
    short = write_tsv(tmp_path / "dev.tsv", 18, seed=1)
    error = distill("--resume", eval=short, expect=2, **options)
    assert "eval" in error
    shutil.rmtree(own)
    make_teacher(own, initializer_range=0.1)
    assert "started with other teacher weights" in distill("--resume", expect=2, **options)
    shutil.rmtree(own)
    shutil.copytree(teacher, own)
    words = (own / "tokenizer.json").read_text()
    (own / "tokenizer.json").write_text(words.replace('"film"', '"mlif"'))
    assert "started with other tokenizer files" in distill("--resume", expect=2, **options)
    (own / "tokenizer.json").write_text(words)
    manifest = tmp_path / "out" / "unfinished" / MANIFEST
    content = manifest.read_text()
    manifest.write_text(content[:50])
    error = distill("--resume", expect=2, seed=5, **options)
    assert f"{manifest} is damaged" in error and "--overwrite" in error
    older = json.loads(content)
    older["fingerprints"]["tokens (tokenizer)"] = older["fingerprints"].pop("tokenizer files")
    manifest.write_text(json.dumps(older))  # as it was once written
    distill("--resume", **options)
    # A complete run, too.
    train.write_text(train.read_text().replace("film", "a film", 1))
    assert "started with other training rows" in distill("--resume", expect=2, **options)
    shutil.copy(files[0], train)
    assert "already complete" in distill("--resume", **options)
    (tmp_path / "out" / "student" / "model.safetensors").unlink()
    error = distill("--resume", expect=2, **options)
    assert "its student is damaged (model.safetensors is missing)" in error


# Errors of each writer on a full disk.
@pytest.mark.parametrize(("place", "error"), [
    ("marker", OSError(errno.ENOSPC, "No space left on device")),
    ("optimizer", RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos")),
])  # fmt: skip
def test_a_full_disk_is_one_sentence_and_leaves_the_old_student(
    distill, begun, tmp_path, monkeypatch, error, place
):
    begun("out", lambda out: distill(out=out, seed=1))
    before = weights_of(tmp_path / "out")

    def full(*args, **kwargs):
        raise error

    def room(path):
        return shutil._ntuple_diskusage(2**30, 2**30, 0 if room.trained else 2**29)

    room.trained = False
    monkeypatch.setattr(shutil, "disk_usage", room)
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: setattr(room, "trained", True))
        if place == "optimizer":
            patch.setattr(torch, "save", full)
        else:
            patch.setattr(saving, "write_manifest", full)
        message = distill("--overwrite", seed=2, expect=1)
    assert "cannot be saved (No space left on device)" in message and "intact" in message
    after = weights_of(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert report_of(tmp_path / "out")["settings"]["seed"] == 1
    assert visible(tmp_path / "out") == ["student", "unfinished"]
    room.trained = False
    distill("--resume", seed=2)
    assert report_of(tmp_path / "out")["settings"]["seed"] == 2
    assert visible(tmp_path / "out") == ["student"]


def test_what_writers_of_models_raise_on_a_full_disk(tmp_path):
    for error in (
        SafetensorError("Error while serializing: No space left (os error 28)"),
        Exception("No space left on device (os error 28)"),  # of a tokenizer
    ):
        said = r"cannot be saved \(No space left on device\)"
        with pytest.raises(SaveFailed, match=said), saving.saving(tmp_path):
            raise error


def test_every_option_has_help_and_a_default_that_passes():
    for words in ([], ["-h"], ["--help"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        for command in ("distill", "evaluate", "predict", "cache", "demo", "doctor", "analyze"):
            assert command in result.output
    output = CliRunner().invoke(app, ["distill", "-h"], env={"COLUMNS": "160"}).output
    saved = as_json(Config.of(teacher="t", task="sst2", device_name="cpu"))
    for option in options_of(Config).values():
        assert (option.flag in output) == ("distill" in option.commands) and option.help
        assert (option.key in saved) == option.saved


def test_replacing_a_directory_is_all_or_nothing(tmp_path):
    """A kill between the two renames restores the old directory."""
    target = tmp_path / "model"

    def cut_off(directory):
        (directory / "w").write_text("half")
        raise KeyboardInterrupt

    replace_directory(target, lambda directory: {"new": (directory / "w").write_text("old")})
    with pytest.raises(KeyboardInterrupt):
        replace_directory(target, cut_off)
    assert (target / "w").read_text() == "old" and find_damage(target) is None
    assert visible(tmp_path) == ["model"]
    target.rename(tmp_path / ".model.old")
    recover_directory(target)
    assert (target / "w").read_text() == "old"


def test_a_new_directory_is_on_the_disk_before_it_replaces_the_old(tmp_path, monkeypatch):
    done, rename = [], Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", lambda *paths: done.append("rename") or rename(*paths))

    def write(directory):
        (directory / "w").write_text("new")
        return {}

    replace_directory(tmp_path / "model", write)
    files = [tmp_path / "model" / name for name in ("w", MANIFEST, ".")]
    assert {path.stat().st_ino for path in files} <= set(done[: done.index("rename")])
    assert done[-1] == tmp_path.stat().st_ino


def test_a_missing_extra_is_named_before_any_work(distill, tmp_path, monkeypatch):
    """From a checkout, pip install 'fastkd[train]' fetches some other fastkd, or nothing."""
    with pytest.raises(MissingExtra, match=r"nowhere is not installed.*-e '[^']*\[train\]'"):
        require("nowhere.at.all", "train")
    # The name of the package to install, not google's.
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(MissingExtra, match=r"^protobuf is not installed; get it with"):
        require("google.protobuf", "onnx")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    error = distill(expect=1)
    assert error.startswith("Error: scikit-learn is not installed; get it with: pip install ")
    assert not (tmp_path / "out").exists()


def test_torch_without_the_extras_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(fastkd, "cli", fastkd.cli)  # which comes back, after another was imported
    for name in [name for name in sys.modules if name.startswith(("typer", "fastkd.cli"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["fastkd", "distill"])
    with pytest.raises(SystemExit, match="1"):
        entry.main()
    words = "fastkd distill needs the extra train (typer is not installed); get it with: pip "
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"Error: {words}")


FILES = ["--train", "setup.py.tsv", "--eval", "setup.py.tsv"]
LISTS_AND_MISTAKES = [
    ["--help"],
    ["--version"],
    ["nosuch"],
    ["--nosuch"],
    ["distill", "--help"],
    ["distill", "--teacher", "bert", *FILES],
    ["distill", "--teacher", "./nosuch", "--task", "sst2"],
    ["distill", "--teacher", "bert", "--task", "sst2", "--epochs", "0"],
    ["evaluate", "--model", "./nosuch", "--data", "pyproject.toml"],
    ["cache", "--teacher", "bert", *FILES],
    ["study", "--nosuch"],
]


WITHOUT_TORCH = f"""
import sys
from fastkd.__main__ import main
for words in {LISTS_AND_MISTAKES}:
    sys.argv[1:] = words
    try:
        main()
    except SystemExit:
        print("imported", words, {{"torch", "transformers", "numpy"}} & set(sys.modules))
"""


def test_lists_and_mistakes_import_no_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    found = [line for line in output.splitlines() if line.startswith("imported")]
    assert found == [f"imported {words} set()" for words in LISTS_AND_MISTAKES]


def test_names_that_are_listed_without_torch():
    assert list(config.NAMES) == [*METHODS, *baselines.BASELINES]
    assert config.LABELLED_SHARE == labelled_order.LABELLED_SHARE
    assert command_settings.MEASURES == MEASURES
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"fastkd {fastkd.__version__}\n")


def test_scores_of_several_test_files_have_their_names(distill, tmp_path):
    files = [write_tsv(tmp_path / name, 10, i) for i, name in enumerate(("one.tsv", "two.b.tsv"))]
    distill("--test", files[0], "--test", files[1])
    report, student = report_of(tmp_path / "out"), tmp_path / "out" / "student"
    assert report["rows"]["test"] == 20 and len(report["settings"]["test"]) == 2
    card = (student / "README.md").read_text()
    for name, path in zip(("one", "two.b"), files, strict=True):
        out = tmp_path / f"{name}.json"
        run("evaluate", model=student, data=path, out=out, device="cpu")
        score = report["test"]["student"][f"accuracy_{name}"]
        assert score == saving.read_json(out)["accuracy"]
        assert f"accuracy_{name} (test)" in card and f"type: {path.name}" in card
    (tmp_path / "c").mkdir()
    same = write_tsv(tmp_path / "c/one.tsv")
    error = distill("--test", files[0], "--test", same, expect=2, out=tmp_path / "twice")
    assert "--test: two files have the same name" in error
