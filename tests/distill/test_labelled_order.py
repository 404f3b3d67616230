"""Row order of an epoch with few labelled rows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastkd.distill.labelled_order import LabelledOrder, has_label


@given(
    st.lists(st.booleans(), min_size=1, max_size=120),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_row_is_read_and_batches_have_their_labelled_share(
    labelled, batch, share, seed, grouped
):
    labelled = np.array(labelled)
    order = LabelledOrder(labelled, batch, share, np.arange(len(labelled)) if grouped else None)
    rows = order.draw(np.random.default_rng(seed))
    assert np.array_equal(rows, order.draw(np.random.default_rng(seed)))
    assert len(rows) == order.rows
    times = np.bincount(rows, minlength=len(labelled))
    assert (times[~labelled] == 1).all()
    assert times.min() >= 1
    wanted = min(math.ceil(share * batch - 1e-9), batch - 1)
    enough = labelled.sum() >= min(share, wanted / batch) * len(labelled)
    if enough or not labelled.any():
        assert (times == 1).all()
        return
    assert times[labelled].max() - times[labelled].min() <= 1
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    for part in parts:
        assert labelled[part].sum() >= math.floor(wanted / batch * len(part))
        assert not labelled[part].all()
        for ranks in (2, 3):
            found = [labelled[own].sum() for own in np.array_split(part, ranks)]
            assert max(found) - min(found) <= 1 + (len(part) % ranks > 0)
    assert all(labelled[part].sum() == wanted for part in parts[:-1])


def test_200_of_5700_rows_are_a_quarter_of_each_batch():
    labelled = np.arange(5700) < 200
    rows = LabelledOrder(labelled, 32).draw(np.random.default_rng(0))
    assert [labelled[x].sum() for x in np.split(rows[: 32 * 229], 229)] == [8] * 229
    # A share of 0 leaves the random order unchanged.
    plain = LabelledOrder(labelled, 32, 0.0).draw(np.random.default_rng(0))
    assert np.array_equal(plain, np.random.default_rng(0).permutation(5700))
    # Where few are unlabelled, no labelled row is dropped.
    for share in (0.95, 1.0):
        order = LabelledOrder(np.arange(68) < 64, 8, share)
        assert order.rows == 68
        assert sorted(order.draw(np.random.default_rng(0))) == list(range(68))


def test_with_lengths_a_batch_has_similar_rows_of_both_kinds():
    labelled, lengths = np.arange(3200) < 100, np.random.default_rng(0).permutation(3200)
    order = LabelledOrder(labelled, 32, lengths=lengths)
    rows = order.draw(np.random.default_rng(0))
    for kind in (True, False):
        parts = np.stack([lengths[x[labelled[x] == kind]] for x in np.split(rows[:1600], 50)])
        assert np.ptp(parts, axis=1).mean() < np.ptp(parts) / 10
        assert (np.diff(parts.mean(1)) < 0).any()  # not from short to long


@pytest.mark.parametrize(("labels", "found"), [
    ([0, -100, 2], [True, False, True]),
    ([0.5, float("nan"), None], [True, False, False]),
    ([[1, 2], [3]], [True, True]),
    ([[1, -100], [-100, -100]], [True, True]),
])  # fmt: skip
def test_what_counts_as_a_label(labels, found):
    assert has_label(labels).tolist() == found
