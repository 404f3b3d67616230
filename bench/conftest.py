"""Options of the pytest-benchmark suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest bench --bench-set bert``."""
    parser.addoption("--bench-set", default=None, help="size set; cpu or bert by device")
