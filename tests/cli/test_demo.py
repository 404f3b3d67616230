"""`fastkd demo`: its corpus and what it needs; the whole run: tests/cli/test_processes.py."""

import itertools
import shutil
from collections import Counter, defaultdict

import pytest

from fastkd.cli import demo
from fastkd.study.docstrings import AREAS, docstrings, load_docstrings, load_pairs
from fastkd.train import packaged_teacher
from fastkd.train.errors import InputError
from tests.support.tiny import make_teacher, run

AREA_OF = {"email": "network", "http": "network", "html": "text", "json": "text"}
METHOD = '    def f{i}(self):\n        """Method {i} of {of}."""\n'
#: Files without a docstring of their own.
ODD = {
    "pathlib.py": 'def p():\n    """Method 1 of  email a A!"""\n',  # in two areas
    "random.py": 'def r():\n    """Too short."""\n',
    "broken.py": 'def f(:\n    """Does not parse at all."""\n',
    "test/random.py": 'def t():\n    """Never to be read here."""\n',
}


def write_library(root):
    """Packages of two areas, each of four modules with four classes of five methods; oddities."""
    files = defaultdict(str, ODD)
    for package, module, name in itertools.product(AREA_OF, "abcd", "ABCD"):
        methods = (METHOD.format(i=i, of=f"{package} {module} {name}") for i in range(5))
        files[f"{package}/{module}.py"] += "".join([f"class {name}:\n", *methods])
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def write_packaged(folder):
    make_teacher(folder / "teacher", layers=6, head=False)
    write_library(folder / "library")


def test_areas_are_balanced_and_mixed_and_share_no_docstring(tmp_path):
    library = write_library(tmp_path / "library")
    sets = load_docstrings(40, 8, library)
    assert sets == load_docstrings(40, 8, library)
    for rows, limit in zip(sets, (40, 8), strict=True):
        labels = [row["label"] for row in rows]
        assert Counter(labels) == {"network": limit, "text": limit}
        assert len({*labels[:limit]}) == 2 and len({row["text"] for row in rows}) == 2 * limit
    groups = [{row["text"][9:] for row in rows} for rows in sets]
    assert not groups[0] & groups[1]  # classes stay together
    texts = {row["text"] for rows in load_docstrings(160, 40, library) for row in rows}
    assert len(texts) == 319 and "Method 1 of email a A." not in texts  # it is in two areas
    assert {text for *_, text in docstrings(library)} > texts | {"Too short."}
    assert max(Counter(" ".join(AREAS.values()).split()).values()) == 1  # a module has one area
    shutil.copytree(library / "email", tmp_path / "one/email")
    for load in (load_docstrings, load_pairs):
        with pytest.raises(InputError, match="too few docstrings"):
            load(10, 10, tmp_path / "one")


def test_pairs_are_graded_by_the_tree(tmp_path):
    library = write_library(tmp_path / "library")
    sets, sides = load_pairs(30, 6, library), []
    assert load_pairs(30, 6, library) == sets
    for rows, count in zip(sets, (30, 6), strict=True):
        assert Counter(row["label"] for row in rows) == dict.fromkeys(range(5), count)
        pairs = {frozenset((row["text"], row["text_pair"])) for row in rows}
        sides.append(frozenset().union(*pairs))
        assert len(pairs) == len(rows)
        for row in rows:
            one, other = (row[x].rstrip(".").split()[3:] for x in ("text", "text_pair"))
            shared = [AREA_OF[one[0]] == AREA_OF[other[0]]]
            shared += [one[: i + 1] == other[: i + 1] for i in range(3)]
            assert row["label"] == [*shared, False].index(False), row
    assert not sides[0] & sides[1]


def test_what_the_demo_leaves_alone_and_needs(monkeypatch, tmp_path):
    (tmp_path / "student").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(demo, "teacher_path", lambda: tmp_path / "teacher")
        assert "a student that isn't the demo's" in run("demo", "--fast", out=tmp_path, expect=2)
    monkeypatch.setattr(packaged_teacher, "PACKAGE", "no_such_package")
    said = run("demo", out=tmp_path / "x", expect=1)
    assert "the packaged teacher, is not installed; get it with" in said and "[demo]'" in said
    assert "--steps" in run("demo", out=tmp_path / "x", steps=0, expect=2)
