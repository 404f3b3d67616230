"""Comparison of two commits: slower providers are reported, noise is not."""

import pytest

from bench import compare

QUIET = [0.0, 0.01, -0.01, 0.02, -0.02]
NOISY = [10 * x for x in QUIET]
DISTURBED = [0.3, *QUIET[1:]]


def test_slower_providers():
    """One disturbed run neither alarms nor hides; growth of less than a tenth isn't reported.

    Nor is growth within four standard errors, of which half is the other providers'.
    """
    for before, after, growth, usual, flag in (
        (QUIET, DISTURBED, 0.0, QUIET, False),
        (DISTURBED, QUIET, 0.18, QUIET, True),
        (QUIET, QUIET, 0.08, QUIET, False),
        (QUIET, QUIET, 0.12, QUIET, True),
        (NOISY, NOISY, 0.28, QUIET, False),
        (NOISY, NOISY, 0.4, QUIET, True),
        (NOISY, NOISY, 0.4, NOISY, False),
        (NOISY, NOISY, 0.5, NOISY, True),
    ):
        pair = before, [x + growth for x in after]
        assert compare.slower([pair, *[(usual, usual)] * 4]) == [flag, *[False] * 4]
    assert compare.slower([]) == []


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
def test_runs_alternate_between_the_two_trees_and_are_reported(
    after, printed, monkeypatch, tmp_path, capsys
):
    calls, left = [], {compare.ROOT: [*after], tmp_path: runs(0.0)}

    def ratios(tree, out, arguments):
        calls.append((tree, arguments))
        return left[tree].pop(0)

    monkeypatch.setattr(compare, "_build_extension", lambda tree: None)
    monkeypatch.setattr(compare, "build", lambda ref: tmp_path)
    monkeypatch.setattr(compare, "ratios", ratios)
    chosen = ["HEAD~1", "--pytest", "-m headline -k 'knn or cca'"]
    assert compare.main(chosen) == ("nothing" not in printed)
    trees, (arguments, *_) = zip(*calls, strict=True)
    turns = [compare.ROOT, tmp_path, tmp_path, compare.ROOT] * 2
    assert [*trees] == [*turns, compare.ROOT, tmp_path]
    assert arguments == ["-m", "headline", "-k", "knn or cca"]
    assert printed in capsys.readouterr().out
