"""Statistics of a study, on data with known effects, their pictures and tables."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from fastkd.study import grid_report, paper_table
from fastkd.study.grid import Cell, Grid
from fastkd.study.grid_report import cells, findings, headline
from fastkd.study.statistics import (
    ABOVE,
    ALIKE,
    BELOW,
    UNKNOWN,
    bootstrap_interval,
    gap_recovered,
    holm,
    of_confusion,
    paired_difference,
    summarize,
)

LABELS = [i % 2 for i in range(1000)]


def predictions(accuracy, seed):
    """Predictions of a model with this accuracy; most err on the same rows."""
    hard = np.random.default_rng(7).random(1000)
    noise = np.random.default_rng(seed).normal(0, 0.05, 1000)
    right = hard + noise < np.quantile(hard + noise, accuracy)
    return [label if ok else 1 - label for label, ok in zip(LABELS, right, strict=True)]


ABOUT = {
    "teacher": {"accuracy": 0.9}, "references": LABELS, "classes": ["no", "yes"], "warnings": {},
    "lower_is_better": [], "percent": [], "rows": {"train": 10, "eval": 1000}, "options": {},
    "rccc": 0.5, "seconds": 1.0,
}  # fmt: skip


def run(accuracy, seed, **more):
    answers = predictions(accuracy, seed)
    scores = {"accuracy": accuracy_score(LABELS, answers)}
    return {**ABOUT, "scores": scores, "predictions": answers, **more}


def summary_of(results, names=None, paper=None):
    """The one table of a study's results by (variant, "t", seed)."""
    names = list(names or dict.fromkeys(name for name, *_ in results))
    seeds = tuple(range(1 + max(seed for *_, seed in results)))
    cells = tuple(Cell(name, "t", seed, {}, {}) for name in names for seed in seeds)
    study = Grid("Typed", names[0], seeds, "none", cells, paper)
    (summary,) = summarize(study, results)
    return study, summary, {row.variant: row for row in summary.rows}


def table(accuracies, seeds=4):
    """A study in which each variant has its accuracy, with noise over seeds."""
    results = {}
    for seed in range(seeds):
        luck = np.random.default_rng(100 + seed).normal(0, 0.004, len(accuracies))
        for i, (name, accuracy) in enumerate(accuracies.items()):
            results[name, "t", seed] = run(accuracy + luck[i], 10 * seed + i)
    return summary_of(results)


def lined(accuracies, seeds=4):
    study, summary, _ = table(accuracies, seeds)
    return study, [summary]


def scored(metric, scores, paper=None, **about):
    """A study of these scores by variant and seed, its results, table and the table's rows."""
    results = {
        (name, "t", seed): run(0.7, seed, **{
            "scores": {metric: score}, "history": [{"step": 1, "scores": {metric: score}}],
            "classes": [], **about,
        })
        for name, by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    }  # fmt: skip
    study, summary, rows = summary_of(results, paper=paper)
    return study, results, summary, rows


def test_verdicts_find_the_planted_effects_only():
    """And the sentence that opens the report."""
    planted = {"labels": 0.7, "same": 0.7, "better": 0.8, "worse": 0.6, "again": 0.7}
    study, summary, rows = table(planted)
    assert rows["better"].verdict == ABOVE and rows["worse"].verdict == BELOW
    assert rows["same"].verdict == ALIKE and rows["again"].verdict == ALIKE
    assert rows["better"].difference.mean == pytest.approx(0.1, abs=0.01)
    assert rows["better"].recovered.mean == pytest.approx(0.5, abs=0.05)
    assert rows["labels"].difference is None and rows["labels"].verdict == ""
    said = "Beyond noise: better is better than labels on t; worse is worse than labels on t."
    assert headline(study, [summary]) == said
    two = {"labels": 0.7, "better": 0.8, "more": 0.8}
    assert "better, more are better than labels on t." in headline(*lined(two))
    for planted, seeds, sentence in (
        ({"a": 0.7, "b": 0.7}, 4, "Nothing exceeds noise with 4 seeds."),
        ({"a": 0.7, "b": 0.7}, 2, "Nothing can be told with two seeds."),
        ({"a": 0.7, "b": 0.8}, 1, "Nothing can be told with one seed."),
    ):
        assert headline(*lined(planted, seeds)) == sentence
    row = table({"labels": 0.7, "better": 0.8}, seeds=1)[2]["better"]
    assert row.verdict == UNKNOWN and math.isnan(row.difference.low) and math.isnan(row.p_holm)


