"""The calls of fastkd/lm/log_probs.py; see `tools.calls`."""

import itertools

import fastkd
from tools.calls import ALL_TYPES, Call, Calls, learns, numbers


def calls() -> Calls:
    for dtype, ids in itertools.product(ALL_TYPES, (numbers(6), numbers(6, 4))):
        inputs = {"hidden": learns(6, 16, dtype=dtype), "head": learns(40, 16, dtype=dtype)}
        options = {"temperature": 2.0, "chunk_bytes": 400}
        yield Call(fastkd.log_probs, inputs | {"ids": ids}, options)
