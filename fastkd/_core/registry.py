"""The one list of losses: what dispatch, doctor, tests, benchmarks and the README go through.

A row says what a loss is called everywhere: its file in fastkd/ and bench/, its tests, its public
names, what its kernels can do, and an input for each function. tests/test_registry.py names what a
new row still lacks, and what is public without a row.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

# Tensors that get a gradient, the others, tensors by keyword; in float64, on the CPU.
Inputs = Callable[[torch.Generator], tuple[list[Tensor], list[Tensor], dict[str, Tensor]]]


@dataclass(frozen=True)
class Kernels:
    """What the kernels behind a public name can do; everything else is left to PyTorch."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    words: Mapping[str, Collection[str]] = field(default_factory=dict)  # option → what they know
    at_most: Mapping[str, int] = field(default_factory=dict)  # size → their largest

    def lack(self, dtype: torch.dtype, facts: Mapping[str, Any]) -> str | None:
        """What of a call they can't do, in words; ``facts`` has its words and sizes."""
        if dtype not in self.dtypes:
            return f"{str(dtype).removeprefix('torch.')} is left to PyTorch"
        for name, words in self.words.items():
            if facts[name] not in words:
                known = " or ".join(map(repr, words))
                return f"its kernels know {name}={known}, got {facts[name]!r}"
        for name, most in self.at_most.items():
            if facts[name] > most:
                return f"its kernels take at most {most} {name}, got {facts[name]}"
        return None


@dataclass(frozen=True)
class Loss:
    """What belongs together under one file name."""

    name: str  # fastkd/<name>.py, bench/<name>.py, tests/test_<name>.py, tests/losses/<name>.py
    title: str
    paper: str = ""
    functions: Mapping[str, Inputs] = field(default_factory=dict)  # each has a twin `*_ref`
    parts: Mapping[str, Inputs] = field(default_factory=dict)  # likewise, but no losses
    modules: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()  # public functions without a reference
    kernels: Mapping[str, Kernels] = field(default_factory=dict)  # Triton's, by public name
    row_kernels: Mapping[str, Kernels] = field(default_factory=dict)  # C++ ones, likewise
    kernel_files: tuple[str, ...] = ()  # kernels/<file>.py

    @property
    def compared(self) -> dict[str, Inputs]:
        """All functions that have a reference."""
        return {**self.functions, **self.parts}

    @property
    def names(self) -> list[str]:
        """All that is public of it."""
        references = (f"{function}_ref" for function in self.compared)
        return [*self.compared, *references, *self.modules, *self.measures]


_RELATIONS = {"normalize": ("l2",), "distance": ("pearson",)}
# The C++ kernels know them all.
_ROWS = Kernels(dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64))


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


def _maps(B: int, H: int, N: int) -> Inputs:
    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        student, teacher = (_random(generator, B, H, N, N) for _ in range(2))
        mask = torch.arange(N) < torch.arange(B)[:, None] + N - B
        return [student], [teacher], {"mask": mask}

    return make


def _two(*shape: int) -> Inputs:
    return lambda generator: ([_random(generator, *shape) for _ in range(2)], [], {})


def _heads(rows: int, student: int, teacher: int, vocabulary: int) -> Inputs:
    shapes = ((rows, student), (vocabulary, student)), ((rows, teacher), (vocabulary, teacher))

    def make(generator: torch.Generator) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        learning, given = ([_random(generator, *shape) for shape in side] for side in shapes)
        return learning, given, {}

    return make


def _skew(n: int) -> Inputs:
    return lambda generator: ([(x := _random(generator, 2, n, n)) - x.mT], [], {})


def _definite(n: int) -> Inputs:
    return lambda generator: (
        [(x := _random(generator, 2, n, n)) @ x.mT + torch.eye(n, dtype=x.dtype)],
        [],
        {},
    )


_SOFT_TARGETS = Kernels(
    words={
        "divergence": ("forward_kl", "reverse_kl", "adaptive_kl", "js"),
        "teacher": ("logits",),  # not its top k
    }
)

