"""Uses of a student: model card, pipeline(), evaluate, predict, ONNX."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as t
from huggingface_hub import ModelCard
from tokenizers.processors import TemplateProcessing

from fastkd.train.saving import read_json
from tests.support.runs import once, report_of
from tests.support.tiny import make_teacher, run, sentences, usual, write_onnx, write_tsv

CLASSES = ("neg", "pos")
Classifier = t.AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a trained student, its files, and the output of its training."""

    def make(path):
        make_teacher(path / "teacher")
        for name, rows, seed in (("train", 40, 0), ("dev", 20, 1), ("test", 30, 2)):
            write_tsv(path / f"{name}.tsv", rows, seed, label=lambda y: CLASSES[y])
        (path / "more.txt").write_text("\n".join(text for text, _ in sentences(24, 3)) + "\n")
        options = {
            "test": path / "test.tsv", "unlabelled": path / "more.txt", "finetune_teacher": 8,
            "teacher_learning_rate": 5e-3, "epochs": 4, "learning_rate": 5e-3,
            "log_json": path / "out" / "log.jsonl", "report_to": "tensorboard",
            "method": "soft_targets",
        }  # fmt: skip
        (path / "output.txt").write_text(run("distill", **usual(path, path, **options)))

    return once(tmp_path_factory, "use", make)


@pytest.fixture
def student(folder):
    return folder / "out" / "student"


@pytest.fixture
def report(folder):
    return report_of(folder / "out")


def rows_of(path):
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def test_the_student_scores_the_same_everywhere(folder, student, report, tmp_path):
    texts, labels = zip(*rows_of(folder / "test.tsv"), strict=True)
    expected = report["test"]["student"]["accuracy"]
    assert expected > 0.8 and report["teacher"]["accuracy"] > 0.9
    best = max(report["history"], key=lambda entry: entry["scores"]["accuracy"])  # the first
    assert (report["best"]["step"], report["student"]) == (best["step"], best["scores"])
    classify = t.pipeline("text-classification", str(student), device="cpu")
    guesses = [found["label"] for found in classify(list(texts))]
    assert sum(g == y for g, y in zip(guesses, labels, strict=True)) / len(texts) == expected
    tokenizer, model = t.AutoTokenizer.from_pretrained(student), Classifier.from_pretrained(student)
    logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
    assert [model.config.id2label[int(i)] for i in logits.argmax(-1)] == guesses
    words = {"model": student, "data": folder / "test.tsv"}
    assert f"30 rows:  accuracy {expected:.4g}" in run("evaluate", **words)
    assert "f1" in run("evaluate", **words, metric="f1", out=tmp_path / "scores.json")
    assert read_json(tmp_path / "scores.json")["accuracy"] == expected
    run("evaluate", **words, out=tmp_path / "scores.tsv")
    assert (tmp_path / "scores.tsv").read_text() == f"rows\taccuracy\n30\t{expected}\n"
    assert "the file exists" in run("evaluate", **words, out=tmp_path / "scores.json", expect=2)
    # How numbers are read is printed. Other orders, and doubtful ones: tests/train/test_data.py.
    numbers = write_tsv(tmp_path / "numbers.tsv", 30, 2)
    said = "labels are read as numbers of the model's classes: 0 is 'neg', 1 is 'pos'\n"
    assert run("evaluate", model=student, data=numbers) == said + run("evaluate", **words)
    heads, *lines = (line.split("\t") for line in run("predict", **words).splitlines())
    assert heads == ["row", "text", "label", "P(neg)", "P(pos)"]
    assert [line[:3] for line in lines] == [
        [str(i), *row] for i, row in enumerate(zip(texts, guesses, strict=True), 2)
    ]
    run("predict", **words, out=tmp_path / "labels.jsonl")
    found = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [row["label"] for row in found] == guesses
    found = torch.tensor([[row["P(neg)"], row["P(pos)"]] for row in found])
    torch.testing.assert_close(found, logits.softmax(-1).detach(), rtol=0, atol=1e-5)
    teacher = {"model": folder / "out/teacher", "data": folder / "dev.tsv"}
    assert f"accuracy {report['teacher']['accuracy']:.4g}" in run("evaluate", **teacher)


