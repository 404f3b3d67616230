"""`fastkd demo`: its corpus and what it needs; the whole run: tests/cli/test_processes.py."""

import itertools
from collections import Counter

import pytest

from fastkd._core.extras import MissingExtra
from fastkd.cli import demo
from fastkd.study.docstrings import AREAS, docstrings, load_docstrings, load_pairs
from fastkd.train import packaged_teacher, saving
from fastkd.train.errors import InputError
from tests.support.tiny import make_teacher, run

AREA_OF = {"email": "network", "http": "network", "html": "text", "json": "text"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Packages of two areas: each has four modules with four classes of five methods."""
    root = tmp_path_factory.mktemp("library")
    for package, module in itertools.product(AREA_OF, "abcd"):
        (root / package).mkdir(exist_ok=True)
        lines = []
        for name in "ABCD":
            lines.append(f"class {name}:")
            for i in range(5):
                text = f"Method {i} of {package} {module} {name}."
                lines += [f"    def f{i}(self):", f'        """{text}"""']
        (root / package / f"{module}.py").write_text("\n".join(lines))
    return root


def test_areas_are_balanced_and_mixed_and_share_no_docstring(library):
    sets = load_docstrings(40, 8, library)
    for rows, limit in zip(sets, (40, 8), strict=True):
        labels = [row["label"] for row in rows]
        assert Counter(labels) == {"network": limit, "text": limit}
        assert len({*labels[: len(rows) // 2]}) == 2 and len({x["text"] for x in rows}) == len(rows)
    groups = [{row["text"][9:] for row in rows} for rows in sets]
    assert not groups[0] & groups[1]  # classes stay together
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


def test_oddities_are_left_out(tmp_path):
    root = write_library(tmp_path / "lib")
    groups = {group for _, group, text in docstrings(root) if "mail number" in text}
    assert groups == {"smtplib.py:Mail"}
    assert not any("Never" in text for _, _, text in docstrings(root))
    for load in (load_docstrings, load_pairs):
        with pytest.raises(InputError, match="too few docstrings"):
            load(10, 10, root)

    (root / "email.py").write_text((root / "random.py").read_text().replace("random", "mail"))
    sets = load_docstrings(30, 4, root)
    assert sets == load_docstrings(30, 4, root)
    assert {row["label"] for row in sets[0]} == {"network", "numbers"}
    texts = [row["text"] for rows in sets for row in rows]
    assert not any("two areas" in text or "Too short" in text for text in texts)


def test_pairs_are_graded_by_the_tree(library):
    sets, sides = load_pairs(30, 6, library), []
    for rows, count in zip(sets, (30, 6), strict=True):
        assert Counter(row["label"] for row in rows) == dict.fromkeys(range(5), count)
        pairs = [(row["text"], row["text_pair"]) for row in rows]
        sides.append({*itertools.chain(*pairs)})
        assert len({*map(frozenset, pairs)}) == len(rows)
        for row in rows:
            one, other = (row[x].rstrip(".").split()[3:] for x in ("text", "text_pair"))
            shared = [AREA_OF[one[0]] == AREA_OF[other[0]]]
            shared += [one[: i + 1] == other[: i + 1] for i in range(3)]
            assert row["label"] == [*shared, False].index(False), row
    assert not sides[0] & sides[1]
    assert load_pairs(30, 6, library) == sets


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
