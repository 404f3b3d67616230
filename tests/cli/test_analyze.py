"""`fastkd analyze` from the command line, on a tiny model saved to disk."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

from fastkd import analysis
from fastkd.analysis import layer_comparison, layer_similarity
from fastkd.cli import analyze_command as report
from fastkd.cli import display
from fastkd.cli.command_settings import AnalyzeSettings
from fastkd.distill import student_from_teacher
from fastkd.train.saving import MANIFEST, read_json
from tests.cli.launched import result_of
from tests.distill.processes import run_ranks
from tests.support.tiny import read_otherwise, run
from tests.train.tasks.through import make_bare
from tests.train.test_data import hub

WORDS = ["a", "small", "model", "of", "words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("analyze") / "model"
    for name, options in {
        ".": {"layers": 3}, "nan": {"layers": 3}, "student": {"hidden_size": 12}, "turned": {},
        "other": {"words": WORDS[:-1]}, "narrow": {"intermediate_size": 8}, "wrong": {},
    }.items():  # fmt: skip
        make_bare(path / name, **{"words": WORDS, **options})
    read_otherwise(path / "turned")
    for name, layers in (("student", [1, 3]), ("narrow", [1, 3]), ("wrong", [2, 4])):
        sizes = {"student_config": {"intermediate_size": 8}} if name == "narrow" else {}
        about = {"teacher_layers": layers, "settings": sizes}
        (path / name / MANIFEST).write_text(json.dumps(about))
    broken = BertModel.from_pretrained(path / "nan")
    torch.nn.init.constant_(broken.encoder.layer[0].output.LayerNorm.weight, float("nan"))
    broken.save_pretrained(path / "nan")
    lines = ["a small model", "words", "", "a model of words a model of words", "small small"] * 8
    lines[0] = "words"
    (path / "text.txt").write_text("\n".join(lines))
    rows = [f"{line}\t{('no', 'yes')[len(line) % 2]}" for line in lines if line]
    (path / "data.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    return path


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing takes longer than all else of a command on few rows."""
    for name in ("plot_layer_panels", "plot_sentence"):
        monkeypatch.setattr(report, name, lambda *args, **options: None)


