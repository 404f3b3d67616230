"""A tiny benchmark case, and pages in a folder."""

import torch

from bench import report
from bench.case import Case, Provider, call


def write_pages_to(folder, monkeypatch):
    """Let `bench.report` read results there, and fill two pages there."""
    for name in ("RESULTS", "PICTURES", "README", "PAGE"):
        monkeypatch.setattr(report, name, folder / name)
    (folder / "RESULTS").mkdir()
    for name in ("README", "PAGE"):
        (folder / name).write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")


def make(*, device, dtype, n):
    x = torch.randn(n, n, device=device, dtype=dtype)
    return {"x": x.requires_grad_(), "y": torch.randn(n, n, device=device, dtype=dtype)}


def reference(x, y):
    return (x * y).sin().sum()


def case(*providers, dtype=torch.float32, n=64, **options):
    return Case(
        loss="toy", title="sine", set="cpu", sizes={"n": n}, dtype=dtype, make=make,
        providers=(Provider("reference", call(reference)), *providers),
        bytes_moved=3 * n * n * 4, operations=n * n, **options,
    )  # fmt: skip
