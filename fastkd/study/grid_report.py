"""Report of a grid: a table of its scores, differences to the baseline, the paper's numbers."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastkd.study.grid import Cell, Grid
from fastkd.study.grid_runs import GridRuns
from fastkd.study.statistics import holm, paired_difference
from fastkd.train.saving import csv_text, write_file

FILES = ("report.md", "runs.csv")
Best = Mapping[tuple[str, str, int], Mapping[str, Any]]


def best_cells(runs: GridRuns) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Of each variant, task and seed the finished run with the best score on --eval."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in runs.grid.cells:
        result = runs.result(cell)
        if result is None or "failed" in result:
            continue
        at = (cell.variant, cell.task, cell.seed)
        name = next(iter(result["scores"]))
        sign = -1 if name in result["lower_is_better"] else 1
        before = found.get(at)
        if before is None or sign * result["scores"][name] > sign * before["scores"][name]:
            found[at] = result
    return found


def write(runs: GridRuns, out: Path) -> str:
    """Write the report of all finished runs; returns its page."""
    grid, best = runs.grid, best_cells(runs)
    missing = sum(runs.result(cell) is None for cell in grid.cells)
    searched = "the best cell on the evaluation rows, for each task and seed"
    lines = [
        f"# {grid.title}", "",
        f"{len(grid.cells)} runs of `fastkd distill`, {len(grid.seeds)} seeds; "
        f"{searched if grid.select == 'dev' else 'every cell'}; compared with {grid.baseline}.",
        *([f"{missing} runs are not finished."] if missing else []), "",
        *table(scores(grid, best)), "", *_differences(grid, best),
    ]  # fmt: skip
    if grid.paper is not None:
        rows = [[name, *map(str, values)] for name, values in grid.paper["rows"].items()]
        lines += [f"## {grid.paper['title']}", "", *table([["", *grid.paper["columns"]], *rows])]
    page = "\n".join(lines) + "\n"
    write_file(out / "report.md", page)
    write_file(out / "runs.csv", csv_text(_runs(runs, grid.cells)))
    return page


def scores(grid: Grid, best: Best) -> list[list[str]]:
    """Headings and rows: each metric of each task, mean ± standard deviation, and the mean.

    The mean is over tasks; a task with several metrics counts once, by their mean.
    """
    metrics: dict[str, list[str]] = {}
    for (_, task, _), result in best.items():
        kept = metrics.setdefault(task, [])
        kept += [name for name in result["scores"] if name not in kept]
    tasks = [task for task in grid.tasks if task in metrics]
    columns = [(task, metric) for task in tasks for metric in metrics[task]]
    rows = [["", *(f"{task} {metric}" for task, metric in columns), "mean over tasks"]]
    teachers = [("teacher", {t: _teacher(best, t) for t in tasks})] if tasks else []
    for name, of in [*teachers, *((v, _variant(best, v, tasks)) for v in grid.variants)]:
        cells = [_cell(of[task].get(metric, [])) for task, metric in columns]
        means = [
            statistics.fmean(statistics.fmean(x) for x in of[task].values())
            for task in tasks
            if of[task]
        ]
        whole = len(means) == len(tasks) and means
        rows.append([name, *cells, f"{statistics.fmean(means):.4f}" if whole else ""])
    return rows


def _variant(best: Best, variant: str, tasks: Iterable[str]) -> dict[str, dict[str, list[float]]]:
    """Scores over seeds, by task and metric."""
    found: dict[str, dict[str, list[float]]] = {task: {} for task in tasks}
    for (name, task, _), result in best.items():
        if name == variant:
            for metric, value in result["scores"].items():
                found[task].setdefault(metric, []).append(value)
    return found


def _teacher(best: Best, task: str) -> dict[str, list[float]]:
    results = [result for (_, of, _), result in best.items() if of == task]
    return {metric: [value] for metric, value in results[0]["teacher"].items()}


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _differences(grid: Grid, best: Best) -> Iterator[str]:
    """A table for each task: differences to the baseline paired by seed, corrected by Holm."""
    for task in grid.tasks:
        found = {}
        for variant in grid.variants:
            pairs = [
                (best[variant, task, seed], best[grid.baseline, task, seed])
                for seed in grid.seeds
                if (variant, task, seed) in best and (grid.baseline, task, seed) in best
            ]
            if pairs and variant != grid.baseline:
                metric = next(iter(pairs[0][0]["scores"]))
                gaps = [one["scores"][metric] - two["scores"][metric] for one, two in pairs]
                found[variant] = metric, len(pairs), paired_difference(gaps)
        if not found:
            continue
        corrected = holm([difference.p for *_, difference in found.values()])
        rows = [["", "metric", "seeds", "difference", "95% over seeds", "p (Holm)"]]
        for (variant, (metric, count, d)), p in zip(found.items(), corrected, strict=True):
            unknown = math.isnan(d.low)
            interval = "" if unknown else f"[{d.low:+.4f}, {d.high:+.4f}]"
            told = "" if math.isnan(p) else f"{p:.3g}"
            rows.append([variant, metric, str(count), f"{d.mean:+.4f}", interval, told])
        yield from (f"## {task}: differences to {grid.baseline}", "", *table(rows), "")


def table(rows: list[list[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    ruler = ["---", *["---:"] * (len(rows[0]) - 1)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:])]


def _runs(runs: GridRuns, cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    """Lines of runs.csv."""
    for cell in cells:
        result = runs.result(cell) or {}
        yield {
            "task": cell.task,
            "variant": cell.variant,
            "seed": cell.seed,
            "values": " ".join(f"{k.removeprefix('--set ')}={v}" for k, v in cell.values.items()),
            "failed": result.get("failed", ""),
            "seconds": result.get("seconds", ""),
            "best_epoch": result.get("best", ""),
            "scores": " ".join(f"{k}={v}" for k, v in result.get("scores", {}).items()),
        }


def plan(grid: Grid) -> list[list[str]]:
    """Headings and rows of the plan: what the runs of a variant on a task have in common."""
    skipped = ("seed", "out", "options")
    rows = [["variant", "task", "runs", "options", "searched"]]
    for variant in grid.variants:
        for task in grid.tasks:
            cells = [c for c in grid.cells if (c.variant, c.task) == (variant, task)]
            if not cells:
                continue
            first = {**cells[0].options, **cells[0].options.get("options", {})}
            axes: dict[str, list[Any]] = {}
            for cell in cells:
                for name, value in cell.values.items():
                    kept = axes.setdefault(name.removeprefix("--set "), [])
                    kept += [] if value in kept else [value]
            shown = {k: v for k, v in first.items() if k not in (*skipped, *axes)}
            options = " ".join(f"{k}={v}" for k, v in shown.items())
            searched = "; ".join(f"{k}: {', '.join(map(str, v))}" for k, v in axes.items())
            rows.append([variant, task, str(len(cells)), options, searched])
    return rows