def test_paired_difference_equals_scipys_ttest_rel():
    a, b = [0.81, 0.84, 0.80, 0.86], [0.79, 0.83, 0.80, 0.82]
    found = paired_difference(np.subtract(a, b))
    expected = stats.ttest_rel(a, b)
    low, high = expected.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, low, high))
    assert paired_difference([0.0, 0.0]).p == 1.0 and paired_difference([0.1, 0.1]).p == 0.0
    # Both seeds lose 20 of 872 rows, but a variance is at least that of rounding to one row.
    found = paired_difference([-20 / 872, -20 / 872], step=1 / 872)
    assert found.low < found.mean < found.high < 0 and 0.005 < found.p < 0.05
    assert paired_difference([0.1, 0.2, 0.3], step=1e-3) == paired_difference([0.1, 0.2, 0.3])


def test_percentages_of_rows_are_rounded_to_one_row_and_numbers_are_not():
    """Each seed has one more of 20 answers right: by chance, as with the same accuracies."""
    scores = {"labels": [60.0] * 3, "other": [65.0] * 3}
    about = {"references": ["film"] * 20, "percent": ["exact_match"]}
    row = scored("exact_match", scores, **about)[-1]["other"]
    assert row.difference == paired_difference([5.0] * 3, step=5.0)
    assert row.difference.rounded and row.verdict == ALIKE
    scores = {"labels": (0.50, 0.52, 0.49), "better": (0.53, 0.551, 0.521)}
    row = scored("pearson", scores, references=[0.5] * 20)[-1]["better"]
    expected = stats.ttest_rel(scores["better"], scores["labels"])
    assert row.difference.p == pytest.approx(expected.pvalue)
    assert row.verdict == ABOVE and row.rows_interval is None


def test_holm_matches_values_computed_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    corrected = holm([0.02, math.nan, 0.5])
    assert corrected[0] == pytest.approx(0.04) and math.isnan(corrected[1])
    assert holm([]) == []


@pytest.mark.parametrize(("classes", "present"), [(2, [0, 1]), (4, range(4)), (3, [0, 2])])
def test_metrics_of_confusion_matrices_match_scikit_learn(classes, present):
    """Macro F1 leaves out classes that do not occur."""
    true, guess = np.random.default_rng(1).choice(present, (2, 60))
    table = np.zeros((classes, classes))
    np.add.at(table, (true, guess), 1)
    average = "binary" if classes == 2 else "macro"
    assert of_confusion("accuracy", table) == pytest.approx(accuracy_score(true, guess))
    assert of_confusion("mcc", table) == pytest.approx(matthews_corrcoef(true, guess))
    assert of_confusion("f1", table) == pytest.approx(f1_score(true, guess, average=average))
    assert of_confusion("mcc", np.array([[5.0, 0.0], [5.0, 0.0]])) == 0.0


def test_bootstrap_interval_matches_resampling_row_by_row():
    one = [predictions(0.8, seed) for seed in range(3)]
    low, high = bootstrap_interval("accuracy", LABELS, one, [predictions(0.7, s) for s in range(3)])
    assert 0 < low < 0.1 < high < 0.2
    gains = np.mean([np.equal(a, LABELS) for a in one], 0) - np.mean(
        [np.equal(predictions(0.7, s), LABELS) for s in range(3)], 0
    )
    drawn = np.random.default_rng(5).choice(gains, (2000, 1000)).mean(1)  # row by row
    assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.003)
    assert bootstrap_interval("accuracy", LABELS, one, one) == (0.0, 0.0)
    assert bootstrap_interval("mse", [0.5], [[0.5]], [[0.5]]) is None
    # Seeds may have labels of their own.
    two = one[:2], [predictions(0.7, s) for s in range(2)]
    flipped = ([a, [1 - x for x in b]] for a, b in ((LABELS, LABELS), *two))
    expected = bootstrap_interval("accuracy", LABELS, *two)
    assert bootstrap_interval("accuracy", *flipped) == expected
    # F1 of a head of three classes is a mean even if the rows have two.
    two = [[0, 1] * 50], [[0, 0] * 50]
    low, high = bootstrap_interval("f1", [0, 1] * 50, *two, num_classes=3)
    gain = 1 - f1_score([0, 1] * 50, [0] * 100, average="macro", zero_division=0.0)
    assert low < gain < high and high - low < 0.15


