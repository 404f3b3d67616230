"""Registry of the losses, read by dispatch, `fastkd doctor`, tests, benchmarks and the README.

A row holds a loss's module, its file name in bench/ and tests/, its public names, what its kernels
support and a call for `fastkd doctor`. tests/test_registry.py reports what a new row lacks and
public names without a row.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Tensors of a call: with a gradient, without, and by keyword.
Inputs = tuple[list[Tensor], list[Tensor], dict[str, Tensor]]
Random = Callable[..., Tensor]  # of a shape


@dataclass(frozen=True)
class Kernels:
    """Calls that the kernels of a public name support; PyTorch runs all others."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    options: Mapping[str, Collection[str]] = field(default_factory=dict)  # name → supported values
    limits: Mapping[str, int] = field(default_factory=dict)  # name of a size → largest supported


@dataclass(frozen=True)
class Loss:
    """One row of the registry."""

    name: str  # bench/test_<name>.py, tests/test_<name>.py, tests/losses/<name>.py
    module: str  # of all its public names
    functions: tuple[str, ...] = ()  # losses with a `*_ref`
    building_blocks: tuple[str, ...] = ()  # others with a `*_ref`
    modules: tuple[str, ...] = ()
    without_reference: tuple[str, ...] = ()  # other public functions
    triton: Mapping[str, Kernels] = field(default_factory=dict)  # public name → its kernels
    cpp: Mapping[str, Kernels] = field(default_factory=dict)
    without_choice: tuple[str, ...] = ()  # computed by the extension wherever it is built
    kernel_files: tuple[str, ...] = ()  # kernels/<file>.py
    calls: Mapping[str, Callable[[Random], Inputs]] = field(default_factory=dict)  # with_reference

    @property
    def with_reference(self) -> tuple[str, ...]:
        """All functions that have a reference."""
        return self.functions + self.building_blocks

    @property
    def names(self) -> list[str]:
        """All public names of the loss."""
        references = (f"{function}_ref" for function in self.with_reference)
        return [*self.with_reference, *references, *self.modules, *self.without_reference]


