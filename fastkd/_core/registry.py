"""Registry of the losses, read by dispatch, `fastkd doctor`, tests, benchmarks and the README.

A row holds a loss's module, its file name in bench/ and tests/, its public names, what its kernels
support, and an input for each function. tests/test_registry.py reports what a new row still lacks
and public names without a row.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

# Makes tensors with a gradient, tensors without, and tensors by keyword; float64, on the CPU.
Inputs = Callable[[torch.Generator], tuple[list[Tensor], list[Tensor], dict[str, Tensor]]]


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
    title: str
    paper: str = ""
    functions: Mapping[str, Inputs] = field(default_factory=dict)  # losses with a `*_ref`
    building_blocks: Mapping[str, Inputs] = field(default_factory=dict)  # others with a `*_ref`
    modules: tuple[str, ...] = ()
    without_reference: tuple[str, ...] = ()  # other public functions
    triton: Mapping[str, Kernels] = field(default_factory=dict)  # public name → its kernels
    cpp: Mapping[str, Kernels] = field(default_factory=dict)
    kernel_files: tuple[str, ...] = ()  # kernels/<file>.py

    @property
    def with_reference(self) -> dict[str, Inputs]:
        """Inputs of all functions that have a reference."""
        return {**self.functions, **self.building_blocks}

    @property
    def names(self) -> list[str]:
        """All public names of the loss."""
        references = (f"{function}_ref" for function in self.with_reference)
        return [*self.with_reference, *references, *self.modules, *self.without_reference]


_RELATIONS = {"normalize": ("l2",), "distance": ("pearson",)}
_CPP = Kernels(dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64))


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _features(
    *shape: int,
    teacher: tuple[int, ...] | None = None,
    masked: bool = False,
    labelled: bool = False,
) -> Inputs:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        options: dict[str, Tensor] = {}
        if masked:
            lengths = torch.arange(shape[0])[:, None] + shape[1] - shape[0]
            options["mask"] = torch.arange(shape[1]) < lengths
        if labelled:
            options["student_labels"] = torch.arange(shape[0]) % 3
        return [_random(generator, *shape)], [_random(generator, *(teacher or shape))], options

    return make


def _hidden_states(B: int, N: int, D: int) -> Inputs:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        student, teacher = (_random(generator, B, N, D) for _ in range(2))
        mask = torch.arange(N) < torch.arange(B)[:, None] + N - B
        return [student], [teacher], {"mask": mask, "weights": _random(generator, B, N)}

    return make


def _maps(B: int, H: int, N: int) -> Inputs:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        student, teacher = (_random(generator, B, H, N, N) for _ in range(2))
        mask = torch.arange(N) < torch.arange(B)[:, None] + N - B
        return [student], [teacher], {"mask": mask}

    return make


def _two_features(*shape: int) -> Inputs:
    return lambda generator: ([_random(generator, *shape) for _ in range(2)], [], {})


def _heads(rows: int, student: int, teacher: int, vocabulary: int) -> Inputs:
    shapes = ((rows, student), (vocabulary, student)), ((rows, teacher), (vocabulary, teacher))

    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        trained, fixed = ([_random(generator, *shape) for shape in model] for model in shapes)
        return trained, fixed, {}

    return make


def _tokens(rows: int, size: int, vocabulary: int) -> Inputs:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        trained = [_random(generator, rows, size), _random(generator, vocabulary, size)]
        ids = torch.randint(vocabulary, (rows, 3), generator=generator)
        return trained, [], {"ids": ids}

    return make


def _skew(n: int) -> Inputs:
    return lambda generator: ([(x := _random(generator, 2, n, n)) - x.mT], [], {})


def _definite(n: int) -> Inputs:
    return lambda generator: (
        [(x := _random(generator, 2, n, n)) @ x.mT + torch.eye(n, dtype=x.dtype)],
        [],
        {},
    )


LOSSES = (
    Loss(
        name="relation",
        module="fastkd.losses.relation",
        title="Relations between tokens and samples, Pearson correlation",
        paper="FCD: Huang et al., *Towards Efficient Pre-Trained Language Model via Feature "
        "Correlation Distillation*, 2023",
        functions={"relation_loss": _features(4, 10, 16, teacher=(4, 10, 24), masked=True)},
        modules=("FCDLoss",),
        cpp={"relation_loss": replace(_CPP, options=_RELATIONS)},
        triton={"relation_loss": Kernels(options=_RELATIONS)},
        kernel_files=("relation", "relation_rows", "relation_small", "relation_long"),
    ),
    Loss(
        name="knn",
        module="fastkd.losses.knn",
        title="K nearest teacher rows of the same class",
        paper="Saadi et al., *Intra-Class Similarity-Guided Feature Distillation*, 2023",
        functions={"knn_feature_loss": _features(20, 16, labelled=True)},
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
        title="COS-NCE, contrastive by angle",
        paper="Fu et al., *LRC-BERT: Latent-representation Contrastive Knowledge Distillation*, "
        "2021",
        functions={"cos_nce_loss": _features(6, 10, 16)},
        modules=("CosNCELoss",),
        cpp={"cos_nce_loss": _CPP},
        triton={"cos_nce_loss": Kernels()},
        kernel_files=("contrastive",),
    ),
    Loss(
        name="cca",
        module="fastkd.losses.cca",
        title="Canonical correlation",
        paper="MC3KD: Fan et al., *Maximizing the Effectiveness of Larger BERT Models for "
        "Compression*, 2025",
        functions={"cca_loss": _features(64, 12, teacher=(64, 16))},
        modules=("CCALoss",),
        without_reference=("canonical_correlations",),
    ),
    Loss(
        name="projection",
        module="fastkd.losses.projection",
        title="Dual orthogonal projection",
        paper="LRKD: Hu et al., *Learnable Relational Knowledge Distillation for Language Model "
        "Compression*, 2025",
        functions={"layer_norm_mse": _two_features(20, 16)},
        building_blocks={"cayley": _skew(12)},
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
        title="Attention maps, mean squared difference",
        paper="Jiao et al., *TinyBERT: Distilling BERT for Natural Language Understanding*, 2020",
        functions={"attention_loss": _maps(3, 4, 6)},
        modules=("AttentionLoss",),
        cpp={"attention_loss": _CPP},
        triton={"attention_loss": Kernels()},
        kernel_files=("attention",),
    ),
    Loss(
        name="hidden_states",
        module="fastkd.losses.hidden_states",
        title="Hidden states: squared difference, cosine, smooth ℓ1",
        paper="Sanh et al., *DistilBERT*, 2019; Li et al., *EAGLE*, 2024",
        functions={"hidden_state_loss": _hidden_states(3, 7, 16)},
        modules=("HiddenStateLoss",),
        cpp={"hidden_state_loss": _CPP},
        triton={"hidden_state_loss": Kernels()},
        kernel_files=("hidden_states",),
    ),
    Loss(
        name="soft_targets",
        module="fastkd.lm.soft_targets",
        title="Soft targets: forward, reverse and adaptive KL, Jensen-Shannon",
        paper="Hinton et al., 2015; Wu et al., 2024",
        functions={
            "soft_target_loss": _features(20, 33),
            "linear_soft_target_loss": _heads(20, 8, 12, 33),
        },
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
    Loss(
        name="token_log_probs",
        module="fastkd.lm.log_probs",
        title="Log-probabilities of tokens, for the losses above",
        building_blocks={"log_probs": _tokens(20, 8, 33)},
    ),
    Loss(
        name="linalg",
        module="fastkd.linalg.roots",
        title="Roots of symmetric matrices",
        building_blocks={"sqrtm": _definite(12), "inv_sqrtm": _definite(12)},
    ),
)
