"""Mutants: one small change in the package at a time, and whether the tests notice it.

    python -m tools.mutants --results runs/mutants.txt          # all groups of tools/mutants.toml
    python -m tools.mutants --results FILE --group losses       # one of them

Mutants are drawn from the syntax trees with a fixed seed. Each is made in a temporary copy, where
the tests of its group run; without a mutant they have to pass. A line of the results is a verdict,
the group, the place and the change. Those in the file aren't run again.
"""

import argparse
import ast
import collections
import itertools
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tomllib

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
SECONDS = 600  # per mutant; a longer run is a caught one


def changes(node: ast.AST) -> Iterator[str]:
    """Replacements of a node's text."""
    text = ast.unparse
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
        case ast.keyword(str(name), ast.Constant(bool(flag))) if name != "strict":
            yield f"{name}={not flag}"
        case ast.Assign([ast.Name(name)], ast.Tuple(items)) if "key" in name and len(items) > 1:
            yield f"{name} = ({', '.join(map(text, items[:-1]))},)"
        case ast.Raise():
            yield "pass"


def mutants(path: Path) -> Iterator[tuple[str, int, str, str, str]]:
    """(kind, line, old text, new text, whole new source) of every change of a file."""
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    for node in (x for x in ast.walk(ast.parse(raw)) if hasattr(x, "end_col_offset")):
        begin = len(b"".join(lines[: node.lineno - 1])) + node.col_offset
        end = len(b"".join(lines[: node.end_lineno - 1])) + node.end_col_offset
        old = raw[begin:end].decode()
        kind = getattr(getattr(node, "func", node), "attr", type(node).__name__)
        for new in changes(node):
            mutated = raw[:begin] + new.encode() + raw[end:]
            yield kind, node.lineno, " ".join(old.split()), new, mutated.decode()


def drawn(package: Path, paths: list[str], count: int) -> list[tuple[str, int, str, str, str]]:
    """``count`` mutants of the files, of each kind in turn; the same ones for the same sources."""
    files = sorted(path for pattern in paths for path in package.glob(pattern))
    every = [(str(f.relative_to(package)), *mutant) for f in files for mutant in mutants(f)]
    random.Random(0).shuffle(every)
    turns: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    every.sort(key=lambda mutant: next(turns[mutant[1]]))
    return [(file, *rest) for file, _, *rest in every[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--package", type=Path, default=ROOT, help="the checkout to mutate")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout of the tests")
    parser.add_argument("--group", action="append", help="of the table; all by default")
    options = parser.parse_args()
    groups = tomllib.loads((ROOT / "tools/mutants.toml").read_text())
    known = options.results.read_text() if options.results.exists() else ""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        copy_source(copy, options.tests)
        shutil.rmtree(copy / "fastkd")
        shutil.copytree(options.package / "fastkd", copy / "fastkd")
        for name in options.group or groups:
            group = groups[name]
            if (verdict := verdict_of(copy, group["tests"])) != "survived":
                sys.exit(f"{name}: without a mutant: {verdict}")
            for file, line, old, new, source in drawn(copy, group["files"], group["count"]):
                place = f"{name}\t{file}:{line}\t{old[:80]} -> {new[:80]}"
                if place in known:
                    continue
                (copy / file).write_text(source)
                verdict = verdict_of(copy, group["tests"])
                shutil.copy(options.package / file, copy / file)
                with options.results.open("a") as results:
                    print(f"{verdict}\t{place}", file=results)
                print(verdict, place, flush=True)


def verdict_of(copy: Path, tests: list[str]) -> str:
    """The first test that fails, "survived", or "slow". Each of ``tests`` is pytest's arguments."""
    options = ["-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    for arguments in tests:
        command = [sys.executable, "-m", "pytest", *options, *shlex.split(arguments)]
        how = {"cwd": copy, "env": os.environ | {"PYTHONPATH": str(copy)}, "capture_output": True}
        try:
            done = subprocess.run(command, **how, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "slow"
        failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        if failed:
            return f"caught by {failed[0].split()[1]}"
        if done.returncode not in (0, 5):  # 5: no test
            return f"caught, exit status {done.returncode}"
    return "survived"


if __name__ == "__main__":
    main()
