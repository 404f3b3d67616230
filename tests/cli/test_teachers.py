"""`fastkd distill --teachers FILE`: a teacher for each row, named by a column of the rows."""

import pytest

from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from tests.support.runs import config_of, first_step, made, report_of
from tests.support.tiny import make_teacher


def test_each_teacher_serves_its_rows(tmp_path):
    """Two names of one teacher give its student; two teachers give another, scored by teacher."""
    for name, scale in (("math", 0.2), ("code", 0.5), ("student", 0.2)):
        make_teacher(tmp_path / name, initializer_range=scale)
    rows, path = tmp_path / "rows.tsv", tmp_path / "teachers.toml"
    lines = [
        f"row {i} is {('bad', 'good')[i % 2]}\t{i % 2}\t{('math', 'code')[i % 3 == 0]}"
        for i in range(18)
    ]
    rows.write_text("\n".join(["text\tlabel\tfield", *lines]))

    def given(text, **options):
        path.write_text(text)
        return {
            "train": rows, "eval": rows, "student": tmp_path / "student", "steps": 3,
            "batch_size": 6, "method": "soft_targets", "out": tmp_path / "out", "teachers": path,
            "teacher_column": "field", **options,
        }  # fmt: skip

    def soft(text, **options):
        return first_step(**given(text, **options))[1]["soft"].item()

    both = 'math = "math"\ncode = "code"\n'
    alone = soft("", teacher=tmp_path / "math", teachers=None, teacher_column=None)
    assert alone == pytest.approx(soft('math = "math"\ncode = "math"\n'), rel=1e-5)
    assert alone != pytest.approx(soft(both), rel=1e-3)
    report = run_distillation(config_of(**given(both, accumulate=2)))
    scores = report["teachers"]
    assert {name: each["rows"] for name, each in scores.items()} == {"math": 12, "code": 6}
    for each in scores.values():
        assert each["teacher"].keys() == each["student"].keys() == report["student"].keys()
    card = (tmp_path / "out" / "student" / "README.md").read_text()
    assert "| code |" in card and "2 teachers, each for its rows" in card
    assert report_of(tmp_path / "out")["teachers"]
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
            made(**given(text, **options))
