"""Statistics of a study: means, paired differences with intervals, and verdicts.

A difference to the baseline has two kinds of noise. Noise over seeds (order of the data, dropout,
the labelled rows): runs of one seed are pairs, and a t test of their differences gives a p-value,
which Holm's method corrects for the number of comparisons in a table. Noise over test rows: a
bootstrap resamples the rows of the same runs. A difference is beyond noise if it passes both tests.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.study.grid import Grid

stats: Any = require("scipy.stats", "train")

LEVEL = 0.95
RESAMPLES = 2000
BATCH_ROWS = 2**22  # resampled rows in memory at a time
#: Least gap between teacher and baseline for which a recovered fraction is reported. For metrics
#: to minimise, which have no fixed range, the gap counts relative to the baseline's score.
SMALLEST_GAP = 0.03
#: Metrics of predicted classes or answers. They change in steps of one row, unlike metrics of
#: numbers.
COUNTED = ("accuracy", "mcc", "f1", "exact_match", "best_exact_match", "best_f1")
ABOVE, BELOW, ALIKE, UNKNOWN = "above", "below", "not told apart", "one seed: can't tell"
BETTER, WORSE = "better", "worse"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of paired differences over seeds, its interval, and the t test's p-value.

    ``rounded``: the differences vary less than the rounding of scores to one row, and the interval
    is that of rounding.
    """

    mean: float
    low: float
    high: float
    p: float
    rounded: bool = False


NO_DIFFERENCE = Difference(math.nan, math.nan, math.nan, math.nan)


def paired_difference(differences: Sequence[float], step: float = 0.0) -> Difference:
    """Mean and t interval of paired differences; the interval of a single pair is NaN.

    Scores that change in steps of ``step`` (one row more is right) may agree by chance. The
    variance is therefore at least that of rounding both scores to ``step``, a bound that
    `scipy.stats.ttest_rel` lacks. Without it the two are equal.

    >>> paired_difference([0.1, 0.2, 0.3]).mean.__round__(3)
    0.2
    """
    x = np.asarray(differences, dtype=float)
    mean, count = float(x.mean()), len(x)
    if count < 2:
        return dataclasses.replace(NO_DIFFERENCE, mean=mean)
    variance, least = float(x.var(ddof=1)), step**2 / 6
    error = math.sqrt(max(variance, least) / count)
    if error == 0:
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0)
    low, high = map(float, stats.t.interval(LEVEL, count - 1, mean, error))
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
    return Difference(mean, low, high, p, variance < least)