def test_gap_recovered_is_none_without_a_sufficient_gap():
    assert gap_recovered([(0.8, 0.8), (0.8, 0.8)], [0.805] * 2) is None
    assert gap_recovered([(0.8, 0.7), (0.82, 0.7)], [0.69] * 2) is None
    assert gap_recovered([(0.8, 0.7), (0.82, 0.7)], [0.9, math.nan]) is None
    assert gap_recovered([], []) is None
    assert gap_recovered([(0.8, 0.7), (0.84, 0.7)], [0.9] * 2).mean == pytest.approx(0.6)
    assert gap_recovered([(0.62, 0.6), (0.55, 0.6)], [0.605, 0.75]) is None  # within noise
    found = gap_recovered([(0.62, 0.6), (0.63, 0.58), (0.6, 0.61)], [0.7, 0.72, 0.69])
    gains, gaps = np.array([0.02, 0.05, -0.01]), np.array([0.1, 0.14, 0.08])
    assert found.mean == pytest.approx(gains.sum() / gaps.sum())  # not the mean of ratios, .144
    half = stats.t.ppf(0.975, 2) * (gains - found.mean * gaps).std(ddof=1) / 3**0.5 / gaps.mean()
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert gap_recovered([(20.0, 20.1)], [20.0], True) is None
    assert gap_recovered([(60.0, 60.5)], [61.0], percent=True) is None


def test_failed_runs_are_counted_and_left_out_of_means():
    results = {(name, "t", seed): run(0.7, seed) for name in ("labels", "bad") for seed in range(2)}
    results["bad", "t", 1] = {"failed": "not finite"}
    _, summary, rows = summary_of(results, ("labels", "bad", "absent"))
    assert [*rows] == ["labels", "bad"]
    bad = rows["bad"]
    assert bad.failed == 1 and bad.seeds == 1 and bad.verdict == UNKNOWN
    assert cells(bad)[:3] == ["bad (1 failed)", "1", f"{bad.mean:.4f}"]
    assert "Failed runs: 1," in findings(summary) and "No verdicts yet" in findings(summary)
    for seed in range(2):
        results["labels", "t", seed] = {"failed": "not finite"}
    _, summary, _ = summary_of(results)
    assert cells(summary.rows[0])[:3] == ["labels (2 failed)", "0", ""]


def test_findings_warn_of_empty_classes_chance_and_constant_students():
    about = {"classes": ["no", "yes", "perhaps"], "training_rows": [6, 0, 4]}
    about |= {"warnings": {"teacher": "are no better than chance"}, "options": {"labelled": 2}}
    names = {"labels": 0.7, "always no": 0.5}
    results = {
        (name, "t", seed): run(x, seed, **about) for name, x in names.items() for seed in range(2)
    }
    for seed in range(2):
        results["always no", "t", seed]["predictions"] = [0] * 1000
    _, summary, _ = summary_of(results)
    text = findings(summary)
    assert "Classes without training rows: yes." in text
    assert "Classes without held-out rows: perhaps." in text
    assert "Students with the same prediction for every row: always no." in text
    assert "The teacher's answers are no better than chance." in text
    assert "2 labels are fewer than the classes." in text
    assert cells(summary.rows[1])[0] == "always no (one prediction for all rows: 2 seeds)"
    results = {at: {**r, **ABOUT, "training_rows": [5, 5]} for at, r in results.items()}
    assert "Classes without" not in findings(summary_of(results)[1])


BARE: dict = {"references": [], "predictions": [0]}


