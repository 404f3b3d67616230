"""A paper's table beside the scores of a study.

``paper`` of a study's file has a ``title``, ``columns`` and ``rows``. A row shows the variant of
its name, the ``teacher``, or a quotation. A column names a score here, ``"mrpc f1"``, or a
measurement (`FACTORS`); a list is the mean of columns or scores, and "" has no score here.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fastkd.study.grid import Grid
from fastkd.study.statistics import (
    ABOVE,
    ALIKE,
    BELOW,
    COUNTED,
    Results,
    Summary,
    holm,
    paired_difference,
    verdict,
    with_deviation,
)
from fastkd.train.options import fits

TEACHER = "teacher"
#: Factors of measurements, in the papers' units; scores are fractions.
FACTORS = {
    "rccc": 100.0, "intra_class_similarity": 100.0, "parameters": 1e-6, "seconds": 1.0,
    "seconds_a_batch": 1.0, "speedup": 1.0,
}  # fmt: skip
#: Measurements of both models' speed, which take time.
TIMED = ("seconds_a_batch", "speedup")


def value_of(column: Any, columns: Mapping[str, Any], read: Callable[[str], Any]) -> float | None:
    """Value of a column: ``read`` of a score, or the mean of a list; None if a part is missing."""
    if isinstance(column, list):
        parts = [value_of(columns.get(part, part), columns, read) for part in column]
        return None if None in parts else statistics.fmean(x for x in parts if x is not None)
    found = read(column) if column else None
    return found if fits(found, float) else None


def values_of(grid: Grid, results: Results, row: str, column: Any) -> dict[int, float]:
    """Values of a column by seed: of a variant, or of the teacher of all or some variants.

    ``results`` are by variant, task and seed.
    """
    name, _, part = row.partition(", ")
    who = TEACHER if name == TEACHER else "student"
    named = [v for v in grid.variants if not part or part in v.split(", ")]
    variants = named[:1] if who == TEACHER else [row]
    columns = {} if grid.paper is None else grid.paper["columns"]
    found = {}
    for seed in grid.seeds:
        by_task = {t: results.get((v, t, seed), {}) for v in variants for t in grid.tasks}
        done = {task: run for task, run in by_task.items() if "scores" in run}
        value = value_of(column, columns, functools.partial(_score, done, who))
        if value is not None:
            found[seed] = value
    return found


def _score(results: Mapping[str, Any], who: str, spec: str) -> float | None:
    """The score ``"task metric"``, or a measurement, of a run."""
    task, _, metric = spec.partition(" ")
    run = results.get(task, {})
    scores = run.get("scores" if who == "student" else TEACHER, {})
    if metric in scores:
        unscaled = metric in (*run["lower_is_better"], *run["percent"])
        return scores[metric] * (1 if unscaled else 100)
    found = run.get(metric) if metric in FACTORS else None
    found = found.get(who) if isinstance(found, Mapping) else found if who == "student" else None
    return None if found is None else found * FACTORS[metric]


def beside(grid: Grid, summaries: Sequence[Summary], results: Results) -> dict[str, Any] | None:
    """The paper's table with our scores, and sentences on each score's side of the baseline."""
    if grid.paper is None:
        return None
    paper = rows_of(grid.paper, grid.variants, grid.baseline, grid.teacher)
    grid = dataclasses.replace(grid, paper=paper)
    headings = [""]
    for name, spec in paper["columns"].items():
        headings += [f"paper: {name}", f"ours: {name}"] if spec else [f"paper: {name}"]
    table = []
    for row, printed in paper["rows"].items():
        cells = [row]
        for cell, spec in zip(printed, paper["columns"].values(), strict=True):
            cells.append(str(cell))
            if spec:
                values = values_of(grid, results, row, spec).values()
                cells.append(with_deviation([*values], ".2f"))
        table.append(cells)
    order = [x for name in paper["columns"] for x in _sentences(grid, results, summaries, name)]
    return {"title": paper["title"], "columns": headings, "rows": table, "order": order}


def _sentences(grid: Grid, results: Results, summaries: Sequence[Summary], name: str) -> list[str]:
    """For each variant: its side of the baseline in a column of the paper, and here."""
    paper = grid.paper
    assert paper is not None
    number, spec = [*paper["columns"]].index(name), paper["columns"][name]
    cells = {row: printed[number] for row, printed in paper["rows"].items()}
    cells = {row: cell for row, cell in cells.items() if spec and fits(cell, float)}
    differences, bases = {}, {variant: _base(grid, variant) for variant in grid.variants}
    for variant, base in bases.items():
        one, other = (values_of(grid, results, x, spec) for x in (variant, base))
        shared = sorted(one.keys() & other.keys())
        if variant != base and {variant, base} <= cells.keys() and shared:
            gaps = [one[seed] - other[seed] for seed in shared]
            differences[variant] = paired_difference(gaps, _step(results, spec))
    corrected = holm([found.p for found in differences.values()])
    lines = []
    for (variant, found), p in zip(differences.items(), corrected, strict=True):
        base, here = bases[variant], verdict(found, p, None)
        for row in (row for summary in summaries for row in summary.rows):
            # The verdict of the table resamples the rows too.
            if (row.variant, f"{row.task} {row.metric}", base) == (variant, spec, grid.baseline):
                here = row.verdict
        gap = round(cells[variant] - cells[base], 2)
        side = ABOVE if gap > 0 else BELOW if gap else "level with"
        if here in (ABOVE, BELOW):
            same = "the same" if here == side else "the opposite" if gap else "not"
            here = f"{same}, beyond noise"
        elif (here, gap) == (ALIKE, 0):
            here = f"the same, {ALIKE}"
        lines.append(
            f"{name}: {variant} is {side} {base} in the paper ({gap:+g}); here {here} "
            f"({found.mean:+.2f})"
        )
    return lines


def _base(grid: Grid, variant: str) -> str:
    """The baseline with the variant's values of lists, such as its teacher; else the study's."""
    _, *parts = variant.split(", ")
    near = ", ".join([grid.baseline.split(", ")[0], *parts])
    return near if near in grid.variants and near != variant else grid.baseline


def _step(results: Results, spec: Any) -> float:
    """Change of a score by one row, if it counts rows."""
    if isinstance(spec, list):
        return 0.0
    task, _, metric = spec.partition(" ")
    runs = (run for (_, at, _), run in results.items() if at == task and "scores" in run)
    rows = len(next(runs, {}).get("references", ()))
    return 100 / rows if rows and metric.removesuffix("_mm") in COUNTED else 0.0


def rows_of(
    paper: Mapping[str, Any], variants: Sequence[str], baseline: str, teacher: str | None
) -> Mapping[str, Any]:
    """``paper`` with its rows under the names of this study's variants.

    A row's name has ``option=value`` for each list of the table's file. An option that no variant
    names is left out: of its values the one of the ``teacher`` counts, or of the ``baseline``.
    """
    named = {_option(part) for variant in variants for part in variant.split(", ")[1:]}
    split = {row: row.split(", ") for row in paper["rows"]}
    wanted: dict[str, str] = {}
    for parts in [baseline.split(", "), *split.values()]:
        for part in parts[1:]:
            wanted.setdefault(_option(part), part)
    taught = [part for parts in split.values() for part in parts[1:] if _option(part) == TEACHER]
    if teacher is not None and taught:
        names = [part.partition("=")[2] for part in dict.fromkeys(taught)]
        wanted[TEACHER] = f"{TEACHER}={_like(teacher, names) or names[0]}"
    rows = {}
    for row, parts in split.items():
        lost = [part for part in parts[1:] if _option(part) not in named]
        if all(wanted[_option(part)] == part for part in lost):
            rows[", ".join(part for part in parts if part not in lost)] = paper["rows"][row]
    return {**paper, "rows": rows}


def _option(part: str) -> str:
    return part.partition("=")[0]


def _like(teacher: str, names: Sequence[str]) -> str | None:
    """The model of the paper that a teacher is: that of its name, or of its kind and size."""
    local = Path(teacher).expanduser()
    if local.name in names or not (local / "config.json").is_file():
        return local.name if local.name in names else None
    config = AutoConfig.from_pretrained(local).get_text_config()
    deep = getattr(config, "num_hidden_layers", 0) > 12
    found = [name for name in names if name.split("-")[0] == config.model_type]
    sized = [name for name in found if deep == ("large" in name or "medium" in name)]
    return next(iter(sized or found), None)
