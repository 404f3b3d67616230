"""Report of a study: pages, tables (CSV) and pictures of its result files."""

import base64
import dataclasses
import io
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.analysis.pictures import new_figure
from fastkd.study import paper_table
from fastkd.study.grid import ONE_STEP, Cell, Grid
from fastkd.study.grid_runs import GridRuns
from fastkd.study.statistics import (
    ABOVE,
    BELOW,
    BETTER,
    LEVEL,
    NO_DIFFERENCE,
    UNKNOWN,
    WORSE,
    Results,
    Row,
    Summary,
    empty_classes,
    summarize,
    with_deviation,
)
from fastkd.train.errors import InputError
from fastkd.train.saving import MANIFEST, csv_text, read_json, write_file, write_json

jinja2: Any = require("jinja2", "train")

#: Files of a report.
FILES = (
    "report.html",
    "report.md",
    "summary.csv",
    "runs.csv",
    "forest.png",
    "curves.png",
    "ics.png",
)
COLOURS = {BETTER: "#1a7f37", WORSE: "#b42318"}
#: Table cells that are coloured, with the name of their colour.
COLOURED_CELLS = {
    ABOVE: BETTER,
    BELOW: WORSE,
    f"{BELOW} ({BETTER})": BETTER,
    f"{ABOVE} ({WORSE})": WORSE,
}
#: Columns of a result table with their explanations.
HEADINGS = {
    "": "",
    "seeds": "completed runs",
    "score": "mean and standard deviation over seeds",
    "difference": "to the baseline, paired by seed",
    "95% over seeds": "t interval of the difference, uncorrected",
    "95% over rows": "bootstrap interval of the difference over test rows with one class each",
    "p (Holm)": "paired t test, corrected for the comparisons of this table",
    "beyond noise": "p below 0.05, and an interval over rows without 0",
    "gap recovered": "fraction of the difference between baseline and teacher",
    "seconds": "training time",
    "MiB": "peak memory above the memory in use before the run",
    "RCCC": "canonical correlation of layers on held-out rows (MC3KD, 3.2)",
    "M_ICS": "intra-class similarity of the last layer (intra-class KNN, 2)",
}
#: Columns that are shown in studies with one of these methods only.
OF_METHODS = {"RCCC": "mc3kd", "M_ICS": "knn"}

#: Columns of runs.csv between a run's name and its scores.
RUN_COLUMNS = ("failed", "best", "seconds", "peak_bytes", "rccc", "intra_class_similarity")

#: Kind and content of a block: heading or paragraph (text), "table" (headings, rows), "list"
#: (lines) or "picture" (title, bytes in base64).
Block = tuple[str, Any]

#: Table cells as text: headings first.
Table = list[list[str]]

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def claim(out: Path) -> None:
    """Record in the manifest of ``out`` that fastkd writes the report's files.

    Raises:
        InputError: a file of the report exists that fastkd did not write.
    """
    manifest = read_json(out / MANIFEST)
    others = (MANIFEST,) if (out / MANIFEST).exists() and "study" not in manifest else FILES
    for name in others:
        if (out / name).exists() and name not in manifest.get("study", ()):
            raise InputError(
                f"--out {out} holds {name}, which `fastkd study` did not write; move it away, or "
                "give another --out"
            )
    write_json(out / MANIFEST, {"study": FILES})


def best_cells(runs: GridRuns) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Of each variant, task and seed the finished run with the best score on --eval.

    If all of them failed, the first.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for cell in runs.grid.cells:
        result = runs.result(cell)
        at = (cell.variant, cell.task, cell.seed)
        before = found.get(at)
        if result is None or ("failed" in result and before is not None):
            continue
        if before is None or "failed" in before or score_of(result) > score_of(before):
            found[at] = result
    return found


def score_of(result: Mapping[str, Any]) -> float:
    """The first metric; more is better."""
    name, value = next(iter(result["scores"].items()))
    return -value if name in result["lower_is_better"] else value


