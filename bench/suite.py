"""All cases of all files of this folder."""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path

from fastkd._core.registry import LOSSES as ROWS

from .case import Case

# In the registry's order; groups that are no single loss come last.
ORDER = [row.name for row in ROWS]
NAMES = sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py"))
MODULES = tuple(
    importlib.import_module(f"{__package__}.test_{name}")
    for name in sorted(NAMES, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
)
LOSSES = tuple(module.LOSS for module in MODULES)

# Sets are pytest's markers. cpu takes minutes on two cores; the others are for GPUs: bert is B=32,
# N=128, D=768; long has long rows, bank large memory banks, vocab LM heads, step whole steps;
# sweep grows one size.
CPU_SETS = ("cpu",)
CUDA_SETS = ("bert", "long", "bank", "vocab", "sweep", "step")
SETS = (*CPU_SETS, *CUDA_SETS)


@functools.cache
def every_case() -> tuple[Case, ...]:
    """Cases, loss by loss; building a case makes no tensors."""
    found = [case for module in MODULES for case in module.cases()]
    return tuple({(case.set, case.key): case for case in found}.values())


def cases(sets: Sequence[str], only: Sequence[str] = ()) -> list[Case]:
    """Cases of ``sets``, of the losses ``only`` (all if empty), each key once."""
    return each_once([c for c in every_case() if c.set in sets and (not only or c.loss in only)])


def each_once(cases: Sequence[Case]) -> list[Case]:
    """The cases without repeated keys; of equal keys a headline case is kept."""
    chosen = {case.key: case for case in cases}
    return list((chosen | {case.key: case for case in cases if case.headline}).values())


def toy(case: Case) -> Case:
    """``case`` at tiny sizes, which are no powers of two if any size is valid."""
    caps = {
        "Ds": 24,
        "Dt": 20,
        "D": 24,
        "rows": 6,
        "V": 40,
        "m": 64,
        "pairs": 2,
        "layers": 2,
        "n": 7,
        "teacher_layers": 2,
        "student_layers": 1,
    }
    sizes = {name: min(value, caps.get(name, 8)) for name, value in case.sizes.items()}
    return dataclasses.replace(case, sizes=sizes, check_sizes={})
