"""Compile every Triton kernel ahead of time, without a GPU, and say what it takes.

``python -m bench.compile_report [module ...] [--all 80,90,100] [--check] [--json]``: modules of
``kernels/``, all by default. For the architectures after ``--all`` it compiles every variant, for
the others enough that any two choices (types, flags, blocks, alignment) that meet in one of a
kernel's variants meet in a compiled one.
``--check`` exits with 1 where a variant spills registers, wants more shared memory than the
architecture has, or should use the tensor cores and doesn't.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Compute capability → bytes of shared memory that one block can have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORE_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def modules() -> list[str]:
    """The kernel modules that declare variants, by file name."""
    import fastkd

    folder = Path(fastkd.__file__).parent / "kernels"
    return sorted(
        path.stem for path in folder.glob("*.py") if "def compile_variants" in path.read_text()
    )


def variants(module: str) -> Iterator[Any]:
    """What ``fastkd.kernels.<module>`` declares."""
    yield from importlib.import_module(f"fastkd.kernels.{module}").compile_variants()


def choices(variant: Any) -> dict[str, str]:
    """What distinguishes one variant of a kernel from another."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options["aligned"] = bool(variant.aligned)
    return {name: str(x) for name, x in (variant.signature | variant.constexprs | options).items()}


def covering(declared: dict[int, Any]) -> list[int]:
    """Few variants of one kernel in which every pair of choices meets that meets in one of all."""
    pairs = {
        index: set(itertools.combinations(sorted(choices(variant).items()), 2))
        for index, variant in declared.items()
    }
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda index: len(pairs[index] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def compile_one(job: tuple[str, int, int]) -> dict[str, Any]:
    """Compile the ``index``-th variant of a module for one architecture; returns its row."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, index, capability = job
    variant = list(variants(module))[index]
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    missing = {name for name, kind in signature.items() if kind == "constexpr"}
    row: dict[str, Any] = {
        "module": module,
        "kernel": variant.kernel.__name__,
        "variant": describe(variant),
        "arch": f"sm_{capability}",
        "warps": variant.num_warps,
        "stages": variant.num_stages,
    }
    if missing != set(variant.constexprs) or set(variant.signature) - set(names):
        row["problems"] = [f"arguments don't match the kernel's: {', '.join(names)}"]
        return row

    start = time.perf_counter()
    try:
        compiled = compile(
            ASTSource(variant.kernel, signature, variant.constexprs, alignment(variant, signature)),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )
    except Exception as error:
        cause: BaseException = error
        while deeper := cause.__cause__ or cause.__context__:  # in a function that it calls
            cause = deeper
        row["problems"] = [f"does not compile: {cause}"]
        return row
    row["seconds"] = round(time.perf_counter() - start, 2)
    row |= resources(compiled.asm["cubin"])
    row["shared"] = compiled.metadata.shared
    row["tensor_cores"] = sum(map(compiled.asm["ptx"].count, TENSOR_CORE_INSTRUCTIONS))
    row["problems"] = problems(row, capability, variant.tensor_cores)
    return row


def alignment(variant: Any, signature: dict[str, Any]) -> dict[tuple[int, ...], list]:
    """The specialisations that a launch with aligned tensors gets."""
    aligned: dict[tuple[int, ...], list] = {}
    for i, (name, kind) in enumerate(signature.items()):
        positions: list[tuple[int, ...]] = [(i,)]
        parts = (kind,)
        if isinstance(kind, tuple):
            positions, parts = [(i, j) for j in range(len(kind))], kind
        for position, part in zip(positions, parts, strict=True):
            if part.startswith("*") or name in variant.aligned:
                aligned[position] = [["tt.divisibility", 16]]
    return aligned


def describe(variant: Any) -> str:
    """Pointer types and constexprs, as short as they still tell variants apart."""
    pointers: list[str] = []
    for kind in variant.signature.values():
        for part in kind if isinstance(kind, tuple) else (kind,):
            if part.startswith("*") and part[1:] not in pointers:
                pointers.append(part[1:])
    constexprs = [f"{name}={value}" for name, value in variant.constexprs.items()]
    return " ".join([",".join(pointers), *constexprs, *["aligned"] * bool(variant.aligned)])


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


def problems(row: dict[str, Any], capability: int, tensor_cores: bool) -> list[str]:
    """What is wrong with one compiled variant, in words."""
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']} bytes")
    if row["shared"] > SHARED_MEMORY[capability]:
        found.append(f"{row['shared']} bytes of shared memory > {SHARED_MEMORY[capability]}")
    if tensor_cores and not row["tensor_cores"]:
        found.append("no tensor-core instructions")
    return found


def jobs_of(name: str, every: set[int]) -> Iterator[tuple[str, int, int]]:
    """The variants of a module to compile, and for which architectures."""
    declared = dict(enumerate(variants(name)))
    kernels = {variant.kernel for variant in declared.values()}
    for capability, kernel in itertools.product(SHARED_MEMORY, kernels):
        own = {
            index: variant
            for index, variant in declared.items()
            if variant.kernel is kernel and capability in (variant.capabilities or SHARED_MEMORY)
        }
        for index in own if capability in every else covering(own):
            yield name, index, capability


def report(names: list[str], every: set[int], workers: int | None = None) -> list[dict[str, Any]]:
    """Compile variants of these modules: every one for some architectures, else `covering`'s."""
    jobs = sorted(job for name in names for job in jobs_of(name, every))
    if not jobs:
        return []
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, jobs, chunksize=4))


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
    every = ",".join(map(str, SHARED_MEMORY))
    parser = argparse.ArgumentParser(prog="python -m bench.compile_report", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules of kernels/ (all by default)")
    parser.add_argument(
        "--all", default="", help=f"architectures to compile every variant for: {every}"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 on any problem")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--workers", type=int, help="processes (one per core by default)")
    options = parser.parse_args(arguments)
    # The interpreter replaces kernels by Python functions, which have nothing to compile.
    if os.environ.pop("TRITON_INTERPRET", "0") == "1" and "triton" in sys.modules:
        parser.error("triton is already imported with TRITON_INTERPRET=1")

    unknown = set(options.modules) - set(modules())
    if unknown:
        parser.error(f"no variants in {', '.join(sorted(unknown))}; known: {', '.join(modules())}")
    architectures = {int(text) for text in options.all.split(",") if text}
    rows = report(options.modules or modules(), architectures, options.workers)
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    wrong = sum(bool(row["problems"]) for row in rows)
    if not options.json:
        print(f"{len(rows)} compiled, {wrong} with problems")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
