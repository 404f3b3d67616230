"""The public calls that are walked without a GPU: for waits (`dry_cuda`), for what they compile.

Every public function and Module, every fixed word of every option and every choice inside a
launcher (dtype, size, alignment, mask, number of layers) has a call here; tests/test_dry_cuda.py
names a word that has none. Inputs are made when a call runs, on the device that stands for a GPU.
"""

# Each call runs before the loop that makes it goes on.
# ruff: noqa: B023

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastkd
from fastkd import functional as F

HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)
ALL_TYPES = (*HALF_AND_FULL, torch.float64)
BOTH = (False, True)
# One layer has a launch of its own, up to 8 share one.
LAYERS = (1, 2)
MANY_LAYERS = 9


class Call(NamedTuple):
    """A public function, or a Module that ``options`` make, and its inputs."""

    of: Callable[..., Any]
    inputs: Callable[[], dict[str, Any]]
    options: dict[str, Any]
    precision: str = "highest"  # of float32 matrix products
    dtype: torch.dtype = torch.float32  # of the Module's parameters

    def __call__(self) -> None:
        """Run it, backward too."""
        torch.set_float32_matmul_precision(self.precision)
        try:
            inputs = self.inputs()
            if isinstance(self.of, type):
                self._module()(**inputs)
            else:
                self.of(**inputs, **self.options)
        finally:
            torch.set_float32_matmul_precision("highest")

    def _module(self) -> torch.nn.Module:
        """Made where and as it is needed: moving parameters there would be a copy."""
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("cuda"):
                return self.of(**self.options)
        finally:
            torch.set_default_dtype(torch.float32)

    def given(self) -> set[str]:
        """Names of arguments that have a value."""
        return {
            name for name, x in (*self.inputs().items(), *self.options.items()) if x is not None
        }

    def __str__(self) -> str:
        given = {name: _summary(x) for name, x in self.inputs().items()} | self.options
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"{self.of.__name__}({words})"


Calls = Iterator[Call]


def _summary(x: Any) -> Any:
    if isinstance(x, list):
        return f"{len(x)} x {_summary(x[0])}"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else x


