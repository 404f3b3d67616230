"""Rows of the tests of all losses, one file for each row of the registry: tests/README.md.

====================  ============================================  =======================
an oracle             the paper's equation in float64, sharing no   ``RANDOM``
                      code with the loss (`tests.support.oracles`)
``RANDOM``            by name, a random call of each public name    test_values, fuzz
                      against the oracle (`tests.support.draw`)
``subjects``          each as a loss of (B, N, D) features, if it   test_layouts, _edges,
                      has such (`tests.support.subject`)            _errors, _derivatives,
                                                                    _compile, _processes
``examples``          calls that the paper or a hand computed       test_values
``edges``             degenerate inputs, their value and gradient   test_edges
``bad``               wrong calls, each after its sentence          test_errors
``growing``           calls whose sizes change, for the compiler    test_compile
``calls``             in tools/calls.py, as tools walk them         test_dry_cuda
====================  ============================================  =======================

tests/test_registry.py names a row without a file, and what a file lacks.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

from fastkd._core.registry import LOSSES
from tests.support.subject import Subject

FILES = {
    loss.name: importlib.import_module(f"tests.losses.{loss.name}")
    for loss in LOSSES
    if Path(__file__).with_name(f"{loss.name}.py").exists()
}


def subjects(backend: str) -> Iterator[Subject]:
    """Subjects of a backend. Kernels have one of each Module, whose pooling is PyTorch's."""
    modules: set[str] = set()
    for loss in LOSSES:
        kernels = loss.cpp if backend == "cpp" else loss.triton
        if kernels or backend == "torch":
            for subject in getattr(FILES.get(loss.name), "subjects", lambda backend: ())(backend):
                function = subject.name.split()[0]
                if backend != "torch" and function[0].isupper():
                    if function in modules:
                        continue
                    modules.add(function)
                # Some functions of a file have no C++ kernels.
                if backend != "cpp" or function in kernels or function not in loss.with_reference:
                    yield subject
