"""`fastkd distill --teachers FILE`: a teacher for each row, named by a column of the rows."""

import pytest

from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError
from tests.support.runs import config_of, first_step, made, report_of
from tests.support.tiny import make_teacher


@pytest.fixture
def given(tmp_path):
    for name, scale in (("math", 0.2), ("code", 0.5), ("student", 0.2)):
        make_teacher(tmp_path / name, initializer_range=scale)
    rows = [("math", "code")[i % 3 == 0] for i in range(18)]
    lines = ["text\tlabel\tfield"]
    lines += [f"row {i} is {'good' if i % 2 else 'bad'}\t{i % 2}\t{x}" for i, x in enumerate(rows)]
    (tmp_path / "rows.tsv").write_text("\n".join(lines))

    def given(text=None, **options):
        usual = {
            **dict.fromkeys(("train", "eval"), tmp_path / "rows.tsv"), "method": "soft_targets",
            "student": tmp_path / "student", "steps": 3, "batch_size": 6, "out": tmp_path / "out",
        }  # fmt: skip
        if text is not None:
            path = tmp_path / "teachers.toml"
            path.write_text(text)
            usual |= {"teachers": path, "teacher_column": "field"}
        return {**usual, **options}

    return given


def test_each_teacher_serves_its_rows(given, tmp_path):
    """Two names of one teacher give its student; two teachers give another, scored by teacher."""
    files = 'math = "math"\ncode = "math"\n', 'math = "math"\ncode = "code"\n'

    def soft(*text, **options):
        return first_step(**given(*text, **options))[1]["soft"].item()

    alone, one, two = soft(teacher=tmp_path / "math"), soft(files[0]), soft(files[1])
    assert alone == pytest.approx(one, rel=1e-5) and alone != pytest.approx(two, rel=1e-3)
    two = run_distillation(config_of(**given(files[1], accumulate=2)))
    scores = two["teachers"]
    assert {name: each["rows"] for name, each in scores.items()} == {"math": 12, "code": 6}
    for each in scores.values():
        assert each["teacher"].keys() == each["student"].keys() == two["student"].keys()
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
