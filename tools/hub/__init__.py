"""The kernels in the Hugging Face kernel hub's layout: `make hub` writes hub/, two projects.

`fastkd-kernels` holds kernels/ as it is, for Triton; `fastkd-roots` the matrix roots of csrc/,
against PyTorch's stable ABI. The hub loads several versions of a kernel side by side from anywhere,
so its rules are (huggingface.co/docs/kernels, "Kernel requirements"): imports are relative, or of
the standard library, torch and triton; the syntax is Python 3.9's; operators are named in the
namespace that `_ops` gives, which its builder writes.
"""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"
# The headers of the roots: their own, and how C++ is compiled for each kind of processor.
ROOTS = [f"linalg/{name}.h" for name in ("roots", "roots_tensors", "roots_kernels", "eigen_lanes")]
ROOTS += [f"base/{name}.h" for name in ("parallel", "each_processor", "processors", "vectors")]
# What kernels import of the package beside each other, and the module that takes its place.
MOVED = {"fastkd._core.operator": "operator", "fastkd._core.dispatch": "interpreter"}


def write(out: Path) -> list[Path]:
    """Both projects, anew."""
    shutil.rmtree(out, ignore_errors=True)
    return [write_kernels(out / "fastkd-kernels"), write_roots(out / "fastkd-roots")]


def write_kernels(project: Path) -> Path:
    """The Triton kernels and their launchers."""
    package = _start(project, "fastkd_kernels")
    launchers: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kernels").glob("*.py")):
        text = path.read_text()
        (package / path.name).write_text(portable(text))
        launchers[path.stem] = [function.name for function in _operators(text)]
    operator = (ROOT / "fastkd/_core/operator.py").read_text()
    operator = operator.replace('f"fastkd::{launcher.__name__}"', _PREFIXED)
    operator = operator.replace("import torch\n", "import torch\n\nfrom ._ops import " + _PREFIX, 1)
    assert _PREFIXED in operator
    (package / "operator.py").write_text(portable(operator))
    dispatch = (ROOT / "fastkd/_core/dispatch.py").read_text()
    (package / "interpreter.py").write_text(
        '"""Where kernels run."""\n\nimport os\n\n\n' + _function(dispatch, "triton_interpreted")
    )
    imports = [
        f"from .{file} import {', '.join(names)}" for file, names in launchers.items() if names
    ]
    names = sorted(name for found in launchers.values() for name in found)
    listed = "".join(f'    "{name}",\n' for name in names)
    head = (FILES / "kernels.py.in").read_text()
    (package / "__init__.py").write_text(
        f"{head}\n" + "\n".join(imports) + f"\n\n__all__ = [\n{listed}]\n"
    )
    card = (project / "CARD.md").read_text()
    described = (f"- `{name}`: {line}" for name, line in sorted(_described()))
    (project / "CARD.md").write_text(card.replace("FUNCTIONS", "\n".join(described)))
    return project


_PREFIX = "add_op_namespace_prefix\n"
_PREFIXED = "add_op_namespace_prefix(launcher.__name__)"


def write_roots(project: Path) -> Path:
    """The C++ and CUDA roots, with the binding that the hub's builder compiles."""
    package = _start(project, "fastkd_roots")
    sources = project / "roots"
    for folder in ("base", "linalg"):
        (sources / folder).mkdir(parents=True)
    for name in ROOTS:
        shutil.copy(ROOT / "csrc" / name, sources / name)
    for name in ("linalg/roots.cpp", "linalg/roots.cu"):
        text = (ROOT / "csrc" / name).read_text().replace('#include "base/module.h"\n', "")
        functions, _ = text.split("STABLE_TORCH_LIBRARY", 1)
        guard = "#ifndef USE_CUDA\n#define USE_CUDA\n#endif\n" if name.endswith(".cu") else ""
        (sources / name).write_text(guard + functions.rstrip() + "\n")
    linalg = (ROOT / "fastkd/linalg/roots.py").read_text()
    names = (
        "_symmetric",
        "_root_values",
        "_nonzero",
        "_root_differences",
        "_inverse_root_differences",
    )
    parts = [(FILES / "roots.py.in").read_text(), *(_function(linalg, name) for name in names)]
    (package / "__init__.py").write_text(portable("\n\n".join(parts)))
    return project


