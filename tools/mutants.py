"""Mutants: one small change in the package at a time, and whether the tests notice it.

    python -m tools.mutants --results runs/mutants.txt          # all groups of tools/mutants.toml
    python -m tools.mutants --results FILE --group losses       # one of them

Mutants are drawn from the syntax trees with a fixed seed: a sign, a comparison, an index by one, a
forgotten mask, clamp, detach or conversion, a dtype, a flag, a shorter key, an error that isn't
raised. Each is made in a temporary copy, where the tests of its group run (`-x`); without a mutant
they have to pass. A line of the results is a verdict, the group, the place and the change. Those in
the file aren't run again, so an interrupted run goes on.
"""

import argparse
import ast
import collections
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  imported once, for all forks
import pytest
import tomllib
import torch._dynamo  # noqa: F401

from tools.check import ROOT, copy_source

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
# Methods that a mutant forgets to call.
FORGOTTEN = {
    "masked_fill", "detach", "double", "float", "clamp", "clamp_min", "clamp_max", "abs", "to",
    "contiguous", "square", "sort", "nan_to_num", "expand_as", "type_as",
}  # fmt: skip
UNSEEN = ("strict", "repr", "frozen")  # flags that change no result
SECONDS = 600  # per mutant; a longer run is a caught one


def changes(node: ast.AST, source: str) -> Iterator[str]:
    """Replacements of a node's text."""

    def text(x: ast.AST) -> str:
        return ast.get_source_segment(source, x) or ""

    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and not isinstance(
            left, ast.Constant | ast.JoinedStr
        ):
            yield f"({text(left)}) {OPERATORS[type(op)]} ({text(right)})"
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield f"({text(left)}) {COMPARISONS[type(op)]} ({text(right)})"
        case ast.UnaryOp(ast.USub() | ast.Not(), operand) if not isinstance(operand, ast.Constant):
            yield text(operand)
        case ast.BoolOp(op, values):
            joined = ") or (" if isinstance(op, ast.And) else ") and ("
            yield f"(({joined.join(map(text, values))}))"
        case ast.Call(ast.Attribute(value, name)) if name in FORGOTTEN:
            yield text(value)
        case ast.Call(ast.Attribute(_, "where"), [_, first, _]):
            yield text(first)
        case ast.Call(ast.Name("max" | "min" as name), _):
            yield {"max": "min", "min": "max"}[name] + text(node)[3:]
        case ast.Subscript(value, ast.Constant(int(index))) if not isinstance(index, bool):
            yield f"{text(value)}[{index + 1}]"
        case ast.Slice(lower, ast.Constant(int(upper)), None):
            yield f"{text(lower) if lower else ''}:{upper + 1}"
        case ast.Attribute(ast.Name("torch"), "float64" | "float32" as dtype):
            yield {"float64": "torch.float32", "float32": "torch.bfloat16"}[dtype]
        case ast.keyword(str(name), ast.Constant(bool(flag))) if name not in UNSEEN:
            yield f"{name}={not flag}"
        case ast.Assign([ast.Name(name)], ast.Tuple(items)) if "key" in name and len(items) > 1:
            yield f"{name} = ({', '.join(map(text, items[:-1]))},)"
        case ast.Raise():
            yield "pass"


def mutants(path: Path) -> list[tuple[str, int, str, str, str]]:
    """(kind, line, old text, new text, whole new source) of every change of a file."""
    source = path.read_text()
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    tree = ast.parse(source)
    annotations = {id(x) for n in ast.walk(tree) for part in ("annotation", "returns")
                   if getattr(n, part, None) for x in ast.walk(getattr(n, part))}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in annotations or not hasattr(node, "end_col_offset"):
            continue
        for new in changes(node, source):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            raw = source.encode()
            old, mutated = raw[begin:end].decode(), (raw[:begin] + new.encode() + raw[end:])
            if new != old:
                kind = getattr(getattr(node, "func", node), "attr", type(node).__name__)
                found.append((kind, node.lineno, " ".join(old.split()), new, mutated.decode()))
    return found


def drawn(package: Path, paths: list[str], count: int) -> list[tuple[str, int, str, str, str]]:
    """``count`` mutants of the files, of each kind in turn; the same ones for the same sources."""
    files = sorted(path for pattern in paths for path in package.glob(pattern))
    every = [(str(f.relative_to(package)), *mutant) for f in files for mutant in mutants(f)]
    random.Random(0).shuffle(every)
    kinds: dict[str, int] = collections.defaultdict(int)
    turns = []
    for file, kind, *rest in every:
        kinds[kind] += 1
        turns.append((kinds[kind], file, *rest))
    return [mutant for _, *mutant in sorted(turns, key=lambda x: x[0])[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--package", type=Path, default=ROOT, help="the checkout to mutate")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout of the tests")
    parser.add_argument("--table", type=Path, default=ROOT / "tools/mutants.toml")
    parser.add_argument("--group", action="append", help="of the table; all by default")
    options = parser.parse_args()
    groups = tomllib.loads(options.table.read_text())
    known = options.results.read_text() if options.results.exists() else ""
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_source(copy, options.tests)
        shutil.rmtree(copy / "fastkd")
        shutil.copytree(options.package / "fastkd", copy / "fastkd")
        for name, group in groups.items():
            if options.group and name not in options.group:
                continue
            verdict = verdict_of(copy, group["tests"])
            if verdict != "survived":
                sys.exit(f"{name}: without a mutant: {verdict}")
            for file, line, old, new, source in drawn(copy, group["files"], group["count"]):
                place = f"{name}\t{file}:{line}\t{old[:80]} -> {new[:80]}"
                if place in known:
                    continue
                before = (copy / file).read_text()
                (copy / file).write_text(source)
                verdict = verdict_of(copy, group["tests"])
                (copy / file).write_text(before)
                with options.results.open("a") as results:
                    print(f"{verdict}\t{place}", file=results)
                print(verdict, place, flush=True)


def verdict_of(copy: Path, tests: list[str]) -> str:
    """The first test that fails, "survived", or "slow". Each of ``tests`` is pytest's arguments."""
    for arguments in tests:
        log = copy / "mutant.log"
        child = os.fork()
        if child == 0:
            run(copy, log, shlex.split(arguments))
        status, end = None, time.monotonic() + SECONDS
        while status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "slow"
            else:
                time.sleep(0.05)
        failed = [x for x in log.read_text().splitlines() if x.startswith(("FAILED", "ERROR"))]
        if failed:
            return f"caught by {failed[0].split()[1]}"
        if status not in (0, 5):  # 5: no test
            return f"caught, exit status {status}"
    return "survived"


def run(copy: Path, log: Path, arguments: list[str]) -> None:
    """Run the tests in this forked process, which has imported all that the package needs."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # of the processes that tests start
    sys.path[:] = [str(copy), *(x for x in sys.path if x and Path(x) != ROOT)]
    for name in [x for x in sys.modules if x.split(".")[0] in ("tools", "tests", "fastkd")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # which their processes would import
    options = ["-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    os._exit(pytest.main([*options, *arguments]))


if __name__ == "__main__":
    main()
