"""`fastkd distill --teachers FILE`: a teacher for each row, named by a column of the rows."""

import pytest

from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from tests.support.runs import config_of, report_of
from tests.support.tiny import make_teacher


@pytest.fixture
def distilled(tmp_path):
    for name in ("math", "code", "student"):
        make_teacher(tmp_path / name)
    rows = [("math", "code")[i % 3 == 0] for i in range(18)]
    lines = ["text\tlabel\tfield"]
    lines += [f"row {i} is {'good' if i % 2 else 'bad'}\t{i % 2}\t{x}" for i, x in enumerate(rows)]
    (tmp_path / "rows.tsv").write_text("\n".join(lines))

    def distilled(name, text=None, **options):
        given = {
            **dict.fromkeys(("train", "eval"), tmp_path / "rows.tsv"), "method": "soft_targets",
            "student": tmp_path / "student", "steps": 3, "batch_size": 6, "out": tmp_path / name,
        }  # fmt: skip
        if text is not None:
            path = tmp_path / "teachers.toml"
            path.write_text(text)
            given |= {"teachers": path, "teacher_column": "field"}
        return run_distillation(config_of(**{**given, **options}))

    return distilled


def test_each_teacher_serves_its_rows(distilled, tmp_path):
    """Two names of one teacher give its student; two teachers give another, scored by teacher."""
    alone = distilled("alone", teacher=tmp_path / "math")
    one = distilled("one", 'math = "math"\ncode = "math"\n')
    two = distilled("two", 'math = "math"\ncode = "code"\n', accumulate=2)
    losses = [report["history"][-1]["losses"] for report in (alone, one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0]["soft"] != pytest.approx(losses[2]["soft"], rel=1e-3)
    scores = two["teachers"]
    assert {name: each["rows"] for name, each in scores.items()} == {"math": 12, "code": 6}
    for each in scores.values():
        assert each["teacher"].keys() == each["student"].keys() == alone["student"].keys()
    card = (tmp_path / "two" / "student" / "README.md").read_text()
    assert "| code |" in card and "2 teachers, each for its rows" in card
    assert report_of(tmp_path / "two")["teachers"]
    for text, options, message in (
        ('math = "math"\n', {}, "row 2: its teacher is 'code'; .*math"),
        ('math = "math"\ncode = "nowhere"\n', {}, "nowhere: no such directory"),
        ('math = "http://h/v1"\n', {}, "a server needs url and model"),
        ("math = 1\n", {}, "math must be a directory, or a table"),
        ("math = {modle = 'a'}\n", {}, "did you mean 'model'"),
        ('code = "math"\nmath = "math"\n', {"teacher_column": "no"}, "row 2: no column 'no'"),
        ('math = "math"\n', {"student": None}, "pass --student"),
        ('math = "math"\n', {"teacher": "x"}, "--teachers and --teacher exclude each other"),
    ):
        with pytest.raises(InputError, match=message):
            distilled("no", text, **options)