def test_teacher_student_and_the_student_before(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    given = {"model": folder, "student": folder / "student", "data": folder / "data.tsv"}
    given |= {"measures": "pwcca", "sentence": "a small model", "batch_size": 40}
    output = run("analyze", **given, out=tmp_path)
    written = json.loads((tmp_path / "layers.json").read_text())
    teacher = report.load("--model", str(folder), AutoModel, False)
    tokenizer = report.tokenizer_of("--model", str(folder), False)
    student = BertModel.from_pretrained(folder / "student")
    texts = [line for line in (folder / "text.txt").read_text().splitlines() if line]
    labels = [len(line) % 2 for line in texts]
    batches = list(report.batches_of(tokenizer, texts, batch_size=40, labels=labels))

    def same(found, expected):
        torch.testing.assert_close(torch.tensor(found).double(), expected)

    for name, model in (("student", student), ("before", student_from_teacher(teacher, [1, 3]))):
        own, found = layer_similarity(model, batches, ["svcca", "pwcca"]), written[name]
        same(found["to_model"]["pwcca"],
             layer_similarity(teacher, batches, ["pwcca"], other=model)["pwcca"])  # fmt: skip
        same(found["pwcca"], own["pwcca"])
        same(found["rccc"], own["svcca"][0, -1])
        same(found["intra_class_similarity"], analysis.layer_intra_class_similarity(model, batches))
        assert 0 < found["relations"]["l2"] <= 1
    same(written["adjacent_cca"], analysis.adjacent_layer_cca(teacher, batches))
    for value in (written["adjacent_cca"][2], written["rccc"]):
        assert f"{value:.4f}" in output
    assert written["tokens"] == sum(int(x["attention_mask"].sum()) for x in batches)
    assert written["sentence"]["tokens"] == ["[CLS]", "a", "small", "model", "[SEP]"]
    rows = list(csv.DictReader((tmp_path / "layers.csv").open()))
    assert len(rows) == 16 + 9 + 9 + 12 + 12
    models = ("model", "before")
    found = [r for r in rows if (r["model"], r["other_model"]) == models and r["layer"] == "2"]
    assert [float(r["value"]) for r in found] == written["before"]["to_model"]["pwcca"][2]
    for name in ("pwcca", "relations"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "32 rows  step 1/1" in output
    assert "student before" in output and "ρ of the sentence's relations" in output


def test_what_the_students_record_says(folder, tmp_path):
    """Sizes of the student before, and columns, which are read as by `fastkd evaluate`."""
    settings = AnalyzeSettings(model=str(folder), student=str(folder / "narrow"), text=folder)
    models, _ = report.load_models(settings, torch.device("cpu"))
    weights = models["before"].state_dict()
    expected = student_from_teacher(models["model"], [1, 3], config={"intermediate_size": 8})
    assert weights["encoder.layer.0.intermediate.dense.weight"].shape == (8, 16)
    assert all(torch.equal(x, weights[name]) for name, x in expected.state_dict().items())
    data = tmp_path / "pairs.tsv"
    data.write_text("one\ttwo\tclass\na\twords\tno\nsmall\tb\tyes\nof\tmodel\t-100\n")
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    student = shutil.copytree(folder / "student", tmp_path / "student")
    (student / MANIFEST).write_text(json.dumps({"settings": columns}))
    texts, pairs, classes = report.read(
        AnalyzeSettings(model=str(folder), student=str(student), data=data)
    )
    # Rows that are marked as having no label are of no class.
    assert (texts[0], pairs[1], [*classes]) == ("a", "b", [0, 1, -100])


def test_a_decoder(folder, tmp_path, without_pictures):
    gpt2, text, out = tmp_path / "gpt2", folder / "text.txt", tmp_path / "out"
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    GPT2Model(GPT2Config(vocab_size=10, **sizes)).save_pretrained(gpt2)
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.post_processor = TemplateProcessing("$A", "$A $B")  # as decoders read
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(gpt2)
    run("analyze", model=gpt2, text=text, out=out, before=gpt2, student=gpt2, measures="cca")
    written = json.loads((tmp_path / "out" / "layers.json").read_text())
    # The first text is one token, which has no relation.
    assert set(written["student"]["relations"].values()) == {None}
    same = torch.tensor(written["student"]["to_model"]["cca"])
    torch.testing.assert_close(same.diagonal(), torch.ones(3))


def command_on_ranks(rank, words):
    """Output of the command, and what it says where it fails in the second process."""
    report.plot_layer_panels = report.plot_sentence = lambda *args, **options: None
    output = run("analyze", *words)

    def stream(*arguments, **options):
        if rank == 1:
            raise ValueError("not here")
        return layer_comparison.stream(*arguments, **options)

    report.stream = stream
    return output, result_of(["analyze", *map(str, words)])


def test_processes_share_the_rows(folder, tmp_path, without_pictures):
    words = ["--model", folder, "--student", folder / "student", "--data", folder / "data.tsv",
             "--batch-size", 5, "--measures", "pwcca", "--device", "cpu"]  # fmt: skip
    run("analyze", *words, "--out", tmp_path / "one")
    found = run_ranks(command_on_ranks, 2, tmp_path, [*words, "--out", tmp_path / "two"])
    (first, (code, _, error)), (second, (other_code, _, silence)) = found
    assert "RCCC" in first and not second
    assert (code, other_code) == (2, 2)
    assert error + silence == f"Error: --model {folder}: not here\n"
    one, two = (read_json(tmp_path / name / "layers.json") for name in ("one", "two"))
    for name in ("rccc", "pwcca", "intra_class_similarity", "tokens"):
        for a, b in ((one, two), (one["student"], two["student"])):
            if name in a:
                torch.testing.assert_close(torch.tensor(a[name]), torch.tensor(b[name]))
    assert one["sentence"] == two["sentence"]


MISTAKES = [
    ({}, "give one of --text FILE, --data FILE and --task NAME"),
    ({"data": "data.tsv", "text": "x"}, "give one of --text FILE"),
    ({"text": "x", "label_column": "y"}, "--label-column is about --data FILE"),
    ({"text": "x", "sentence": " "}, "--sentence holds no text"),
    ({"text": "x", "before": "x"}, "--before needs --student"),
    ({"text": "x", "measures": "svcca,ckaa"}, "'ckaa': known: svcca"),
    ({"text": "text.txt", "student": "./other"}, "./other: its vocabulary has 9 tokens, the"),
    ({"text": "text.txt", "student": "./turned"}, "./turned: 'words' is token 5 of its tokenizer"),
    ({"text": "text.txt", "student": "./wrong"}, "made of another --model: layers must be"),
    ({"text": "text.txt", "model": "./nan"}, "--model ./nan: layer 1 of the model gave values"),
    ({"text": "text.txt", "rows": 1, "measures": "unbiased_cka"}, "at least four real tokens"),
    ({"text": "none.txt"}, "none.txt: no such file"),
    ({"text": "."}, "--text .: can't be read"),
]  # fmt: skip


def test_mistakes_are_one_sentence(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for given, said in MISTAKES:
        assert said in run("analyze", **{"model": folder, **given}, expect=2), given


def test_a_task_from_the_hub_and_texts_from_a_pipe(folder, monkeypatch, without_pictures):
    lines = [line.split("\t") for line in (folder / "data.tsv").read_text().splitlines()[1:]]
    texts, labels = zip(*lines, strict=True)
    numbers = [int(label == "yes") for label in labels]
    calls = hub(monkeypatch, {"validation": {"sentence": texts, "label": numbers}})
    output = run("analyze", model=folder, task="sst2", rows=9, measures="svcca")
    assert calls == [("nyu-mll/glue", "sst2", "validation")]
    assert "intra-class similarity, last layer" in output
    read, write = os.pipe()
    os.write(write, b"one\n\n two\n")
    os.close(write)
    piped = AnalyzeSettings(model="m", text=Path(f"/dev/fd/{read}"))
    assert report.read(piped)[0] == ["one", "two"]
    os.close(read)
