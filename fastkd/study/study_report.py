"""Page, tables and pictures of a study, made from its JSON files only."""

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
    UNKNOWN,
    WORSE,
    Difference,
    Results,
    Row,
    Summary,
    at_chance,
    classes_of,
    empty_classes,
    summarize,
    worth,
)
from fastkd.study.study_runs import StudyRuns
from fastkd.train.errors import InputError
from fastkd.train.saving import MANIFEST, csv_text, read_json, read_manifest, write_file, write_json

jinja2: Any = require("jinja2", "train")

#: What a report consists of.
FILES = ("report.html", "report.md", "summary.csv", "runs.csv", "forest.png", "curves.png")
COLOURS = {BETTER: "#1a7f37", WORSE: "#b42318"}
#: What a cell of the table means.
MEANINGS = {
    ABOVE: BETTER,
    BELOW: WORSE,
    f"{BELOW} ({BETTER})": BETTER,
    f"{ABOVE} ({WORSE})": WORSE,
}
HEADINGS = (
    "", "seeds", "score", "difference", "95% over seeds", "95% over rows", "p (Holm)",
    "beyond noise", "gap recovered", "seconds", "MiB", "RCCC", "M_ICS",
)  # fmt: skip

#: Columns of runs.csv behind the run's name, before its scores.
OF_A_RUN = ("failed", "steps", "seconds", "peak_bytes", "rccc", "intra_class_similarity")

#: A part of the page: a heading or paragraph, "table" with (headings, rows), "list", or "picture"
#: with (title, bytes in base64).
Block = tuple[str, Any]

PAGE = Path(__file__).with_name("report.html.jinja")


