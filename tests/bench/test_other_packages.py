"""fastkd's losses of draft models and on-policy students equal other packages' formulas."""

import dataclasses

import pytest
import torch

from bench import draft_options, other_packages

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


def test_every_option_is_measured_beside_the_call_without_it():
    sizes, found = {"rows": 8, "D": 6, "V": 40, "K": 4}, {}
    for group in draft_options.groups():
        case = group.case
        small = {name: sizes[name] for name in case.sizes}
        case = dataclasses.replace(case, sizes=small)
        found[group.title] = other_packages.measured(case, seconds=0.0, least=1)
        assert found[group.title]["reference"]["ratio"]["median"] == 1
        if "a teacher row" in group.title:  # two ways to one value
            inputs = group.make(device=SIZES["device"], dtype=case.dtype, **small)
            losses = [provider.bind(inputs).forward() for provider in case.providers]
            torch.testing.assert_close(*losses)
    lines = other_packages.table_of_options({"options": found}).splitlines()
    assert len(lines) == 2 + sum(len(group.options) for group in draft_options.groups())
