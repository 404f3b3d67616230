"""The calls of fastkd/linalg/roots.py; see `tools.calls`."""

import itertools

import fastkd
from tools.calls import ALL_TYPES, Call, Calls, learns


def calls() -> Calls:
    for n, dtype, root in itertools.product(
        (1, 16, 96, 97, 150), ALL_TYPES, (fastkd.sqrtm, fastkd.inv_sqrtm)
    ):
        yield Call(root, {"a": learns(5, n, n, dtype=dtype)}, {})
