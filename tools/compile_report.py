"""Compile every Triton kernel ahead of time, without a GPU, and report the resources it uses.

``python -m tools.compile_report [module ...] [--every] [--arch 80,90,100]``: modules of
``kernels/``, all by default. The forms are those that the calls of `tools.calls` launch, recorded
without a GPU by tools/dry_cuda.py: one of each kernel and architecture, or all with ``--every``.
The exit status is 1 if a form spills registers, needs more shared memory than the architecture
has, or has matrix products without tensor cores. Consumer cards (86, 89, 120) are compiled on
request, and may spill a few registers.
"""

import argparse
import functools
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from fastkd._core.atomic_files import write_file

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "compiled"
# Compute capability → bytes of shared memory that one block can have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
CONSUMER = {86: 99 * 1024, 89: 99 * 1024, 120: 99 * 1024}
EVERY = SHARED_MEMORY | CONSUMER
TENSOR_CORE_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
# Launch options that change what is compiled.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


class Form(NamedTuple):
    """Arguments of Triton's compiler for one form of a kernel."""

    module: str
    name: str
    capability: int
    types: tuple[tuple[str, Any], ...]  # of every argument; "constexpr" where the value is fixed
    values: tuple[tuple[Any, Any], ...]  # the fixed ones, by name or by place in a tuple
    known: tuple[tuple[Any, Any], ...]  # what Triton knows of the other values, by place
    launch: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, *fields: Any) -> "Form":
        """The form of these fields, which may be lists, as in JSON."""
        return cls(*_tuples(fields))

    @classmethod
    def from_launch(
        cls,
        kernel: Any,
        capability: int,
        signature: dict,
        constexprs: dict,
        attributes: dict,
        how: Any,
    ) -> "Form":
        """The form of a launch, from the arguments of JITFunction._do_compile."""
        names = list(signature)
        return cls.of(
            kernel.fn.__module__,
            kernel.fn.__name__,
            capability,
            signature.items(),
            [(names[at[0]] if len(at) == 1 else at, x) for at, x in constexprs.items()],
            [(at, known) for at, known in attributes.items() if known],
            [(name, getattr(how, name)) for name in OPTIONS],
        )

    @property
    def kernel(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    def compiled(self) -> Any:
        """Triton's compiled kernel for the form's architecture; Triton caches it."""
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        # What a launch tells the compiler about the arguments, such as multiples of 16.
        known = {at: [list(fact) for fact in facts] for at, facts in self.known}
        source = ASTSource(self.kernel, dict(self.types), dict(self.values), known)
        target = GPUTarget("cuda", self.capability, 32)
        return compile(source, target=target, options=dict(self.launch))


def _tuples(x: Any) -> Any:
    parts = (list, tuple, type({}.items()))
    return tuple(map(_tuples, x)) if isinstance(x, parts) else x


def modules() -> list[str]:
    """The modules that hold kernels, by file name."""
    from fastkd._core.registry import LOSSES

    return sorted(file for loss in LOSSES for file in loss.kernel_files)


def variants(module: str) -> list[Form]:
    """The forms of ``fastkd.kernels.<module>`` that calls start, on every architecture."""
    from fastkd._core.registry import LOSSES

    forms = (x for loss in LOSSES if module in loss.kernel_files for x in recorded(loss.name))
    return [form for form in forms if form.module == f"fastkd.kernels.{module}"]


@functools.cache
def recorded(loss: str) -> list[Form]:
    """Forms that the calls of a loss start, stored until a source changes."""
    return [Form.of(*fields) for fields in walked(loss)["forms"]]


def walked(loss: str) -> dict[str, Any]:
    """`tools.dry_cuda.report` of a loss: problems of its calls, and their forms."""
    from filelock import FileLock

    KEPT.mkdir(parents=True, exist_ok=True)
    file = KEPT / f"calls-{loss}-{_sources_key()}.json"
    if not file.exists() and os.environ.get("TRITON_INTERPRET") == "1":
        not_interpreted("tools.dry_cuda")
    with FileLock(f"{file}.lock"):
        if not file.exists():
            found = importlib.import_module("tools.dry_cuda").report(loss)
            write_file(file, json.dumps(found), shared=True)
    return json.loads(file.read_text())


def not_interpreted(module: str, *arguments: str) -> str:
    """Output of ``python -m module`` without Triton's interpreter, which compiles nothing."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{result.stderr}")
    return result.stdout


@functools.cache
def _sources_key() -> str:
    import torch
    import triton

    summary = hashlib.sha256(f"{sys.version} {torch.__version__} {triton.__version__}".encode())
    own = (f"tools/{name}.py" for name in ("calls", "dry_cuda", "compile_report"))
    for pattern in ("fastkd/**/*.py", "fastkd/*.so", "kernels/*.py", *own):
        for path in sorted(ROOT.glob(pattern)):
            summary.update(path.read_bytes())
    return summary.hexdigest()[:16]


def compile_one(form: Form) -> dict[str, Any]:
    """Compile a form, which Triton caches; returns its row of the report."""
    row: dict[str, Any] = {
        "module": form.module,
        "kernel": form.name,
        "variant": describe(form),
        "arch": f"sm_{form.capability}",
        "warps": dict(form.launch)["num_warps"],
        "stages": dict(form.launch)["num_stages"],
    }
    start = time.perf_counter()
    try:
        compiled = form.compiled()
    except Exception as error:
        return row | {"problems": [f"does not compile: {root_cause(error)}"]}
    row["seconds"] = round(time.perf_counter() - start, 2)
    row |= resources(compiled.asm["cubin"])
    row["shared"] = compiled.metadata.shared
    row["tensor_cores"] = sum(map(compiled.asm["ptx"].count, TENSOR_CORE_INSTRUCTIONS))
    row["problems"] = problems(row, form.capability, "tt.dot" in compiled.asm["ttir"])
    return row


def root_cause(error: BaseException) -> BaseException:
    """The innermost error, raised in a function that the kernel calls."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return error


def describe(form: Form) -> str:
    """Short text of a form: pointer types, fixed values and alignment."""
    kinds = (x for _, kind in form.types for x in (kind if isinstance(kind, tuple) else (kind,)))
    pointers = ",".join(dict.fromkeys(kind[1:] for kind in kinds if kind.startswith("*")))
    fixed = [f"{name}={value}" for name, value in form.values]
    known = {at[0] for at, _ in form.known}
    loose = [name for place, (name, kind) in enumerate(form.types)
             if kind != "constexpr" and place not in known]  # fmt: skip
    return " ".join([pointers, *fixed, f"unaligned: {','.join(loose)}" if loose else "aligned"])


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of spills, from the compiled binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spills": usage["STACK"] + usage["LOCAL"]}


def problems(row: dict[str, Any], capability: int, has_products: bool) -> list[str]:
    """Problems of one compiled form, as text."""
    found = []
    if row["spills"] and capability in SHARED_MEMORY:
        found.append(f"spills {row['spills']} bytes")
    if row["shared"] > EVERY[capability]:
        found.append(f"{row['shared']} bytes of shared memory > {EVERY[capability]}")
    if has_products and not row["tensor_cores"]:
        found.append("no tensor-core instructions")
    return found


def chosen(names: Iterable[str], capabilities: Iterable[int], every: bool) -> list[Form]:
    """Forms of these modules for these architectures: one of each kernel, or every one."""
    wanted = set(capabilities)
    found = [form for name in names for form in variants(name) if form.capability in wanted]
    if every:
        return found
    groups: dict[tuple[str, int], list[Form]] = {}
    for form in found:
        groups.setdefault((form.name, form.capability), []).append(form)
    return [group[len(group) // 2] for group in groups.values()]


def largest(module: str, name: str, capability: int) -> Form:
    """The form of a kernel that has the largest blocks."""
    forms = (x for x in variants(module) if (x.name, x.capability) == (name, capability))
    return max(forms, key=_size)


def _size(form: Form) -> int:
    blocks = [x for name, x in form.values if "BLOCK" in str(name) or name == "TILE"]
    return math.prod(blocks) * dict(form.launch)["num_stages"]


def report(forms: list[Form], workers: int | None = None) -> list[dict[str, Any]]:
    workers = min(workers or os.cpu_count() or 1, len(forms))
    if workers <= 1:
        return [compile_one(form) for form in forms]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, forms, chunksize=4))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text, problems at the end of their line."""
    columns = ["arch", "warps", "stages", "registers", "spills", "shared", "tensor_cores"]
    lines = [" ".join(f"{column:>12}" for column in columns) + "  kernel"]
    for row in rows:
        cells = " ".join(f"{row.get(column, '-')!s:>12}" for column in columns)
        trouble = "".join(f"  <- {problem}" for problem in row["problems"])
        lines.append(f"{cells}  {row['kernel']} {row['variant']}{trouble}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    known, others = (",".join(map(str, x)) for x in (SHARED_MEMORY, CONSUMER))
    parser = argparse.ArgumentParser(prog="python -m tools.compile_report", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules of kernels/ (all by default)")
    parser.add_argument("--arch", default=known, help=f"of {known} (all by default) and {others}")
    parser.add_argument("--every", action="store_true", help="every form, not one of each kernel")
    options = parser.parse_args(arguments)
    # The interpreter replaces kernels by Python functions, which have nothing to compile.
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        parser.error("triton is already imported with TRITON_INTERPRET=1")

    names = options.modules or modules()
    if unknown := set(names) - set(modules()):
        parser.error(f"no kernels in {', '.join(sorted(unknown))}; known: {', '.join(modules())}")
    architectures = [int(text) for text in options.arch.split(",") if text]
    rows = report(chosen(names, architectures, options.every))
    wrong = [row for row in rows if row["problems"]]
    print(table(rows))
    print(f"{len(rows)} compiled, {len(wrong)} with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
