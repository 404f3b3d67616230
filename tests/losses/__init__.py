"""Tables of each loss for the tests of all losses, one file for each row of the registry.

====================  =============================================  =======================
an oracle             the paper's equation in float64, sharing no    ``RANDOM``, and the
                      code with the loss (`tests.support.oracles`)   loss's own test file
``RANDOM``            by name, a random call of each public name     tests/fuzz.py,
                      against the oracle (`tests.support.draw`)      tests/test_fuzz.py
``subjects``          each as a loss of (B, N, D) features, if it    tests/test_promises.py
                      has such (`tests.support.subject`)
``calls``             in tools/calls/<loss>.py, as tools that are    tests/test_dry_cuda.py,
                      no tests walk them: every word and choice      tools/compile_report.py
====================  =============================================  =======================

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
