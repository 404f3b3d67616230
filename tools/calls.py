"""Public calls that tools/dry_cuda.py runs without a GPU, and whose kernels are compiled.

Every public function and Module, every value of a Literal option and every choice of a launcher
(dtype, size, alignment, mask, number of layers) has a call among those of its loss, a function of
that name here; tests/test_dry_cuda.py names missing ones. Tensors are created when a call runs.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import fastkd
from fastkd import Divergence
from fastkd.lm import log_probs
from fastkd.lm.divergences import NAMES
from fastkd.lm.soft_targets import DIVERGENCES, REDUCTIONS
from fastkd.lm.targets import OF_WHOLE_MASS
from fastkd.losses.hidden_states import KINDS

HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)
ALL_TYPES = (*HALF_AND_FULL, torch.float64)
BOTH = (False, True)
POOLS = ("tokens", "cls", "mean")
MEANS = ("mean", "sum", "none")  # reductions
ON_A_GPU = ("auto", "torch", "triton")
DEVICE = torch.device("cuda")  # of tensors and Modules
# One layer has a launch of its own, up to 8 share one.
LAYERS = (1, 2)
MANY_LAYERS = 9
SOME_LAYERS = (*LAYERS, MANY_LAYERS)
# Divergences whose kernel is shared, and those that have a kernel of their own.
EVERY_DIVERGENCE = (*DIVERGENCES, *(Divergence(x) for x in NAMES if x not in DIVERGENCES))


class Made(NamedTuple):
    """A tensor of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = False

    def tensor(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=DEVICE, requires_grad=self.learns)


