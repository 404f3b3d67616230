"""Labelled text on every machine: the docstrings of Python's standard library.

The label of a docstring is its area of the library; that of a pair is how close both are in the
library. Files are parsed, never imported.
"""

import ast
import hashlib
import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fastkd._core.atomic_files import write_file
from fastkd.train.errors import InputError

AREAS = {
    "concurrency": (
        "asyncio asyncore asynchat concurrent contextvars multiprocessing queue sched selectors "
        "signal subprocess threading _threading_local"
    ),
    "files": (
        "bz2 dbm filecmp fileinput fnmatch genericpath glob gzip lzma ntpath os pathlib posixpath "
        "_pyio shelve shutil stat tarfile tempfile zipfile"
    ),
    "interfaces": "cmd curses idlelib tkinter turtle turtledemo",
    "language": (
        "abc ast code codeop compileall copy dis importlib inspect modulefinder opcode pickle "
        "pickletools pkgutil py_compile pyclbr runpy symtable token tokenize types typing weakref"
    ),
    "network": (
        "cgi email ftplib http imaplib ipaddress mailbox mimetypes nntplib poplib smtplib socket "
        "socketserver ssl telnetlib urllib webbrowser wsgiref xmlrpc"
    ),
    "numbers": (
        "bisect calendar collections _collections_abc datetime _pydatetime decimal _pydecimal enum "
        "fractions functools graphlib heapq numbers operator random statistics _strptime zoneinfo"
    ),
    "testing": (
        "bdb cProfile cgitb doctest faulthandler logging pdb profile pstats pydoc timeit trace "
        "traceback tracemalloc unittest warnings"
    ),
    "text": (
        "argparse base64 codecs configparser csv difflib gettext html json locale "
        "optparse plistlib pprint re reprlib shlex string textwrap tomllib xml"
    ),
}
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
FEWEST_WORDS = 4
LONGEST_WORDS = 60
HELD_OUT = 5  # one group in five
# Two texts of a pair share nothing, or an area, a package, a module, a class.
GRADES = 5


#: A row of a file: text and label, and perhaps the second text.
Row = dict[str, Any]


def write(kind: str, train_rows: int, eval_rows: int, folder: Path) -> None:
    """Write the rows of a set, train.jsonl and eval.jsonl; nothing if they are there."""
    if (folder / "eval.jsonl").exists():
        return
    train, evals = SETS[kind](train_rows, eval_rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("eval", evals)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_file(folder / f"{name}.jsonl", lines, shared=True)


def docstrings(root: Path) -> Iterator[tuple[str, str, str]]:
    """(area, group, text) of every docstring below ``root`` whose module has an area.

    A group is a class or function at the top level of a module, with its members.
    """
    area_of = {module: area for area, modules in AREAS.items() for module in modules.split()}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        area = area_of.get(relative.parts[0].removesuffix(".py"))
        if area is None or SKIPPED & set(relative.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for top in [tree, *tree.body]:
            nodes = [top] if top is tree else ast.walk(top)
            group = f"{relative.as_posix()}:{getattr(top, 'name', '')}"
            for node in nodes:
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node)
                    if text:
                        yield area, group, text


def load_docstrings(train_rows: int, eval_rows: int, root: Path | None = None) -> list[list[Row]]:
    """Training and held-out docstrings, at most ``train_rows`` and ``eval_rows`` of each area.

    Every text occurs once, and a class with its methods is either trained on or held out. Areas
    that this installation lacks are left out.

    Raises:
        InputError: fewer than two areas have docstrings (Python was installed without sources).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    sets = []
    for texts, limit in zip(_split(root), (train_rows, eval_rows), strict=True):
        of_area = {area: [text for own, _, text in texts if own == area] for area in AREAS}
        sets.append({area: x[:limit] for area, x in of_area.items() if len(x) >= limit // 2})
    names = sorted(sets[0].keys() & sets[1].keys())
    if len(names) < 2:
        raise _too_few(root)
    each = ([{"text": x, "label": area} for area in names for x in found[area]] for found in sets)
    return [sorted(rows, key=lambda row: _hash(row["text"])) for rows in each]


def load_pairs(train_rows: int, eval_rows: int, root: Path | None = None) -> list[list[Row]]:
    """Training and held-out pairs of docstrings, at most that many of each grade.

    The label is what both texts share: 4 a class, 3 a module, 2 a package, 1 an area, 0 nothing. A
    class with its methods is either trained on or held out, and no pair has texts of both sets.

    Raises:
        InputError: fewer than two areas have docstrings, or a grade has no pairs.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    sets = []
    for texts, limit in zip(_split(root), (train_rows, eval_rows), strict=True):
        pairs = [pair for grade in range(GRADES) for pair in _pairs(texts, grade, limit)]
        if len({grade for *_, grade in pairs}) < GRADES:
            raise _too_few(root)
        pairs.sort(key=lambda pair: _hash(f"{pair[0]} {pair[1]}"))
        sets.append([{"text": a, "label": float(x), "text_pair": b} for a, b, x in pairs])
    return sets


def _location(area: str, group: str) -> tuple[str, ...]:
    """Area, package, module and class of a docstring; no class for a function."""
    path, _, name = group.rpartition(":")
    package = PurePosixPath(path).parts[0]
    return area, package, path, name if name[:1].isupper() else ""


def _grade(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Number of levels that two places share; an empty class name is never shared."""
    levels = zip(one, other, strict=True)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1] != "", levels)))


def _pairs(
    texts: list[tuple[str, str, str]], grade: int, limit: int
) -> Iterator[tuple[str, str, int]]:
    """At most ``limit`` pairs of a grade, drawn by hash; each text is the first of one pair."""
    near: dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]] = {}
    for area, group, text in texts:
        location = _location(area, group)
        near.setdefault(location[:grade], []).append((location, text))
    seen: set[frozenset[str]] = set()
    for area, group, text in sorted(texts, key=lambda found: _hash(f"{grade} {found[2]}")):
        if len(seen) == limit:
            return
        location = _location(area, group)
        others = [
            x for at, x in near[location[:grade]] if x != text and _grade(location, at) == grade
        ]
        if not others:
            continue
        other = others[_hash(f"{text} {grade}") % len(others)]
        if frozenset((text, other)) not in seen:
            seen.add(frozenset((text, other)))
            yield text, other, grade


def _split(root: Path) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Training and held-out (area, group, text); every text once, ordered by hash."""
    found: dict[str, tuple[str, str, str]] = {}
    ambiguous = set()
    for area, group, text in docstrings(root):
        words = text.split()
        if len(words) < FEWEST_WORDS:
            continue
        shortened = " ".join(words[:LONGEST_WORDS])
        key = re.sub(r"\W+", "", shortened).casefold()
        if key in found and found[key][0] != area:
            ambiguous.add(key)
        found.setdefault(key, (area, group, shortened))
    splits: tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]] = ([], [])
    for key in sorted(found.keys() - ambiguous, key=_hash):
        splits[_hash(found[key][1]) % HELD_OUT == 0].append(found[key])
    return splits


def _too_few(root: Path) -> InputError:
    return InputError(
        f"too few docstrings below {root}: this Python comes without its library's sources"
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:8], "big")


#: Functions that load the sets, by the value of ``docstrings`` in a study's file.
SETS: dict[str, Callable[..., list[list[Row]]]] = {"areas": load_docstrings, "pairs": load_pairs}
