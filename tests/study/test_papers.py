"""The papers' tables: their own cells as our scores, and their averages."""

import functools
import json
from pathlib import Path

import pytest

from fastkd.study import grid, paper_table
from fastkd.study.grid import StudySettings
from fastkd.study.statistics import summarize
from fastkd.train.options import fits, read_options_file
from tests.support.tiny import make_teacher
from tests.train.tasks.test_two_tokenizers import byte_pairs

#: Printed averages that aren't those of the printed cells, and the right ones.
WRONG_AVERAGES = {
    ("fcd-1", "FCD, teacher=bert-base-uncased", 79.6): 79.69,
    ("lrkd-4", "teacher", 26.7): 26.64,
    ("lrkd-4", "RKL", 23.7): 23.64,
    ("lrkd-1", "ReAugKD", 81.8): None,  # has no cells for three of eight columns
}
TABLES = [
    name
    for name in grid.names_of_papers()
    if "paper" in read_options_file(grid.path_of(Path(f"paper:{name}")))
]


@functools.cache
def table(name, **options):
    """A paper's study, without its search: the tables are the same."""
    return grid.read(StudySettings(spec=Path(f"paper:{name}"), grid="first", **options))


def test_printed_averages_are_those_of_the_printed_cells():
    wrong, right = {}, 0
    for name in TABLES:
        paper = table(name).paper
        for number, spec in enumerate(paper["columns"].values()):
            for row, cells in paper["rows"].items() if isinstance(spec, list) else ():
                if not {*spec} <= paper["columns"].keys():
                    continue  # a mean of scores, which the paper doesn't print
                of_row = dict(zip(paper["columns"], cells, strict=True))
                mean, printed = paper_table.value_of(spec, {}, of_row.get), cells[number]
                if mean is not None and abs(mean - printed) <= 0.05 + 1e-9:
                    right += 1
                else:
                    wrong[name, row, printed] = mean and round(mean, 2)
    assert wrong == WRONG_AVERAGES and right > 40


def results_of(study, paper):
    """Results of all runs whose scores are the paper's cells."""
    found = {}
    for cell in study.cells:
        cells = paper["rows"].get(cell.variant)
        teacher = paper["rows"].get("teacher", cells)
        if cells is None:
            continue
        run = {"scores": {}, "teacher": {}, "lower_is_better": ["perplexity"], "percent": []}
        run |= {"references": [], "predictions": [0, 1], "classes": [], "rows": {}, "seconds": 1.0}
        for printed, of_teacher, spec in zip(
            cells, teacher, paper["columns"].values(), strict=True
        ):
            for each in [spec] if isinstance(spec, str) else spec:
                task, _, metric = each.partition(" ")
                if task != cell.task:
                    continue
                value, taught = (x if fits(x, float) else 50.0 for x in (printed, of_teacher))
                if factor := paper_table.FACTORS.get(metric):
                    run[metric] = value / factor
                else:
                    scale = 1 if metric == "perplexity" else 100
                    run["scores"][metric] = value / scale
                    run["teacher"][metric] = taught / scale
        run["scores"] = run["scores"] or {"accuracy": 0.5}
        found[cell.variant, cell.task, cell.seed] = run
    return found


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_own_cells_are_the_same_everywhere(name):
    study = table(name)
    paper = paper_table.rows_of(study.paper, study.variants, study.baseline, study.teacher)
    results = results_of(study, paper)
    found = paper_table.beside(study, summarize(study, results), results)
    for (row, *cells), printed in zip(found["rows"], paper["rows"].values(), strict=True):
        named = dict(zip(found["columns"][1:], cells, strict=True))
        assert [named[f"paper: {column}"] for column in paper["columns"]] == [*map(str, printed)]
        for column, cell in zip(paper["columns"], printed, strict=True):
            ours = named.get(f"ours: {column}")
            if row in study.variants and fits(cell, float) and ours is not None:
                assert float(ours.split()[0]) == pytest.approx(cell, abs=0.101)
    wrong = [line for line in found["order"] if "; here the same, " not in line]
    assert not wrong
    arms = sum(variant in paper["rows"] for variant in study.variants)
    assert len(found["order"]) >= arms - 1


@pytest.mark.parametrize(("name", "kind", "row", "cell"), [
    ("mc3kd-2", "bert", "MC3KD, student_layers=6", 44.12),
    ("mc3kd-3", "bert", "PKD", 16.72),
    ("mc3kd-6", "bert", "PKD 6 to 3", 53.07),  # no model of the table: that of the baseline
    ("mc3kd-9", "bert", "MC3KD", 23.71),
    ("fcd-1", "bert", "FCD", "66M"),
    ("fcd-1", "roberta", "FCD", "82M"),
    ("mc3kd-3", "large", "KD", 14.89),
])  # fmt: skip
def test_a_teacher_of_ones_own_stands_beside_the_paper(tmp_path, name, kind, row, cell):
    make = make_teacher if kind != "roberta" else lambda path: byte_pairs(path, 290, causal=False)
    path = make(tmp_path / "mine")
    if kind == "large":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 24}))
    study = table(name, teacher=str(path))
    paper = paper_table.rows_of(study.paper, study.variants, study.baseline, study.teacher)
    assert paper["rows"][row][0] == cell and study.baseline in paper["rows"]
    results = results_of(study, paper)
    found = paper_table.beside(study, summarize(study, results), results)
    (cells,) = (each for each in found["rows"] if each[0] == row)
    first = found["columns"].index(f"ours: {[*paper['columns']][-1]}")
    assert cells[first] and all("the same" in line for line in found["order"])