def learns(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    return Made(shape, dtype, True)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Made:
    """A teacher's features."""
    return Made(shape, dtype)


numbers = partial(given, dtype=torch.int64)  # labels, or a mask


def pair(
    *shape: int,
    teacher: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    learning: bool = True,
) -> dict[str, Any]:
    """Features of student and teacher, of the same shape by default; lists with ``layers``."""
    student, other = Made(shape, dtype, learning), Made(teacher or shape, dtype)
    sides = {"student": student, "teacher": other}
    return sides if layers is None else {name: [x] * layers for name, x in sides.items()}


def each(**choices: Any) -> Iterator[dict[str, Any]]:
    """Options with every combination of these choices."""
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def mask_of(*shape: int, masked: bool) -> dict[str, Made]:
    return {"mask": numbers(*shape)} if masked else {}


def each_made(x: Any) -> Iterator[Made]:
    """The tensors of an input."""
    if isinstance(x, partial):
        x = [*x.args, *x.keywords.values()]
    if isinstance(x, Made):
        yield x
    for part in x if isinstance(x, list) else []:
        yield from each_made(part)


def made(x: Any) -> Any:
    """An input with its tensors created; a `functools.partial` is called on its own."""
    if isinstance(x, list):
        return [made(y) for y in x]
    if isinstance(x, partial):
        return x.func(*map(made, x.args), **{name: made(y) for name, y in x.keywords.items()})
    return x.tensor() if isinstance(x, Made) else x


class Call(NamedTuple):
    """A public function or Module class, its tensors, and its options."""

    of: Callable[..., Any]
    inputs: dict[str, Any]
    options: dict[str, Any]
    precision: str = "highest"  # of float32 matrix products
    dtype: torch.dtype = torch.float32  # of the Module's parameters
    waits: bool = False  # for the device, as its documentation says

    def run(self) -> None:
        """Run forward and backward pass."""
        with self.multiplying():
            inputs = {name: made(x) for name, x in self.inputs.items()}
            if isinstance(self.of, type):
                self.module()(**inputs)
            else:
                self.of(**inputs, **self.options)

    @contextlib.contextmanager
    def multiplying(self) -> Iterator[None]:
        """Context in which float32 matrix products have the call's precision."""
        torch.set_float32_matmul_precision(self.precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")

    def module(self) -> torch.nn.Module:
        """The Module on `DEVICE` in the call's dtype; moving it later would be a copy."""
        torch.set_default_dtype(self.dtype)
        try:
            with DEVICE:
                return self.of(**self.options)
        finally:
            torch.set_default_dtype(torch.float32)

    def given(self) -> set[str]:
        """Names of the arguments that are not None."""
        return {name for name, x in (self.inputs | self.options).items() if x is not None}

    def __str__(self) -> str:
        return _summary(partial(self.of, **self.inputs, **self.options))


Calls = Iterator[Call]


def of(loss: str) -> Calls:
    """Calls of a loss."""
    return LOSSES[loss]()


def _summary(x: Any) -> str:
    if isinstance(x, list):
        return f"{len(x)} x {_summary(x[0])}"
    if isinstance(x, partial):
        words = [*map(_summary, x.args), *(f"{n}={_summary(y)}" for n, y in x.keywords.items())]
        return f"{x.func.__name__}({', '.join(words)})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Made) else str(x)


# --- fastkd/losses and fastkd/linalg -----------------------------------------------------------


def attention() -> Calls:
    # Tokens: few and many, multiples of 16 or not.
    for dtype, N, masked, layers, heads, learning in product(
        ALL_TYPES, (1, 17, 32, 33, 128), BOTH, SOME_LAYERS, ("match", "mean"), BOTH
    ):
        teacher = (2, 4 if heads == "match" else 3, N, N)
        maps = pair(2, 4, N, N, teacher=teacher, dtype=dtype, layers=layers, learning=learning)
        yield Call(fastkd.AttentionLoss, maps | mask_of(2, N, masked=masked), {"heads": heads})
    inputs = pair(3, 4, 20, 20) | {"mask": numbers(3, 20)}
    for options in each(heads=("match", "mean"), reduction=MEANS, backend=ON_A_GPU):
        for function in (fastkd.AttentionLoss, fastkd.attention_loss):
            yield Call(function, inputs, options)
        yield Call(fastkd.attention_loss, inputs | {"weights": given(3)}, options)
    # More than 2^31 elements.
    yield Call(fastkd.attention_loss, pair(64, 32, 4096, 4096), {})


def cca() -> Calls:
    from fastkd.kernels.cca import launch_digit_product

    for n, symmetric in product((32, 768), (False, True)):
        inputs = {name: given(2, n, n, dtype=torch.float64) for name in ("a", "b")}
        yield Call(launch_digit_product, inputs, {"symmetric": symmetric})
    for (m, D), ridge, top_k, dtype in product(
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
        yield Call(fastkd.cca_loss, inputs, {"ridge": ridge, "top_k": top_k}, waits=waits)
    for options in each(reduction=MEANS, backend=ON_A_GPU):
        yield Call(fastkd.cca_loss, pair(3, 64, 8, teacher=(3, 64, 16)), options)
    for (m, D), dtype in product([(32, 768), (32, 8), (200, 8), (4096, 8)], ALL_TYPES):
        inputs = {"x": given(2, m, D, dtype=dtype), "y": given(2, m, 16, dtype=dtype)}
        inputs["mask"] = numbers(2, m)
        yield Call(fastkd.canonical_correlations, inputs, {}, waits=True)
    for pool in POOLS:
        inputs = {"student": [learns(80, 16, 48), learns(80, 16, 32)], "mask": numbers(80, 16)}
        yield Call(fastkd.CCALoss, inputs | {"teacher": [given(80, 16, 64)] * 2}, {"pool": pool})
    for options in each(memory=(500, "auto")):
        yield Call(fastkd.CCALoss, pair(80, 16, 48, teacher=(80, 16, 64), layers=1), options)


def contrastive() -> Calls:
    labels: list[torch.dtype | None] = [None, torch.int64, torch.float32, torch.bool, torch.float64]
    # A batch of up to 16, or of up to 32 without labels, is compared in one visit of a position.
    rows = [(6, None), (17, None), (6, (5, 3)), (6, (6, 5, 3))]
    for dtype, kind, (B, shape), masked, D in product(ALL_TYPES, labels, rows, BOTH, (8, 16)):
        options: dict[str, Any] = {"labels": numbers(B, dtype=kind)} if kind else {}
        if shape:
            options["negatives"] = given(*shape, D, dtype=dtype)
            if masked == (D == 16):  # both sides masked or neither, else one of them
                kind_of_mask = torch.bool if masked else torch.int64
                options["negatives_mask"] = numbers(*shape, dtype=kind_of_mask)
            if kind:
                options["negatives_labels"] = numbers(*shape[:-1], dtype=kind)
        options |= mask_of(B, 3, masked=masked)
        for reduction in MEANS:
            inputs = pair(B, 3, D, dtype=dtype) | options
            yield Call(fastkd.cos_nce_loss, inputs, {"reduction": reduction})
        for layers in SOME_LAYERS if D == 16 and masked else LAYERS:
            if shape:
                options["negatives"] = [given(*shape, D, dtype=dtype)] * layers
            inputs = pair(B, 3, 48, teacher=(B, 3, D), dtype=dtype, layers=layers) | options
            sizes = {"student_dim": 48, "teacher_dim": D}
            yield Call(fastkd.CosNCELoss, inputs, sizes, dtype=dtype)
    sizes, inputs = (
        {"student_dim": 48, "teacher_dim": 64},
        pair(4, 16, 48, teacher=(4, 16, 64), layers=3),
    )
    for options in each(pool=POOLS, reduction=("mean", "sum"), backend=ON_A_GPU):
        yield Call(fastkd.CosNCELoss, inputs, sizes | options)
    for masked, B in product(BOTH, (6, 17)):
        inputs = pair(B, 3, 16) | {"weights": given(B, 3)} | mask_of(B, 3, masked=masked)
        for options in each(reduction=MEANS, backend=ON_A_GPU):
            yield Call(fastkd.cos_nce_loss, inputs, options)
    for labelled, size in product(
        BOTH, ((2, 48), (1, 48), (33, 1, 768), (2**17, 32, 768), (64, 2**20, 64))
    ):
        inputs = pair(*size) | {"labels": numbers(size[0]) if labelled else None}
        for backend in ("torch", "triton") if len(size) == 2 else ("auto",):
            yield Call(fastkd.cos_nce_loss, inputs, {"backend": backend})


def hidden_states() -> Calls:
    for dtype, D, kind, masked, learning in product(
        ALL_TYPES, (1, 48, 770, 4096), KINDS, BOTH, BOTH
    ):
        inputs = pair(4, 8, D, dtype=dtype, learning=learning) | mask_of(4, 8, masked=masked)
        yield Call(fastkd.hidden_state_loss, inputs, {"kind": kind})
    sizes = {"student_dim": 32, "teacher_dim": 48, "beta": 0.5}
    inputs = pair(4, 8, 48) | {"mask": numbers(4, 8)}
    weighted = inputs | {"weights": given(4, 8, dtype=torch.bfloat16)}
    for options in each(kind=KINDS, reduction=MEANS, backend=ON_A_GPU):
        yield Call(fastkd.hidden_state_loss, inputs, options)
        yield Call(fastkd.hidden_state_loss, weighted, options)
        yield Call(
            fastkd.HiddenStateLoss, weighted | {"student": learns(4, 8, 32)}, options | sizes
        )
    # More than 2^31 elements.
    yield Call(fastkd.hidden_state_loss, pair(2**22, 768), {"beta": 1.0})


def knn() -> Calls:
    def rows(N: int, M: int, D: int, kind: torch.dtype, dtype: torch.dtype) -> dict[str, Any]:
        mine, others = numbers(N, dtype=kind), numbers(M, dtype=kind)
        sides = pair(N, D, teacher=(M, D), dtype=dtype)
        return sides | {"student_labels": mine, "teacher_labels": others}

    # Rows, rows of the bank, features: few and many, sorted by label or not, from products.
    sizes = [(N, M, D) for N in (32, 65) for M in (32, 1024) for D in (8, 16)]
    sizes += [(N, 32, D) for N in (1, 65) for D in (4096, 4097)]
    kinds = (torch.int64, torch.float32, torch.float64)
    for dtype, kind, size in product(HALF_AND_FULL, kinds, sizes):
        for options in each(tolerance=(None, 0.5), k=(1, 8, 32), reduction=("sum", "mean")):
            yield Call(fastkd.knn_feature_loss, rows(*size, kind, dtype), options)
    sizes = [(1, 32, 8), (4096, 4096, 64), (17, 300, 70_000), (32, 65536, 768)]
    for dtype, kind, size in product(ALL_TYPES, (torch.int64, torch.float32), sizes):
        for options in each(tolerance=(None, 2.0**40), k=(1, 8)):
            yield Call(fastkd.knn_feature_loss, rows(*size, kind, dtype), options)
    # More than 2^31 elements.
    sizes = [(2**20, 2**20, 64), (2**22, 2**12, 768), (64, 2**22, 768), (32, 32, 2**24)]
    for size in sizes:
        yield Call(fastkd.knn_feature_loss, rows(*size, torch.int64, torch.float32), {"k": 4})
    others = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, *HALF_AND_FULL)
    for kind in others:
        inputs = pair(65, 16) | {"student_labels": numbers(65, dtype=kind)}
        for options in each(tolerance=(None, 1), reduction=MEANS, backend=("torch", "triton")):
            yield Call(fastkd.knn_feature_loss, inputs, options)
    weighted = rows(65, 65, 16, torch.int64, torch.float32) | {"weights": given(65)}
    for options in each(reduction=MEANS, backend=ON_A_GPU):
        yield Call(fastkd.knn_feature_loss, weighted, options)
    samples = {"labels": numbers(8), "mask": numbers(8, 16)}
    sizes = {"k": 2, "student_dim": 48, "teacher_dim": 64}
    inputs = pair(8, 16, 48, teacher=(8, 16, 64)) | samples
    for options in each(pool=POOLS, reduction=MEANS, backend=ON_A_GPU):
        yield Call(fastkd.IntraClassKNNLoss, inputs, sizes | options)
    bank = {"teacher_labels": numbers(300), "teacher_mask": numbers(300, 20)}
    inputs = pair(8, 16, 48, teacher=(300, 20, 48)) | samples | bank
    yield Call(fastkd.IntraClassKNNLoss, inputs, {})
    for dtype in ALL_TYPES:
        inputs = {"features": given(8, 16, dtype=dtype), "labels": numbers(8), "mask": numbers(8)}
        options = {"size": 32, "dim": 16, "dtype": dtype, "label_dtype": torch.int64}
        yield Call(fastkd.FeatureQueue, inputs, options)
        inputs = {"features": learns(8, 16, dtype=dtype), "labels": numbers(8)}
        yield Call(fastkd.intra_class_similarity, inputs, {})


def linalg() -> Calls:
    for n, dtype, root in product(
        (1, 16, 96, 97, 150), ALL_TYPES, (fastkd.sqrtm, fastkd.inv_sqrtm)
    ):
        yield Call(root, {"a": learns(5, n, n, dtype=dtype)}, {})


def projection() -> Calls:
    reductions = ("batchmean", "mean", "sum")
    for dtype in ALL_TYPES:
        yield Call(fastkd.cayley, {"skew": learns(3, 20, 20, dtype=dtype)}, {})
    for backend in ("torch", "triton"):
        yield Call(fastkd.cayley, {"skew": learns(48, 48)}, {"backend": backend})
    columns = [1, 15, 16, 17, 48, 770, 9000, 20000]
    columns += [size for log in range(5, 15) for size in (2**log - 1, 2**log)]
    sides = ((learns, given), (given, learns), (learns, learns))
    for dtype, D, (x, y) in product(ALL_TYPES, columns, sides):
        yield Call(
            fastkd.layer_norm_mse, {"x": x(5, D, dtype=dtype), "y": y(5, D, dtype=dtype)}, {}
        )
    inputs = {"x": learns(2, 3, 48), "y": learns(2, 3, 48)}
    for options in each(reduction=reductions, backend=ON_A_GPU):
        for weights in ({}, {"weights": given(2, 3)}):
            yield Call(fastkd.layer_norm_mse, inputs | weights, options)
    yield Call(fastkd.layer_norm_mse, {"x": learns(2**22, 768), "y": learns(2**22, 768)}, {})
    for (n, out), rows, backend in product(
        ((1, 1), (48, 32), (48, 64), (256, 256), (257, 257), (2047, 2047), (2048, 2048)),
        (4, 4096),
        ON_A_GPU,
    ):
        options = {"in_dim": n, "out_dim": out, "backend": backend}
        yield Call(fastkd.OrthogonalProjection, {"x": learns(rows, n)}, options)
    sizes = {"student_dim": 48, "teacher_dim": 64}
    for shape, orthogonal, reduction, backend in product(
        ((8,), (8, 16)), BOTH, reductions, ON_A_GPU
    ):
        features = pair(*shape, 48, teacher=(*shape, 64))
        mask = mask_of(*shape, masked=len(shape) == 2)
        options = {"orthogonal": orthogonal, "reduction": reduction, "backend": backend}
        yield Call(fastkd.DualProjectionLoss, features | mask, sizes | options)
    features = pair(8, 16, 48, teacher=(8, 20, 64))
    masks = {"mask": numbers(8, 16), "teacher_mask": numbers(8, 20)}
    yield Call(fastkd.DualProjectionLoss, features | masks, sizes)


def relation() -> Calls:
    def layers_of(B: int, N: int, D: int, masked: bool, **options: Any) -> dict[str, Any]:
        return pair(B, N, D, teacher=(B, N, 2 * D), **options) | mask_of(B, N, masked=masked)

    triton = {"backend": "triton"}
    counts = (2, 16, 17, 32, 33, 64, 65, 128, 129)
    for masked, options in product(BOTH, each(dtype=HALF_AND_FULL, layers=LAYERS, learning=BOTH)):
        for B, N in zip(counts, counts[::-1], strict=True):
            # The kernels see features of any size and layout as multiples of 16.
            precisions = ("highest", "high")[: 1 + (options["dtype"] == torch.float32)]
            for precision in precisions:
                inputs = layers_of(B, N, 8 if N % 2 else 16, masked, **options)
                yield Call(fastkd.FCDLoss, inputs, triton, precision)
    # Rows of which a program of the backward pass holds one or several.
    widths = (256, 512, 1024, 2048, 4096, 4112)
    for D, masked, options in product(widths, BOTH, each(dtype=HALF_AND_FULL, layers=LAYERS)):
        yield Call(fastkd.FCDLoss, layers_of(2, 16, D, masked, **options), triton)
    for options in each(dtype=(torch.bfloat16,), layers=(MANY_LAYERS,), learning=BOTH):
        yield Call(fastkd.FCDLoss, layers_of(32, 128, 768, True, **options), {})
    two_layers = layers_of(4, 16, 48, True, layers=2)
    sides = ("tokens", "samples")
    for options in each(
        normalize=("l2", "layer_norm", "softmax", "none"), distance=("pearson", "mse", "kl")
    ):
        yield Call(fastkd.FCDLoss, two_layers, options)
        for dtype, over in product(ALL_TYPES, sides):
            inputs = pair(4, 16, 48, dtype=dtype) | {"mask": numbers(4, 16)}
            yield Call(fastkd.relation_loss, inputs, options | {"over": over})
        inputs = pair(2, 300, 48, dtype=torch.bfloat16) | {"mask": numbers(2, 300)}
        for more in each(over=sides, backend=("torch",)):
            yield Call(fastkd.relation_loss, inputs, options | more)
    for backend in ("torch", "triton"):
        yield Call(fastkd.FCDLoss, two_layers, {"backend": backend})
    for N, backend, masked in product((16, 300), ON_A_GPU, BOTH):
        inputs = pair(4, N, 48) | {"weights": given(4)} | mask_of(4, N, masked=masked)
        yield Call(fastkd.relation_loss, inputs, {"backend": backend})
    # Sizes that Triton sees as 1, more than 2^31 elements, more blocks than a grid's second
    # dimension takes.
    shapes = [(2, 1, 48), (1, 5, 48), (300, 16, 48), (2, 4096, 64), (100_000, 32, 768)]
    shapes += [(64, 8192, 4096), (2, 70_000, 16)]
    for over, shape in product(sides, shapes):
        inputs = pair(*shape) | {"mask": numbers(*shape[:2])}
        yield Call(fastkd.relation_loss, inputs, {"over": over} | triton)


# --- fastkd/lm ---------------------------------------------------------------------------------


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {f"{side}_logits": x for side, x in pair(*shape, dtype=dtype).items()}


def heads(*leading: int, V: int, student=learns, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "student_hidden": student(*leading, 48, dtype=dtype),
        "student_head": student(V, 48, dtype=dtype),
        "teacher_hidden": given(*leading, 64, dtype=dtype),
        "teacher_head": given(V, 64, dtype=dtype),
    }


def top_k(*shape: int, dtype: torch.dtype = torch.float32, tail: str = "bucket") -> Any:
    """A teacher's most probable tokens (..., k), with a tail of probability 0.1."""

    def most_probable(ids: Tensor, logits: Tensor) -> fastkd.TopK:
        return fastkd.TopK(ids, logits.log_softmax(-1) + math.log(0.9), tail)

    return partial(most_probable, numbers(*shape), given(*shape, dtype=dtype))


def labelled(rows: int) -> Any:
    return partial(fastkd.CrossEntropy, numbers(rows), label_smoothing=0.1, z_loss=0.1)


def of_tokens(
    hidden: Tensor, head: Tensor, ids: Tensor, backend: str = "auto", **options: Any
) -> Tensor:
    """A call of `log_probs`, which has no such option, by a backend."""
    backend_of = log_probs.backend_of
    chosen = mock.patch.object(log_probs, "backend_of", lambda _, *call: backend_of(backend, *call))
    with chosen:
        return fastkd.log_probs(hidden, head, ids, **options)


def calls_of_heads() -> Calls:
    """All that a head has, labels beside soft targets and alone, a student's part of the tokens."""
    loss, share = fastkd.linear_soft_target_loss, Divergence("js", beta=0.2)
    for divergence, dtype, reduction, tail in product(
        ("forward_kl", share), ALL_TYPES, REDUCTIONS, ("", "bucket", "renormalise")
    ):
        inputs = heads(6, V=1025, dtype=dtype) | {"task": labelled(6)}
        bias = learns(1025, dtype=dtype)
        inputs["student_head"] = partial(fastkd.Head, inputs["student_head"], bias, 0.5, 30.0)
        if tail:
            inputs |= {"teacher_hidden": top_k(6, 4, tail=tail), "teacher_head": None}
        options = {"vocabulary": 1000, "return_terms": True, "chunk_bytes": 1 << 15}
        yield Call(loss, inputs, options | {"divergence": divergence, "reduction": reduction})
    for dtype, V in product(ALL_TYPES, (50, 64, 1040, 1041, 16_400, 16_401)):
        features = {"hidden": learns(6, 48, dtype=dtype), "head": learns(V, 48, dtype=dtype)}
        yield Call(of_tokens, features | {"ids": numbers(6, 4)}, {"temperature": 2.0})
        inputs = heads(6, V=V, dtype=dtype) | {"task": labelled(6)}
        for options in each(soft_weight=(0.0,), reduction=REDUCTIONS, chunk_bytes=(1 << 24,)):
            yield Call(loss, inputs, options)
    whole = ("forward_kl", "reverse_kl", *map(Divergence, OF_WHOLE_MASS[2:]))
    for divergence, dtype, mass in product(whole, ALL_TYPES, ("renormalised", "whole")):
        inputs = heads(6, V=1025, dtype=dtype) | {"student_head": learns(50, 48, dtype=dtype)}
        inputs |= {"draft": partial(fastkd.Draft, numbers(50), mass), "weights": given(6)}
        yield Call(loss, inputs, {"divergence": divergence})


def calls_of_two_vocabularies() -> Calls:
    """A teacher of 70 tokens, 40 of which match some of the student's 50."""
    ids = torch.arange(40)
    match = fastkd.VocabularyMatch(ids, ids + 20, student_size=50, teacher_size=70)
    for unmatched, dtype in product(("renormalise", "bucket", "sorted"), ALL_TYPES):
        options = {"vocabulary": match, "unmatched": unmatched}
        inputs = logits(6, 50, dtype=dtype) | {"teacher_logits": given(6, 70, dtype=dtype)}
        yield Call(fastkd.soft_target_loss, inputs, options)
        inputs = heads(6, V=50, dtype=dtype) | {"teacher_head": given(70, 64, dtype=dtype)}
        inputs["draft"] = partial(fastkd.Draft, soft_mask=numbers(6))
        yield Call(fastkd.linear_soft_target_loss, inputs, options)


def calls_of_logits() -> Calls:
    """Every divergence, with weights; those whose kernel isn't shared, at three sizes; top k."""
    loss = fastkd.soft_target_loss
    for divergence, dtype, masked in product(EVERY_DIVERGENCE, ALL_TYPES, BOTH):
        extras = mask_of(2, 3, masked=masked) | {"weights": given(2, 3, dtype=torch.bfloat16)}
        inputs = logits(2, 3, 1025, dtype=dtype) | extras
        yield Call(loss, inputs, {"divergence": divergence})
    others = [*EVERY_DIVERGENCE[len(DIVERGENCES) :], Divergence("js", beta=0.2)]
    for divergence, dtype, V in product(others, ALL_TYPES, (50, 1025, 30522)):
        yield Call(loss, logits(6, V, dtype=dtype), {"divergence": divergence})
    for dtype, tail, masked, V in product(
        ALL_TYPES, ("bucket", "renormalise"), BOTH, (1025, 1040, 152_064)
    ):
        inputs = logits(2, 3, V, dtype=dtype) | {"teacher_logits": top_k(2, 3, 64, tail=tail)}
        yield Call(loss, inputs | mask_of(2, 3, masked=masked), {})
    for k, masked in product((64, 1030), BOTH):
        inputs = logits(2, 3, 1040) | {"teacher_logits": top_k(2, 3, k)}
        for options in each(divergence=EVERY_DIVERGENCE, temperature=(1.0, 20.0)):
            yield Call(loss, inputs | mask_of(2, 3, masked=masked), options)


def soft_targets() -> Calls:
    kinds = (torch.int8, torch.int64, *ALL_TYPES)
    denominators = [7, 2.5, *(numbers(dtype=kind) for kind in kinds)]
    choices: list[tuple[str, Any]] = [(reduction, None) for reduction in REDUCTIONS]
    choices += [("batchmean", number) for number in denominators]
    for divergence, dtype, masked, V, (reduction, number) in product(
        DIVERGENCES, ALL_TYPES, BOTH, (1, 50, 1024, 1025, 1040, 16_400, 30522, 152_064), choices
    ):
        if (reduction, number) != choices[0] and V not in (1024, 1025):
            continue
        options = {"divergence": divergence, "reduction": reduction}
        extras = mask_of(2, 3, masked=masked) | {"denominator": number}
        yield Call(fastkd.soft_target_loss, logits(2, 3, V, dtype=dtype) | extras, options)
        if not isinstance(number, Made):
            inputs = heads(2, 3, V=V, dtype=dtype) | extras
            yield Call(fastkd.linear_soft_target_loss, inputs, options)
    inputs = heads(3, V=50, student=given, dtype=torch.float32)
    for options in each(divergence=DIVERGENCES, reduction=REDUCTIONS, backend=ON_A_GPU):
        for of in (fastkd.SoftTargetLoss, fastkd.soft_target_loss):
            yield Call(of, logits(6, 50), options)
        yield Call(fastkd.linear_soft_target_loss, inputs, options)
    yield from calls_of_heads()
    yield from calls_of_logits()
    yield from calls_of_two_vocabularies()
    extras = {"mask": numbers(6), "denominator": numbers(), "weights": given(6)}
    yield Call(fastkd.SoftTargetLoss, logits(6, 50) | extras, {})
    for dtype, masked, V in product(ALL_TYPES, BOTH, (50, 1024, 1025, 1040)):
        inputs = logits(2, 3, V, dtype=dtype) | mask_of(2, 3, masked=masked)
        for hot in each(divergence=DIVERGENCES, temperature=(20.0,)):
            yield Call(fastkd.soft_target_loss, inputs, hot)
    for divergence in ("forward_kl", "adaptive_kl"):
        yield Call(fastkd.soft_target_loss, logits(2**15, 152_064), {"divergence": divergence})


def token_log_probs() -> Calls:
    for dtype, ids in product(ALL_TYPES, (numbers(6), numbers(6, 4))):
        inputs = {"hidden": learns(6, 16, dtype=dtype), "head": learns(40, 16, dtype=dtype)}
        options = {"temperature": 2.0, "chunk_bytes": 400}
        yield Call(fastkd.log_probs, inputs | {"ids": ids}, options)


LOSSES = {
    calls.__name__: calls
    for calls in (
        attention, cca, contrastive, hidden_states, knn, linalg, projection, relation,
        soft_targets, token_log_probs,
    )
}  # fmt: skip
