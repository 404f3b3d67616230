"""Uses of a student: model card, pipeline(), evaluate, predict, ONNX."""

import io
import json
import math
import re
import shutil
import sys

import pytest
import torch
import transformers as t
from huggingface_hub import ModelCard
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from fastkd.cli.display import RichDisplay
from fastkd.train.distillation import write_card
from fastkd.train.errors import InputError
from fastkd.train.models import longest
from fastkd.train.tasks.classification import Classification
from tests.support.runs import once, report_of
from tests.support.tiny import make_teacher, run, sentences, usual, write_onnx, write_tsv
from tests.train.tasks.through import encoded, told, write_lines

STUDENT, CLASSES = "out/student", ("neg", "pos")
DEV = ("dev", 20, 1), ("two.dev", 20, 1)
Classifier = t.AutoModelForSequenceClassification
SIZES = {"vocab_size": 17, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32,
         "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):

    def make(path):
        make_teacher(path / "teacher")
        for name, rows, seed in (("train", 40, 0), *DEV, ("test", 30, 2)):
            write_tsv(path / f"{name}.tsv", rows, seed, label=lambda y: CLASSES[y])
        write_lines(path / "more.txt", 24, seed=3)
        tests = ("--test", path / "test.tsv", "--test", path / "two.dev.tsv")
        options = {
            "unlabelled": path / "more.txt", "finetune_teacher": 8, "teacher_learning_rate": 5e-3,
            "epochs": 4, "learning_rate": 5e-3, "log_json": path / "out" / "log.jsonl",
            "report_to": "tensorboard", "method": "soft_targets",
        }  # fmt: skip
        run("distill", *tests, **usual(path, path, **options))

    return once(tmp_path_factory, "use", make)


def test_the_student_scores_the_same_everywhere(folder, tmp_path):
    rows = (folder / "test.tsv").read_text().splitlines()[1:]
    texts, labels = zip(*(row.split("\t") for row in rows), strict=True)
    report = report_of(folder / "out")
    expected = report["test"]["student"]["accuracy_test"]
    assert expected > 0.8 and report["teacher"]["accuracy"] > 0.9
    assert report["test"]["student"]["accuracy_two.dev"] == report["student"]["accuracy"]
    best = max(report["history"], key=lambda entry: entry["scores"]["accuracy"])  # the first
    assert (report["best"]["step"], report["student"]) == (best["step"], best["scores"])
    words = {"model": folder / STUDENT, "data": folder / "test.tsv"}
    heads, *lines = (line.split("\t") for line in run("predict", **words).splitlines())
    assert heads == ["row", "text", "label", "P(neg)", "P(pos)"]
    assert sum(line[2] == y for line, y in zip(lines, labels, strict=True)) / 30 == expected
    classify = t.pipeline("text-classification", str(folder / STUDENT), device="cpu", top_k=None)
    for i, (line, text, found) in enumerate(zip(lines, texts, classify([*texts]), strict=True), 2):
        chances = {x["label"]: x["score"] for x in found}
        assert line[:3] == [str(i), text, max(chances, key=chances.get)]
        assert [*map(float, line[3:])] == pytest.approx([chances[x] for x in CLASSES], abs=1e-5)
    said, out = run("evaluate", **words), tmp_path / "scores.tsv"
    assert f"30 rows:  accuracy {expected:.4g}" in said
    assert "f1 " in run("evaluate", **words, metric="f1", out=out)
    assert re.match(rf"rows\tf1\taccuracy\n30\t[.\d]+\t{expected}\n$", out.read_text())
    assert "the file exists" in run("evaluate", **words, out=out, expect=2)
    # How numbers are read is printed. Other orders, and doubtful ones: tests/train/test_data.py.
    words["data"] = write_tsv(tmp_path / "numbers.tsv", 30, 2)
    numbered = "labels are read as numbers of the model's classes: 0 is 'neg', 1 is 'pos'\n"
    assert run("evaluate", **words) == numbered + said
    teacher = {"model": folder / "out/teacher", "data": folder / "dev.tsv"}
    assert f"accuracy {report['teacher']['accuracy']:.4g}" in run("evaluate", **teacher)


def test_onnx_files(folder, tmp_path):
    words = {"model": folder / STUDENT, "data": folder / "test.tsv", "onnx": tmp_path / "x.onnx"}
    assert "no such file" in run("evaluate", **words, expect=2)
    write_onnx(Classifier.from_pretrained(folder / STUDENT), words["onnx"], "logits")
    score = report_of(folder / "out")["test"]["student"]["accuracy_test"]
    assert f"accuracy {score:.4g}" in run("evaluate", **words)
    other = make_teacher(tmp_path / "other", labels=3)
    assert "it has 2 outputs, and --model" in run("predict", **words | {"model": other}, expect=2)
    words["onnx"].write_bytes(b"x")
    assert "can't be loaded" in run("evaluate", **words, expect=2)
    config = t.BertConfig(**{**SIZES, "vocab_size": 5})  # it knows fewer tokens
    for model, said, *outputs in (
        (t.BertForSequenceClassification, "can't be run", "logits"),
        (t.BertForQuestionAnswering, "end_logits; it must read", "start_logits", "end_logits"),
    ):
        write_onnx(model(config), words["onnx"], *outputs)
        assert said in run("evaluate", **words, expect=2)


def test_card_report_and_log(folder):
    card, report = ModelCard.load(folder / STUDENT / "README.md"), report_of(folder / "out")
    values = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    names = {"accuracy": "dev.tsv", "accuracy_two.dev": "two.dev.tsv", "accuracy_test": "test.tsv"}
    scores = report["student"] | report["test"]["student"]
    assert values == {(file, name): scores[name] for name, file in names.items()}
    assert "Rows: 40 train, 20 eval, 50 test, 24 unlabelled." in card.text
    events = [json.loads(x) for x in (folder / "out" / "log.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step" and "soft" in e["title"]]
    assert steps[-1]["step"] == steps[-1]["steps"] == 4 * 8  # 64 rows in batches of 8
    scores = [e["scores"] for e in events if e["event"] == "evaluation" and "soft" in e["title"]]
    assert scores == [entry["scores"] for entry in report["history"]]
    # An evaluation's losses are the means over the epoch before it, not its last steps'.
    for epoch, entry in enumerate(report["history"]):
        losses = [e["losses"]["soft"] for e in steps if 8 * epoch < e["step"] <= 8 * (epoch + 1)]
        assert len(losses) == 8 and entry["losses"]["soft"] == pytest.approx(sum(losses) / 8)
    assert events[-1]["event"] == "complete" and events[-1]["student"] == report["student"]
    for model in ("student", "teacher"):
        assert [*(folder / "out/logs" / model).glob("events*")]


def test_what_is_printed_of_a_report_and_its_card(folder, tmp_path):
    """Metrics that a cache lacks for its teacher are empty cells, not shifted ones."""
    report, bare = report_of(folder / "out"), {"parameters": {"student": 20}, "seconds_a_batch": {}}
    report["best"]["epoch"], settings = 2 / 7, report["settings"] | {"teacher_offload": True}
    report |= {
        "labels": ["<b>a|b</b>", "*c_d*\ne"], "parameters": {"teacher": 10, "student": 20},
        "student": {"mcc": 0.25, "accuracy": 0.5}, "teacher": {"accuracy": 0.9},
        "seconds_a_batch": {"teacher": 0.6, "student": 1.0},
    }  # fmt: skip
    for more, *words in (
        ({}, "student is 1.7 times slower and 2.0 times larger", "epoch 0.29,", 'classify("...")',
         "2.0 times larger, 1.7 times slower on the machine", "| accuracy_two.dev (test) |",
         r"Classes: \<b\>a\|b\</b\>, \*c\_d\* e."),
        ({"parameters": {"teacher": 100, "student": 99}, "paired": True},
         "1.7 times slower and as large", 'classify({"text": "...", "text_pair": "..."})'),
        ({**bare, "served_teacher": "9 rows/s"}, "`: in a server, 9 rows/s."),
        ({**bare, "stored_teacher": "in files"}, "`: in files."),
        (bare, "`: known by its log-probabilities."),
        ({"settings": settings}, "0.0 MiB of weights on the device only while it ran"),
    ):  # fmt: skip
        console = Console(file=io.StringIO(), width=120)
        RichDisplay(console).results(report | more, tmp_path)
        write_card(tmp_path, report | more)
        said = console.file.getvalue()
        assert all(part in said + (tmp_path / "README.md").read_text() for part in words), more
        rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
        assert rows["student"].split()[-4:-2] == ["0.2500", "0.5000"]
        assert ("the student is" in said) == ("0.9000" in said) == ("teacher" in rows)
        assert rows.get("teacher", "").find("0.9000") in (-1, rows["student"].index("0.5000"))


def test_numbers_and_texts_without_them(distill, folder, tmp_path):
    """Only losses on labels leave such rows out; the least error selects the student."""
    real = write_tsv(tmp_path / "real.tsv", 16, label=lambda y: 1000 * y - 100.0 + 0.5 * y)
    distill(teacher=make_teacher(tmp_path / "one", labels=1), train=real, eval=real, epochs=3,
            method="knn", unlabelled=folder / "more.txt", text_column="sentence",
            labels="numbers", metric="mse")  # fmt: skip
    report = report_of(tmp_path / "out")
    assert report["rows"] == {"train": 16, "eval": 16, "unlabelled": 24}
    losses = report["history"][-1]["losses"]  # the targets are far from a fresh head's outputs
    assert all(map(math.isfinite, losses.values())) and losses["task"] > 100
    scores = [entry["scores"]["mse"] for entry in report["history"]]
    assert len({*scores}) == 3 and report["student"]["mse"] == min(scores)
    words = {"model": tmp_path / "out/student", "data": real, "metric": "mse"}
    assert f"mse {min(scores):.4g}" in run("evaluate", **words)


def test_every_row_has_its_line(folder, tmp_path):
    good, bad, none = ("good film", "pos"), ("bad film", "neg"), ("", None)
    # Files, and their output: also a blank row has one, by its number.
    for name, text, expected, *options in (
        ("x.txt", "\ngood film\n\n  \nbad film\n\n",
         {1: none, 2: good, 3: none, 4: none, 5: bad, 6: none}),
        ("x.tsv", "id\ttext\n7\tgood film\n\n8\t \n9\tbad film\n",
         {2: good, 3: none, 4: none, 5: bad}),
        ("x.csv", 'id,text\n7,"bad film"\n\n8,\n9,bad film\n', {2: bad, 3: none, 4: none, 5: bad}),
        ("one.csv", "text\ngood film\n\n\nbad film\n", {2: good, 3: none, 4: none, 5: bad}),
        ("x.jsonl", '{"text": "good film"}\n{"text": ""}\n', {1: good, 2: none}),
        ("bare.csv", "7,good film\n8,bad film\n", {1: good, 2: bad},
         {"no_header": True, "text_column": 1}),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        out = tmp_path / f"{name}.jsonl"
        rows = told(folder / STUDENT, tmp_path / name, out, **dict(*options))
        found = {row["row"]: (row["text"].strip(), row["label"]) for row in rows}
        assert found == expected and len(rows) == len(expected), name
        assert all((row["P(neg)"] is None) == (row["label"] is None) for row in rows)
    words = {"model": folder / STUDENT, "data": tmp_path / "x.txt"}
    assert "6 rows, 4 of them without text" in run("predict", **words, out=tmp_path / "x.json")
    # Texts of more lines than one keep to their own line, and a quote is a quote.
    words["data"] = tmp_path / "x.csv"
    words["data"].write_text('text\n"good ""a"" \t\nfilm"\nbad film\n')
    _, first, second = run("predict", **words).splitlines()
    assert first.startswith('2\tgood "a"   film\tpos\t') and second.startswith("4\tbad film\tneg")
    run("predict", **words, out=tmp_path / "found.csv")
    assert '2,"good ""a"" \t\nfilm",pos' in (tmp_path / "found.csv").read_text()
    words["data"].write_text("id,text\n7,\n")
    assert "no row holds text" in run("predict", **words, expect=2)


def test_columns_and_length_are_those_of_the_training(folder, tmp_path):
    """A student of pairs refuses rows without a second text; a damaged manifest is no matter."""
    model, data = shutil.copytree(folder / STUDENT, tmp_path / "model"), tmp_path / "long.txt"
    data.write_text("good film " * 20)
    words = {"model": model, "data": data}
    at_16, at_32 = (run("predict", **words, max_length=length) for length in (16, 32))
    assert run("predict", **words) == at_16 != at_32
    for manifest in ("[1]", '{"settings": 5}', '{"settings": {"max_length": 1}}'):
        (model / "fastkd.json").write_text(manifest)
        assert run("predict", **words) == at_32
    lines = [f"{text}\tthe film\t{y}" for text, y in sentences(20, 1)]
    data = words["data"] = tmp_path / "pairs.tsv"
    data.write_text("\n".join(["one\ttwo\tclass", *lines]) + "\n")
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    expected = run("evaluate", **words, **columns)
    (model / "fastkd.json").write_text(json.dumps({"settings": columns}))
    assert run("evaluate", **words) == expected
    said = "was trained on pairs of texts; --text-pair-column"
    assert said in run("evaluate", **words, text_column="one", label_column="class", expect=2)
    for name, words in (("dev.tsv", said), ("more.txt", "two are compared")):
        assert words in run("predict", data=folder / name, model=model, expect=2)


def test_a_marker_runs_no_code(tiny, tmp_path, monkeypatch):
    """Only --task imports a class: a cloned model may lie in the working directory."""
    monkeypatch.chdir(tmp_path)
    model, ran = shutil.copytree(tiny / "teacher", tmp_path / "a-model"), tmp_path / "ran"
    code = "from fastkd.train.tasks.classification import Classification as Mine\n"
    (model / "task.py").write_text(f"{code}open({str(ran)!r}, 'w')\n")
    words = {"model": model, "data": tiny / "dev.tsv"}
    for name in ("a-model.task:Mine", "task", "..models"):
        (model / "fastkd.json").write_text(json.dumps({"task": name}))
        for command in ("evaluate", "predict"):
            assert f"--task {name!r}" in run(command, **words, expect=2)
    assert not ran.exists()
    run("predict", **words, task="a-model.task:Mine")
    assert ran.exists()


def test_the_longest_and_the_shortest_text_of_a_model(tiny):
    """RoBERTa reads fewer tokens than its configuration has positions, XLNet any number."""
    tokenizer = t.AutoTokenizer.from_pretrained(tiny / "teacher", model_max_length=10**30)
    for config, limit in (
        (t.BertConfig(**SIZES), 32), (t.RobertaConfig(**SIZES), 31),
        (t.XLNetConfig(vocab_size=17, d_model=16, n_layer=1, n_head=2), sys.maxsize),
    ):  # fmt: skip
        assert longest(tokenizer, Classifier.from_config(config)) == limit
    with pytest.raises(InputError, match="2: leaves no room for text, as the tokenizer adds 2 tok"):
        encoded(tiny / "dev.tsv", Classification(CLASSES), tokenizer, length=2)


@pytest.mark.parametrize(("side", "config"), [
    ("left", t.GPT2Config(**SIZES)), ("right", t.LlamaConfig(**SIZES, intermediate_size=64)),
])  # fmt: skip
def test_a_text_is_read_as_it_is_alone(tiny, tmp_path, side, config):
    """By decoders, also one whose padding token the tokenizer lacks."""
    torch.manual_seed(3)
    model = Classifier.from_config(config).eval()
    backend = t.AutoTokenizer.from_pretrained(tiny / "teacher").backend_tokenizer
    backend.post_processor = TemplateProcessing("$A", "$A $B")  # as decoders read
    named = {"unk_token": "[UNK]", "eos_token": "[SEP]", "padding_side": side}
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    for row in told(tmp_path / "model", tiny / "dev.tsv", tmp_path / "a.jsonl"):
        found = [x for name, x in row.items() if "P(" in name]
        alone = model(**tokenizer(row["text"], return_tensors="pt")).logits[0].softmax(-1)
        assert found == pytest.approx(alone.tolist(), abs=2e-6, rel=0)
