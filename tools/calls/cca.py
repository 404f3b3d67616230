"""The calls of fastkd/losses/cca.py; see `tools.calls`."""

import itertools

import torch

import fastkd
from tools.calls import ALL_TYPES, Call, Calls, given, learns, numbers, pair


def calls() -> Calls:
    from fastkd.kernels.cca import launch_digit_product

    for n, symmetric in itertools.product((32, 768), (False, True)):
        inputs = {name: given(2, n, n, dtype=torch.float64) for name in ("a", "b")}
        yield Call(launch_digit_product, inputs, {"symmetric": symmetric})
    for (m, D), ridge, top_k, dtype in itertools.product(
        [(32, 768), (64, 64), (512, 768), (4096, 768)],
        (1e-2, (1e-6, 1e-4), (0.0, 1e-4), 0.0),
        (None, 4),
        ALL_TYPES,
    ):
        eigenvectors = bool(top_k) or ridge in (0.0, (0.0, 1e-4))
        if eigenvectors and m > 64:
            continue
        # Covariances are larger than what the extension's kernel takes.
        waits = eigenvectors and D == 768 and dtype == torch.float64
        inputs = pair(3, m, D, teacher=(3, m, 2 * D), dtype=dtype) | {"mask": numbers(3, m)}
        options = {"ridge": ridge, "top_k": top_k}
        yield Call(fastkd.cca_loss, inputs, options, waits=waits)
    for reduction, backend in itertools.product(
        ("sum", "mean", "none"), ("auto", "torch", "triton")
    ):
        inputs = pair(3, 64, 8, teacher=(3, 64, 16))
        yield Call(fastkd.cca_loss, inputs, {"reduction": reduction, "backend": backend})
    for (m, D), dtype in itertools.product([(32, 768), (32, 8), (200, 8), (4096, 8)], ALL_TYPES):
        inputs = {"x": given(2, m, D, dtype=dtype), "y": given(2, m, 16, dtype=dtype)}
        inputs["mask"] = numbers(2, m)
        yield Call(fastkd.canonical_correlations, inputs, {}, waits=True)
    for pool in ("tokens", "cls", "mean"):
        inputs = {"student": [learns(80, 16, 48), learns(80, 16, 32)], "mask": numbers(80, 16)}
        yield Call(fastkd.CCALoss, inputs | {"teacher": [given(80, 16, 64)] * 2}, {"pool": pool})
    for memory in (500, "auto"):
        inputs = pair(80, 16, 48, teacher=(80, 16, 64), layers=1)
        yield Call(fastkd.CCALoss, inputs, {"memory": memory})
