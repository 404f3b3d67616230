"""The calls of fastkd/losses/hidden_states.py; see `tools.calls`."""

import itertools

import torch

import fastkd
from fastkd.losses.hidden_states import KINDS, REDUCTIONS
from tools.calls import ALL_TYPES, BOTH, ON_A_GPU, Call, Calls, given, learns, mask_of, numbers


def calls() -> Calls:
    for dtype, D, kind, masked, learning in itertools.product(
        ALL_TYPES, (1, 48, 770, 4096), KINDS, BOTH, BOTH
    ):
        student = learns if learning else given
        inputs = {"student": student(4, 8, D, dtype=dtype), "teacher": given(4, 8, D, dtype=dtype)}
        yield Call(fastkd.hidden_state_loss, inputs | mask_of(4, 8, masked=masked), {"kind": kind})
    for kind, reduction, backend, weighted in itertools.product(KINDS, REDUCTIONS, ON_A_GPU, BOTH):
        inputs = {"student": learns(4, 8, 48), "teacher": given(4, 8, 48), "mask": numbers(4, 8)}
        weights = {"weights": given(4, 8, dtype=torch.bfloat16)} if weighted else {}
        options = {"kind": kind, "reduction": reduction, "backend": backend}
        yield Call(fastkd.hidden_state_loss, inputs | weights, options)
        if weighted:
            sizes = {"student_dim": 32, "teacher_dim": 48, "beta": 0.5}
            inputs["student"] = learns(4, 8, 32)
            yield Call(fastkd.HiddenStateLoss, inputs | weights, options | sizes)
    # More than 2^31 elements.
    large = {"student": learns(2**22, 768), "teacher": given(2**22, 768)}
    yield Call(fastkd.hidden_state_loss, large, {"beta": 1.0})
