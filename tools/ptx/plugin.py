"""pytest plugin, ``-p tools.ptx.plugin``: Triton's launches on CPU tensors run as compiled code.

``--capability`` chooses for which GPU, 80 by default.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--capability", type=int, default=80, help="that kernels are compiled for")


@pytest.fixture(autouse=True, scope="session")
def _executed(request: pytest.FixtureRequest):
    from tools.ptx import executing

    with executing(request.config.getoption("--capability")):
        yield
