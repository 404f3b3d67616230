"""Random calls over the samples of several processes, against one process with all of them.

The processes are threads, as in tests of PyTorch; tests/test_distributed.py has real ones.
"""

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

import fastkd
from fastkd.distributed import AcrossRanks
from tests.support.draw import Draw

# A loss, and its arguments from student (B, N, Ds), teacher (B, N, Dt), mask (B, N), labels (B).
Call = tuple[Callable[..., Any], Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]


def run_threads(world: int, function: Callable[[int], Any]) -> list[Any]:
    """``function(rank)`` of ``world`` processes that are threads; results by rank."""
    results: list[Any] = [None] * world
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # ends the others' waiting
        finally:
            dist.destroy_process_group()

    with _threaded():
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [x for x in results if isinstance(x, BaseException)]
    if errors:  # the first that no other caused
        raise next((x for x in errors if not isinstance(x, SystemExit)), errors[0])
    return results


@contextmanager
def _threaded() -> Iterator[None]:
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    multi_threaded_pg._install_threaded_pg()
    multi_threaded_pg.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        isolate(False)


def relations(draw: Draw) -> Call:
    options = {}
    if draw.backend != "cpp":  # whose kernels have no others
        options = {"normalize": draw.pick(["l2", "layer_norm", "none"])}
        options["distance"] = draw.pick(["pearson", "mse"])
    if draw.chance(0.3):
        module = functools.partial(fastkd.FCDLoss, draw.pick([0.0, 0.5]), **options)
        return module, lambda s, t, m, y: (([s, 2 * s], [t, t.exp()]), {"mask": m})
    options["over"] = draw.pick(["samples", "samples", "tokens"])
    packed = draw.chance(0.3)
    weighted = draw.chance(0.5) and options["over"] == "tokens"

    def arguments(s: Tensor, t: Tensor, m: Tensor, y: Tensor) -> tuple[Any, dict[str, Any]]:
        more = {"segments": (m.cumsum(1) > 2).long()} if packed else {}
        return (s, t, m), options | more | ({"weights": t[:, 0, 0]} if weighted else {})

    return fastkd.relation_loss, arguments


def neighbours(draw: Draw) -> Call:
    options = {
        "k": draw.pick([1, 2, 9]),
        "reduction": draw.pick(["sum", "mean", "none"]),
        "ignore_index": draw.pick([-100, 1]),
        "tolerance": draw.pick([None, 1.0]),
    }
    if draw.chance(0.5):
        pool = draw.pick(["cls", "mean", "tokens"])
        sizes = {"student_dim": 6, "teacher_dim": 7, "pool": pool}
        return (
            functools.partial(fastkd.IntraClassKNNLoss, **options | sizes),
            lambda s, t, m, y: ((s, t, y), {"mask": m}),
        )
    bank, weighted = draw.chance(0.5), draw.chance(0.5)

    def arguments(s: Tensor, t: Tensor, m: Tensor, y: Tensor) -> tuple[Any, dict[str, Any]]:
        more = {"weights": t[:, 0, 6]} if weighted else {}
        rows = t[:, :1, :6].repeat(1, 2, 1).flatten(0, 1) if bank else t[:, 0, :6]
        labels = (y, y.repeat_interleave(2)) if bank else (y,)
        return (s[:, 0], rows, *labels), options | more

    return fastkd.knn_feature_loss, arguments


def contrasts(draw: Draw) -> Call:
    reduction, labelled = draw.pick(["mean", "sum"]), draw.chance(0.5)
    if draw.chance(0.4):
        module = functools.partial(
            fastkd.CosNCELoss, 6, 7, draw.pick(["tokens", "cls", "mean"]), reduction=reduction
        )
        return module, lambda s, t, m, y: (
            ([s, s.sin()], [t, t]),
            {"mask": m} | ({"labels": y} if labelled else {}),
        )
    negatives, weighted = draw.pick([None, "own", "bank"]), draw.chance(0.5)
    rows = draw.chance(0.3)  # without tokens
    options = {"reduction": draw.pick([reduction, "none"]) if rows else reduction}

    def arguments(s: Tensor, t: Tensor, m: Tensor, y: Tensor) -> tuple[Any, dict[str, Any]]:
        if rows:
            s, t, m = s[:, 0], t[:, 0], m[:, 0]
        given = {"mask": m} | ({"labels": y} if labelled else {})
        if weighted:
            given["weights"] = t[..., 6]
        if negatives == "own":  # (B, K, ..., D)
            given["negatives"] = torch.stack([t[..., 1:].sin(), t[..., 1:].cos()], 1)
            if labelled:
                given["negatives_labels"] = torch.stack([y, y + 1], 1)
        elif negatives == "bank":
            given["negatives"] = torch.cat([t[..., :6].exp(), t[..., 1:]])
            given["negatives_mask"] = torch.cat([m, m])
            if labelled:
                given["negatives_labels"] = torch.cat([y, 1 - y])
        return (s, t[..., :6]), given | options

    return fastkd.cos_nce_loss, arguments


