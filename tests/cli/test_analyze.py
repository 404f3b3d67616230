"""`fastkd analyze` from the command line, on a tiny model saved to disk."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertModel

from fastkd import analysis
from fastkd.analysis import layer_similarity
from fastkd.cli import analyze_command as report
from fastkd.cli import display
from fastkd.cli.command_settings import AnalyzeSettings
from fastkd.distill import student_from_teacher
from fastkd.train.saving import MANIFEST, read_json
from tests.cli.launched import without_pictures
from tests.support.tiny import read_otherwise, run
from tests.train.tasks.through import make_bare
from tests.train.test_data import hub

WORDS = ["a", "small", "model", "of", "words"]
NARROW = {"intermediate_size": 8}
TEXTS = ["words", "words", "a model of words a model of words", "small small"]
TEXTS += 7 * ["a small model", *TEXTS[1:]]
LABELS = [len(text) % 2 for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("analyze") / "model"
    for name, options in {
        ".": {"layers": 3}, "nan": {"layers": 3}, "student": {"hidden_size": 12}, "turned": {},
        "other": {"words": WORDS[:-1]}, "wrong": {},
    }.items():  # fmt: skip
        make_bare(path / name, **{"words": WORDS, **options})
    read_otherwise(path / "turned")
    columns = {"text_column": "one", "text_pair_column": "two", "label_column": "class"}
    for name, layers, settings in (
        ("student", [1, 3], {"student_config": NARROW}), ("wrong", [2, 4], {}),
        ("turned", [1, 3], columns),
    ):  # fmt: skip
        about = {"teacher_layers": layers, "settings": settings}
        (path / name / MANIFEST).write_text(json.dumps(about))
    broken = BertModel.from_pretrained(path / "nan")
    torch.nn.init.constant_(broken.encoder.layer[0].output.LayerNorm.weight, float("nan"))
    broken.save_pretrained(path / "nan")
    (path / "text.txt").write_text("\n\n".join(TEXTS))
    rows = [f"{text}\t{('no', 'yes')[label]}" for text, label in zip(TEXTS, LABELS, strict=True)]
    (path / "data.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    return path


def test_teacher_student_and_the_student_before(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    given = {"model": folder, "student": folder / "student", "data": folder / "data.tsv"}
    given |= {"measures": "pwcca", "sentence": "a small model", "batch_size": 40}
    output = run("analyze", **given, out=tmp_path)
    written = read_json(tmp_path / "layers.json")
    teacher = report.load("--model", str(folder), AutoModel, False)
    tokenizer = report.tokenizer_of("--model", str(folder), False)
    batches = list(report.batches_of(tokenizer, TEXTS, batch_size=40, labels=LABELS))

    def same(found, expected):
        torch.testing.assert_close(torch.tensor(found).double(), expected)

    for name, model in (
        ("student", BertModel.from_pretrained(folder / "student")),
        ("before", student_from_teacher(teacher, [1, 3], config=NARROW)),
    ):
        own, found = layer_similarity(model, batches, ["svcca", "pwcca"]), written[name]
        other = layer_similarity(teacher, batches, ["pwcca"], other=model)
        same(found["to_model"]["pwcca"], other["pwcca"])
        same(found["pwcca"], own["pwcca"])
        same(found["rccc"], own["svcca"][0, -1])
        same(found["intra_class_similarity"], analysis.layer_intra_class_similarity(model, batches))
        assert 0 < found["relations"]["l2"] <= 1
    same(written["adjacent_cca"], analysis.adjacent_layer_cca(teacher, batches))
    assert f"{written['adjacent_cca'][2]:.4f}" in output and f"{written['rccc']:.4f}" in output
    assert written["tokens"] == sum(int(x["attention_mask"].sum()) for x in batches)
    assert written["sentence"]["tokens"] == ["[CLS]", "a", "small", "model", "[SEP]"]
    rows = list(csv.DictReader((tmp_path / "layers.csv").open()))
    assert len(rows) == 16 + 9 + 9 + 12 + 12
    models = ("model", "before")
    found = [r for r in rows if (r["model"], r["other_model"]) == models and r["layer"] == "2"]
    assert [float(r["value"]) for r in found] == written["before"]["to_model"]["pwcca"][2]
    for name in ("pwcca", "relations"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for words in ("32 rows  step 1/1", "student before", "ρ of the sentence's relations"):
        assert words in output


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


def test_rows_of_a_file_the_hub_and_a_pipe(folder, tmp_path, monkeypatch):
    without_pictures(monkeypatch.setattr)
    calls = hub(monkeypatch, {"validation": {"sentence": TEXTS, "label": LABELS}})
    output = run("analyze", model=folder, task="sst2", rows=9, measures="svcca")
    assert calls == [("nyu-mll/glue", "sst2", "validation")]
    assert "intra-class similarity, last layer" in output
    read, write = os.pipe()
    os.write(write, b"one\n\n two\n")
    os.close(write)
    piped = AnalyzeSettings(model="m", text=Path(f"/dev/fd/{read}"))
    assert report.read(piped)[0] == ["one", "two"]
    os.close(read)
    # Columns are those of the student's record; rows marked as having no label are of no class.
    data = tmp_path / "pairs.tsv"
    data.write_text("one\ttwo\tclass\na\twords\tno\nsmall\tb\tyes\nof\tmodel\t-100\n")
    settings = AnalyzeSettings(model=str(folder), student=str(folder / "turned"), data=data)
    texts, pairs, classes = report.read(settings)
    assert (texts[0], pairs[1], [*classes]) == ("a", "b", [0, 1, -100])
