"""A submission to the GLUE server, checked by the format that the server publishes."""

import csv
import io
import re
import zipfile

import pytest

from fastkd.train import glue
from tests.support.tiny import make_teacher, run

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
HEADERS = {  # of GLUE's own test files
    "cola": "index\tsentence",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2",
}
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
    lines = glue.table([-0.25, 2.5, 6.0]).split()[2:]
    assert lines == ["0", "0.000000", "1", "2.500000", "2", "5.000000"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_teacher(root / "cola", NAMES["CoLA"], 1)
    make_teacher(root / "mnli", ENTAILMENT, 1)
    make_teacher(root / "stsb", 1, 1, problem_type="regression")
    return root


def test_a_submission(models, tmp_path, monkeypatch):
    """Of few rows, and constant answers for what was not predicted."""
    few = {name: 3 + i for i, name in enumerate(SERVER)}
    for name, of in glue.FILES.items():
        small = glue.TestSet(**{**vars(of), "rows": few[name]})
        monkeypatch.setitem(glue.FILES, name, small)
    for name, file in FILES.items():
        path, header = tmp_path / file, HEADERS[file.split("/")[0]]
        path.parent.mkdir(exist_ok=True)
        texts = "\ta film" * header.count("\t")
        path.write_text("\n".join([header, *(f"{i}{texts}" for i in range(few[name]))]) + "\n")
    for task in HEADERS:
        out = run("predict", model=models / task, task=task, data=tmp_path / task,
                  glue=tmp_path / "out", device="cpu")  # fmt: skip
        assert all(f"{name}.tsv" in out for name, file in FILES.items() if task in file)
    text = run("predict", glue_zip=tmp_path / "out", out=tmp_path / "glue.zip")
    assert "constant answers for AX, MRPC" in text and "CoLA" not in text
    with zipfile.ZipFile(io.BytesIO((tmp_path / "glue.zip").read_bytes())) as packed:
        assert {*packed.namelist()} == {f"{name}.tsv" for name in SERVER}
        for name, (_, labels) in SERVER.items():
            content = packed.read(f"{name}.tsv").decode().splitlines()
            header, *lines = csv.reader(content, delimiter="\t")
            assert header == ["index", "prediction"]
            assert [line[0] for line in lines] == [str(i) for i in range(few[name])]
            for _, answer in lines:
                number = re.fullmatch(r"\d\.\d+", answer) and float(answer) <= 5
                assert answer in labels if labels else number, name
    single = run("predict", model=models / "mnli", task="mnli", glue=tmp_path / "two",
                 data=tmp_path / FILES["MNLI-mm"], device="cpu")  # fmt: skip
    assert "MNLI-mm.tsv" in single and not (tmp_path / "two" / "MNLI-m.tsv").exists()
    (tmp_path / "two" / "RTE.tsv").write_text("index\tprediction\n0\tentailment\n")
    error = run("predict", glue_zip=tmp_path / "two", out=tmp_path / "x.zip", expect=2)
    assert "RTE.tsv has 1 rows" in error


def test_the_test_file_of_cola(models, tmp_path):
    """It has a header and other columns than train.tsv."""
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta film\n1\tthe film is bad\n")
    (tmp_path / "train.tsv").write_text("gj04\t1\t\ta film\ngj04\t0\t*\tthe film is bad\n")
    found = []
    for name in ("test", "train"):
        data = tmp_path / f"{name}.tsv"
        text = run("predict", model=models / "cola", task="cola", data=data, device="cpu")
        found.append([line.split("\t")[1:] for line in text.splitlines()])
    assert found[0] == found[1] and len(found[0]) == 3
