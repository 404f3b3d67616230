"""All cases of all losses, by size set."""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path

from fastkd._core.registry import LOSSES as ROWS

from . import step
from .harness import Case

# bench/<name>.py of every row; tests/test_registry.py names a row without.
WITH_FILE = [row.name for row in ROWS if Path(__file__).with_name(f"{row.name}.py").exists()]
MODULES = (*(importlib.import_module(f"{__package__}.{name}") for name in WITH_FILE), step)
LOSSES = tuple(module.LOSS for module in MODULES)

# cpu takes under five minutes on two cores; bert is B32 N128 D768; long, bank and vocab are what
# their names say; sweep grows one size; step times whole training steps; cca-12 is twelve layer
# pairs on a CPU, where the reference takes minutes; words are heads of language models, beside all
# that computes their losses on a CPU (`words`).
CPU_SETS = ("cpu",)
CUDA_SETS = ("bert", "long", "bank", "vocab", "sweep", "step")
SETS = (*CPU_SETS, *CUDA_SETS, "cca-12", "words")


@functools.cache
def every_case() -> tuple[Case, ...]:
    """All of them, loss by loss; building a case makes no tensors."""
    found = [case for module in MODULES for case in module.cases()]
    return tuple({(case.set, case.key): case for case in found}.values())


def cases(sets: Sequence[str], only: Sequence[str] = ()) -> list[Case]:
    """The cases of ``sets``, of the losses ``only`` (all if empty), each key once."""
    chosen = [c for c in every_case() if c.set in sets and (not only or c.loss in only)]
    return list({case.key: case for case in chosen}.values())


def toy(case: Case) -> Case:
    """``case`` at sizes that take no time, none of them a power of two where it may be anything."""
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
    }
    sizes = {name: min(value, caps.get(name, 8)) for name, value in case.sizes.items()}
    return dataclasses.replace(case, sizes=sizes, check_sizes={})
