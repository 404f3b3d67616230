"""The calls of fastkd/linalg/roots.py; see `tools.calls`."""

import itertools

import fastkd
from fastkd._core import extension
from tools.calls import ALL_TYPES, Call, Calls, learns


def calls() -> Calls:
    for n, dtype, root in itertools.product(
        (1, 16, 96, 97, 150), ALL_TYPES, (fastkd.sqrtm, fastkd.inv_sqrtm)
    ):
        waits = n > 64 and extension.BATCHED_SOLVER
        yield Call(root, {"a": learns(5, n, n, dtype=dtype)}, {}, waits=waits)