@pytest.mark.slow
@pytest.mark.thorough
def test_answers_import_no_more_than_they_need(tiny):
    words = ["evaluate", "--model", str(tiny / "teacher"), "--data", str(tiny / "dev.tsv")]
    code = (
        "import sys, fastkd.__main__ as entry\n"
        "try:\n    entry.main()\n"
        "finally:\n    print('imported', {'peft', 'sklearn', 'scipy.stats'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert "accuracy" in done.stdout and "imported set()" in done.stdout


def test_onnx_files(folder, student, report, tmp_path):
    """One of the student gives the same score; those of something else are refused."""
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    path = tmp_path / "x.onnx"
    words = {"model": student, "data": folder / "test.tsv", "onnx": path}

    def refused(said, command="evaluate", **more):
        assert said in run(command, **words | more, expect=2)

    refused("no such file")
    write_onnx(Classifier.from_pretrained(student), path, "logits")
    score = report["test"]["student"]["accuracy"]
    assert f"accuracy {score:.4g}" in run("evaluate", **words)
    other = make_teacher(tmp_path / "other", labels=3)
    refused("it has 2 outputs, and --model", "predict", model=other)
    path.write_bytes(b"x")
    refused("--onnx")
    for name, output, said in (
        ("pixels", "a", "reads pixels and has the outputs a; it must read"),
        ("input_ids", "a", "can't be run"),  # of other types
    ):
        value = {x: helper.make_tensor_value_info(x, 1, [1, 2]) for x in (name, output)}
        node = helper.make_node("Identity", [name], [output])
        graph = helper.make_graph([node], "graph", [value[name]], [value[output]])
        opset = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), str(path))
        refused(said)