def claim(out: Path) -> None:
    """Record in the manifest of ``out`` that fastkd writes the report's files.

    Raises:
        InputError: one of them is there, and isn't.
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
    """Write report.html, report.md, summary.csv, runs.csv and the pictures into ``out``."""
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
    blocks = list(_blocks(study, summaries, _about(study, missing), pictures, machines(found)))
    page = jinja2.Environment(autoescape=True).from_string(PAGE.read_text("utf-8"))
    html = page.render(title=study.title, blocks=blocks, colours=COLOURS, meanings=MEANINGS)
    write_file(out / "report.html", html)
    write_file(out / "report.md", _markdown(blocks))
    write_file(out / "summary.csv", _csv(flat(row) for s in summaries for row in s.rows))
    write_file(out / "runs.csv", _csv(_flat_run(*item) for item in found.items()))
    return summaries


HOW = (
    "Score: mean and standard deviation over the seeds, after the last step; no evaluation chose "
    "it. Differences are paired by seed. An interval over seeds is a t interval, uncorrected; "
    "p is that t test's, corrected by Holm for the comparisons of its table; where all seeds agree "
    "on counted rows, their variance is taken to be that of rounding to a row. The interval over "
    "rows draws the test rows again, where each has a class. Beyond noise means: p below 0.05, and "
    "an interval over rows without 0. Gap recovered is the share of the way from the baseline to "
    "the teacher. Seconds and MiB are a run's training and its peak above what the process had "
    "before."
)


def _about(study: Study, missing: int) -> str:
    cached = (
        "the teacher's outputs come from a cache, so seconds are without its forward pass"
        if study.cache
        else "seconds include the teacher's forward pass"
    )
    parts = [
        f"{len(study.variants)} variants, {len(study.seeds)} seeds, {study.budget} each with "
        f"{study.batch_size} rows a step, {_students(study)}; compared with {study.baseline}; "
        f"{cached}."
    ]
    if missing:
        parts.append(
            f"{missing} runs are not there yet; their cells are empty or have fewer seeds."
        )
    return " ".join(parts)


def _students(study: Study) -> str:
    made_of = {variant.student or study.student for variant in study.variants}
    if made_of.isdisjoint(STUDENTS):
        return f"students that begin as {' or '.join(sorted(Path(x).name for x in made_of))}"
    sizes = "".join(f", {name} {value}" for name, value in study.student_config.items())
    made = "of random weights" if study.student_weights == "random" else "of the teacher's layers"
    return f"{study.student_layers}-layer students made {made}{sizes}"


def told(summary: Summary) -> str:
    """Sentences that summarise a table."""
    count = summary.teacher["rows"]
    about = (
        f"Teacher: {_metric(summary)} {summary.teacher_score:.4f}; {count['train']} training "
        f"rows, {count['held out']} held out."
    )
    about += "".join(f" {warning}" for warning in warnings_of(summary))
    if failed := sum(row.failed for row in summary.rows):
        about += f" Failed runs: {failed}; runs.csv says why, and no mean has them."
    said = {row.verdict for row in summary.rows if row.difference is not None}
    if said <= {UNKNOWN}:
        return f"{about} Noise can't be told yet: no variant shares two seeds with the baseline."
    above, below = (
        ", ".join(row.variant for row in summary.rows if row.verdict == verdict) or "none"
        for verdict in (ABOVE, BELOW)
    )
    if summary.smaller_is_better:
        return f"{about} Below the baseline beyond noise: {below}. Above it beyond noise: {above}."
    return f"{about} Above the baseline beyond noise: {above}. Below it beyond noise: {below}."


def _metric(summary: Summary) -> str:
    return f"{summary.metric}{' (less is better)' if summary.smaller_is_better else ''}"


def warnings_of(summary: Summary) -> list[str]:
    """Warnings on a table: empty classes, teacher or students no better than chance."""
    found = [
        f"No {what} row is of class {', '.join(names)}."
        for what, names in empty_classes(summary.teacher).items()
        if names
    ]
    if (summary.labelled or math.inf) < len(classes_of(summary.teacher)):
        found.append(f"With {summary.labelled} labels not every class has one.")
    if at_chance(summary.teacher):
        found.append("The teacher is at chance: its answers say nothing about the labels.")
    if constant := [row.variant for row in summary.rows if row.constant]:
        found.append(f"Students that give every row the same answer: {', '.join(constant)}.")
    return found


def cells(row: Row) -> list[str]:
    """Cells of a table row as text; undefined values are empty."""
    d, share, rows = row.difference, row.recovered, row.rows_interval
    return [
        row.variant
        + (f" ({row.failed} failed)" if row.failed else "")
        + (f" (one answer to all rows: {row.constant} seeds)" if row.constant else ""),
        str(row.seeds),
        _number(row.mean, ".4f") + (f" ± {row.spread:.4f}" if row.seeds > 1 else ""),
        "" if d is None else _number(d.mean, "+.4f"),
        "" if d is None else _interval(d.low, d.high),
        "" if rows is None else _interval(*rows),
        _number(row.p_holm, ".3g"),
        row.verdict + (f" ({row.worth})" if row.worth and row.smaller_is_better else ""),
        "" if share is None else f"{share.mean:.0%} {_interval(share.low, share.high, '.0%')}",
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
    """The paper's table with our results, and whether its ranking holds.

    The order is each row against the baseline, by the mean of the paper's columns.
    """
    if study.paper is None:
        return None
    paper = study.paper
    theirs: Mapping[str, list[float]] = paper["rows"]
    smaller = bool(paper.get("smaller_is_better"))
    rows, order = [], []
    ours = {s.task: {row.variant: row for row in s.rows} for s in summaries}
    for name, values in theirs.items():
        found = [ours[s.task].get(name) for s in summaries]
        mine = ["" if row is None else _of_hundred(row, row.mean) for row in found]
        rows.append([name, *map(str, values), *mine])
        if name == study.baseline or study.baseline not in theirs:
            continue
        gap = float(np.mean(values) - np.mean(theirs[study.baseline]))
        for row in filter(None, found):
            if row.difference is not None:
                said = ABOVE if gap > 0 else BELOW if gap else "equal"
                here = _against(worth(said, smaller), row)
                order.append(f"{row.task}: {name} is {said} {study.baseline} in the paper "
                             f"({gap:+.1f}); here {here}")  # fmt: skip
    columns = ["", *(f"paper: {c}" for c in paper["columns"]), *(f"ours: {t}" for t in ours)]
    return {"title": paper["title"], "columns": columns, "rows": rows, "order": order}


def _against(theirs: str, row: Row) -> str:
    assert row.difference is not None
    unit = "" if row.smaller_is_better else " points"
    size = f"({_of_hundred(row, row.difference.mean, '+')}{unit})"
    if not row.worth:
        return f"{row.verdict} {size}"
    return f"{'the same' if row.worth == theirs else 'the opposite'}, beyond noise {size}"


def _scale(row: Row | Summary) -> int:
    """Factor for display: 100 for fractions, 1 for percentages and metrics to minimise."""
    return 1 if row.smaller_is_better or row.percent else 100


def _of_hundred(row: Row, value: float, sign: str = "") -> str:
    return f"{_scale(row) * value:{sign}.{2 if row.smaller_is_better else 1}f}"


def _blocks(
    study: Study, summaries: list[Summary], about: str, pictures: list, measured: list[str]
) -> Iterator[Block]:
    """Blocks of the page, from top to bottom."""
    yield from (("h1", study.title), ("p", about), ("p", HOW))
    for summary in summaries:
        yield from (("h2", summary.task), ("p", told(summary)))
        yield "table", (HEADINGS, [cells(row) for row in summary.rows])
    yield from (("picture", picture) for picture in pictures)
    if paper := beside_paper(study, summaries):
        yield from (("h2", paper["title"]), ("table", (paper["columns"], paper["rows"])))
        yield "list", paper["order"]
    yield from (("h2", "Where it was measured"), ("list", measured))


def _markdown(blocks: Iterable[Block]) -> str:
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
    """Columns of a row of summary.csv."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name in ("difference", "recovered"):
            value = value or Difference(math.nan, math.nan, math.nan, math.nan)
            found.update({f"{field.name}_{k}": v for k, v in dataclasses.asdict(value).items()})
        elif field.name == "rows_interval":
            low, high = value or (math.nan, math.nan)
            found.update({"rows_low": low, "rows_high": high})
        else:
            found[field.name] = value
    return found