def with_deviation(values: Sequence[float], form: str = ".4f", deviation: bool = True) -> str:
    """Mean and standard deviation as text; empty without values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{form}}"
    return f"{mean} ± {statistics.stdev(values):{form}}" if deviation and values[1:] else mean


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979); NaN stays NaN and is not counted.

    >>> [round(x, 3) for x in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")  # NaN last
    order = order[: np.count_nonzero(~np.isnan(values))]
    corrected = np.full(len(values), np.nan)
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected.tolist()


def bootstrap_interval(
    metric: str,
    labels: Sequence[int] | Sequence[Sequence[int]],
    students: Sequence[Sequence[int]],
    baselines: Sequence[Sequence[int]],
    num_classes: int = 2,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Bootstrap interval, over test rows, of the mean difference of ``metric`` over seeds.

    ``students`` and ``baselines`` hold one sequence of predicted classes for each seed, and so may
    ``labels``, where seeds draw rows. None for a metric of numbers.
    """
    if metric not in COUNTED:
        return None
    cells = num_classes**2
    true = np.broadcast_to(labels, np.shape(students)) * num_classes  # (seeds, n)
    pairs = np.concatenate([true + students, true + baselines])

    def difference(index: np.ndarray, axis: int) -> np.ndarray:
        """Mean difference of each resample; ``index`` (resamples, n) has numbers of rows."""
        index = np.atleast_2d(index)
        offsets = cells * np.arange(len(index))[:, None]
        tables = [
            np.bincount((run[index] + offsets).ravel(), minlength=cells * len(index))
            for run in pairs
        ]
        shape = (2, len(students), len(index), num_classes, num_classes)
        student, baseline = of_confusion(metric, np.reshape(tables, shape).astype(float))
        return (student - baseline).mean(0)

    rows = np.arange(pairs.shape[1])
    found = stats.bootstrap(
        (rows,), difference, n_resamples=RESAMPLES, batch=max(1, BATCH_ROWS // len(rows)),
        vectorized=True, confidence_level=LEVEL, method="percentile", rng=seed,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def of_confusion(metric: str, table: np.ndarray) -> np.ndarray:
    """Accuracy, Matthews correlation or F1 of confusion matrices (*, true class, predicted class).

    F1 is that of the second of two classes, and else the mean over the classes that occur.
    """
    total = table.sum((-1, -2))
    right = np.trace(table, axis1=-2, axis2=-1)
    if metric == "accuracy":
        return right / total
    true, predicted = table.sum(-1), table.sum(-2)
    if metric == "mcc":
        above = right * total - (true * predicted).sum(-1)
        below = (total**2 - (true**2).sum(-1)) * (total**2 - (predicted**2).sum(-1))
        return np.divide(above, np.sqrt(below), out=np.zeros_like(above), where=below > 0)
    hits = np.diagonal(table, axis1=-2, axis2=-1)
    occurs = true + predicted > 0
    f1 = np.divide(2 * hits, true + predicted, out=np.zeros(hits.shape), where=occurs)
    return f1[..., 1] if table.shape[-1] == 2 else f1.sum(-1) / occurs.sum(-1)


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of one variant on one data set."""

    task: str
    variant: str
    metric: str
    seeds: int
    mean: float
    std: float  # standard deviation over seeds
    difference: Difference | None  # to the baseline; None for the baseline itself
    p_holm: float
    rows_interval: tuple[float, float] | None  # bootstrap over test rows
    verdict: str
    recovered: Difference | None  # fraction of the gap from the baseline to the teacher
    seconds: float
    peak_bytes: float | None
    rccc: float
    intra_class_similarity: float
    failed: int = 0
    constant: int = 0  # seeds whose student predicts the same for every row
    lower_is_better: bool = False
    percent: bool = False

    @property
    def quality(self) -> str:
        """Meaning of the verdict: "better", "worse", or "" if it is neither above nor below."""
        better, worse = (BELOW, ABOVE) if self.lower_is_better else (ABOVE, BELOW)
        return {better: BETTER, worse: WORSE}.get(self.verdict, "")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result table of one data set.

    ``example``: a result file, for what all runs have in common.
    """

    task: str
    metric: str
    example: Mapping[str, Any]
    teacher_score: float  # mean over the runs
    rows: tuple[Row, ...]

    @property
    def lower_is_better(self) -> bool:
        return self.metric in self.example["lower_is_better"]

    @property
    def percent(self) -> bool:
        return self.metric in self.example["percent"]


Results = Mapping[tuple[str, str, int], Mapping[str, Any]]


def summarize(grid: Grid, results: Results) -> list[Summary]:
    """Result tables of finished runs, by variant, task and seed; a data set without has none."""
    tables = []
    for task in grid.tasks:
        runs: dict[str, dict[int, Any]] = {}
        for variant, seed in itertools.product(grid.variants, grid.seeds):
            if (run := results.get((variant, task, seed))) is not None:
                runs.setdefault(variant, {})[seed] = run
        good = [r for each in runs.values() for r in each.values() if "failed" not in r]
        if good:
            metric = next(iter(good[0]["scores"]))
            teacher = [r["teacher"][metric] for r in good if metric in r["teacher"]]
            mean = float(np.mean(teacher)) if teacher else math.nan
            summary = Summary(task, metric, good[0], mean, ())
            tables.append(dataclasses.replace(summary, rows=_rows(summary, runs, grid.baseline)))
    return tables


def _rows(summary: Summary, runs: Mapping[str, dict[int, Any]], baseline: str) -> tuple[Row, ...]:
    """One row for each variant; ``runs`` has each variant's runs by seed."""
    completed = {
        name: {seed: run for seed, run in by_seed.items() if "failed" not in run}
        for name, by_seed in runs.items()
    }
    base = completed.get(baseline, {})
    comparisons = {
        name: _compare(summary, [(by_seed[seed], base[seed]) for seed in shared])
        for name, by_seed in completed.items()
        if name != baseline and (shared := sorted(by_seed.keys() & base.keys()))
    }
    differences = [found["difference"] for found in comparisons.values()]
    corrected = dict(zip(comparisons, holm([d.p for d in differences]), strict=True))
    return tuple(
        _row(summary, name, by_seed, comparisons.get(name, {}), corrected.get(name, math.nan))
        for name, by_seed in runs.items()
    )


def _compare(summary: Summary, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Fields of a row that compare a variant with the baseline; ``pairs`` has one run of each."""
    metric, classes = summary.metric, summary.example["classes"]
    references = [run["references"] for run, _ in pairs]
    step = 0.0
    if metric in COUNTED and references[0]:
        step = (100.0 if summary.percent else 1.0) / len(references[0])
    scores = [(run["scores"][metric], base["scores"][metric]) for run, base in pairs]
    interval = None
    if classes:
        students, baselines = (
            [x["predictions"] for x in runs] for runs in zip(*pairs, strict=True)
        )
        interval = bootstrap_interval(metric, references, students, baselines, len(classes))
    return {
        "difference": paired_difference([run - base for run, base in scores], step),
        "rows_interval": interval,
        "recovered": gap_recovered(
            scores,
            [run["teacher"].get(metric, math.nan) for run, _ in pairs],
            summary.lower_is_better,
            summary.percent,
        ),
    }


def _row(
    summary: Summary, name: str, by_seed: dict[int, Any], compared: dict[str, Any], p_holm: float
) -> Row:
    def mean(field: str) -> float:
        known = [run[field] for run in runs if run.get(field) is not None]
        return float(np.mean(known)) if known else math.nan

    runs = [run for run in by_seed.values() if "failed" not in run]
    scores = [run["scores"][summary.metric] for run in runs]
    found = {"difference": None, "rows_interval": None, "recovered": None, **compared}
    difference = found["difference"]
    return Row(
        task=summary.task,
        variant=name,
        metric=summary.metric,
        seeds=len(runs),
        mean=float(np.mean(scores)) if scores else math.nan,
        std=float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan,
        **found,
        p_holm=p_holm,
        verdict=verdict(difference, p_holm, found["rows_interval"]) if difference else "",
        seconds=mean("seconds"),
        peak_bytes=mean("peak_bytes"),
        rccc=mean("rccc"),
        intra_class_similarity=mean("intra_class_similarity"),
        failed=len(by_seed) - len(runs),
        constant=sum(len(set(run["predictions"])) == 1 for run in runs),
        lower_is_better=summary.lower_is_better,
        percent=summary.percent,
    )


def empty_classes(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of the classes without training rows and without held-out rows."""
    names = result["classes"]
    counts = {
        "training": result.get("training_rows") if names else None,
        "held-out": np.bincount(result["references"], minlength=len(names)) if names else None,
    }
    return {
        what: [name for name, rows in zip(names, found, strict=True) if not rows]
        for what, found in counts.items()
        if found is not None
    }


def verdict(difference: Difference, p: float, interval: tuple[float, float] | None) -> str:
    """ABOVE or BELOW if a difference is beyond noise, over seeds (corrected) and over rows."""
    if math.isnan(p):
        return UNKNOWN
    low, high = interval or (difference.low, difference.high)
    if p >= 1 - LEVEL or low <= 0 <= high:
        return ALIKE
    return ABOVE if difference.mean > 0 else BELOW


def gap_recovered(
    scores: Sequence[tuple[float, float]],
    teachers: Sequence[float],
    lower_is_better: bool = False,
    percent: bool = False,
) -> Difference | None:
    """Mean (student − baseline) over mean (teacher − baseline); ``scores`` pairs the first two.

    Its interval is the mean residual's, gain − ratio · gap, over the mean gap. None if the
    gap is below SMALLEST_GAP, within noise over seeds, or unknown for some seed.

    >>> gap_recovered([(0.7, 0.6), (0.8, 0.6)], [0.9, 0.9]).mean.__round__(3)
    0.5
    """
    sign = -1 if lower_is_better else 1
    gaps = [sign * (teacher - base) for teacher, (_, base) in zip(teachers, scores, strict=True)]
    scale = 100.0 if percent else 1.0
    if scores and lower_is_better:
        scale = float(np.mean([base for _, base in scores]))
    if not gaps or not np.mean(gaps) >= SMALLEST_GAP * scale or paired_difference(gaps).low <= 0:
        return None
    gap, gains = float(np.mean(gaps)), [sign * (student - base) for student, base in scores]
    ratio = float(np.mean(gains)) / gap
    found = paired_difference(
        [ratio + (gain - ratio * each) / gap for gain, each in zip(gains, gaps, strict=True)]
    )
    return dataclasses.replace(found, mean=ratio)
