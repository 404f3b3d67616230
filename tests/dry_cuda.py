"""The GPU path without a GPU: public calls on tensors that have shapes and a CUDA device, no data.

Everything runs but the arithmetic: checks, the choice of backend, forward and backward of the
autograd functions, every launch of a kernel. ``python -m tests.dry_cuda`` prints, as JSON, what
went wrong in each call. Two things would: a tensor on another device, and waiting for the GPU,
which a value read by the host, a copy to or from the CPU, or a solver that looks at errors does.
"""

# Each call runs before the loop that makes it goes on.
# ruff: noqa: B023

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

import fastkd
from fastkd import _extension
from fastkd import functional as F

# Operations that wait for the device, as PyTorch's documentation of them says.
WAITING = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "_local_scalar_dense",
    "equal",
    "masked_select",
    "nonzero",
}
HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)
ALL_TYPES = (*HALF_AND_FULL, torch.float64)
# Blocks' and groups' edges in the second and third dimension of a launch.
LARGEST_GRID = 65535

Calls = Iterator[tuple[str, Callable[[], Any]]]


def features(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)


def given(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A teacher's features, labels, a mask."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def on_gpu(module: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """A module whose parameters are made on the device: moving them there would be a copy."""
    with torch.device("cuda"):
        return module(*args, **kwargs)


def relations() -> Calls:
    sizes = [(2, 1), (32, 128), (300, 16), (3, 129), (2, 4096)]
    for (B, N), dtype, over, masked in itertools.product(
        sizes, HALF_AND_FULL, ("tokens", "samples"), (False, True)
    ):
        yield (
            f"relation_loss {B}x{N} {dtype} {over} mask={masked}",
            lambda: F.relation_loss(
                features(B, N, 48, dtype=dtype),
                given(B, N, 64, dtype=dtype),
                given(B, N) if masked else None,
                over=over,
            ),
        )
    for normalize, distance, dtype in itertools.product(
        ("l2", "layer_norm", "softmax", "none"), ("pearson", "mse", "kl"), ALL_TYPES
    ):
        yield (
            f"relation_loss {normalize} {distance} {dtype}",
            lambda: F.relation_loss(
                features(4, 16, 48, dtype=dtype),
                given(4, 16, 48, dtype=dtype),
                given(4, 16),
                normalize=normalize,
                distance=distance,
            ),
        )
    for layers, size in itertools.product((1, 6, 13), (16, 200)):
        yield (
            f"FCDLoss of {layers} layers, {size} tokens",
            lambda: fastkd.FCDLoss()(
                [features(4, size, 48) for _ in range(layers)],
                [given(4, size, 64, dtype=torch.float32) for _ in range(layers)],
                given(4, size),
            ),
        )


def nearest_neighbours() -> Calls:
    sizes = [(32, 32, 768), (32, 65536, 768), (4096, 4096, 64), (17, 300, 70_000)]
    for (N, M, D), k, tolerance, dtype in itertools.product(
        sizes, (1, 8, 32), (None, 0.5), ALL_TYPES
    ):
        yield (
            f"knn_feature_loss {N}x{M}x{D} k={k} tolerance={tolerance} {dtype}",
            lambda: F.knn_feature_loss(
                features(N, D, dtype=dtype),
                given(M, D, dtype=dtype),
                given(N),
                given(M),
                k=k,
                tolerance=tolerance,
            ),
        )
    for pool in ("cls", "mean", "tokens"):
        yield (
            f"IntraClassKNNLoss {pool}",
            lambda: on_gpu(fastkd.IntraClassKNNLoss, 2, 48, 64, pool=pool)(
                features(8, 16, 48),
                given(8, 16, 64, dtype=torch.float32),
                given(8),
                mask=given(8, 16),
            ),
        )


def contrastive() -> Calls:
    negatives: dict[str, tuple[int, ...] | None]
    negatives = {"the batch's": None, "shared": (5, 3, 48), "each's": (6, 5, 3, 48)}
    for (kind, shape), labels, masked, reduction, dtype in itertools.product(
        negatives.items(), (False, True), (False, True), ("mean", "sum", "none"), ALL_TYPES
    ):
        if labels and shape:
            continue
        yield (
            f"cos_nce_loss {kind} labels={labels} mask={masked} {reduction} {dtype}",
            lambda: F.cos_nce_loss(
                features(6, 3, 48, dtype=dtype),
                given(6, 3, 48, dtype=dtype),
                negatives=given(*shape, dtype=dtype) if shape else None,
                labels=given(6) if labels else None,
                mask=given(6, 3) if masked else None,
                reduction=reduction,
            ),
        )
    for pool in ("tokens", "cls", "mean"):
        yield (
            f"CosNCELoss {pool}",
            lambda: on_gpu(fastkd.CosNCELoss, 48, 64, pool=pool)(
                [features(4, 16, 48)] * 3, [given(4, 16, 64, dtype=torch.float32)] * 3
            ),
        )


def correlations() -> Calls:
    for (m, D), ridge, dtype in itertools.product(
        [(32, 768), (64, 64), (512, 768), (4096, 768)], (1e-2, (1e-6, 1e-4)), ALL_TYPES
    ):
        yield (
            f"cca_loss {m}x{D} ridge={ridge} {dtype}",
            lambda: F.cca_loss(
                features(3, m, D, dtype=dtype),
                given(3, m, 2 * D, dtype=dtype),
                given(3, m),
                ridge=ridge,
            ),
        )
    yield (
        "cca_loss of few observations, the largest",
        lambda: F.cca_loss(features(3, 32, 768), given(3, 32, 768, dtype=torch.float32), top_k=4),
    )
    for pool in ("tokens", "cls", "mean"):
        yield (
            f"CCALoss {pool} of layers of two sizes",
            lambda: fastkd.CCALoss(pool=pool)(
                [features(8, 16, 48), features(8, 16, 32)],
                [given(8, 16, 64, dtype=torch.float32)] * 2,
                given(8, 16),
            ),
        )


def roots() -> Calls:
    for n, dtype, root in itertools.product((1, 16, 96), ALL_TYPES, (F.sqrtm, F.inv_sqrtm)):
        yield (f"{root.__name__} {n} {dtype}", lambda: root(features(5, n, n, dtype=dtype)))


def projections() -> Calls:
    for dtype in ALL_TYPES:
        yield (f"cayley {dtype}", lambda: F.cayley(features(3, 20, 20, dtype=dtype)))
        for reduction, D in itertools.product(("mean", "batchmean", "sum"), (48, 770, 9000, 20000)):
            yield (
                f"layer_norm_mse {D} {dtype} {reduction}",
                lambda: F.layer_norm_mse(
                    features(5, D, dtype=dtype), features(5, D, dtype=dtype), reduction=reduction
                ),
            )
    for rows, out in itertools.product((4, 4096), (32, 48, 64)):
        yield (
            f"OrthogonalProjection {rows}x{out}",
            lambda: on_gpu(fastkd.OrthogonalProjection, 48, out)(features(rows, 48)),
        )
    for shape, orthogonal in itertools.product(((8,), (8, 16)), (True, False)):
        yield (
            f"DualProjectionLoss {shape} orthogonal={orthogonal}",
            lambda: on_gpu(fastkd.DualProjectionLoss, 48, 64, orthogonal=orthogonal)(
                features(*shape, 48),
                given(*shape, 64, dtype=torch.float32),
                given(*shape) if len(shape) == 2 else None,
            ),
        )


def soft_targets() -> Calls:
    for divergence, reduction, masked, V, dtype in itertools.product(
        ("forward_kl", "reverse_kl", "adaptive_kl", "js"),
        ("batchmean", "sum", "none"),
        (False, True),
        (50, 30522, 152_064),
        ALL_TYPES,
    ):
        mask = (lambda: given(2, 3)) if masked else (lambda: None)
        options: dict[str, Any] = {"divergence": divergence, "reduction": reduction}
        name = f"{divergence} {reduction} mask={masked} V={V} {dtype}"
        yield (
            f"soft_target_loss {name}",
            lambda: F.soft_target_loss(
                features(2, 3, V, dtype=dtype),
                given(2, 3, V, dtype=dtype),
                mask=mask(),
                temperature=2.0,
                **options,
            ),
        )
        yield (
            f"linear_soft_target_loss {name}",
            lambda: F.linear_soft_target_loss(
                features(2, 3, 48, dtype=dtype),
                features(V, 48, dtype=dtype),
                given(2, 3, 64, dtype=dtype),
                given(V, 64, dtype=dtype),
                mask=mask(),
                denominator=given() if reduction == "batchmean" else None,
                **options,
            ),
        )


def huge() -> Calls:
    """More than 2^31 elements, or more blocks than a grid's second dimension takes."""
    for over, shape in itertools.product(
        ("tokens", "samples"), ((100_000, 32, 768), (64, 8192, 4096), (2, 70_000, 16))
    ):
        yield (
            f"relation_loss {shape} {over}",
            lambda: F.relation_loss(
                features(*shape), given(*shape, dtype=torch.float32), given(*shape[:2]), over=over
            ),
        )
    for N, M, D in ((2**20, 2**20, 64), (2**22, 2**12, 768), (64, 2**22, 768), (32, 32, 2**24)):
        yield (
            f"knn_feature_loss {N}x{M}x{D}",
            lambda: F.knn_feature_loss(
                features(N, D), given(M, D, dtype=torch.float32), given(N), given(M), k=4
            ),
        )
    for labels, shape in itertools.product((False, True), ((2**17, 32, 768), (64, 2**20, 64))):
        yield (
            f"cos_nce_loss {shape} labels={labels}",
            lambda: F.cos_nce_loss(
                features(*shape),
                given(*shape, dtype=torch.float32),
                labels=given(shape[0]) if labels else None,
            ),
        )
    yield ("layer_norm_mse", lambda: F.layer_norm_mse(features(2**22, 768), features(2**22, 768)))
    for divergence in ("forward_kl", "adaptive_kl"):
        yield (
            f"soft_target_loss {divergence}",
            lambda: F.soft_target_loss(
                features(2**15, 152_064),
                given(2**15, 152_064, dtype=torch.float32),
                divergence=divergence,
            ),
        )


def planted() -> Calls:
    """Mistakes that have to be found."""
    yield ("a value read", lambda: features(3).sum().item())
    yield ("a choice", lambda: bool(features(3).isnan().any()))
    yield ("a selection", lambda: features(3)[given(3, dtype=torch.bool)])
    yield ("a copy to the CPU", lambda: features(3).cpu())
    yield ("a copy from the CPU", lambda: features(3) + torch.tensor([1.0, 2.0, 3.0]).cuda())
    yield ("two devices", lambda: features(3) + torch.ones(3))
    yield ("a solver", lambda: torch.linalg.eigh(features(3, 3)))


SUBJECTS = (
    relations,
    nearest_neighbours,
    contrastive,
    correlations,
    roots,
    projections,
    soft_targets,
    huge,
)


class Waited(Exception):
    """The call would wait for the device."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in WAITING:
            raise Waited(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        if func._opname in ("_to_copy", "copy_"):
            source = args[0] if func._opname == "_to_copy" else args[1]
            if source.device.type != result.device.type and source.dim():
                raise Waited(f"{func} from {source.device} to {result.device}")
        return result


class _Context:
    """Stands for an autograd function's; the engine itself needs a real device."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def forward_and_backward(cls: Any, *arguments: Any) -> Any:
    """What ``cls.apply`` and the engine would do."""
    context = _Context(arguments)
    results = cls.forward(context, *arguments)
    outputs = results if isinstance(results, tuple) else (results,)
    for output in outputs:
        assert output.device.type == "cuda", f"{cls.__name__} returns a tensor on {output.device}"
    if any(context.needs_input_grad):
        grads = cls.backward(context, *(torch.empty_like(output) for output in outputs))
        for argument, grad in zip(
            arguments, grads if isinstance(grads, tuple) else (grads,), strict=True
        ):
            if grad is not None:
                assert (grad.shape, grad.device) == (argument.shape, argument.device), cls.__name__
    # The next function's inputs still require grad.
    for output in outputs:
        output.requires_grad_(output.is_floating_point() and any(context.needs_input_grad))
    return results


def start(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch: every argument given, tensors on the device, a grid that CUDA takes."""
    name = kernel.__name__
    arguments = dict(zip(kernel.arg_names, args, strict=False))
    arguments |= {key: value for key, value in kwargs.items() if key in kernel.arg_names}
    assert set(arguments) == set(kernel.arg_names), f"{name}: {set(kernel.arg_names)} wanted"
    unknown = set(kwargs) - set(arguments) - {"num_warps", "num_stages"}
    assert not unknown, f"{name}: unknown {unknown}"
    for argument in arguments.values():
        for x in argument if isinstance(argument, (tuple, list)) else (argument,):
            assert not isinstance(x, Tensor) or x.device.type == "cuda", f"{name}: {x.device}"
    sizes = [int(size) for size in grid]
    assert min(sizes) > 0 and max(sizes[1:], default=1) <= LARGEST_GRID, f"{name}: grid {sizes}"


@contextlib.contextmanager
def dry_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Inside, CUDA tensors have no data and kernels don't run."""
    nothing = contextlib.nullcontext
    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (torch.autograd.Function, "apply", classmethod(forward_and_backward)),
            (JITFunction, "run", start),
            (torch.cuda, "device_of", lambda x: nothing()),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (_extension, "CUDA", _extension.CPU),
            (_extension, "cuda_roots_fit", lambda n, device: n <= 96),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Watch())
        yield


def problems(calls: Calls) -> dict[str, str]:
    """Type and message of what each of the calls raises; nothing for one that runs."""
    found = {}
    for name, call in calls:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return found


def load_guard() -> None:
    """Compile and load the few lines without which CUDA tensors need a torch with CUDA."""
    source = Path(__file__).with_name("no_cuda_guard.cpp")
    paths = [f"-I{path}" for path in cpp_extension.include_paths()]
    paths += [f"-L{path}" for path in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/no_cuda_guard.so"
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", *paths]
        subprocess.run([*command, str(source), "-lc10", "-o", library], check=True)
        torch.ops.load_library(library)


def main() -> None:
    load_guard()
    with dry_cuda():
        report = {subject.__name__: problems(subject()) for subject in SUBJECTS}
        report["planted"] = problems(planted())
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
