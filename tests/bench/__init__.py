"""A tiny benchmark case."""

import torch

from bench.case import Case, Provider, call


def make(*, device, dtype, n):
    x = torch.randn(n, n, device=device, dtype=dtype)
    return {"x": x.requires_grad_(), "y": torch.randn(n, n, device=device, dtype=dtype)}


def reference(x, y):
    return (x * y).sin().sum()


def case(*providers, dtype=torch.float32, n=64, **options):
    return Case(
        loss="toy",
        title="sine",
        set="cpu",
        sizes={"n": n},
        dtype=dtype,
        make=make,
        providers=(Provider("reference", call(reference)), *providers),
        bytes_moved=3 * n * n * 4,
        operations=n * n,
        **options,
    )
