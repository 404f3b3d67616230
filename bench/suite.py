"""All cases of all losses, by size set."""

import functools
from collections.abc import Sequence

from . import cca, contrastive, knn, linalg, projection, relation, soft_targets, step
from .harness import Case

MODULES = (relation, knn, contrastive, cca, projection, soft_targets, linalg, step)
LOSSES = tuple(module.LOSS for module in MODULES)

# cpu finishes in three minutes on two cores; bert is B32 N128 D768; long, bank and vocab are what
# their names say; sweep grows one size; step times whole training steps; cca-12 is twelve layer
# pairs on a CPU, where the reference takes minutes.
SETS = ("cpu", "bert", "long", "bank", "vocab", "sweep", "step", "cca-12")


@functools.cache
def every_case() -> tuple[Case, ...]:
    """All of them, loss by loss; building a case makes no tensors."""
    found = [case for module in MODULES for case in module.cases()]
    return tuple({(case.set, case.key): case for case in found}.values())


def cases(sets: Sequence[str], only: Sequence[str] = ()) -> list[Case]:
    """The cases of ``sets``, of the losses ``only`` (all if empty), each key once."""
    chosen = [c for c in every_case() if c.set in sets and (not only or c.loss in only)]
    return list({case.key: case for case in chosen}.values())