def write(runs: GridRuns, out: Path) -> list[Summary]:
    """Write the report of all finished runs into ``out``; returns its result tables."""
    grid, best = runs.grid, best_cells(runs)
    summaries = summarize(grid, best)
    pictures = []
    for name, title, draw in (
        ("forest", "Difference to the baseline", _forest),
        ("curves", "Learning curves", _curves),
        ("ics", "M_ICS at each evaluation", _similarity_curves),
    ):
        if summaries and (name != "ics" or any(map(_similarities, best.values()))):
            content = draw(grid, summaries, best)
            write_file(out / f"{name}.png", content)
            pictures.append((title, base64.b64encode(content).decode()))
    missing = sum(not runs.done(cell) for cell in grid.cells)
    blocks = list(_blocks(grid, summaries, best, missing, pictures))
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    html = page.render(
        title=grid.title, blocks=blocks, colours=COLOURS, coloured_cells=COLOURED_CELLS,
        explanations=HEADINGS,
    )  # fmt: skip
    write_file(out / "report.html", html)
    write_file(out / "report.md", _markdown(blocks))
    write_file(out / "summary.csv", _csv(flat(row) for s in summaries for row in s.rows))
    write_file(out / "runs.csv", _csv(_flat_run(runs, cell) for cell in grid.cells))
    return summaries


def _overview(grid: Grid, missing: int) -> str:
    """Sentence on variants, runs and baseline."""
    searched = "the best cell on the evaluation rows, for each task and seed"
    parts = [
        f"{len(grid.cells)} runs of `fastkd distill`: {len(grid.variants)} variants, "
        f"{len(grid.seeds)} seeds; {searched if grid.select == 'dev' else 'every cell'}; compared "
        f"with {grid.baseline}."
    ]
    if grid.seconds is not None:
        parts.append(f"Each run has the steps that take {grid.seconds:g} seconds.")
    if grid.cache:
        parts.append("Seconds exclude the teacher's forward pass, where its outputs are cached.")
    parts += grid.notes
    if missing:
        parts.append(f"{missing} runs are not finished; their cells are empty or have fewer seeds.")
    return " ".join(parts)


def headline(grid: Grid, summaries: list[Summary]) -> str:
    """The sentence that opens a report: what exceeds noise, or that nothing does."""
    seeds = max((row.seeds for summary in summaries for row in summary.rows), default=0)
    tasks: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        for row in summary.rows:
            if row.quality:
                tasks.setdefault((row.quality, row.variant), []).append(row.task)
    variants: dict[tuple[str, str], list[str]] = {}
    for (quality, variant), names in tasks.items():
        variants.setdefault((quality, ", ".join(names)), []).append(variant)
    few = {0: "No run is finished.", 1: "Nothing can be told with one seed.",
           2: "Nothing can be told with two seeds."}  # fmt: skip
    if not tasks:
        return few.get(seeds, f"Nothing exceeds noise with {seeds} seeds.")
    text = "; ".join(
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {quality} than {grid.baseline} "
        f"on {where}"
        for (quality, where), names in variants.items()
    )
    return f"{'Two seeds tell little. ' if seeds == 2 else ''}Beyond noise: {text}."


def findings(summary: Summary) -> str:
    """Sentences on a table: teacher, rows, failed runs, and warnings.

    The warnings are of classes without rows, a teacher at chance, and constant students.
    """
    example, count = summary.example, summary.example["rows"]
    found = [
        f"Teacher: {_metric(summary)} {summary.teacher_score:.4f}; {count.get('train', 0)} "
        f"training rows with labels, {count['eval']} held out."
    ]
    for what, names in empty_classes(example).items():
        if names:
            found.append(f"Classes without {what} rows: {', '.join(names)}.")
    labelled = example["options"].get("labelled")
    if labelled is not None and labelled < len(example["classes"]):
        found.append(f"{labelled} labels are fewer than the classes.")
    if why := example["warnings"].get("teacher"):
        found.append(f"The teacher's answers {why}.")
    if constant := [row.variant for row in summary.rows if row.constant]:
        found.append(f"Students with the same prediction for every row: {', '.join(constant)}.")
    if failed := sum(row.failed for row in summary.rows):
        found.append(f"Failed runs: {failed}, left out of the means; runs.csv has the reasons.")
    if {row.verdict for row in summary.rows if row.difference is not None} <= {UNKNOWN}:
        found.append("No verdicts yet: no variant has two seeds in common with the baseline.")
    return " ".join(found)


