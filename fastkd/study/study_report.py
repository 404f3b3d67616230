"""Report of a study, from its JSON files: pages, tables (CSV) and pictures."""

import base64
import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.analysis.pictures import new_figure
from fastkd.study.spec import STUDENTS, Study
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
    at_chance,
    classes_of,
    empty_classes,
    quality,
    summarize,
)
from fastkd.study.study_runs import StudyRuns
from fastkd.train.errors import InputError
from fastkd.train.saving import MANIFEST, csv_text, read_json, read_manifest, write_file, write_json

jinja2: Any = require("jinja2", "train")

#: Files of a report.
FILES = ("report.html", "report.md", "summary.csv", "runs.csv", "forest.png", "curves.png")
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
    "score": "mean and standard deviation over seeds, after the last step",
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

#: Columns of runs.csv between a run's name and its scores.
RUN_COLUMNS = ("failed", "steps", "seconds", "peak_bytes", "rccc", "intra_class_similarity")

#: Kind and content of a block: heading or paragraph (text), "table" (headings, rows), "list"
#: (lines) or "picture" (title, bytes in base64).
Block = tuple[str, Any]

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def claim(out: Path) -> None:
    """Record in the manifest of ``out`` that fastkd writes the report's files.

    Raises:
        InputError: a file of the report exists that fastkd did not write.
    """
    manifest = read_manifest(out) or {}
    others = (MANIFEST,) if (out / MANIFEST).exists() and "study" not in manifest else FILES
    for name in others:
        if (out / name).exists() and name not in manifest.get("study", ()):
            raise InputError(
                f"--out {out} holds {name}, which `fastkd study` did not write; move it away, or "
                "give another --out"
            )
    write_json(out / MANIFEST, {"study": FILES})


def write(runs: StudyRuns, out: Path) -> list[Summary]:
    """Write the report of all finished runs into ``out``; returns its result tables."""
    study, found = runs.study, runs.results()
    teachers = {name: read_json(task.folder / MANIFEST) for name, task in runs.tasks.items()}
    summaries = summarize(study, found, {k: v for k, v in teachers.items() if v})
    missing = len(runs.jobs) - len(found)
    pictures = []
    for name, title, draw in (
        ("forest", "Difference to the baseline", _forest),
        ("curves", "Learning curves", _curves),
    ):
        if summaries:
            content = draw(study, summaries, found)
            write_file(out / f"{name}.png", content)
            pictures.append((title, base64.b64encode(content).decode()))
    overview = _overview(study, missing, all(task.caches for task in runs.tasks.values()))
    blocks = list(_blocks(study, summaries, overview, pictures, machines(found)))
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    html = page.render(
        title=study.title, blocks=blocks, colours=COLOURS, coloured_cells=COLOURED_CELLS,
        explanations=HEADINGS,
    )  # fmt: skip
    write_file(out / "report.html", html)
    write_file(out / "report.md", _markdown(blocks))
    write_file(out / "summary.csv", _csv(flat(row) for s in summaries for row in s.rows))
    write_file(out / "runs.csv", _csv(_flat_run(*item) for item in found.items()))
    return summaries


def _overview(study: Study, missing: int, cached: bool) -> str:
    """Sentence on variants, budget, students and baseline."""
    seconds = (
        "seconds exclude the teacher's forward pass, whose outputs are read from a cache"
        if cached
        else "seconds include the teacher's forward pass"
    )
    parts = [
        f"{len(study.variants)} variants, {len(study.seeds)} seeds, {study.budget} each with "
        f"{study.batch_size} rows a step, {_students(study)}; compared with {study.baseline}; "
        f"{seconds}."
    ]
    if missing:
        parts.append(f"{missing} runs are not finished; their cells are empty or have fewer seeds.")
    return " ".join(parts)


def _students(study: Study) -> str:
    """Size and initial weights of the students, as text."""
    made_of = {variant.student or study.student for variant in study.variants}
    if made_of.isdisjoint(STUDENTS):
        return f"students initialised from {' or '.join(sorted(Path(x).name for x in made_of))}"
    sizes = "".join(f", {name} {value}" for name, value in study.student_config.items())
    made = "of random weights" if study.student_weights == "random" else "of the teacher's layers"
    return f"{study.student_layers}-layer students made {made}{sizes}"