def learns(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A teacher's features."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Labels, or a mask."""
    return given(*shape, dtype=dtype)


def mask_of(*shape: int, masked: bool) -> dict[str, Tensor]:
    return {"mask": numbers(*shape)} if masked else {}


def relation() -> Calls:
    def pair(B: int, N: int, D: int, dtype: torch.dtype, layers: int, learning: bool, masked: bool):
        student = learns if learning else given
        return {
            "student": [student(B, N, D, dtype=dtype) for _ in range(layers)],
            "teacher": [given(B, N, 2 * D, dtype=dtype) for _ in range(layers)],
            **mask_of(B, N, masked=masked),
        }

    sides = (2, 16, 17, 32, 33, 64, 65, 128, 129)
    for dtype, masked, layers, learning in itertools.product(HALF_AND_FULL, BOTH, LAYERS, BOTH):
        for B, N in zip(sides, sides[::-1], strict=True):
            # The kernels see features of any size and layout as multiples of 16.
            for precision in ("highest", "high") if dtype == torch.float32 else ("highest",):
                D = 8 if N % 2 else 16
                yield Call(
                    fastkd.FCDLoss,
                    lambda: pair(B, N, D, dtype, layers, learning, masked),
                    {"backend": "triton"},
                    precision,
                )
    for learning in BOTH:
        inputs = lambda: pair(32, 128, 768, torch.bfloat16, MANY_LAYERS, learning, True)  # noqa: E731
        yield Call(fastkd.FCDLoss, inputs, {})
    for normalize, distance, over in itertools.product(
        ("l2", "layer_norm", "softmax", "none"), ("pearson", "mse", "kl"), ("tokens", "samples")
    ):
        options = {"normalize": normalize, "distance": distance}
        for (B, N), backend, dtype in (
            *(((4, 16), "auto", dtype) for dtype in ALL_TYPES),
            ((2, 300), "torch", torch.bfloat16),
        ):
            yield Call(
                F.relation_loss,
                lambda: {
                    "student": learns(B, N, 48, dtype=dtype),
                    "teacher": given(B, N, 48, dtype=dtype),
                    "mask": numbers(B, N),
                },
                options | {"over": over, "backend": backend},
            )
        inputs = lambda: pair(4, 16, 48, torch.float32, 2, True, True)  # noqa: E731
        yield Call(fastkd.FCDLoss, inputs, options)
        packed = lambda: inputs() | {"segments": numbers(4, 16)}  # noqa: E731
        yield Call(fastkd.FCDLoss, packed, options)
    for backend in ("torch", "triton"):
        inputs = lambda: pair(4, 16, 48, torch.float32, 2, True, True)  # noqa: E731
        yield Call(fastkd.FCDLoss, inputs, {"backend": backend})
    yield Call(
        F.relation_loss,
        lambda: {
            "student": learns(4, 16, 48),
            "teacher": given(4, 16, 48),
            "segments": numbers(4, 16),
        },
        {},
    )
    # Sizes that Triton sees as 1, more than 2^31 elements, more blocks than a grid's second
    # dimension takes.
    for over, shape in itertools.product(
        ("tokens", "samples"),
        (
            (2, 1, 48),
            (1, 5, 48),
            (300, 16, 48),
            (2, 4096, 64),
            (100_000, 32, 768),
            (64, 8192, 4096),
            (2, 70_000, 16),
        ),
    ):
        yield Call(
            F.relation_loss,
            lambda: {
                "student": learns(*shape),
                "teacher": given(*shape),
                "mask": numbers(*shape[:2]),
            },
            {"over": over, "backend": "triton"},
        )


def knn() -> Calls:
    def rows(N: int, M: int, D: int, kind: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "student": learns(N, D, dtype=dtype),
            "teacher": given(M, D, dtype=dtype),
            "student_labels": numbers(N, dtype=kind),
            "teacher_labels": numbers(M, dtype=kind),
        }

    # Rows, rows of the bank, features: few and many, sorted by label or not, from products.
    sizes = [(N, M, D) for N in (32, 65) for M in (32, 1024) for D in (8, 16)]
    sizes += [(N, 32, D) for N in (1, 65) for D in (4096, 4097)]
    kinds = (torch.int64, torch.float32, torch.float64)
    for dtype, kind, (N, M, D), tolerance, k, reduction in itertools.product(
        HALF_AND_FULL, kinds, sizes, (None, 0.5), (1, 8, 32), ("sum", "mean")
    ):
        inputs = lambda: rows(N, M, D, kind, dtype)  # noqa: E731
        options = {"k": k, "tolerance": tolerance, "reduction": reduction}
        yield Call(F.knn_feature_loss, inputs, options)
    sizes = [(1, 32, 8), (4096, 4096, 64), (17, 300, 70_000), (32, 65536, 768)]
    for dtype, kind, (N, M, D), tolerance, k in itertools.product(
        ALL_TYPES, (torch.int64, torch.float32), sizes, (None, 2.0**40), (1, 8)
    ):
        inputs = lambda: rows(N, M, D, kind, dtype)  # noqa: E731
        yield Call(F.knn_feature_loss, inputs, {"k": k, "tolerance": tolerance})
    # More than 2^31 elements.
    sizes = [(2**20, 2**20, 64), (2**22, 2**12, 768), (64, 2**22, 768), (32, 32, 2**24)]
    for N, M, D in sizes:
        inputs = lambda: rows(N, M, D, torch.int64, torch.float32)  # noqa: E731
        yield Call(F.knn_feature_loss, inputs, {"k": 4})
    others = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, *HALF_AND_FULL)
    for kind, tolerance, reduction in itertools.product(others, (None, 1), ("sum", "mean", "none")):
        for backend in ("torch", "triton"):
            yield Call(
                F.knn_feature_loss,
                lambda: {
                    "student": learns(65, 16),
                    "teacher": given(65, 16),
                    "student_labels": numbers(65, dtype=kind),
                },
                {"tolerance": tolerance, "reduction": reduction, "backend": backend},
            )
    for pool, reduction, backend in itertools.product(
        ("cls", "mean", "tokens"), ("sum", "mean", "none"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.IntraClassKNNLoss,
            lambda: {
                "student": learns(8, 16, 48),
                "teacher": given(8, 16, 64),
                "labels": numbers(8),
                "mask": numbers(8, 16),
            },
            {
                "k": 2,
                "student_dim": 48,
                "teacher_dim": 64,
                "pool": pool,
                "reduction": reduction,
                "backend": backend,
            },
        )
    yield Call(
        fastkd.IntraClassKNNLoss,
        lambda: {
            "student": learns(8, 16, 48),
            "teacher": given(300, 20, 48),
            "labels": numbers(8),
            "mask": numbers(8, 16),
            "teacher_labels": numbers(300),
            "teacher_mask": numbers(300, 20),
        },
        {},
    )
    for dtype in ALL_TYPES:
        yield Call(
            fastkd.FeatureQueue,
            lambda: {
                "features": given(8, 16, dtype=dtype),
                "labels": numbers(8),
                "mask": numbers(8),
            },
            {"size": 32, "dim": 16, "dtype": dtype, "label_dtype": torch.int64},
        )
        yield Call(
            F.intra_class_similarity,
            lambda: {"features": learns(8, 16, dtype=dtype), "labels": numbers(8)},
            {},
        )


def contrastive() -> Calls:
    labels: list[torch.dtype | None] = [None, torch.int64, torch.float32, torch.bool, torch.float64]
    for dtype, kind, shape, masked, D in itertools.product(
        ALL_TYPES, labels, (None, (5, 3), (6, 5, 3)), BOTH, (8, 16)
    ):

        def option() -> dict[str, Any]:
            chosen = {"labels": numbers(6, dtype=kind)} if kind else {}
            if shape:
                chosen["negatives"] = given(*shape, D, dtype=dtype)
                if masked:
                    chosen["negatives_mask"] = given(*shape) > 0
                if kind:
                    chosen["negatives_labels"] = numbers(*shape[:-1], dtype=kind)
            return chosen

        def layer_option(layers: int) -> dict[str, Any]:
            chosen = option()
            if shape:
                chosen["negatives"] = [given(*shape, D, dtype=dtype) for _ in range(layers)]
            return chosen

        for reduction in ("mean", "sum", "none"):
            yield Call(
                F.cos_nce_loss,
                lambda: {
                    "student": learns(6, 3, D, dtype=dtype),
                    "teacher": given(6, 3, D, dtype=dtype),
                    **option(),
                    **mask_of(6, 3, masked=masked),
                },
                {"reduction": reduction},
            )
        for layers in (*LAYERS, MANY_LAYERS) if D == 16 and masked else LAYERS:
            yield Call(
                fastkd.CosNCELoss,
                lambda: {
                    "student": [learns(6, 3, 48, dtype=dtype) for _ in range(layers)],
                    "teacher": [given(6, 3, D, dtype=dtype) for _ in range(layers)],
                    **layer_option(layers),
                    **mask_of(6, 3, masked=masked),
                },
                {"student_dim": 48, "teacher_dim": D},
                dtype=dtype,
            )
    for dtype, K, described, masked in itertools.product(
        ALL_TYPES, ((5,), (6, 5)), (torch.int64, torch.float64, None), BOTH
    ):
        # Given negatives that are padded, or of known labels.
        def described_negatives() -> dict[str, Any]:
            extras = {"negatives_mask": numbers(*K, 3)} if masked or not described else {}
            if described:
                extras["negatives_labels"] = numbers(*K, dtype=described)
                extras["labels"] = numbers(6, dtype=described)
            return extras

        yield Call(
            F.cos_nce_loss,
            lambda: {
                "student": learns(6, 3, 16, dtype=dtype),
                "teacher": given(6, 3, 16, dtype=dtype),
                "negatives": given(*K, 3, 16, dtype=dtype),
                **described_negatives(),
                **mask_of(6, 3, masked=masked),
            },
            {},
        )
        for layers in LAYERS:
            yield Call(
                fastkd.CosNCELoss,
                lambda: {
                    "student": [learns(6, 3, 16, dtype=dtype) for _ in range(layers)],
                    "teacher": [given(6, 3, 16, dtype=dtype) for _ in range(layers)],
                    "negatives": [given(*K, 3, 16, dtype=dtype) for _ in range(layers)],
                    **described_negatives(),
                    **mask_of(6, 3, masked=masked),
                },
                {"student_dim": 16, "teacher_dim": 16},
                dtype=dtype,
            )
    for pool, reduction, backend in itertools.product(
        ("tokens", "cls", "mean"), ("mean", "sum"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.CosNCELoss,
            lambda: {"student": [learns(4, 16, 48)] * 3, "teacher": [given(4, 16, 64)] * 3},
            {"student_dim": 48, "teacher_dim": 64, "pool": pool, "reduction": reduction}
            | {"backend": backend},
        )
    for labelled, shape in itertools.product(
        BOTH, ((2, 48), (1, 48), (33, 1, 768), (2**17, 32, 768), (64, 2**20, 64))
    ):
        for backend in ("torch", "triton") if len(shape) == 2 else ("auto",):
            yield Call(
                F.cos_nce_loss,
                lambda: {
                    "student": learns(*shape),
                    "teacher": given(*shape),
                    "labels": numbers(shape[0]) if labelled else None,
                },
                {"backend": backend},
            )


def cca() -> Calls:
    for (m, D), ridge, top_k, dtype in itertools.product(
        [(32, 768), (64, 64), (512, 768), (4096, 768)],
        (1e-2, (1e-6, 1e-4), (0.0, 1e-4), 0.0),
        (None, 4),
        ALL_TYPES,
    ):
        yield Call(
            F.cca_loss,
            lambda: {
                "student": learns(3, m, D, dtype=dtype),
                "teacher": given(3, m, 2 * D, dtype=dtype),
                "mask": numbers(3, m),
            },
            {"ridge": ridge, "top_k": top_k},
        )
    for reduction, backend in itertools.product(("sum", "mean", "none"), ("auto", "torch")):
        yield Call(
            F.cca_loss,
            lambda: {"student": learns(3, 64, 8), "teacher": given(3, 64, 16)},
            {"reduction": reduction, "backend": backend},
        )
    for m, D, dtype in itertools.product((32, 200, 4096), (8, 768), ALL_TYPES):
        yield Call(
            F.canonical_correlations,
            lambda: {
                "x": given(2, m, D, dtype=dtype),
                "y": given(2, m, 16, dtype=dtype),
                "mask": numbers(2, m),
            },
            {},
        )
    for pool in ("tokens", "cls", "mean"):
        yield Call(
            fastkd.CCALoss,
            lambda: {
                "student": [learns(80, 16, 48), learns(80, 16, 32)],
                "teacher": [given(80, 16, 64)] * 2,
                "mask": numbers(80, 16),
            },
            {"pool": pool},
        )


def linalg() -> Calls:
    for n, dtype, root in itertools.product(
        (1, 16, 96, 97, 768), ALL_TYPES, (F.sqrtm, F.inv_sqrtm)
    ):
        yield Call(root, lambda: {"a": learns(5, n, n, dtype=dtype)}, {})


def projection() -> Calls:
    for dtype in ALL_TYPES:
        yield Call(F.cayley, lambda: {"skew": learns(3, 20, 20, dtype=dtype)}, {})
    for backend in ("torch", "triton"):
        yield Call(F.cayley, lambda: {"skew": learns(48, 48)}, {"backend": backend})
    columns = [1, 15, 16, 17, 48, 770, 9000, 20000]
    columns += [size for log in range(5, 15) for size in (2**log - 1, 2**log)]
    for dtype, D, (x, y) in itertools.product(
        ALL_TYPES, columns, ((learns, given), (given, learns), (learns, learns))
    ):
        yield Call(
            F.layer_norm_mse, lambda: {"x": x(5, D, dtype=dtype), "y": y(5, D, dtype=dtype)}, {}
        )
    for reduction, backend in itertools.product(
        ("mean", "batchmean", "sum"), ("auto", "torch", "triton")
    ):
        yield Call(
            F.layer_norm_mse,
            lambda: {"x": learns(2, 3, 48), "y": learns(2, 3, 48)},
            {"reduction": reduction, "backend": backend},
        )
    yield Call(F.layer_norm_mse, lambda: {"x": learns(2**22, 768), "y": learns(2**22, 768)}, {})
    for (n, out), rows, backend in itertools.product(
        ((1, 1), (48, 32), (48, 64), (256, 256), (257, 257), (2047, 2047), (2048, 2048)),
        (4, 4096),
        ("auto", "torch", "triton"),
    ):
        yield Call(
            fastkd.OrthogonalProjection,
            lambda: {"x": learns(rows, n)},
            {"in_dim": n, "out_dim": out, "backend": backend},
        )
    for shape, orthogonal, reduction, backend in itertools.product(
        ((8,), (8, 16)), BOTH, ("mean", "batchmean", "sum"), ("auto", "torch", "triton")
    ):
        yield Call(
            fastkd.DualProjectionLoss,
            lambda: {
                "student": learns(*shape, 48),
                "teacher": given(*shape, 64),
                **mask_of(*shape, masked=len(shape) == 2),
            },
            {"student_dim": 48, "teacher_dim": 64, "orthogonal": orthogonal}
            | {"reduction": reduction, "backend": backend},
        )
    yield Call(
        fastkd.DualProjectionLoss,
        lambda: {
            "student": learns(8, 16, 48),
            "teacher": given(8, 20, 64),
            "mask": numbers(8, 16),
            "teacher_mask": numbers(8, 20),
        },
        {"student_dim": 48, "teacher_dim": 64},
    )


def attention() -> Calls:
    # Tokens: few and many, multiples of 16 or not.
    sizes = (1, 17, 32, 33, 128)
    for dtype, N, masked, layers, heads, learning in itertools.product(
        ALL_TYPES, sizes, BOTH, (*LAYERS, MANY_LAYERS), ("match", "mean"), BOTH
    ):
        student = learns if learning else given
        H_t = 4 if heads == "match" else 3
        yield Call(
            fastkd.AttentionLoss,
            lambda: {
                "student": [student(2, 4, N, N, dtype=dtype) for _ in range(layers)],
                "teacher": [given(2, H_t, N, N, dtype=dtype) for _ in range(layers)],
                **mask_of(2, N, masked=masked),
            },
            {"heads": heads},
        )
    for heads, reduction, backend in itertools.product(
        ("match", "mean"), ("mean", "sum", "none"), ("auto", "torch", "triton")
    ):
        inputs = lambda: {  # noqa: E731
            "student": learns(3, 4, 20, 20),
            "teacher": given(3, 4, 20, 20),
            "mask": numbers(3, 20),
        }
        options = {"heads": heads, "reduction": reduction, "backend": backend}
        for of in (fastkd.AttentionLoss, F.attention_loss):
            yield Call(of, inputs, options)
    # More than 2^31 elements.
    yield Call(
        F.attention_loss,
        lambda: {"student": learns(64, 32, 4096, 4096), "teacher": given(64, 32, 4096, 4096)},
        {},
    )


def soft_targets() -> Calls:
    divergences = ("forward_kl", "reverse_kl", "adaptive_kl", "js")
    kinds = (torch.int8, torch.int64, *ALL_TYPES)
    denominators = [7, 2.5, *(lambda kind=kind: numbers(dtype=kind) for kind in kinds)]
    reductions = ("batchmean", "sum", "none")
    choices: list[tuple[str, Any]] = [(reduction, None) for reduction in reductions]
    choices += [("batchmean", number) for number in denominators]
    for divergence, dtype, masked, V, (reduction, number) in itertools.product(
        divergences, ALL_TYPES, BOTH, (1, 50, 1024, 1025, 1040, 30522, 152_064), choices
    ):
        if number is not None and V not in (1024, 1025):
            continue
        options = {"divergence": divergence, "reduction": reduction}

        def extras() -> dict[str, Any]:
            denominator = number() if callable(number) else number
            return mask_of(2, 3, masked=masked) | {"denominator": denominator}

        yield Call(
            F.soft_target_loss,
            lambda: {
                "student_logits": learns(2, 3, V, dtype=dtype),
                "teacher_logits": given(2, 3, V, dtype=dtype),
                **extras(),
            },
            options,
        )
        if number is not None and callable(number):
            continue
        yield Call(
            F.linear_soft_target_loss,
            lambda: {
                "student_hidden": learns(2, 3, 48, dtype=dtype),
                "student_weight": learns(V, 48, dtype=dtype),
                "teacher_hidden": given(2, 3, 64, dtype=dtype),
                "teacher_weight": given(V, 64, dtype=dtype),
                **extras(),
            },
            options,
        )
    for divergence, reduction, backend in itertools.product(
        divergences, ("batchmean", "sum", "none"), ("auto", "torch", "triton")
    ):
        options = {"divergence": divergence, "reduction": reduction, "backend": backend}
        for of in (fastkd.SoftTargetLoss, F.soft_target_loss):
            yield Call(
                of,
                lambda: {"student_logits": learns(6, 50), "teacher_logits": given(6, 50)},
                options,
            )
        yield Call(
            F.linear_soft_target_loss,
            lambda: {
                "student_hidden": given(3, 8),
                "student_weight": given(50, 8),
                "teacher_hidden": given(3, 8),
                "teacher_weight": given(50, 8),
            },
            options,
        )
    yield Call(
        fastkd.SoftTargetLoss,
        lambda: {
            "student_logits": learns(6, 50),
            "teacher_logits": given(6, 50),
            "mask": numbers(6),
            "denominator": numbers(),
        },
        {},
    )
    for divergence in ("forward_kl", "adaptive_kl"):
        yield Call(
            F.soft_target_loss,
            lambda: {
                "student_logits": learns(2**15, 152_064),
                "teacher_logits": given(2**15, 152_064),
            },
            {"divergence": divergence},
        )


CALLS: dict[str, Callable[[], Calls]] = {
    subject.__name__: subject
    for subject in (relation, knn, contrastive, cca, linalg, projection, attention, soft_targets)
}