def test_learning_curves_average_runs_of_different_lengths(monkeypatch):
    scores = {"labels": (0.5, 0.6), "fcd": (0.5, 0.6)}
    study, found, *summaries, _ = scored("accuracy", scores, **BARE)
    for (variant, _, seed), result in found.items():
        steps = (4, 8) if seed else (2, 4, 5)
        result["history"] = [{"step": n, "scores": {"accuracy": n / steps[-1]}} for n in steps]
        if variant == "fcd":
            result["history"] = [x | {"intra_class_similarity": 0.5} for x in result["history"]]
    monkeypatch.setattr(grid_report, "_png", lambda figure: figure)
    (ax,) = grid_report._similarity_curves(study, summaries, found).axes
    assert ax.get_title() == "t: M_ICS" and len(ax.lines) == 1
    assert list(ax.lines[0].get_ydata()) == [0.5] * 3
    figure = grid_report._curves(study, summaries, found)
    (ax,) = figure.axes
    _, *lines = ax.lines  # the first is the teacher's
    assert len(lines) == 2
    for line in lines:
        assert list(line.get_xdata()) == pytest.approx([0.4, 0.8, 1.0])
        assert list(line.get_ydata()) == pytest.approx([(0.4 + 0.5) / 2, 0.8, 1.0])
    assert lines[0].get_linewidth() > lines[1].get_linewidth()  # so that both show
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["teacher", "labels", "fcd"]


PERPLEXITIES = {
    "labels": (28.5, 28.9, 28.4),
    "lower": (23.7, 24.2, 23.5),
    "higher": (31.5, 31.8, 31.3),
    "alike": (28.4, 29.1, 28.3),
}
PAPER = {
    "title": "Perplexity", "columns": {"x": "t perplexity", "y": ""},
    "rows": {"labels": [28.5, 1], "lower": [23.7, 1], "higher": [27.0, 1], "alike": ["-", 1]},
}  # fmt: skip


def test_pictures_and_tables_of_a_metric_to_minimise(monkeypatch):
    """Lower perplexity is the better verdict."""
    lower = {**BARE, "lower_is_better": ["perplexity"], "teacher": {"perplexity": 20.0}}
    made, results, summary, rows = scored("perplexity", PERPLEXITIES, PAPER, **lower)
    assert (rows["lower"].verdict, rows["lower"].quality) == ("below", "better")
    assert (rows["higher"].verdict, rows["higher"].quality) == ("above", "worse")
    assert rows["alike"].verdict == "not told apart" and rows["alike"].quality == ""
    assert rows["lower"].difference.mean == pytest.approx(-4.8)
    assert rows["lower"].rows_interval is None
    assert rows["lower"].recovered.mean == pytest.approx(4.8 / 8.6, abs=0.01)
    text = "lower is better than labels on t; higher is worse than labels on t."
    assert headline(made, [summary]) == f"Beyond noise: {text}"
    assert "below (better)" in cells(rows["lower"])
    monkeypatch.setattr(grid_report, "_png", lambda figure: figure)
    (ax,) = grid_report._forest(made, [summary], results).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["higher", "alike", "lower"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_color() for line in dots][::2] == ["#b42318", "#1a7f37"]
    assert dots[-1].get_xdata()[0] == pytest.approx(-4.8)  # not in percentage points
    assert ax.get_xlabel() == "perplexity (lower is better) above labels"
    beside = paper_table.beside(made, [summary], results)
    assert beside["columns"] == ["", "paper: x", "ours: x", "paper: y"]
    assert beside["rows"][1] == ["lower", "23.7", "23.80 ± 0.36", "1"]
    lower, higher = beside["order"]
    assert (
        lower == "x: lower is below labels in the paper (-4.8); here the same, beyond noise (-4.80)"
    )
    assert higher.endswith("(-1.5); here the opposite, beyond noise (+2.93)")
    # Percentages are not scaled again.
    given = {**BARE, "percent": ["accuracy"], "teacher": {"accuracy": 61.0}}
    made, results, summary, _ = scored("accuracy", PERPLEXITIES, **given)
    (ax,) = grid_report._forest(made, [summary], results).axes
    dots = sorted(line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o")
    assert dots[0] == pytest.approx(-4.8)
