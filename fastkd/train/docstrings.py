"""Real labelled text on every machine: the docstrings of Python's standard library.

The label of a docstring is the area of the library it comes from. Files are parsed, never imported.
"""

import ast
import collections
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fastkd.train.corpus import Corpus
from fastkd.train.errors import InputError
from fastkd.train.rows import Rows, in_memory
from fastkd.train.tasks.classification import Classification

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
HELD_OUT = 5  # one group in so many


def docstrings(root: Path) -> Iterator[tuple[str, str, str]]:
    """(area, group, text) of every docstring below ``root`` whose module has an area.

    A group is a class or function at the top of a module, with all that is in it.
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
            nodes = [top] if top is tree else _statements(top)
            group = f"{relative.as_posix()}:{getattr(top, 'name', '')}"
            for node in nodes:
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node)
                    if text:
                        yield area, group, text


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what it holds but for expressions, in the order of `ast.walk`."""
    todo = collections.deque([node])
    while todo:
        node = todo.popleft()
        yield node
        todo.extend(x for x in ast.iter_child_nodes(node) if not isinstance(x, ast.expr))


def load_docstrings(train_rows: int = 350, eval_rows: int = 60, root: Path | None = None) -> Corpus:
    """At most so many training and held-out docstrings of each area.

    Every text occurs once, and a class with its methods is either trained on or held out. Areas
    whose modules this installation doesn't have are left out.

    Raises:
        InputError: fewer than two areas have docstrings (Python was installed without sources).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
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

    splits: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    for key in sorted(found.keys() - ambiguous, key=_hash):
        area, group, text = found[key]
        held_out = _hash(group) % HELD_OUT == 0
        splits[held_out].setdefault(area, []).append(text)
    names = sorted(
        area
        for area in AREAS
        if len(splits[False].get(area, [])) >= train_rows // 2
        and len(splits[True].get(area, [])) >= eval_rows // 2
    )
    if len(names) < 2:
        raise InputError(
            f"too few docstrings below {root}: this Python comes without its library's sources"
        )
    train, evals = (
        _rows(splits[held_out], names, limit)
        for held_out, limit in ((False, train_rows), (True, eval_rows))
    )
    assert not set(train.texts) & set(evals.texts)
    return Corpus(train, {"": evals}, Classification(tuple(names)), ("accuracy", "f1"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:8], "big")


def _rows(areas: dict[str, list[str]], names: list[str], limit: int) -> Rows:
    rows = [(text, i) for i, name in enumerate(names) for text in areas[name][:limit]]
    rows.sort(key=lambda row: _hash(row[0]))
    return in_memory("docstrings", [text for text, _ in rows], [label for _, label in rows])