def correlations(draw: Draw) -> Call:
    ridge, top_k = draw.pick([1e-2, (1e-2, 1e-1)]), draw.pick([None, None, 2])
    if draw.chance(0.5):
        pool, many = draw.pick(["tokens", "cls", "mean"]), draw.chance(0.5)
        return (
            functools.partial(fastkd.CCALoss, ridge, top_k, pool),
            lambda s, t, m, y: (([s, s.sin()], [t, t]) if many else (s, t), {"mask": m}),
        )
    form = draw.pick(["rows", "items", "moments"])
    options = {"ridge": ridge, "top_k": top_k, "reduction": draw.pick(["sum", "mean", "none"])}

    def arguments(s: Tensor, t: Tensor, m: Tensor, y: Tensor) -> tuple[Any, dict[str, Any]]:
        if form == "rows":
            given = s[:, 0], t[:, 0], m[:, 0]
        elif form == "items":  # one of them may have nothing to compare
            given = tuple(torch.stack([x[:, 0], x[:, 0].sin()]) for x in (s, t))
            given = *given, torch.stack([m[:, 0], y > 2])
        else:  # of few features and many tokens
            given = tuple(x[..., :2].flatten(0, 1)[None] for x in (s, t))
            given = *given, m.flatten()[None]
        return given, options

    return fastkd.cca_loss, arguments


def made(loss: Callable[..., Any], dtype: torch.dtype, **gather: Any) -> Callable[..., Tensor]:
    """The loss: a Module with its parameters, or a function."""
    if not isinstance(getattr(loss, "func", loss), type):
        return functools.partial(loss, **gather)
    generator = torch.Generator().manual_seed(0)
    module = loss(**gather).to(dtype)
    for x in module.parameters():
        x.data.copy_(torch.randn(x.shape, generator=generator, dtype=dtype))
    return module


def step(
    loss: Any, arguments: Any, data: Any, upstream: Tensor, masked: bool = True
) -> list[Tensor]:
    """Value, gradient at the student's features, and the parameters' gradients."""
    student, *others = data
    student = student.clone().requires_grad_()
    given, options = arguments(student, *others)
    if not masked and others[1].all():  # of this process; others may have a mask
        options.pop("mask", None)
    value = loss(*given, **options)
    parameters = list(loss.parameters()) if isinstance(loss, torch.nn.Module) else []
    gradients = torch.autograd.grad(
        value,
        [student, *parameters],
        upstream[: value.numel()].view(value.shape).to(value),
        allow_unused=True,
        materialize_grads=True,
    )
    return [value.detach(), *gradients]


def gathered(draw: Draw) -> str | None:
    """Check a loss with ``gather=True``, and in `AcrossRanks`, on a part of the samples each."""
    dtype = draw.pick([torch.float64, torch.float64, torch.float32])
    forms = [relations, neighbours, contrasts]
    loss, arguments = draw.pick(forms if draw.backend == "cpp" else [*forms, correlations])(draw)
    has = "backend" in inspect.signature(loss).parameters
    loss = functools.partial(loss, **{"backend": draw.backend} if has else {})
    world = draw.pick([1, 2, 2, 3, 4])
    counts = [draw.pick([0, 1, 2, 3, 5]) for _ in range(world)]
    counts[draw.random.randrange(world)] += 1
    samples, positions = sum(counts), draw.pick([1, 2, 5, 9])
    student, teacher = (draw.normal(samples, positions, D).to(dtype) for D in (6, 7))
    data = student, teacher, draw.mask(samples, positions), draw.labels(samples)
    upstream = 1 + draw.uniform(samples * positions + 2)
    wanted = step(made(loss, dtype), arguments, data, upstream)
    ends = [0, *itertools.accumulate(counts)]
    # Rows of unlike lengths are padded; `AcrossRanks` needs rows of one length, samples first.
    across = draw.chance(0.3) and arguments(*data)[0][0] is student
    trimmed = not across and draw.chance(0.5)
    # KNN over tokens divides by the longest width.
    whole_one = world if loss.keywords.get("pool") != "tokens" else draw.pick(range(world))

    def each(rank: int) -> list[Tensor]:
        own = [x[ends[rank] : ends[rank + 1]] for x in data]
        if trimmed and rank != whole_one:
            length = max([1, *(1 + own[2].any(0).nonzero().flatten()).tolist()])
            own[:3] = (x[:, :length] for x in own[:3])
        whole = AcrossRanks(made(loss, dtype)) if across else made(loss, dtype, gather=True)
        return step(whole, arguments, own, upstream, masked=across)

    ranks = run_threads(world, each) if world > 1 else [each(0)]
    found = [rank[0] for rank in ranks]
    gradients = [F.pad(rank[1], (0, 0, 0, positions - rank[1].shape[1])) for rank in ranks]
    pairs = [(f"the value of rank {i}", x, wanted[0]) for i, x in enumerate(found)]
    # Data-parallel training takes the mean of gradients over the processes.
    pairs.append(("the student's gradient", torch.cat(gradients) / world, wanted[1]))
    for i, parameter in enumerate(wanted[2:], 2):
        mean = torch.stack([rank[i] for rank in ranks]).mean(0)
        pairs.append((f"the gradient of parameter {i - 2}", mean, parameter))
    for name, x, y in pairs:
        error = (x - y).norm() if x.shape == y.shape else torch.tensor(torch.inf)
        allowed = (1e-9 if dtype == torch.float64 else 1e-4) * (1 + y.norm())
        if not error <= allowed:
            how = "AcrossRanks" if across else "trimmed" if trimmed else "gather=True"
            return (
                f"{name}: {x.shape}, {error:.2g} off {tuple(y.shape)} of {y.norm():.2g}\n"
                f"  {loss} {how}, {dtype}, {counts} samples of {positions}\n"
                f"  {arguments(*data)[1]}"
            )
    return None
