"""What a loss adds to the tests that go through every loss: a file each, named as its row.

``<loss>.py`` has the oracle, written from the paper (`tests.support.oracles` has what they share);
``RANDOM``, random calls against it, by name (`tests.support.draw`); and ``subjects(backend)``, if
it has losses of (B, N, D) features (`tests.support.subject`). tests/test_losses.py names a row
without a file, and what a file lacks.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

from fastkd._core.losses import LOSSES
from tests.support.subject import Subject

FILES = {
    loss.name: importlib.import_module(f"tests.losses.{loss.name}")
    for loss in LOSSES
    if Path(__file__).with_name(f"{loss.name}.py").exists()
}


def subjects(backend: str) -> Iterator[Subject]:
    for loss in LOSSES:
        kernels = loss.row_kernels if backend == "cpp" else loss.kernels
        if kernels or backend == "torch":
            for subject in getattr(FILES.get(loss.name), "subjects", lambda backend: ())(backend):
                function = subject.name.split()[0]
                # In C++ some of a file's functions have kernels, others none.
                if backend != "cpp" or function in kernels or function not in loss.compared:
                    yield subject