def test_card_report_and_log(folder, student, report):
    card = ModelCard.load(student / "README.md")
    assert card.data.library_name == "transformers"
    assert {r.dataset_name for r in card.data.eval_results} == {"dev.tsv", "test.tsv"}
    values = {(r.dataset_split, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert values["evaluation", "accuracy"] == report["student"]["accuracy"]
    assert values["test", "accuracy"] == report["test"]["student"]["accuracy"]
    assert "Rows: 40 train, 20 eval, 30 test, 24 unlabelled." in card.text
    assert report["rows"] == {"train": 40, "eval": 20, "test": 30, "unlabelled": 24}
    output = (folder / "output.txt").read_text()
    assert "24 rows without labels" in output and "README.md" in report["files"]
    events = [json.loads(x) for x in (folder / "out" / "log.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step" and e["title"] == "soft_targets"]
    assert steps[-1]["step"] == steps[-1]["steps"] == 4 * 8  # 64 rows in batches of 8
    assert {"task", "soft"} <= set(steps[0]["losses"])
    scores = [e["scores"] for e in events if e["event"] == "evaluation" and "soft" in e["title"]]
    assert scores == [entry["scores"] for entry in report["history"]]
    # An evaluation's losses are the means over the epoch before it, not its last steps'.
    for epoch, entry in enumerate(report["history"]):
        losses = [e["losses"]["soft"] for e in steps if 8 * epoch < e["step"] <= 8 * (epoch + 1)]
        assert len(losses) == 8 and entry["losses"]["soft"] == pytest.approx(sum(losses) / 8)
    assert events[-1]["event"] == "complete" and events[-1]["student"] == report["student"]
    logs = folder / "out" / "logs"
    assert list((logs / "student").glob("events*")) and list((logs / "teacher").glob("events*"))


def test_numbers_and_texts_without_them(distill, folder, tmp_path):
    """Only losses on labels leave such rows out; the least error selects the student."""
    real = write_tsv(tmp_path / "real.tsv", 16, label=lambda y: 1000 * y - 100.0 + 0.5 * y)
    more, student = folder / "more.txt", tmp_path / "out" / "student"
    distill(teacher=make_teacher(tmp_path / "one", labels=1), train=real, eval=real, epochs=3,
            method="knn", text_column="sentence", labels="numbers", unlabelled=more,
            metric="mse")  # fmt: skip
    report = report_of(tmp_path / "out")
    assert report["rows"] == {"train": 16, "eval": 16, "unlabelled": 24}
    losses = report["history"][-1]["losses"]
    assert all(torch.tensor(list(losses.values())).isfinite())
    assert losses["task"] > 100  # the targets are far from a fresh head's outputs
    scores = [entry["scores"]["mse"] for entry in report["history"]]
    assert len({*scores}) == 3 and report["student"]["mse"] == min(scores)
    found = run("predict", model=student, data=more, text_column="sentence")
    assert found.startswith("row\ttext\tvalue\n") and len(found.splitlines()) == 25
    said = run("evaluate", model=student, data=real, metric="mse")
    assert f"mse {report['student']['mse']:.4g}" in said


def test_every_row_has_its_line(student, tmp_path):
    """Each line of the input has a line of output, also a blank one."""
    out = tmp_path / "found.json"

    def predicted(name, text, **more):
        (tmp_path / name).write_text(text)
        said = run("predict", model=student, data=tmp_path / name, out=out, overwrite=True, **more)
        return json.loads(out.read_text()), said

    found, said = predicted("x.txt", "\ngood film\n\n  \nbad film\n\n")
    for name, values in (
        ("row", [1, 2, 3, 4, 5, 6]),
        ("text", ["", "good film", "", "", "bad film", ""]),
        ("label", [None, "pos", None, None, "neg", None]),
    ):
        assert [row[name] for row in found] == values
    assert {row["P(neg)"] for row in found if not row["text"]} == {None}
    assert "6 rows, 4 of them without text" in said
    for name, text, labels in (
        ("x.tsv", "id\ttext\n7\tgood film\n\n8\t \n9\tbad film\n", ["pos", None, None, "neg"]),
        ("x.csv", 'id,text\n7,"good\nfilm"\n\n8,\n9,bad film\n', ["pos", None, None, "neg"]),
        ("one.csv", "text\ngood film\n\n\nbad film\n", ["pos", None, None, "neg"]),
        ("x.jsonl", '{"text": "good film"}\n{"text": ""}\n', ["pos", None]),
    ):
        assert [row["label"] for row in predicted(name, text)[0]] == labels, name
    assert "no row holds text" in predicted("empty.csv", "id,text\n7,\n", expect=2)[1]
    (tmp_path / "bare.csv").write_text("7,good film\n8,bad film\n")  # without a header
    words = {"model": student, "data": tmp_path / "bare.csv", "no_header": True, "text_column": 1}
    assert len(run("predict", **words).splitlines()) == 3
    # Texts of more lines than one keep to their own line, and a quote is a quote.
    data = tmp_path / "x.csv"
    data.write_text('text\n"good ""a"" \t\nfilm"\nbad film\n')
    lines = run("predict", model=student, data=data).splitlines()[1:]
    rows = [["2", 'good "a"   film', "pos"], ["4", "bad film", "neg"]]
    assert [line.split("\t")[:3] for line in lines] == rows
    run("predict", model=student, data=data, out=tmp_path / "found.csv")
    assert '2,"good ""a"" \t\nfilm",pos' in (tmp_path / "found.csv").read_text()


def test_columns_are_those_of_the_training(folder, tmp_path):
    """A student of pairs refuses rows without a second text; a damaged manifest is no matter."""
    model, pairs = shutil.copytree(folder / "teacher", tmp_path / "model"), tmp_path / "pairs.tsv"
    for manifest in ("[1]", '{"settings": 5}', '{"settings": {"max_length": 1}}'):
        (model / "fastkd.json").write_text(manifest)
        assert len(run("predict", model=model, data=folder / "dev.tsv").splitlines()) == 21
    lines = [f"{text}\tthe film\t{'np'.index(y[0])}" for text, y in rows_of(folder / "dev.tsv")]
    pairs.write_text("\n".join(["one\ttwo\tclass", *lines]) + "\n")
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    expected = run("evaluate", model=model, data=pairs, **columns)
    (model / "fastkd.json").write_text(json.dumps({"settings": columns}))
    assert run("evaluate", model=model, data=pairs) == expected
    said = "was trained on pairs of texts; --text-pair-column"
    words = {"text_column": "one", "label_column": "class", "expect": 2}
    assert said in run("evaluate", model=model, data=pairs, **words)
    for name, words in (("dev.tsv", said), ("more.txt", "two are compared")):
        assert words in run("predict", data=folder / name, model=model, expect=2)


def test_a_marker_runs_no_code(tiny, tmp_path, monkeypatch):
    """Only --task imports a class: a cloned model may lie in the working directory."""
    monkeypatch.chdir(tmp_path)
    model = shutil.copytree(tiny / "teacher", tmp_path / "a-model")
    (model / "task.py").write_text(
        "from fastkd.train.tasks.classification import Classification\n"
        "class Mine(Classification):\n    pass\n"
        "from pathlib import Path\nPath('ran').touch()\n"
    )
    for name in ("a-model.task:Mine", "task", "..models"):
        (model / "fastkd.json").write_text(json.dumps({"task": name}))
        for command in ("evaluate", "predict"):
            said = run(command, model=model, expect=2, data=tiny / "dev.tsv")
            assert f"--task {name!r}" in said
            assert not Path("ran").exists()
    run("predict", model=model, task="a-model.task:Mine", data=tiny / "dev.tsv")
    assert Path("ran").exists()


def test_a_length_that_leaves_no_room_for_words(tiny, tmp_path):
    model = shutil.copytree(tiny / "teacher", tmp_path / "model")
    backend = t.AutoTokenizer.from_pretrained(model).backend_tokenizer
    special, pair = [("[CLS]", 2), ("[SEP]", 3)], "[CLS] $A [SEP] [SEP] $B [SEP]"  # as RoBERTa's
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=special
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    t.PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(model)
    data = tmp_path / "pairs.tsv"
    data.write_text("text\tsecond\ngood film\tgood\n")
    options = {"model": model, "data": data, "text_pair_column": "second"}
    error = run("predict", max_length=4, expect=2, **options)
    assert "--max-length 4: leaves no room for text, as the tokenizer adds 4 tokens to a" in error
    run("predict", max_length=5, **options)


def test_the_longest_text_of_a_model(tiny, tmp_path):
    """RoBERTa reads two tokens fewer than its configuration has positions, XLNet any number."""
    data, sizes = tmp_path / "long.txt", {"vocab_size": 17, "pad_token_id": 0}
    data.write_text("good film " * 20)
    roberta = t.RobertaConfig(
        **sizes, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=20,
    )  # fmt: skip
    xlnet = t.XLNetConfig(**sizes, d_model=16, n_layer=1, n_head=2, d_inner=32)
    for config in (roberta, xlnet):
        model = shutil.copytree(tiny / "teacher", tmp_path / config.model_type)
        Classifier.from_config(config).save_pretrained(model)
        tokenizer = t.AutoTokenizer.from_pretrained(model, model_max_length=10**30)
        tokenizer.save_pretrained(model)
    assert len(run("predict", model=model, data=tiny / "dev.tsv").splitlines()) == 21
    words = {"model": tmp_path / "roberta", "data": data}
    assert "the model reads at most 19" in run("predict", max_length=20, expect=2, **words)
    assert run("predict", **words) == run("predict", max_length=19, **words)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_read_as_it_is_alone(side, tmp_path):
    """By decoders, also one whose padding token the tokenizer lacks."""
    make_teacher(tmp_path / "words", head=False)
    torch.manual_seed(3)
    sizes = {"vocab_size": 17, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    sizes |= {"hidden_size": 32, "max_position_embeddings": 32, "initializer_range": 0.5}
    if side == "left":
        model = t.GPT2ForSequenceClassification(t.GPT2Config(**sizes))
    else:
        model = t.LlamaForSequenceClassification(t.LlamaConfig(**sizes, intermediate_size=64))
    backend = t.AutoTokenizer.from_pretrained(tmp_path / "words").backend_tokenizer
    backend.post_processor = TemplateProcessing("$A", "$A $B")  # as decoders read
    named = {"unk_token": "[UNK]", "eos_token": "[SEP]", "padding_side": side}
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, **named, model_max_length=32)
    for part in (model.eval(), tokenizer):
        part.save_pretrained(tmp_path / "model")
    data, out = write_tsv(tmp_path / "a.tsv", 30), tmp_path / "out.json"
    run("predict", model=tmp_path / "model", data=data, text_column="sentence", out=out)
    found = [[x for name, x in row.items() if "P(" in name] for row in json.loads(out.read_text())]
    texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text, _ in sentences(30, 0)]
    with torch.no_grad():
        alone = [model(ids).logits[0].softmax(-1).tolist() for ids in texts]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=2e-6, rtol=0)
