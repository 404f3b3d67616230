"""fastkd's losses of draft models and on-policy students equal other packages' formulas."""

import dataclasses

import pytest
import torch

from bench import other_packages

ROWS = other_packages.rows()
NAMES = [f"{row.package} {i}" for i, row in enumerate(ROWS)]
SIZES = {"rows": 16, "D": 6, "V": 40, "device": torch.device("cpu")}


def value_and_grads(row, function, dtype):
    inputs = row.make(dtype=dtype, **SIZES)
    leaves = [x for x in inputs.values() if x.requires_grad]
    loss = function(**inputs)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_equal_in_float64(row):
    ours, theirs = (value_and_grads(row, x, torch.float64) for x in (row.fastkd, row.formula))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_table_has_a_line_for_each_row(monkeypatch):
    small = dataclasses.replace(ROWS[0].case, sizes={"rows": 8, "D": 4, "V": 12}, check_sizes={})
    monkeypatch.setattr(other_packages.Row, "case", small)
    found = other_packages.measured(small, seconds=0.0)
    machine = {"cpu": "a processor", "threads": 1}
    where = {"machine": machine, "versions": {"torch": "2"}, "commit": "abc"}
    result = {"where": where, "rows": {small.title: found}}
    lines = other_packages.table(result).splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(ROWS)
    assert all(found[name]["ms"] > 0 for name in ("reference", "fastkd"))
