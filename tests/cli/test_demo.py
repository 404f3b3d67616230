"""`fastkd demo`: its corpus and what it needs; the whole run: tests/cli/test_processes.py."""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fastkd._core.extras import MissingExtra
from fastkd.analysis.pictures import new_figure
from fastkd.cli import demo
from fastkd.study.docstrings import AREAS, docstrings, load_docstrings, load_pairs
from fastkd.train import packaged_teacher, saving
from fastkd.train.errors import InputError
from tests.support.tiny import make_teacher, run

#: Modules of eight areas: the whole library takes seconds to parse.
SOME = (
    "cmd codecs configparser enum http importlib json logging mailbox multiprocessing numbers "
    "operator statistics tarfile turtle"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Some of Python's own modules."""
    root, whole = tmp_path_factory.mktemp("library"), Path(sysconfig.get_path("stdlib"))
    for name in SOME.split():
        if (whole / name).is_dir():
            shutil.copytree(whole / name, root / name)
        elif (whole / f"{name}.py").exists():  # some are packages of their own
            shutil.copy(whole / f"{name}.py", root)
    return root


def test_areas_are_balanced_and_mixed_and_share_no_docstring(library):
    corpus = load_docstrings(40, 8, library)
    assert len(corpus.names) >= 6
    keys = []
    for rows, limit in ((corpus.train, 40), (corpus.evals[""], 8)):
        counts = np.bincount(rows.labels, minlength=len(corpus.names)).tolist()
        assert max(counts) == limit and min(counts) >= limit // 2
        assert set(rows.labels[: len(rows) // 2]) == set(range(len(corpus.names)))
        keys.append({"".join(filter(str.isalnum, text)).casefold() for text in rows.texts})
        assert len(keys[-1]) == len(rows)
    assert not keys[0] & keys[1]
    modules = [module for listed in AREAS.values() for module in listed.split()]
    assert len(modules) == len(set(modules))


def write_library(root):
    root.mkdir()
    methods = "".join(
        f'    def f{i}(self):\n        """Send mail number {i}, a nice one."""\n' for i in range(40)
    )
    (root / "smtplib.py").write_text(
        '"""The module about sending mail."""\nclass Mail:\n    """One mail to be sent."""\n'
        + methods
    )
    (root / "random.py").write_text(
        "\n".join(f'def r{i}():\n    """Draw a random number {i} now."""' for i in range(40))
        + '\ndef both():\n    """Text that stands in two areas."""\n'
        + 'def short():\n    """Too short."""\n'
    )
    (root / "pathlib.py").write_text('def p():\n    """Text that  stands in two areas!"""\n')
    (root / "broken.py").write_text('def f(:\n    """Does not parse at all."""\n')
    (root / "heapq.py").write_bytes(b"\x00\xff")
    (root / "test").mkdir()
    (root / "test" / "random.py").write_text('def t():\n    """Never to be read here."""\n')
    return root


def write_packaged(folder):
    make_teacher(folder / "teacher", layers=6, head=False)
    library = write_library(folder / "library")
    (library / "ast.py").write_text((library / "random.py").read_text().replace("random", "tree"))


def test_classes_stay_together_and_oddities_are_left_out(tmp_path):
    root = write_library(tmp_path / "lib")
    groups = {group for _, group, text in docstrings(root) if "mail number" in text}
    assert groups == {"smtplib.py:Mail"}
    assert not any("Never" in text for _, _, text in docstrings(root))
    with pytest.raises(InputError, match="too few docstrings"):
        load_docstrings(10, 10, root)

    (root / "email.py").write_text((root / "random.py").read_text().replace("random", "mail"))
    corpus = load_docstrings(30, 4, root)
    again = load_docstrings(30, 4, root)
    assert corpus.train.texts == again.train.texts
    assert corpus.train.labels.tolist() == again.train.labels.tolist()
    assert corpus.names == ["network", "numbers"]
    texts = corpus.train.texts + corpus.evals[""].texts
    assert not any("two areas" in text or "Too short" in text for text in texts)
    mail = [
        any("Send mail number" in text for text in rows.texts)
        for rows in (corpus.train, corpus.evals[""])
    ]
    assert sum(mail) <= 1


def test_pairs_are_graded_by_the_tree(tmp_path, library):
    found = reversed([*docstrings(library)])  # the first of a text counts
    texts = {" ".join(text.split()[:60]): group for _, group, text in found}
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    corpus = load_pairs(30, 6, library)
    assert corpus.names is None and corpus.metrics == ("spearman", "pearson")
    sides = []
    for rows, count in ((corpus.train, 30), (corpus.evals[""], 6)):
        labels = rows.labels.tolist()
        assert sorted(labels) == sorted([0.0, 1.0, 2.0, 3.0, 4.0] * count)
        sides.append(set(rows.texts) | set(rows.pairs))
        assert len(set(map(frozenset, zip(rows.texts, rows.pairs, strict=True)))) == len(rows)
        for first, second, label in zip(rows.texts, rows.pairs, labels, strict=True):
            (one, name), (other, second_name) = (texts[x].split(":") for x in (first, second))
            packages = [path.split("/")[0] for path in (one, other)]
            areas = [area_of[package.removesuffix(".py")] for package in packages]
            shared = [areas[0] == areas[1], packages[0] == packages[1], one == other]
            shared.append(name == second_name and name[:1].isupper())
            assert label == [*shared, False].index(False), (first, second)
    assert not sides[0] & sides[1]
    again = load_pairs(30, 6, library)
    assert again.train.texts == corpus.train.texts and again.train.pairs == corpus.train.pairs
    with pytest.raises(InputError, match="too few docstrings"):
        load_pairs(10, 10, write_library(tmp_path / "lib"))


def test_shares_stand_beside_every_interval(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        demo, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1]
    )
    gain = {"mean": 0.2, "low": -0.1, "high": 0.5}
    students = {
        "labels": {"accuracy": 0.4, "difference": None, "recovered": None},
        "fcd": {"accuracy": 0.6, "difference": gain, "recovered": {"mean": 2 / 3}},
    }
    about = {"teacher": {"scores": {"accuracy": 0.7}}, "seeds": [0, 1], "rows": {"train": 9}}
    size = {"student_layers": 3, "labelled": 4}
    demo._draw({**about, "students": students, "size": size}, tmp_path / "students.png")
    (ax,) = figures[0].axes
    ends = [max(line.get_xdata()) for line in ax.lines if len(set(line.get_xdata())) > 1]
    (share,) = (text for text in ax.texts if "of the gap" in text.get_text())
    assert ends == [90.0] and share.get_text() == "67% of the gap"
    assert 90 < share.get_position()[0] < ax.get_xlim()[1]


def test_what_the_demo_leaves_alone_and_needs(monkeypatch, tmp_path):
    (tmp_path / "student").mkdir()
    saving.write_json(tmp_path / "student" / saving.MANIFEST, {"run": "x", "files": {}})
    with monkeypatch.context() as patch:
        patch.setattr(demo, "teacher_path", lambda: tmp_path / "teacher")
        assert "a student that isn't the demo's" in run("demo", "--fast", out=tmp_path, expect=2)
    monkeypatch.setattr(packaged_teacher, "PACKAGE", "no_such_package")
    with pytest.raises(MissingExtra, match=r"\[demo\]"):
        packaged_teacher.teacher_path()
    assert "[demo]'" in run("demo", out=tmp_path / "x", expect=1)
    assert "--steps" in run("demo", out=tmp_path / "x", steps=0, expect=2)
