"""Launches of fastkd's kernels, recorded with their arguments before they ran."""

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tools.executed import executing
from tools.ptx import compiled

# Calls whose kernels have copies, products, reductions and atomics between them.
CALLS = ("forward_kl", "relation", "reverse_kl", "js", "adaptive_kl", "knn")


def run(call: str) -> None:
    import fastkd

    torch.manual_seed(0)
    if call == "relation":
        x = torch.randn(2, 40, 96, dtype=torch.bfloat16)
        y = torch.randn(2, 40, 130, dtype=torch.bfloat16)
        fastkd.relation_loss(x.requires_grad_(), y, backend="triton").backward()
    elif call == "knn":
        features, bank = torch.randn(70, 64), torch.randn(90, 64)
        classes = torch.arange(90) % 2
        fastkd.knn_feature_loss(features, bank, classes[:70], classes, k=3, backend="triton")
    else:
        student, teacher = torch.randn(2, 5, 300)
        options = {"divergence": call, "backend": "triton"}
        fastkd.soft_target_loss(student.requires_grad_(), teacher, **options).backward()


def launches() -> Iterator[dict[str, Any]]:
    for capability in (80, 90):
        for call in CALLS:
            yield from launches_of(call, capability)


@functools.cache
def launches_of(call: str, capability: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def note(program, grid, threads, shared, args, written):
        fresh = [i for i, x in enumerate(args) if torch.is_tensor(x) and is_fresh(x, written)]
        kept = [x.detach().clone() if torch.is_tensor(x) else x for x in args]
        found.append({"ptx": program.text, "grid": grid, "threads": threads[0], "shared": shared,
                      "args": kept, "fresh": fresh, "name": program.entry.name,
                      "capability": capability})  # fmt: skip
        return execute(program, grid, threads, shared, args, written)

    def is_fresh(x, written):
        new = {start for (start, _), known in written.items() if not known.any()}
        return x.data_ptr() in new

    execute = compiled.execute
    with mock.patch.object(compiled, "execute", note), executing(capability):
        run(call)
    return found


def copied(args: list) -> list:
    return [x.clone() if torch.is_tensor(x) else x for x in args]


def launch_of(name: str, capability: int = 80) -> dict[str, Any]:
    """The first launch of a kernel, with copied tensors."""
    calls = (launches_of(call, capability) for call in CALLS)
    found = next(x for launches in calls for x in launches if x["name"] == name)
    return {**found, "args": copied(found["args"])}