def _metric(summary: Summary) -> str:
    return f"{summary.metric}{' (lower is better)' if summary.lower_is_better else ''}"


def cells(row: Row) -> list[str]:
    """Cells of a table row as text; undefined values are empty."""
    d, recovered, rows = row.difference, row.recovered, row.rows_interval
    return [
        row.variant
        + (f" ({row.failed} failed)" if row.failed else "")
        + (f" (one prediction for all rows: {row.constant} seeds)" if row.constant else ""),
        str(row.seeds),
        _number(row.mean, ".4f") + (f" ± {row.std:.4f}" if row.seeds > 1 else ""),
        "" if d is None else _number(d.mean, "+.4f"),
        "" if d is None else _interval(d.low, d.high),
        "" if rows is None else _interval(*rows),
        _number(row.p_holm, ".3g"),
        row.verdict + (f" ({row.quality})" if row.quality and row.lower_is_better else ""),
        ""
        if recovered is None
        else f"{recovered.mean:.0%} {_interval(recovered.low, recovered.high, '.0%')}",
        _number(row.seconds, ".1f"),
        _number(None if row.peak_bytes is None else row.peak_bytes / 2**20, ".0f"),
        _number(row.rccc, ".3f"),
        _number(row.intra_class_similarity, ".3f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def _interval(low: float, high: float, form: str = "+.4f") -> str:
    return "" if math.isnan(low) else f"[{low:{form}}, {high:{form}}]"


def machines(found: Results) -> list[str]:
    """Machines, versions and commits of the runs, with their number of runs."""
    counts: dict[str, int] = {}
    for about in (run["machine"] for run in found.values() if "failed" not in run):
        computer, versions = about["machine"], about["versions"]
        name = computer.get("gpu") or computer["cpu"]
        line = (
            f"{name}, {computer['threads']} threads, torch {versions.get('torch')}, "
            f"transformers {versions.get('transformers')}, commit {about['commit']}"
        )
        counts[line] = counts.get(line, 0) + 1
    return [f"{line}: {number} runs" for line, number in sorted(counts.items())]


def scores(grid: Grid, best: Results) -> Table:
    """Headings and rows: each metric of each task, mean ± standard deviation, and the mean.

    The mean is over tasks; a task counts once, by the mean of its metrics (`averaged`).
    """
    good = {at: result for at, result in best.items() if "failed" not in result}
    metrics: dict[str, list[str]] = {}
    counted: dict[str, set[str]] = {}
    for (_, task, _), result in good.items():
        kept = metrics.setdefault(task, [])
        kept += [name for name in result["scores"] if name not in kept]
        counted[task] = {*averaged(result)}
    tasks = [task for task in grid.tasks if task in metrics]
    columns = [(task, metric) for task in tasks for metric in metrics[task]]
    rows = [["", *(f"{task} {metric}" for task, metric in columns), "mean over tasks"]]
    named = [(variant, "scores") for variant in grid.variants]
    for name, field in [("teacher", "teacher"), *named]:
        of: dict[str, dict[str, list[float]]] = {task: {} for task in tasks}
        for (variant, task, _), result in good.items():
            if name in ("teacher", variant):
                for metric, value in result[field].items():
                    of[task].setdefault(metric, []).append(value)
        means = [
            statistics.fmean(x)
            for task in tasks
            if (x := [statistics.fmean(v) for k, v in of[task].items() if k in counted[task]])
        ]
        whole = len(means) == len(tasks) and means
        each = (of[task].get(metric, []) for task, metric in columns)
        cells = [with_deviation(values, deviation=name != "teacher") for values in each]
        rows.append([name, *cells, f"{statistics.fmean(means):.4f}" if whole else ""])
    return rows


def averaged(result: Mapping[str, Any]) -> list[str]:
    """Metrics of a task's mean: of several test files, else all; those to minimise only alone."""
    names, lower = [*result["scores"]], result["lower_is_better"]
    names = [name for name in names if (name in lower) == (names[0] in lower)]
    return [x for x in names if x.endswith(tuple(result.get("tests", ())))] or names


def _blocks(
    grid: Grid, summaries: list[Summary], best: Results, missing: int, pictures: list
) -> Iterator[Block]:
    """Blocks of the page, from top to bottom."""
    ours, methods = scores(grid, best), {cell.options.get("method") for cell in grid.cells}
    kept = [i for i, name in enumerate(HEADINGS) if OF_METHODS.get(name) in {None, *methods}]
    headings = [[*HEADINGS][i] for i in kept]
    top: list[Block] = [("h1", grid.title), ("p", headline(grid, summaries))]
    drawn: list[Block] = [("picture", picture) for picture in pictures]
    yield from (*top, ("table", (ours[0], ours[1:])), *drawn[:1])
    yield "p", _overview(grid, missing)
    for summary in summaries:
        yield from (("h2", summary.task), ("p", findings(summary)))
        rows = [cells(row) for row in summary.rows]
        yield "table", (headings, [[row[i] for i in kept] for row in rows])
    yield "h2", "Columns of the tables"
    yield "list", [f"{name}: {HEADINGS[name]}" for name in headings if name]
    yield from drawn[1:]
    if paper := paper_table.beside(grid, summaries, best):
        yield from (("h2", paper["title"]), ("table", (paper["columns"], paper["rows"])))
        yield "list", paper["order"]
    yield from (("h2", "Machines and versions"), ("list", machines(best)))


def _markdown(blocks: Iterable[Block]) -> str:
    """The page in Markdown, without pictures."""
    found = []
    for kind, content in blocks:
        if kind == "table":
            content = "\n".join(table([content[0], *content[1]]))
        elif kind == "list":
            content = "\n".join(f"- {line}" for line in content)
        if kind != "picture":
            found.append({"h1": "# ", "h2": "## "}.get(kind, "") + content)
    return "\n\n".join(found) + "\n"


def table(rows: list[list[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    ruler = ["---", *["---:"] * (len(rows[0]) - 1)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:])]


def flat(row: Row) -> dict[str, Any]:
    """One line of summary.csv, by column."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name in ("difference", "recovered"):
            columns = dataclasses.asdict(value or NO_DIFFERENCE)
            found.update({f"{field.name}_{k}": v for k, v in columns.items()})
        elif field.name == "rows_interval":
            low, high = value or (math.nan, math.nan)
            found.update({"rows_low": low, "rows_high": high})
        else:
            found[field.name] = value
    return found


def _flat_run(runs: GridRuns, cell: Cell) -> dict[str, Any]:
    """One line of runs.csv, by column."""
    result = runs.result(cell) or {}
    named = {name: getattr(cell, name) for name in ("task", "variant", "seed")}
    values = " ".join(f"{k.removeprefix('--set ')}={v}" for k, v in cell.values.items())
    return {
        **named,
        "values": values,
        **{name: result.get(name, "") for name in RUN_COLUMNS},
        **result.get("scores", {}),
    }


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV; a NaN is an empty cell."""
    return csv_text(
        {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        for row in rows
    )


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=130, format="png")
    return content.getvalue()


def _forest(grid: Grid, summaries: list[Summary], found: Results) -> bytes:
    """Forest plot: differences with their intervals over seeds, coloured if beyond noise."""
    most = max(len(summary.rows) for summary in summaries)
    figure = new_figure(1.5 + 4.2 * len(summaries), 1.2 + 0.32 * most)
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    for ax, summary in zip(axes, summaries, strict=True):
        rows = [row for row in summary.rows if row.difference is not None]
        reverse = summary.lower_is_better
        scale = 1 if reverse or summary.percent else 100  # fractions in points
        rows.sort(key=lambda row: row.difference.mean, reverse=reverse)  # type: ignore[union-attr]
        for i, row in enumerate(rows):
            d, colour = row.difference, COLOURS.get(row.quality, "#777777")
            assert d is not None
            if not math.isnan(d.low):
                ax.plot([scale * d.low, scale * d.high], [i, i], color=colour, linewidth=2)
            face = "white" if d.rounded else colour
            ax.plot(scale * d.mean, i, "o", color=colour, markerfacecolor=face)
        ax.axvline(0, color="black", linewidth=0.8)
        base = next((r.mean for r in summary.rows if r.variant == grid.baseline), math.nan)
        ax.axvline(scale * (summary.teacher_score - base), color="black", linestyle=":")
        ax.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=8)
        unit = "" if reverse else "points of "
        ax.set_xlabel(f"{unit}{_metric(summary)} above {grid.baseline}", fontsize=8)
        ax.set_title(f"{summary.task} (dotted: teacher)", fontsize=9)
        ax.tick_params(labelsize=8)
    title = f"{LEVEL:.0%} intervals over seeds; coloured: beyond noise"
    if any(row.difference and row.difference.rounded for s in summaries for row in s.rows):
        title += "\nhollow: all seeds agree; the bar is the rounding of scores to one row"
    figure.suptitle(title, fontsize=9)
    return _png(figure)


def _widen(lines: list[Any]) -> None:
    """Widen each line that coincides with later lines, so that it shows behind them."""
    points = [{*zip(*line.get_data(), strict=True)} for line in lines]
    for i, line in enumerate(lines):
        above = sum(len(points[i] & later) > 1 for later in points[i + 1 :])
        line.set_linewidth(line.get_linewidth() + 2.5 * above)


def _similarities(run: Mapping[str, Any]) -> list[float]:
    """M_ICS at each evaluation of a run; empty if it was not measured."""
    values = [entry.get("intra_class_similarity") for entry in run.get("history", [])]
    return [] if None in values else values


def _similarity_curves(grid: Grid, summaries: list[Summary], found: Results) -> bytes:
    """M_ICS at every evaluation, as `_curves` (intra-class KNN, Figure 2)."""
    return _curves(grid, summaries, found, lambda run, _: _similarities(run), "M_ICS")


def _scores(run: Mapping[str, Any], metric: str) -> list[float]:
    return [entry["scores"][metric] for entry in run["history"]]


def _curves(
    grid: Grid,
    summaries: list[Summary],
    found: Results,
    read: Callable[[Mapping[str, Any], str], list[float]] = _scores,
    name: str = "",
) -> bytes:
    """Learning curves: mean score over seeds at every evaluation, by the fraction of steps done."""
    order = grid.variants
    figure = new_figure(2.5 + 4.2 * len(summaries), 4.5)
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    for ax, summary in zip(axes, summaries, strict=True):
        if not name:
            ax.axhline(summary.teacher_score, color="black", linewidth=1, label="teacher")
        for row in summary.rows:
            runs = [
                run
                for (variant, task, _), run in found.items()
                if (task, variant) == (summary.task, row.variant) and "failed" not in run
                if read(run, summary.metric)
            ]
            if not runs:
                continue
            steps = [[entry["step"] for entry in run["history"]] for run in runs]
            done = [[step / each[-1] for step in each] for each in steps]
            scores = [
                np.interp(done[0], fractions, read(run, summary.metric))
                for fractions, run in zip(done, runs, strict=True)
            ]
            i = order.index(row.variant)
            style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "marker": "."}
            ax.plot(done[0], np.mean(scores, 0), label=row.variant, **style)
        _widen(ax.lines)
        ax.set_xlabel("fraction of the steps")
        ax.set_title(f"{summary.task}: {name or _metric(summary)}", fontsize=9)
        ax.tick_params(labelsize=8)
    drawn = {line.get_label(): line for ax in axes for line in ax.lines}
    drawn = {name: drawn[name] for name in ("teacher", *order) if name in drawn}
    figure.legend(drawn.values(), drawn, loc="outside right upper", fontsize=7)
    return _png(figure)


def _option(value: Any) -> str:
    if value == ONE_STEP:
        return "one step"
    if isinstance(value, dict):  # stages, or sizes of a student
        return "+".join(k if isinstance(v, dict) else f"{k}:{v}" for k, v in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def plan(grid: Grid) -> Table:
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
            options = " ".join(f"{k}={_option(v)}" for k, v in shown.items())
            searched = "; ".join(f"{k}: {', '.join(map(str, v))}" for k, v in axes.items())
            rows.append([variant, task, str(len(cells)), options, searched])
    return rows