def inputs_of(function: str) -> Inputs:
    """Inputs of a function with a reference, random float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return next(loss.calls[function] for loss in LOSSES if function in loss.calls)(random)


def _mask(B: int, N: int) -> Tensor:
    return torch.arange(N) < torch.arange(B)[:, None] + N - B


def _skew(x: Tensor) -> Tensor:
    return x - x.mT


def _positive(x: Tensor) -> Tensor:
    """Positive definite matrices."""
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


_RELATIONS = {"normalize": ("l2",), "distance": ("pearson",)}
_CPP = Kernels(dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64))

LOSSES = (
    Loss(
        name="relation",
        module="fastkd.losses.relation",
        functions=("relation_loss",),
        modules=("FCDLoss",),
        cpp={"relation_loss": replace(_CPP, options=_RELATIONS)},
        triton={"relation_loss": Kernels(options=_RELATIONS)},
        kernel_files=("relation", "relation_rows", "relation_small", "relation_long"),
        calls={"relation_loss": lambda x: ([x(4, 10, 16)], [x(4, 10, 24)], {"mask": _mask(4, 10)})},
    ),
    Loss(
        name="knn",
        module="fastkd.losses.knn",
        functions=("knn_feature_loss",),
        modules=("IntraClassKNNLoss",),
        without_reference=("intra_class_similarity",),
        # Beyond it matrix products of all pairs cost less than differences of pairs of one label.
        cpp={"knn_feature_loss": replace(_CPP, limits={"products": 2**27})},
        triton={"knn_feature_loss": Kernels(limits={"neighbours": 32})},
        kernel_files=("knn",),
        calls={
            "knn_feature_loss": lambda x: (
                [x(20, 16)],
                [x(20, 16)],
                {"student_labels": torch.arange(20) % 3},
            )
        },
    ),
    Loss(
        name="contrastive",
        module="fastkd.losses.cos_nce",
        functions=("cos_nce_loss",),
        modules=("CosNCELoss",),
        cpp={"cos_nce_loss": _CPP},
        triton={"cos_nce_loss": Kernels()},
        kernel_files=("contrastive",),
        calls={"cos_nce_loss": lambda x: ([x(6, 10, 16)], [x(6, 10, 16)], {})},
    ),
    Loss(
        name="cca",
        module="fastkd.losses.cca",
        functions=("cca_loss",),
        triton={"cca_loss": Kernels()},
        kernel_files=("cca",),
        modules=("CCALoss",),
        without_reference=("canonical_correlations",),
        calls={"cca_loss": lambda x: ([x(64, 12)], [x(64, 16)], {})},
    ),
    Loss(
        name="projection",
        module="fastkd.losses.projection",
        functions=("layer_norm_mse",),
        building_blocks=("cayley",),
        modules=("DualProjectionLoss", "OrthogonalProjection"),
        triton={
            "layer_norm_mse": Kernels(limits={"columns": 16384}),
            "cayley": Kernels(),
            "OrthogonalProjection": Kernels(dtypes=(torch.float32,)),
        },
        cpp={"layer_norm_mse": _CPP},
        kernel_files=("projection", "cayley"),
        calls={
            "layer_norm_mse": lambda x: ([x(20, 16), x(20, 16)], [], {}),
            "cayley": lambda x: ([_skew(x(2, 12, 12))], [], {}),
        },
    ),
    Loss(
        name="attention",
        module="fastkd.losses.attention",
        functions=("attention_loss",),
        modules=("AttentionLoss",),
        cpp={"attention_loss": _CPP},
        triton={"attention_loss": Kernels()},
        kernel_files=("attention",),
        calls={
            "attention_loss": lambda x: ([x(3, 4, 6, 6)], [x(3, 4, 6, 6)], {"mask": _mask(3, 6)})
        },
    ),
    Loss(
        name="hidden_states",
        module="fastkd.losses.hidden_states",
        functions=("hidden_state_loss",),
        modules=("HiddenStateLoss",),
        cpp={"hidden_state_loss": _CPP},
        triton={"hidden_state_loss": Kernels()},
        kernel_files=("hidden_states",),
        calls={
            "hidden_state_loss": lambda x: (
                [x(3, 7, 16)],
                [x(3, 7, 16)],
                {"mask": _mask(3, 7), "weights": x(3, 7)},
            )
        },
    ),
    Loss(
        name="soft_targets",
        module="fastkd.lm.soft_targets",
        functions=("soft_target_loss", "linear_soft_target_loss"),
        modules=("SoftTargetLoss",),
        cpp={name: _CPP for name in ("soft_target_loss", "linear_soft_target_loss")},
        triton={name: Kernels() for name in ("soft_target_loss", "linear_soft_target_loss")},
        kernel_files=(
            "soft_targets",
            "soft_targets_top_k",
            "cross_entropy",
            "reduction",
            "upstream",
        ),
        calls={
            "soft_target_loss": lambda x: ([x(20, 33)], [x(20, 33)], {}),
            "linear_soft_target_loss": lambda x: ([x(20, 8), x(33, 8)], [x(20, 12), x(33, 12)], {}),
        },
    ),
    Loss(
        name="token_log_probs",
        module="fastkd.lm.log_probs",
        building_blocks=("log_probs",),
        calls={
            "log_probs": lambda x: (
                [x(20, 8), x(33, 8)],
                [],
                {"ids": torch.arange(60).view(20, 3) % 33},
            )
        },
    ),
    Loss(
        name="linalg",
        module="fastkd.linalg.roots",
        building_blocks=("sqrtm", "inv_sqrtm"),
        without_choice=("sqrtm", "inv_sqrtm"),
        calls={
            name: lambda x: ([_positive(x(2, 12, 12))], [], {}) for name in ("sqrtm", "inv_sqrtm")
        },
    ),
)

# Public arguments of losses, not called themselves.
ARGUMENTS = (
    "CrossEntropy", "Divergence", "Draft", "Head", "ImportanceRatio", "TopK", "VocabularyMatch",
)  # fmt: skip