def findings(summary: Summary) -> str:
    """Sentences that summarise a table: teacher, warnings, and differences beyond noise."""
    count = summary.teacher["rows"]
    text = (
        f"Teacher: {_metric(summary)} {summary.teacher_score:.4f}; {count['train']} training "
        f"rows, {count['held out']} held out."
    )
    text += "".join(f" {warning}" for warning in warnings_of(summary))
    if failed := sum(row.failed for row in summary.rows):
        text += f" Failed runs: {failed}, left out of the means; runs.csv has the reasons."
    verdicts = {row.verdict for row in summary.rows if row.difference is not None}
    if verdicts <= {UNKNOWN}:
        return f"{text} No verdicts yet: no variant has two seeds in common with the baseline."
    above, below = (
        ", ".join(row.variant for row in summary.rows if row.verdict == verdict) or "none"
        for verdict in (ABOVE, BELOW)
    )
    if summary.lower_is_better:
        return f"{text} Below the baseline beyond noise: {below}. Above it beyond noise: {above}."
    return f"{text} Above the baseline beyond noise: {above}. Below it beyond noise: {below}."


def _metric(summary: Summary) -> str:
    return f"{summary.metric}{' (lower is better)' if summary.lower_is_better else ''}"


def warnings_of(summary: Summary) -> list[str]:
    """Warnings of a table: classes without rows, teacher at chance, constant students."""
    found = [
        f"Classes without {what} rows: {', '.join(names)}."
        for what, names in empty_classes(summary.teacher).items()
        if names
    ]
    if (summary.labelled or math.inf) < len(classes_of(summary.teacher)):
        found.append(f"{summary.labelled} labels are fewer than the classes.")
    if at_chance(summary.teacher):
        found.append("The teacher is at chance: its predictions are independent of the labels.")
    if constant := [row.variant for row in summary.rows if row.constant]:
        found.append(f"Students with the same prediction for every row: {', '.join(constant)}.")
    return found


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
    for run in found.values():
        about = run["measured"]["machine"]
        computer, versions = about["machine"], about["versions"]
        name = computer.get("gpu") or computer["cpu"]
        line = (
            f"{name}, {computer['threads']} threads, torch {versions.get('torch')}, "
            f"transformers {versions.get('transformers')}, commit {about['commit']}"
        )
        counts[line] = counts.get(line, 0) + 1
    return [f"{line}: {number} runs" for line, number in sorted(counts.items())]


def beside_paper(study: Study, summaries: list[Summary]) -> dict[str, Any] | None:
    """The paper's table with our results, and whether each row's side of the baseline is the same.

    The paper's side is that of the mean over its columns.
    """
    if study.paper is None:
        return None
    paper = study.paper
    theirs: Mapping[str, list[float]] = paper["rows"]
    lower_is_better = bool(paper.get("lower_is_better"))
    rows, order = [], []
    ours = {s.task: {row.variant: row for row in s.rows} for s in summaries}
    for name, values in theirs.items():
        found = [ours[s.task].get(name) for s in summaries]
        mine = ["" if row is None else _points(row, row.mean) for row in found]
        rows.append([name, *map(str, values), *mine])
        if name == study.baseline or study.baseline not in theirs:
            continue
        gap = float(np.mean(values) - np.mean(theirs[study.baseline]))
        for row in filter(None, found):
            if row.difference is not None:
                side = ABOVE if gap > 0 else BELOW if gap else "equal"
                here = _agreement(quality(side, lower_is_better), row)
                order.append(f"{row.task}: {name} is {side} {study.baseline} in the paper "
                             f"({gap:+.1f}); here {here}")  # fmt: skip
    columns = ["", *(f"paper: {c}" for c in paper["columns"]), *(f"ours: {t}" for t in ours)]
    return {"title": paper["title"], "columns": columns, "rows": rows, "order": order}


def _agreement(paper_quality: str, row: Row) -> str:
    """Whether a row's verdict is that of the paper, as text."""
    assert row.difference is not None
    unit = "" if row.lower_is_better else " points"
    size = f"({_points(row, row.difference.mean, '+')}{unit})"
    if not row.quality:
        return f"{row.verdict} {size}"
    return f"{'the same' if row.quality == paper_quality else 'the opposite'}, beyond noise {size}"


def _scale(row: Row | Summary) -> int:
    """Factor for display: 100 for fractions, 1 for percentages and metrics to minimise."""
    return 1 if row.lower_is_better or row.percent else 100


def _points(row: Row, value: float, sign: str = "") -> str:
    """A score in percentage points; metrics to minimise unscaled."""
    return f"{_scale(row) * value:{sign}.{2 if row.lower_is_better else 1}f}"


