"""Registry of the losses, read by dispatch, `fastkd doctor`, tests, benchmarks and the README.

A row holds a loss's module, its file name in bench/ and tests/, its public names and what its
kernels support. tests/test_registry.py reports what a new row still lacks and public names without
a row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Kernels:
    """Calls that the kernels of a public name support; PyTorch runs all others."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    options: Mapping[str, Collection[str]] = field(default_factory=dict)  # name → supported values
    limits: Mapping[str, int] = field(default_factory=dict)  # name of a size → largest supported

    def why_not(self, dtype: torch.dtype, call: Mapping[str, Any]) -> str | None:
        """Why the kernels don't support a call, or None; ``call`` has its options and sizes."""
        if dtype not in self.dtypes:
            return f"{str(dtype).removeprefix('torch.')} is left to PyTorch"
        for name, values in self.options.items():
            if call[name] not in values:
                supported = " or ".join(map(repr, values))
                return f"its kernels support {name}={supported}, got {call[name]!r}"
        for name, largest in self.limits.items():
            if call[name] > largest:
                return f"its kernels take at most {largest} {name}, got {call[name]}"
        return None


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
    kernel_files: tuple[str, ...] = ()  # kernels/<file>.py

    @property
    def with_reference(self) -> tuple[str, ...]:
        """All functions that have a reference."""
        return self.functions + self.building_blocks

    @property
    def names(self) -> list[str]:
        """All public names of the loss."""
        references = (f"{function}_ref" for function in self.with_reference)
        return [*self.with_reference, *references, *self.modules, *self.without_reference]


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
    ),
    Loss(
        name="contrastive",
        module="fastkd.losses.cos_nce",
        functions=("cos_nce_loss",),
        modules=("CosNCELoss",),
        cpp={"cos_nce_loss": _CPP},
        triton={"cos_nce_loss": Kernels()},
        kernel_files=("contrastive",),
    ),
    Loss(
        name="cca",
        module="fastkd.losses.cca",
        functions=("cca_loss",),
        triton={"cca_loss": Kernels()},
        kernel_files=("cca",),
        modules=("CCALoss",),
        without_reference=("canonical_correlations",),
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
    ),
    Loss(
        name="attention",
        module="fastkd.losses.attention",
        functions=("attention_loss",),
        modules=("AttentionLoss",),
        cpp={"attention_loss": _CPP},
        triton={"attention_loss": Kernels()},
        kernel_files=("attention",),
    ),
    Loss(
        name="hidden_states",
        module="fastkd.losses.hidden_states",
        functions=("hidden_state_loss",),
        modules=("HiddenStateLoss",),
        cpp={"hidden_state_loss": _CPP},
        triton={"hidden_state_loss": Kernels()},
        kernel_files=("hidden_states",),
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
    ),
    Loss(name="token_log_probs", module="fastkd.lm.log_probs", building_blocks=("log_probs",)),
    Loss(name="linalg", module="fastkd.linalg.roots", building_blocks=("sqrtm", "inv_sqrtm")),
)

# Public arguments of losses, not called themselves.
ARGUMENTS = (
    "CrossEntropy", "Divergence", "Draft", "Head", "ImportanceRatio", "TopK", "VocabularyMatch",
)  # fmt: skip