def _start(project: Path, package: str) -> Path:
    """A project's fixed files, and the folder of its package."""
    shutil.copytree(FILES / project.name, project)
    for path in project.rglob("*.in"):
        path.rename(path.with_suffix(""))
    shutil.copy(FILES / "flake.nix", project)
    shutil.copy(ROOT / "LICENSE", project)
    (project / "tests" / "__init__.py").touch()
    folder = project / "torch-ext" / package
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def portable(source: str) -> str:
    """A module with relative imports and Python 3.9's syntax."""
    source = re.sub(r"^from (fastkd[\w.]*) import", _relative, source, flags=re.MULTILINE)
    source = re.sub(r", strict=(?:True|False)\)", ")", source)
    lines = source.splitlines(keepends=True)
    names = set()
    for node in sorted(_unions(source), key=lambda n: (n.lineno, n.col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        assert first == last, f"a union over two lines: {ast.unparse(node)}"
        line = lines[first].encode()
        new = _spelled(node).encode()
        lines[first] = (line[: node.col_offset] + new + line[node.end_col_offset :]).decode()
        names |= set(re.findall(r"Optional|Union", new.decode()))
    source = "".join(lines)
    if names:
        wanted = f"from typing import {', '.join(sorted(names))}\n"
        # Not by text: a line of the docstring may begin with "from".
        imports = (ast.Import, ast.ImportFrom)
        first = next(node for node in ast.parse(source).body if isinstance(node, imports))
        lines = source.splitlines(keepends=True)
        source = "".join([*lines[: first.lineno - 1], wanted, *lines[first.lineno - 1 :]])
    ast.parse(source, feature_version=(3, 9))
    return source


def _relative(match: re.Match[str]) -> str:
    module = match[1]
    name = MOVED.get(module) or module.removeprefix("fastkd.kernels").removeprefix(".")
    assert "." not in name, f"a kernel imports {module}, which the hub's package hasn't"
    return f"from .{name} import"


def _unions(source: str) -> Iterator[ast.BinOp]:
    """The outermost ``A | B`` of annotations."""
    for node in ast.walk(ast.parse(source)):
        for field in ("annotation", "returns"):
            stack = [getattr(node, field, None)]
            while stack:
                part = stack.pop()
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr):
                    yield part
                elif part is not None:
                    stack += ast.iter_child_nodes(part)


def _spelled(union: ast.expr) -> str:
    """``A | B | None`` as Python 3.9 writes it."""
    parts: list[str] = []
    while isinstance(union, ast.BinOp):
        parts.insert(0, ast.unparse(union.right))
        union = union.left
    parts.insert(0, ast.unparse(union))
    rest = [part for part in parts if part != "None"]
    inner = rest[0] if len(rest) == 1 else f"Union[{', '.join(rest)}]"
    return f"Optional[{inner}]" if len(rest) < len(parts) else inner


def _operators(source: str) -> Iterator[ast.FunctionDef]:
    """Functions under ``@operator(...)``."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(d, ast.Call) and ast.unparse(d.func) == "operator"
            for d in node.decorator_list
        ):
            yield node


def _described() -> Iterator[tuple[str, str]]:
    """Launchers, each with the first sentence of its docstring."""
    for path in (ROOT / "kernels").glob("*.py"):
        for function in _operators(path.read_text()):
            text = " ".join((ast.get_docstring(function) or "").split())
            yield function.name, re.split(r"(?<=\.) ", text)[0]


def _function(source: str, name: str) -> str:
    found = (n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    return (ast.get_source_segment(source, next(found)) or "") + "\n"
