"""``python -m tools.amd [module ...] [--every] [--prove]``: the kernels compile for an AMD GPU.

The AMD backend of the Triton wheel compiles the forms that calls start on sm_80 for gfx942 (MI300).
None of them has run on an AMD GPU: `fastkd._core.dispatch` takes PyTorch there. ``--every`` takes
each form, not a covering set. ``--prove`` does so where kernels/proven.json does not know the state
of the code, and notes it there. The exit status is 1 where a form does not compile.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tools.compile_report import (
    AMD,
    PROVEN,
    Form,
    chosen,
    describe,
    modules,
    note_proven,
    root_cause,
    state,
)

ARCHITECTURE, WARP = "gfx942", 64


def problem(form: Form) -> str | None:
    """Why ``form`` does not compile, or None."""
    import torch

    torch.version.hip = "of a compiler"  # before the kernels are imported: see kernels/rounding.py
    from triton import compile
    from triton.backends.compiler import GPUTarget

    try:
        compile(
            form.source(), target=GPUTarget("hip", ARCHITECTURE, WARP), options=dict(form.launch)
        )
    except Exception as error:
        return f"{form.name} {describe(form)}: {root_cause(error)}"
    return None


def problems(names: Iterable[str], every: bool, workers: int | None) -> tuple[int, list[str]]:
    """The number of forms, and what is wrong with those that do not compile."""
    forms = chosen(names, [80], every)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(problem, forms, chunksize=4))
    return len(forms), [x for x in found if x is not None]


def current_state() -> str:
    """Hash of everything that is compiled."""
    return hashlib.sha256("".join(map(state, modules())).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.amd", description=__doc__)
    parser.add_argument("modules", nargs="*", default=modules(), help="all by default")
    parser.add_argument("--every", action="store_true", help="every form, not a covering set")
    parser.add_argument("--prove", action="store_true", help="every form, if they are not proven")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    if options.prove and json.loads(PROVEN.read_text()).get(AMD) == current_state():
        return 0
    count, wrong = problems(options.modules, options.every or options.prove, options.workers)
    if options.prove and not wrong:
        note_proven({AMD: current_state()})
    print("\n".join([*wrong, f"{count} forms compiled for {ARCHITECTURE}, {len(wrong)} failed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
