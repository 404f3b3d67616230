"""pytest plugin that runs Triton's launches on CPU tensors as compiled code.

``-p tools.executed.plugin --capability 90``; the default is 80.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "0"
# Files of tests/kernels and tests/ptx that compile or execute by themselves, in `make tests`.
BY_THEMSELVES = {f"test_{name}.py" for name in ("compile", "counts", "instructions", "roots")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--capability", type=int, default=80, help="that kernels are compiled for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that start no kernel, and those that compile graphs of their own."""
    left_out = [item for item in items if not runs_kernels(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if runs_kernels(item)]


def runs_kernels(item: pytest.Item) -> bool:
    file, test = item.path.name, item.nodeid.partition("::")[2]
    in_kernels = {"kernels", "ptx"} & set(item.path.parts) and file not in BY_THEMSELVES
    return bool(in_kernels) or "triton" in test


@pytest.fixture(autouse=True, scope="session")
def _executed(request: pytest.FixtureRequest):
    from tools.executed import executing

    with executing(request.config.getoption("--capability")):
        yield