def _blocks(
    study: Study, summaries: list[Summary], overview: str, pictures: list, measured: list[str]
) -> Iterator[Block]:
    """Blocks of the page, from top to bottom."""
    yield from (("h1", study.title), ("p", overview))
    for summary in summaries:
        yield from (("h2", summary.task), ("p", findings(summary)))
        yield "table", ([*HEADINGS], [cells(row) for row in summary.rows])
    yield "h2", "Columns of the tables"
    yield "list", [f"{name}: {explanation}" for name, explanation in HEADINGS.items() if name]
    yield from (("picture", picture) for picture in pictures)
    if paper := beside_paper(study, summaries):
        yield from (("h2", paper["title"]), ("table", (paper["columns"], paper["rows"])))
        yield "list", paper["order"]
    yield from (("h2", "Machines and versions"), ("list", measured))


def _markdown(blocks: Iterable[Block]) -> str:
    """The page in Markdown, without pictures."""
    found = []
    for kind, content in blocks:
        if kind == "table":
            headings, rows = content
            ruler = ["---", *["---:"] * (len(headings) - 1)]
            content = "\n".join(f"| {' | '.join(row)} |" for row in (headings, ruler, *rows))
        elif kind == "list":
            content = "\n".join(f"- {line}" for line in content)
        if kind != "picture":
            found.append({"h1": "# ", "h2": "## "}.get(kind, "") + content)
    return "\n\n".join(found) + "\n"


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


def _flat_run(key: tuple[str, str, int], run: Mapping[str, Any]) -> dict[str, Any]:
    """One line of runs.csv, by column."""
    named = dict(zip(("task", "variant", "seed"), key, strict=True))
    values = {**run, **run["measured"]}
    return {
        **named,
        **{name: values.get(name, "") for name in RUN_COLUMNS},
        **run.get("scores", {}),
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


def _forest(study: Study, summaries: list[Summary], found: Results) -> bytes:
    """Forest plot: differences with their intervals over seeds, coloured if beyond noise."""
    most = max(len(summary.rows) for summary in summaries)
    figure = new_figure(1.5 + 4.2 * len(summaries), 1.2 + 0.32 * most)
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    for ax, summary in zip(axes, summaries, strict=True):
        rows = [row for row in summary.rows if row.difference is not None]
        scale, reverse = _scale(summary), summary.lower_is_better
        rows.sort(key=lambda row: row.difference.mean, reverse=reverse)  # type: ignore[union-attr]
        for i, row in enumerate(rows):
            d, colour = row.difference, COLOURS.get(row.quality, "#777777")
            assert d is not None
            if not math.isnan(d.low):
                ax.plot([scale * d.low, scale * d.high], [i, i], color=colour, linewidth=2)
            face = "white" if d.rounded else colour
            ax.plot(scale * d.mean, i, "o", color=colour, markerfacecolor=face)
        ax.axvline(0, color="black", linewidth=0.8)
        base = next((r.mean for r in summary.rows if r.variant == study.baseline), math.nan)
        ax.axvline(scale * (summary.teacher_score - base), color="black", linestyle=":")
        ax.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=8)
        unit = "" if reverse else "points of "
        ax.set_xlabel(f"{unit}{_metric(summary)} above {study.baseline}", fontsize=8)
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


def _curves(study: Study, summaries: list[Summary], found: Results) -> bytes:
    """Learning curves: mean score over seeds at every evaluation.

    With a budget in seconds the runs differ in steps. Their curves are then averaged by the
    fraction of steps done.
    """
    order = [variant.name for variant in study.variants]
    figure = new_figure(2.5 + 4.2 * len(summaries), 4.5)
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    for ax, summary in zip(axes, summaries, strict=True):
        ax.axhline(summary.teacher_score, color="black", linewidth=1, label="teacher")
        for row in summary.rows:
            runs = [
                run["history"]
                for (task, variant, _), run in found.items()
                if (task, variant) == (summary.task, row.variant) and "failed" not in run
            ]
            if not runs:
                continue
            done = [[entry["step"] / run[-1]["step"] for entry in run] for run in runs]
            scores = [
                np.interp(done[0], fractions, [entry["scores"][summary.metric] for entry in run])
                for fractions, run in zip(done, runs, strict=True)
            ]
            at = np.multiply(done[0], study.steps or 1)
            i = order.index(row.variant)
            style = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "marker": "."}
            ax.plot(at, np.mean(scores, 0), label=row.variant, **style)
        _widen(ax.lines)
        ax.set_xlabel("step" if study.steps else "fraction of the steps")
        ax.set_title(f"{summary.task}: {_metric(summary)}", fontsize=9)
        ax.tick_params(labelsize=8)
    drawn = {line.get_label(): line for ax in axes for line in ax.lines}
    drawn = {name: drawn[name] for name in ("teacher", *order) if name in drawn}
    figure.legend(drawn.values(), drawn, loc="outside right upper", fontsize=7)
    return _png(figure)
