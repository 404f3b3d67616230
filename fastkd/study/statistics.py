"""What runs say: means, paired differences with intervals, and what exceeds noise.

Two kinds of noise are told apart. Over seeds (order of the data, dropout, the labelled rows), the
runs of one seed are pairs, and their differences go into a t test; its p-values are corrected for
the number of comparisons in a table (Holm). Over test rows, the rows are drawn again
(bootstrap) while the runs stay. A difference is beyond noise if it passes both.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastkd._core.extras import require
from fastkd.study.spec import Study

stats: Any = require("scipy.stats", "train")

LEVEL = 0.95
RESAMPLES = 2000
#: A gap between teacher and baseline below this is no scale for a share of it; of scores without
#: a bound, such as perplexity, a gap below this share of the baseline's.
SMALLEST_GAP = 0.03
#: Scores of classes, which move by a row; the others are of numbers.
COUNTED = ("accuracy", "mcc", "f1")
ABOVE, BELOW, ALIKE, UNKNOWN = "above", "below", "not told apart", "one seed: can't tell"
BETTER, WORSE = "better", "worse"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of paired differences over seeds, its interval, and the t test's p-value.

    ``rounded``: the seeds agree more closely than scores are counted, and the variance is that of
    rounding.
    """

    mean: float
    low: float
    high: float
    p: float
    rounded: bool = False


def paired(differences: Sequence[float], step: float = 0.0) -> Difference:
    """The t interval of paired differences; without a bound where there is one pair.

    Scores that move in steps (a row more is right) may be alike by chance: their variance is taken
    to be at least that of rounding two of them to ``step``.

    Example:
        >>> paired([0.1, 0.2, 0.3]).mean.__round__(3)
        0.2
    """
    x = np.asarray(differences, dtype=float)
    mean, count = float(x.mean()), len(x)
    if count < 2:
        return Difference(mean, math.nan, math.nan, math.nan)
    variance, least = float(x.var(ddof=1)), step**2 / 6
    error = math.sqrt(max(variance, least) / count)
    reach = error * float(stats.t.ppf((1 + LEVEL) / 2, count - 1))
    if error == 0:
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0)
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
    return Difference(mean, mean - reach, mean + reach, p, variance < least)


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979); NaN stays and doesn't count.

    Example:
        >>> [round(x, 3) for x in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=float)
    there = np.flatnonzero(~np.isnan(values))
    order = there[np.argsort(values[there], kind="stable")]
    corrected = np.full(len(values), np.nan)
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected.tolist()