LOSSES = (
    Loss(
        name="relation",
        title="Relations between tokens and samples, Pearson correlation",
        paper="FCD: Huang et al., *Towards Efficient Pre-Trained Language Model via Feature "
        "Correlation Distillation*, 2023",
        functions={"relation_loss": _features(4, 10, 16, teacher=(4, 10, 24), masked=True)},
        modules=("FCDLoss",),
        row_kernels={"relation_loss": replace(_ROWS, words=_RELATIONS)},
        kernels={"relation_loss": Kernels(words=_RELATIONS)},
        kernel_files=("relation", "relation_rows", "relation_small", "relation_long"),
    ),
    Loss(
        name="knn",
        title="K nearest teacher rows of the same class",
        paper="Saadi et al., *Intra-Class Similarity-Guided Feature Distillation*, 2023",
        functions={"knn_feature_loss": _features(20, 16, labelled=True)},
        modules=("IntraClassKNNLoss",),
        measures=("intra_class_similarity",),
        # Beyond, matrix products of all pairs cost less than differences of those of one label.
        row_kernels={"knn_feature_loss": replace(_ROWS, at_most={"products": 2**27})},
        kernels={"knn_feature_loss": Kernels(at_most={"neighbours": 32})},
        kernel_files=("knn",),
    ),
    Loss(
        name="contrastive",
        title="COS-NCE, contrastive by angle",
        paper="Fu et al., *LRC-BERT: Latent-representation Contrastive Knowledge Distillation*, "
        "2021",
        functions={"cos_nce_loss": _features(6, 10, 16)},
        modules=("CosNCELoss",),
        row_kernels={"cos_nce_loss": _ROWS},
        kernels={"cos_nce_loss": Kernels()},
        kernel_files=("contrastive",),
    ),
    Loss(
        name="cca",
        title="Canonical correlation",
        paper="MC3KD: Fan et al., *Maximizing the Effectiveness of Larger BERT Models for "
        "Compression*, 2025",
        functions={"cca_loss": _features(64, 12, teacher=(64, 16))},
        modules=("CCALoss",),
        measures=("canonical_correlations",),
    ),
    Loss(
        name="projection",
        title="Dual orthogonal projection",
        paper="LRKD: Hu et al., *Learnable Relational Knowledge Distillation for Language Model "
        "Compression*, 2025",
        functions={"layer_norm_mse": _two(20, 16)},
        parts={"cayley": _skew(12)},
        modules=("DualProjectionLoss", "OrthogonalProjection"),
        kernels={
            "layer_norm_mse": Kernels(at_most={"columns": 16384}),
            "cayley": Kernels(),
            "OrthogonalProjection": Kernels(dtypes=(torch.float32,)),
        },
        row_kernels={"layer_norm_mse": _ROWS},
        kernel_files=("projection", "cayley"),
    ),
    Loss(
        name="attention",
        title="Attention maps, mean squared difference",
        paper="Jiao et al., *TinyBERT: Distilling BERT for Natural Language Understanding*, 2020",
        functions={"attention_loss": _maps(3, 4, 6)},
        modules=("AttentionLoss",),
        row_kernels={"attention_loss": _ROWS},
        kernels={"attention_loss": Kernels()},
        kernel_files=("attention",),
    ),
    Loss(
        name="soft_targets",
        title="Soft targets: forward, reverse and adaptive KL, Jensen-Shannon",
        paper="Hinton et al., 2015; Wu et al., 2024",
        functions={
            "soft_target_loss": _features(20, 33),
            "linear_soft_target_loss": _heads(20, 8, 12, 33),
        },
        modules=("SoftTargetLoss",),
        row_kernels={
            name: replace(_SOFT_TARGETS, dtypes=_ROWS.dtypes)
            for name in ("soft_target_loss", "linear_soft_target_loss")
        },
        kernels={name: _SOFT_TARGETS for name in ("soft_target_loss", "linear_soft_target_loss")},
        kernel_files=("soft_targets",),
    ),
    Loss(
        name="linalg",
        title="Roots of symmetric matrices, for the losses above",
        parts={"sqrtm": _definite(12), "inv_sqrtm": _definite(12)},
    ),
)
