"""Comparison of two commits: slower providers are reported, noise is not."""

import random

import pytest

from bench import compare

QUIET = [0.0, 0.01, -0.01, 0.02, -0.02]


def simulated(source, deviations, disturbed):
    """Runs of one side: scatter between runs, of the rounds within them, and disturbances."""
    return [
        [
            source.gauss(0, deviation)
            + 1.25 * source.gauss(0, 0.065) / 15**0.5
            + (0.26 if source.random() < disturbed else 0.0)
            for _ in range(5)
        ]
        for deviation in deviations
    ]


@pytest.mark.parametrize(
    "scatter, disturbed, detected",
    [(0.02, 0.0, 0.98), (0.02, 0.03, 0.97), (0.04, 0.0, 0.9), (0.04, 0.03, 0.85), (0.08, 0.03, 0)],
)
def test_error_rates_of_the_comparison(scatter, disturbed, detected):
    """Headline groups hold 25 providers: under 5% of comparisons raise an alarm, +20% is found."""
    source = random.Random(0)
    comparisons, size = 60, 25
    alarms = found = 0
    for _ in range(comparisons):
        deviations = [scatter * source.lognormvariate(0, 0.2) for _ in range(size)]
        before, after = (simulated(source, deviations, disturbed) for _ in range(2))
        alarms += any(compare.slower(list(zip(before, after, strict=True))))
        grown = [[x + 0.1823 for x in runs] for runs in after[: size // 3]] + after[size // 3 :]
        found += sum(compare.slower(list(zip(before, grown, strict=True)))[: size // 3])
    assert alarms < 0.05 * comparisons
    assert found > detected * comparisons * (size // 3)


def test_one_disturbed_run_neither_alarms_nor_hides():
    disturbed = [0.3, *QUIET[1:]]
    grown = [x + 0.18 for x in QUIET]
    others = [(QUIET, QUIET)] * 4
    assert not any(compare.slower([(QUIET, disturbed), *others]))
    assert compare.slower([(disturbed, grown), *others]) == [True] + 4 * [False]
    assert compare.slower([]) == []


@pytest.mark.parametrize("growth, flagged", [(0.08, False), (0.12, True)])
def test_changes_below_ten_per_cent_are_not_reported(growth, flagged):
    assert compare.slower([(QUIET, [x + growth for x in QUIET])]) == [flagged]


def runs(ratio, peak=1 << 20):
    return [{"knn, fastkd cpp": (ratio + x, peak)} for x in QUIET]


@pytest.mark.parametrize(
    "after, printed",
    [
        (runs(0.0), "nothing is slower"),
        (runs(0.3), "1 -> 1.35 of the reference's time (1.35×)"),
        (runs(0.0, peak=2 << 20), "peak 1.00 -> 2.00 MiB"),
        ([{}] * 5, "knn, fastkd cpp: no longer measured"),
    ],
)
def test_report_lists_slower_and_missing_groups(after, printed, capsys):
    assert compare.report(runs(0.0), after) == ("nothing" not in printed)
    assert printed in capsys.readouterr().out


def test_runs_alternate_between_the_two_trees(monkeypatch, tmp_path):
    calls = []

    def ratios(tree, out, arguments):
        calls.append((tree, arguments))
        return runs(0.0)[0]

    monkeypatch.setattr(compare, "_build_extension", lambda tree: None)
    monkeypatch.setattr(compare, "build", lambda ref: tmp_path)
    monkeypatch.setattr(compare, "ratios", ratios)
    chosen = ["HEAD~1", "--runs", "4", "--pytest", "-m headline -k 'knn or cca'"]
    assert compare.main(chosen) == 0
    trees = [tree for tree, _ in calls]
    assert trees == [compare.ROOT, tmp_path, tmp_path, compare.ROOT] * 2
    assert calls[0][1] == ["-m", "headline", "-k", "knn or cca"]