def resampled(
    metric: str,
    labels: Sequence[int],
    students: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    classes: int = 2,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Interval of the mean difference of ``metric`` over other draws of the test rows.

    Both hold the predictions (rows) of each seed, of a head of so many ``classes``; None for a
    metric of numbers.
    """
    if metric not in COUNTED:
        return None
    # Rows with the same answers everywhere are drawn together: they count alike.
    rows = np.column_stack([labels, *students, *others])  # (n, 1 + 2 seeds)
    kinds, sizes = np.unique(rows, axis=0, return_counts=True)
    counts = np.random.default_rng(seed).multinomial(len(rows), sizes / len(rows), RESAMPLES)

    def scores(run: int) -> np.ndarray:
        cells = np.zeros((len(kinds), classes * classes))
        cells[np.arange(len(kinds)), kinds[:, 0] * classes + kinds[:, run]] = 1
        return of_confusion(metric, (counts @ cells).reshape(-1, classes, classes))

    seeds = len(students)
    differences = sum(scores(i) - scores(i + seeds) for i in range(1, 1 + seeds)) / seeds
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    return float(low), float(high)


def of_confusion(metric: str, table: np.ndarray) -> np.ndarray:
    """Accuracy, Matthews correlation or F1 of confusions (*, true, predicted)."""
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
    there = true + predicted > 0
    f1 = np.divide(2 * hits, true + predicted, out=np.zeros_like(hits), where=there)
    return f1[..., 1] if table.shape[-1] == 2 else f1.sum(-1) / there.sum(-1)


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant on a data set."""

    task: str
    variant: str
    metric: str
    seeds: int
    mean: float
    spread: float  # standard deviation over seeds
    difference: Difference | None  # to the baseline; None for itself
    p_holm: float
    rows_interval: tuple[float, float] | None
    verdict: str
    recovered: Difference | None  # share of the gap from the baseline to the teacher
    seconds: float
    peak_bytes: float | None
    rccc: float
    intra_class_similarity: float
    failed: int = 0
    constant: int = 0  # seeds whose student gives every row the same answer
    smaller_is_better: bool = False
    percent: bool = False

    @property
    def worth(self) -> str:
        """What the verdict means: "better", "worse", or nothing."""
        return worth(self.verdict, self.smaller_is_better)


def worth(verdict: str, smaller_is_better: bool) -> str:
    """What it means to be "above" or "below"; nothing for other words."""
    found = {ABOVE: BETTER, BELOW: WORSE}
    if smaller_is_better:
        found = {ABOVE: WORSE, BELOW: BETTER}
    return found.get(verdict, "")


@dataclasses.dataclass(frozen=True)
class Summary:
    """The table of a data set."""

    task: str
    metric: str
    teacher: Mapping[str, Any]
    rows: tuple[Row, ...]
    labelled: int | None = None  # rows that a student sees with labels

    @property
    def teacher_score(self) -> float:
        return self.teacher["scores"][self.metric]

    @property
    def smaller_is_better(self) -> bool:
        return self.metric in self.teacher.get("smaller", ())

    @property
    def percent(self) -> bool:
        return self.metric in self.teacher.get("percent", ())


Results = Mapping[tuple[str, str, int], Mapping[str, Any]]


def summarize(study: Study, results: Results, teachers: Mapping[str, Any]) -> list[Summary]:
    """The tables of a study, of the runs that are there."""
    found = []
    for task in study.tasks:
        teacher = teachers.get(task.name)
        runs = {
            variant.name: {
                seed: results[task.name, variant.name, seed]
                for seed in study.seeds
                if (task.name, variant.name, seed) in results
            }
            for variant in study.variants
        }
        runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
        if teacher is not None and runs:
            table = _table(study, task.name, runs, teacher)
            found.append(dataclasses.replace(table, labelled=task.labelled))
    return found


def _table(
    study: Study, task: str, runs: dict[str, dict[int, Any]], teacher: Mapping[str, Any]
) -> Summary:
    metric = teacher["metrics"][0]
    smaller, percent = (metric in teacher.get(what, ()) for what in ("smaller", "percent"))
    classes = classes_of(teacher)
    sound = {
        name: {seed: run for seed, run in by_seed.items() if "failed" not in run}
        for name, by_seed in runs.items()
    }
    base = sound.get(study.baseline, {})
    compared = {}
    for name, by_seed in sound.items():
        both = sorted(set(by_seed) & set(base))
        if name != study.baseline and both:
            values = [
                by_seed[seed]["scores"][metric] - base[seed]["scores"][metric] for seed in both
            ]
            step = 1 / len(teacher["labels"]) if metric in COUNTED and teacher["labels"] else 0.0
            compared[name] = paired(values, step), both
    corrected = dict(zip(compared, holm([d.p for d, _ in compared.values()]), strict=True))
    rows = []
    for name, by_seed in runs.items():
        difference, both = compared.get(name, (None, []))
        interval = None
        if both and classes:
            interval = resampled(
                metric,
                teacher["labels"],
                [sound[name][seed]["predictions"] for seed in both],
                [base[seed]["predictions"] for seed in both],
                len(classes),
            )
        p = corrected.get(name, math.nan)
        pairs = [
            (sound[name][seed]["scores"][metric], base[seed]["scores"][metric]) for seed in both
        ]
        rows.append(
            Row(
                task=task,
                variant=name,
                metric=metric,
                difference=difference,
                p_holm=p,
                rows_interval=interval,
                verdict="" if difference is None else verdict(difference, p, interval),
                recovered=recovered(pairs, teacher["scores"][metric], smaller, percent),
                smaller_is_better=smaller,
                percent=percent,
                failed=len(by_seed) - len(sound[name]),
                **_means(list(sound[name].values()), metric),
            )
        )
    return Summary(task, metric, teacher, tuple(rows))


def _means(runs: list[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    def mean(values: list[Any]) -> float:
        there = [v for v in values if v is not None]
        return float(np.mean(there)) if there else math.nan

    scores = [run["scores"][metric] for run in runs]
    return {
        "seeds": len(runs),
        "constant": sum(len(set(run["predictions"])) == 1 for run in runs),
        "mean": mean(scores),
        "spread": float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan,
        "seconds": mean([run["measured"]["seconds"] for run in runs]),
        "peak_bytes": mean([run["measured"]["peak_bytes"] for run in runs]),
        "rccc": mean([run["rccc"] for run in runs]),
        "intra_class_similarity": mean([run.get("intra_class_similarity") for run in runs]),
    }


def at_chance(teacher: Mapping[str, Any]) -> bool:
    """Whether a teacher's answers on the held-out rows can't be told from any that ignore them.

    Classes by a chi-squared test of answers and labels and the sign of their correlation, numbers
    by the test of Pearson's.
    """
    labels, answers = (np.asarray(teacher.get(name, ())) for name in ("labels", "predictions"))
    if not answers.size or answers.dtype.kind not in "iuf":  # none, or words
        return False
    if len(set(answers.tolist())) == 1 or len(set(labels.tolist())) == 1:
        return True
    if teacher["classes"] is None:
        found = stats.pearsonr(answers, labels)
        return bool(found.statistic <= 0 or found.pvalue >= 1 - LEVEL)
    count = len(teacher["classes"])
    table = np.bincount(labels.astype(int) * count + answers.astype(int), minlength=count**2)
    table = table.reshape(count, count)
    there = table[np.ix_(table.sum(1) > 0, table.sum(0) > 0)]
    p = stats.chi2_contingency(there, correction=False).pvalue
    return bool(of_confusion("mcc", table[None].astype(float))[0] <= 0 or p >= 1 - LEVEL)


def classes_of(teacher: Mapping[str, Any]) -> list[str]:
    """The classes, if each row has one; words of a row that do leave none."""
    return (teacher["classes"] or []) if teacher["labels"] else []


def empty_classes(teacher: Mapping[str, Any]) -> dict[str, list[str]]:
    """The classes without rows to train on, and those without rows that are held out."""
    names = classes_of(teacher)
    if not names:
        return {}
    counts = {
        "training": teacher.get("rows_of_classes"),
        "held-out": np.bincount(teacher["labels"], minlength=len(names)).tolist(),
    }
    return {
        what: [name for name, rows in zip(names, found, strict=True) if not rows]
        for what, found in counts.items()
        if found is not None
    }


def verdict(difference: Difference, p: float, interval: tuple[float, float] | None) -> str:
    """Whether a difference is beyond noise: over seeds after the correction, and over rows."""
    if math.isnan(p):
        return UNKNOWN
    low, high = interval or (difference.low, difference.high)
    if p >= 1 - LEVEL or low <= 0 <= high:
        return ALIKE
    return ABOVE if difference.mean > 0 else BELOW


def recovered(
    pairs: Sequence[tuple[float, float]],
    teacher: float,
    smaller_is_better: bool = False,
    percent: bool = False,
) -> Difference | None:
    """(student − baseline) / (teacher − baseline) of each seed; None without a gap to speak of."""
    sign = -1 if smaller_is_better else 1
    gaps = [sign * (teacher - base) for _, base in pairs]
    scale = 100.0 if percent else 1.0
    if pairs and smaller_is_better:
        scale = float(np.mean([base for _, base in pairs]))
    if not gaps or min(gaps) <= 0 or float(np.mean(gaps)) < SMALLEST_GAP * scale:
        return None
    return paired([sign * (s - b) / gap for (s, b), gap in zip(pairs, gaps, strict=True)])
