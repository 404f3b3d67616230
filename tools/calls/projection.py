"""The calls of fastkd/losses/projection.py; see `tools.calls`."""

import itertools

import fastkd
from fastkd.losses.projection import REDUCTIONS
from tools.calls import ALL_TYPES, BOTH, ON_A_GPU, Call, Calls, given, learns, mask_of, numbers


def calls() -> Calls:
    for dtype in ALL_TYPES:
        yield Call(fastkd.cayley, {"skew": learns(3, 20, 20, dtype=dtype)}, {})
    for backend in ("torch", "triton"):
        yield Call(fastkd.cayley, {"skew": learns(48, 48)}, {"backend": backend})
    columns = [1, 15, 16, 17, 48, 770, 9000, 20000]
    columns += [size for log in range(5, 15) for size in (2**log - 1, 2**log)]
    sides = ((learns, given), (given, learns), (learns, learns))
    for dtype, D, (x, y) in itertools.product(ALL_TYPES, columns, sides):
        pair = {"x": x(5, D, dtype=dtype), "y": y(5, D, dtype=dtype)}
        yield Call(fastkd.layer_norm_mse, pair, {})
    for reduction, backend in itertools.product(REDUCTIONS, ON_A_GPU):
        pair = {"x": learns(2, 3, 48), "y": learns(2, 3, 48)}
        options = {"reduction": reduction, "backend": backend}
        for weights in ({}, {"weights": given(2, 3)}):
            yield Call(fastkd.layer_norm_mse, pair | weights, options)
    yield Call(fastkd.layer_norm_mse, {"x": learns(2**22, 768), "y": learns(2**22, 768)}, {})
    for (n, out), rows, backend in itertools.product(
        ((1, 1), (48, 32), (48, 64), (256, 256), (257, 257), (2047, 2047), (2048, 2048)),
        (4, 4096),
        ON_A_GPU,
    ):
        options = {"in_dim": n, "out_dim": out, "backend": backend}
        yield Call(fastkd.OrthogonalProjection, {"x": learns(rows, n)}, options)
    sizes = {"student_dim": 48, "teacher_dim": 64}
    for shape, orthogonal, reduction, backend in itertools.product(
        ((8,), (8, 16)), BOTH, REDUCTIONS, ON_A_GPU
    ):
        features = {"student": learns(*shape, 48), "teacher": given(*shape, 64)}
        mask = mask_of(*shape, masked=len(shape) == 2)
        options = {"orthogonal": orthogonal, "reduction": reduction, "backend": backend}
        yield Call(fastkd.DualProjectionLoss, features | mask, sizes | options)
    features = {"student": learns(8, 16, 48), "teacher": given(8, 20, 64)}
    masks = {"mask": numbers(8, 16), "teacher_mask": numbers(8, 20)}
    yield Call(fastkd.DualProjectionLoss, features | masks, sizes)
