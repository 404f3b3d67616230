"""A submission to the GLUE server, checked by the format that the server publishes."""

import csv
import io
import re
import zipfile

import pytest

from fastkd.train import glue
from tests.support.tiny import make_teacher, run

# Names, numbers of rows and labels of the server, as its page and sample submission have them.
ENTAILMENT = {"entailment", "neutral", "contradiction"}
SERVER = {
    "AX.tsv": (1104, ENTAILMENT),
    "CoLA.tsv": (1063, {"0", "1"}),
    "MNLI-m.tsv": (9796, ENTAILMENT),
    "MNLI-mm.tsv": (9847, ENTAILMENT),
    "MRPC.tsv": (1725, {"0", "1"}),
    "QNLI.tsv": (5463, {"entailment", "not_entailment"}),
    "QQP.tsv": (390965, {"0", "1"}),
    "RTE.tsv": (3000, {"entailment", "not_entailment"}),
    "SST-2.tsv": (1821, {"0", "1"}),
    "STS-B.tsv": (1379, None),
    "WNLI.tsv": (146, {"0", "1"}),
}
HEADERS = {  # of GLUE's own test files
    "cola": "index\tsentence",
    "sst2": "index\tsentence",
    "mrpc": "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "qqp": "id\tquestion1\tquestion2",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2",
    "qnli": "index\tquestion\tsentence",
    "rte": "index\tsentence1\tsentence2",
    "ax": "index\tsentence1\tsentence2",
}
FOLDERS = dict.fromkeys(HEADERS, ("test.tsv",)) | {
    "mnli": ("test_matched.tsv", "test_mismatched.tsv"), "ax": ("diagnostic.tsv",),
}  # fmt: skip
NAMES = {
    "cola": ["unacceptable", "acceptable"],
    "sst2": ["0", "1"],
    "mrpc": ["not_equivalent", "equivalent"],
    "qqp": ["0", "1"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
    "mnli": ["contradiction", "entailment", "neutral"],
}


def check(content: bytes) -> None:
    """Raise unless the server accepts the submission."""
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        assert set(packed.namelist()) == set(SERVER)
        for name, (rows, labels) in SERVER.items():
            text = packed.read(name).decode()
            lines = list(csv.reader(text.splitlines(), delimiter="\t"))
            assert lines[0] == ["index", "prediction"], name
            assert [line[0] for line in lines[1:]] == [str(i) for i in range(rows)], name
            answers = {line[1] for line in lines[1:]}
            if labels is None:
                assert all(re.fullmatch(r"\d\.\d+", x) and float(x) <= 5 for x in answers), name
            else:
                assert answers <= labels, name


def write_tests(folder, task, rows):
    folder.mkdir()
    columns = HEADERS[task].split("\t")
    for file, number in zip(FOLDERS[task], rows, strict=True):
        lines = [HEADERS[task]]
        for i in range(number):
            lines.append("\t".join([str(i), *(["a film"] * (len(columns) - 1))]))
        (folder / file).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for task, names in NAMES.items():
        make_teacher(root / task, names, 1)
    make_teacher(root / "stsb", 1, 1, problem_type="regression")
    return root


def test_a_submission_of_all_tasks(models, tmp_path, monkeypatch):
    """Of few rows: the server's counts are those that `pack` and the checker compare."""
    lines = glue.table([-0.25, 2.5, 6.0]).split()[2:]
    assert lines == ["0", "0.000000", "1", "2.500000", "2", "5.000000"]
    few = {name: max(3, n % 7) for name, (n, _) in SERVER.items()}
    for name, of in glue.FILES.items():
        assert of.rows == SERVER[f"{name}.tsv"][0]
        small = glue.TestSet(**{**vars(of), "rows": few[f"{name}.tsv"]})
        monkeypatch.setitem(glue.FILES, name, small)
        monkeypatch.setitem(SERVER, f"{name}.tsv", (few[f"{name}.tsv"], SERVER[f"{name}.tsv"][1]))
    for task in FOLDERS:
        sets = [f"{n}.tsv" for n, of in glue.FILES.items() if of.task == task]
        write_tests(tmp_path / task, task, [few[name] for name in sets])
        model = models / ("mnli" if task == "ax" else task)
        out = run("predict", model=model, task=task, data=tmp_path / task, glue=tmp_path / "out",
                  device="cpu")  # fmt: skip
        assert all(name in out for name in sets)
    text = run("predict", glue_zip=tmp_path / "out", out=tmp_path / "glue.zip")
    assert "constant answers for WNLI" in text
    check((tmp_path / "glue.zip").read_bytes())
    single = run("predict", model=models / "mnli", task="mnli", glue=tmp_path / "two",
                 data=tmp_path / "mnli" / "test_mismatched.tsv", device="cpu")  # fmt: skip
    assert "MNLI-mm.tsv" in single and not (tmp_path / "two" / "MNLI-m.tsv").exists()
    (tmp_path / "two" / "RTE.tsv").write_text("index\tprediction\n0\tentailment\n")
    error = run("predict", glue_zip=tmp_path / "two", out=tmp_path / "x.zip", expect=2)
    assert "RTE.tsv has 1 rows" in error


def test_mistakes_and_the_test_file_of_cola(models, tmp_path):
    """It has a header and other columns than train.tsv."""
    (tmp_path / "rows.tsv").write_text("index\tsentence\n0\ta film\n")
    rows, rte = {"data": tmp_path / "rows.tsv"}, {"model": models / "rte"}
    glue = {"glue": tmp_path / "out", "device": "cpu", **rows}
    for options, words in (
        ({**glue, **rte, "task": "sst2"}, "class 'entailment' is no label of SST-2"),
        ({**glue, **rte}, "needs --task NAME"),
        ({**glue, "task": "sst2"}, "--model is missing"),
        (rte, "--data is missing"),
        ({**rte, **rows, "task": "ax"}, "--task 'ax'"),
        ({"glue_zip": tmp_path, "out": tmp_path / "a.zip"}, "no files of `--glue`"),
        ({"glue_zip": tmp_path}, "needs --out"),
    ):
        assert words in run("predict", **options, expect=2)
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta film\n1\tthe film is bad\n")
    (tmp_path / "train.tsv").write_text("gj04\t1\t\ta film\ngj04\t0\t*\tthe film is bad\n")
    found = []
    for name in ("test", "train"):
        data = tmp_path / f"{name}.tsv"
        text = run("predict", model=models / "cola", task="cola", data=data, device="cpu")
        found.append([line.split("\t")[1:] for line in text.splitlines()])
    assert found[0] == found[1] and len(found[0]) == 3
