"""A submission to the GLUE server, checked by the format that the server publishes."""

import csv
import re
import zipfile
from dataclasses import replace

from fastkd.train import glue
from tests.support.tiny import make_teacher, run, sentences

# Numbers of rows and labels of the server, as its page and sample submission have them.
ENTAILMENT, TWO = ("contradiction", "entailment", "neutral"), ("entailment", "not_entailment")
SERVER = {
    "AX": (1104, ENTAILMENT), "CoLA": (1063, ("0", "1")), "MNLI-m": (9796, ENTAILMENT),
    "MNLI-mm": (9847, ENTAILMENT), "MRPC": (1725, ("0", "1")), "QNLI": (5463, TWO),
    "QQP": (390965, ("0", "1")), "RTE": (3000, TWO), "SST-2": (1821, ("0", "1")),
    "STS-B": (1379, ()), "WNLI": (146, ("0", "1")),
}  # fmt: skip
#: Classes of the hub's data sets that have other names.
NAMES = {
    "CoLA": ("unacceptable", "acceptable"), "MRPC": ("not_equivalent", "equivalent"),
    "QQP": ("not_duplicate", "duplicate"), "SST-2": ("negative", "positive"),
}  # fmt: skip
SOME, PAIR = sentences(20, 0), ["sentence1", "sentence2"]
#: GLUE's own test files that are predicted here.
FILES = {
    "CoLA": "cola/test.tsv", "STS-B": "stsb/test.tsv", "MNLI-m": "mnli/test_matched.tsv",
    "MNLI-mm": "mnli/test_mismatched.tsv",
}  # fmt: skip


def test_rows_and_labels_are_the_servers():
    for name, of in glue.FILES.items():
        rows, labels = SERVER[name]
        assert of.rows == rows
        for classes in (labels, NAMES.get(name, labels)):
            found = glue.server_labels(name, classes)
            assert [found[given] for given in classes] == [*labels]
    assert glue.FILES.keys() == SERVER.keys()
    assert glue.table([-0.25, 2.5, 6.0]).split()[3::2] == ["0.000000", "2.500000", "5.000000"]


def test_a_submission(tmp_path, monkeypatch):
    few = {name: 3 + i for i, name in enumerate(SERVER)}
    files = {name: replace(of, rows=few[name]) for name, of in glue.FILES.items()}
    monkeypatch.setattr(glue, "FILES", files)
    for name, file in FILES.items():
        header = ["index", *(["sentence"] if name == "CoLA" else ["genre", *PAIR])]
        lines = [header, *([str(i), *[x] * (len(header) - 1)] for i, (x, _) in enumerate(SOME))]
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("\n".join(map("\t".join, lines[: 1 + few[name]])) + "\n")
    for task, classes, kind in (
        ("cola", NAMES["CoLA"], None), ("stsb", 1, "regression"), ("mnli", ENTAILMENT, None),
    ):  # fmt: skip
        model = make_teacher(tmp_path / f"{task} model", classes, 1, problem_type=kind)
        given = {"model": model, "task": task, "device": "cpu"}
        out = run("predict", **given, data=tmp_path / task, glue=tmp_path / "out")
        assert all(f"{name}.tsv" in out for name, file in FILES.items() if task in file)
    text = run("predict", glue_zip=tmp_path / "out", out=tmp_path / "glue.zip")
    assert "constant answers for AX, MRPC" in text and "CoLA" not in text
    with zipfile.ZipFile(tmp_path / "glue.zip") as packed:
        assert {*packed.namelist()} == {f"{name}.tsv" for name in SERVER}
        for name, (_, labels) in SERVER.items():
            content = packed.read(f"{name}.tsv").decode().splitlines()
            header, *lines = csv.reader(content, delimiter="\t")
            assert header == ["index", "prediction"]
            assert [line[0] for line in lines] == [str(i) for i in range(few[name])]
            scores = r"[0-4]\.\d+|5\.0+"
            assert all(x in labels if labels else re.fullmatch(scores, x) for _, x in lines), name
    two = tmp_path / "two"
    assert "-mm.tsv" in run("predict", **given, glue=two, data=tmp_path / FILES["MNLI-mm"])
    assert not (two / "MNLI-m.tsv").exists()
    (two / "RTE.tsv").write_text("index\tprediction\n0\tentailment\n")
    assert "RTE.tsv has 1 rows" in run("predict", glue_zip=two, out=two / "x.zip", expect=2)