def _flat_run(key: tuple[str, str, int], run: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(zip(("task", "variant", "seed"), key, strict=True))
    said = {**run, **run["measured"]}
    return {**named, **{name: said.get(name, "") for name in OF_A_RUN}, **run.get("scores", {})}


def _csv(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as CSV, with NaN as an empty cell."""
    return csv_text(
        {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        for row in rows
    )


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=130, format="png")
    return content.getvalue()


def _forest(study: Study, summaries: list[Summary], found: Results) -> bytes:
    """Every difference with its interval over seeds, coloured where it is beyond noise."""
    most = max(len(summary.rows) for summary in summaries)
    figure = new_figure(1.5 + 4.2 * len(summaries), 1.2 + 0.32 * most)
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    for ax, summary in zip(axes, summaries, strict=True):
        rows = [row for row in summary.rows if row.difference is not None]
        scale, smaller = _scale(summary), summary.smaller_is_better
        rows.sort(key=lambda row: row.difference.mean, reverse=smaller)  # type: ignore[union-attr]
        for i, row in enumerate(rows):
            d, colour = row.difference, COLOURS.get(row.worth, "#777777")
            assert d is not None
            if not math.isnan(d.low):
                ax.plot([scale * d.low, scale * d.high], [i, i], color=colour, linewidth=2)
            face = "white" if d.rounded else colour
            ax.plot(scale * d.mean, i, "o", color=colour, markerfacecolor=face)
        ax.axvline(0, color="black", linewidth=0.8)
        base = next((r.mean for r in summary.rows if r.variant == study.baseline), math.nan)
        ax.axvline(scale * (summary.teacher_score - base), color="black", linestyle=":")
        ax.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=8)
        unit = "" if smaller else "points of "
        ax.set_xlabel(f"{unit}{_metric(summary)} above {study.baseline}", fontsize=8)
        ax.set_title(f"{summary.task} (dotted: teacher)", fontsize=9)
        ax.tick_params(labelsize=8)
    how = f"{LEVEL:.0%} intervals over seeds; coloured: beyond noise"
    if any(row.difference and row.difference.rounded for s in summaries for row in s.rows):
        how += "\nhollow: all seeds agree, and the bar is what rounding scores to one row allows"
    figure.suptitle(how, fontsize=9)
    return _png(figure)


def _widen(lines: list[Any]) -> None:
    """Lines that run along later ones are wider, so that these don't hide them."""
    points = [{*zip(*line.get_data(), strict=True)} for line in lines]
    for i, line in enumerate(lines):
        above = sum(len(points[i] & later) > 1 for later in points[i + 1 :])
        line.set_linewidth(line.get_linewidth() + 2.5 * above)


def _curves(study: Study, summaries: list[Summary], found: Results) -> bytes:
    """Mean score over seeds at every evaluation; of lines that coincide the lower ones are wider.

    Runs of a budget in seconds differ in their steps: they are laid over each other.
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
            shares = [[entry["step"] / run[-1]["step"] for entry in run] for run in runs]
            scores = [
                np.interp(shares[0], share, [entry["scores"][summary.metric] for entry in run])
                for share, run in zip(shares, runs, strict=True)
            ]
            at = np.multiply(shares[0], study.steps or 1)
            i = order.index(row.variant)
            look = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "marker": "."}
            ax.plot(at, np.mean(scores, 0), label=row.variant, **look)
        _widen(ax.lines)
        ax.set_xlabel("step" if study.steps else "share of the steps")
        ax.set_title(f"{summary.task}: {_metric(summary)}", fontsize=9)
        ax.tick_params(labelsize=8)
    drawn = {line.get_label(): line for ax in axes for line in ax.lines}
    drawn = {name: drawn[name] for name in ("teacher", *order) if name in drawn}
    figure.legend(drawn.values(), drawn, loc="outside right upper", fontsize=7)
    return _png(figure)
