"""pytest plugin: a JSON line for every test as soon as it ends, and none twice.

FASTKD_RESULT_LINES names the file. Tests that it lists as passed are left out.
"""

import json
import os
from pathlib import Path

import pytest

FILE = Path(os.environ.get("FASTKD_RESULT_LINES", os.devnull))
LINES = FILE.read_text().splitlines() if FILE.exists() else []
# xdist's workers start while lines are added, and must leave out the same tests.
if "FASTKD_RESULT_LINES" in os.environ:
    os.environ.setdefault("FASTKD_RESULT_LINES_BEFORE", str(len(LINES)))
BEFORE = int(os.environ.get("FASTKD_RESULT_LINES_BEFORE", "0"))
ROWS = [json.loads(line) for line in LINES[:BEFORE]]
PASSED = {row["name"] for row in ROWS} - {row["name"] for row in ROWS if row["problem"]}


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to the process that leads
        config.pluginmanager.register(Lines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.nodeid not in PASSED]


class Lines:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            problem = report.longreprtext[-2000:] if report.failed else ""
            with FILE.open("a") as file:
                print(json.dumps({"name": report.nodeid, "problem": problem}), file=file)
