"""The calls of fastkd/losses/cca.py; see `tools.calls`."""

import itertools

import fastkd
from tools.calls import ALL_TYPES, Call, Calls, given, learns, numbers


def calls() -> Calls:
    for (m, D), ridge, top_k, dtype in itertools.product(
        [(32, 768), (64, 64), (512, 768), (4096, 768)],
        (1e-2, (1e-6, 1e-4), (0.0, 1e-4), 0.0),
        (None, 4),
        ALL_TYPES,
    ):
        if m > 64 and (top_k or ridge in (0.0, (0.0, 1e-4))):
            continue  # PyTorch's eigh waits for the device, as the documentation says
        yield Call(
            fastkd.cca_loss,
            {
                "student": learns(3, m, D, dtype=dtype),
                "teacher": given(3, m, 2 * D, dtype=dtype),
                "mask": numbers(3, m),
            },
            {"ridge": ridge, "top_k": top_k},
        )
    for reduction, backend in itertools.product(("sum", "mean", "none"), ("auto", "torch")):
        yield Call(
            fastkd.cca_loss,
            {"student": learns(3, 64, 8), "teacher": given(3, 64, 16)},
            {"reduction": reduction, "backend": backend},
        )
    for (m, D), dtype in itertools.product([(32, 768), (32, 8), (200, 8), (4096, 8)], ALL_TYPES):
        yield Call(
            fastkd.canonical_correlations,
            {
                "x": given(2, m, D, dtype=dtype),
                "y": given(2, m, 16, dtype=dtype),
                "mask": numbers(2, m),
            },
            {},
        )
    for pool in ("tokens", "cls", "mean"):
        yield Call(
            fastkd.CCALoss,
            {
                "student": [learns(80, 16, 48), learns(80, 16, 32)],
                "teacher": [given(80, 16, 64)] * 2,
                "mask": numbers(80, 16),
            },
            {"pool": pool},
        )
    for memory in (500, "auto"):
        yield Call(
            fastkd.CCALoss,
            {"student": [learns(80, 16, 48)], "teacher": [given(80, 16, 64)]},
            {"memory": memory},
        )
