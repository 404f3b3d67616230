"""Similarity between the layers of one model or two, streamed over a data set."""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastkd._core import check
from fastkd.analysis.moments import Covariances, Moments
from fastkd.analysis.similarity_measures import (
    Measure,
    check_measures,
    check_moments,
    matrix,
    moments_for,
    svcca,
)
from fastkd.distributed import Group, world_size
from fastkd.models.backbone import Model, backbone_of
from fastkd.models.batch import NOT_INPUTS, Batch, all_layers, batch_of
from fastkd.models.inputs import IGNORED, Batches, in_eval_mode
from fastkd.models.outputs import Outputs, pooled_rows

Pool = Literal["cls", "mean"]


def layer_similarity(
    model: nn.Module,
    batches: Batches,
    measures: Sequence[Measure] = ("svcca", "cka"),
    *,
    other: nn.Module | None = None,
    variance: float = 0.99,
    gather: bool = False,
    group: Group = None,
) -> dict[str, Tensor]:
    """Similarity measures between all layers of a model, or of two models, from one pass.

    Each measure equals `fastkd.analysis.similarity` on all features at once. Every real token is
    one observation. The data is read once, under ``no_grad`` and in eval mode (the training mode is
    restored afterwards). Memory holds float64 matrices of the size of all layers, whatever the
    number of batches.

    CKA, and SVCCA of at most 0.99 of the variance, are computed from covariances, with errors up to
    1e-9. The other measures use a triangular factor, with an error of about κ·1e-16, which takes
    four to five times as long.

    Args:
        model: a transformers model with one stack of blocks, with or without a head, or
            `fastkd.distill.Blocks`.
        batches: dicts of arguments as a `fastkd.distill.Distiller` reads them. ``attention_mask``
            (B, N), if present, marks real tokens. Packed rows are read document by document.
            ``labels`` only make the decoder's inputs of an encoder-decoder.
        measures: "svcca", "pwcca", "cca", "cka", "unbiased_cka".
        other: a second model that reads the same tokens, for example a student; of any sizes.
        variance: fraction of the variance that SVCCA keeps, in (0, 1]; 1 keeps all (plain CCA).
        gather, group: compare over the batches of all processes, or of a group; each reads its own.

    Returns:
        A matrix for each measure, float64 on the CPU: (L+1, L+1), or (L+1, L_other+1); row 0 is the
        input of the first block. PWCCA takes its weights from the row's layer, unless the column's
        rank is lower.

    Raises:
        ValueError: fewer than two real tokens (four for the unbiased CKA), no list of blocks, rows
            of several documents that the model reads as one, values that are not finite, or an
            unknown measure.
        TypeError: no transformers model, or an input that the model doesn't take.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> teacher = BertModel(config)
    >>> student = BertModel(BertConfig.from_dict({**config.to_dict(), "num_hidden_layers": 1}))
    >>> ids = torch.arange(48).view(4, 12)
    >>> found = layer_similarity(teacher, [{"input_ids": ids}], ["cka"], other=student)
    >>> found["cka"].shape
    torch.Size([4, 2])
    """
    check_measures(measures, variance)
    moments = moments_for(measures, variance)
    models = [model] if other is None else [model, other]
    moments, counts = stream(models, batches, moments, gather=gather, group=group)
    check_layers(moments, counts, measures)
    rows, columns = range(counts[0]), range(sum(counts[:-1]), sum(counts))
    return {name: matrix(moments, name, rows, columns, variance) for name in measures}


def adjacent_layer_cca(
    model: nn.Module,
    batches: Batches,
    *,
    variance: float = 0.99,
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Canonical correlation of each layer with the layer before it (MC3KD, eq. 2).

    C(l) = CCA(T_{l-1}, T_l), l = 1..L, where layer 0 is the embeddings: the entries next to the
    diagonal of `svcca_matrix`, from 2L + 1 covariances instead of all pairs.

    Args:
        model, batches, variance, gather, group: as in `layer_similarity`.

    Returns:
        (L,) float64 on the CPU, in [0, 1]; entry l-1 is C(l).

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids = torch.arange(48).view(4, 12)
    >>> batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    >>> adjacent_layer_cca(BertModel(config), batches).shape
    torch.Size([3])
    """
    check_measures(["svcca"], variance)
    moments = moments_for(["svcca"], variance)
    if isinstance(moments, Covariances):
        moments.reach = 1
    moments, counts = stream([model], batches, moments, gather=gather, group=group)
    check_layers(moments, counts)
    pairs = range(counts[0] - 1)
    return torch.stack([svcca(moments, i, i + 1, variance) for i in pairs]).cpu()


def svcca_matrix(
    model: nn.Module,
    batches: Batches,
    *,
    variance: float = 0.99,
    other: nn.Module | None = None,
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """SVCCA between all layers of a model: mean canonical correlation of the leading directions.

    Each layer is reduced to the leading singular directions that hold ``variance`` of its
    variance; entry (i, j) is the mean of the canonical correlations between layers i and j
    (Raghu et al. 2017; MC3KD, section 3.2). Arguments and errors as in `layer_similarity`.

    Returns:
        (L+1, L+1) float64 on the CPU, symmetric, in [0, 1]; row 0 is the embeddings' output. With
        ``other`` (L+1, L_other+1).

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids = torch.arange(48).view(4, 12)
    >>> svcca_matrix(BertModel(config), [{"input_ids": ids}]).diagonal()
    tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    return layer_similarity(
        model, batches, ["svcca"], other=other, variance=variance, gather=gather, group=group
    )["svcca"]


def cka_matrix(
    model: nn.Module,
    batches: Batches,
    *,
    unbiased: bool = False,
    other: nn.Module | None = None,
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """Linear CKA between all layers of a model: ‖Σ_xy‖²_F / (‖Σ_xx‖_F ‖Σ_yy‖_F).

    Kornblith et al. 2019; ``unbiased`` is Song et al.'s estimate, which isn't too high for few
    observations. Other arguments, result and errors as in `layer_similarity`.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids = torch.arange(48).view(4, 12)
    >>> cka_matrix(BertModel(config), [{"input_ids": ids}]).shape
    torch.Size([4, 4])
    """
    measure: Measure = "unbiased_cka" if unbiased else "cka"
    options: Any = {"other": other, "gather": gather, "group": group}
    return layer_similarity(model, batches, [measure], **options)[measure]


def rccc(matrix: Tensor, *, first: int = 0) -> float:
    """RCCC, the entry A_1m of an SVCCA matrix: first layer against last (MC3KD, section 3.2).

    A smaller value means larger linear differences between a model's layers. ``first`` is the row
    of the paper's layer 1: 0, the embeddings' output, or 1, the first block.

    >>> rccc(torch.tensor([[1.0, 0.25], [0.25, 1.0]]))
    0.25
    """
    check.floating("matrix", matrix)
    check.integer("first", first)
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"matrix must be square and not empty, got shape {tuple(matrix.shape)}")
    if not 0 <= first < len(matrix):
        raise ValueError(f"first must be from 0 to {len(matrix) - 1}, got {first}")
    return float(matrix[first, -1])


class IntraClassSums:
    """Sums of unit vectors for each class and layer, for M_ICS.

    M_ICS = (1/N) Σ_c ‖Σ_{i in c} s_i/‖s_i‖‖² / N_c (intra-class KNN, section 2). A sample has one
    row in each layer: the token that a classification head reads, or the mean of its real tokens.
    """

    def __init__(self, pool: Pool = "cls") -> None:
        check.choice("pool", pool, ("cls", "mean"))
        self.pool = pool
        self.clear()

    def clear(self) -> None:
        """Remove all samples."""
        self.counts: dict[int, int] = {}
        self.sums: dict[int, list[Tensor]] = {}

    def update(self, outputs: Outputs, mask: Tensor, labels: Tensor, model: Model) -> None:
        """Add a batch of ``model``: hidden states (B, N, D_l) in outputs, mask (B, N), labels (B,).

        Every row starts at position 0.
        """
        if labels.dim() != 1 or labels.is_floating_point():
            raise ValueError(
                "labels must be integers (B,), one for each sample, got "
                f"{labels.dtype} of shape {tuple(labels.shape)}"
            )
        if len(labels) != len(mask):
            raise ValueError(
                f"labels must be one for each sample, got {len(labels)} for {len(mask)} samples "
                "(packed documents and the choices of a question are samples too)"
            )
        mask, labels = mask.cpu(), labels.cpu()
        labelled = mask.any(1) & (labels != IGNORED)
        rows: list[Tensor] = []
        for layer in sorted(outputs.hidden):
            x = outputs.hidden[layer].cpu().double()
            pooled = pooled_rows(self.pool, model, x, mask, outputs.sentence)
            rows.append(nn.functional.normalize(pooled, dim=1))
        for label in labels[labelled].unique().tolist():
            chosen = labelled & (labels == label)
            self._add(label, int(chosen.sum()), [x[chosen].sum(0) for x in rows])

    def merge(self, other: "IntraClassSums") -> None:
        """Add the samples of ``other``."""
        for label, count in other.counts.items():
            self._add(label, count, other.sums[label])

    def value(self) -> Tensor:
        """M_ICS of every layer, (L+1,)."""
        total = sum(self.counts.values())
        by_class = [
            torch.stack([x.square().sum() for x in sums]) / self.counts[label]
            for label, sums in self.sums.items()
        ]
        return torch.stack(by_class).sum(0) / total

    def _add(self, label: int, count: int, sums: list[Tensor]) -> None:
        self.counts[label] = self.counts.get(label, 0) + count
        before = self.sums.get(label, [torch.zeros_like(x) for x in sums])
        self.sums[label] = [a + b for a, b in zip(before, sums, strict=True)]


def layer_intra_class_similarity(
    model: nn.Module,
    batches: Batches,
    *,
    pool: Pool = "cls",
    gather: bool = False,
    group: Group = None,
) -> Tensor:
    """M_ICS of every layer: similarity within classes (`fastkd.intra_class_similarity`).

    Args:
        model, gather, group: as in `layer_similarity`.
        batches: as in `layer_similarity`, with integer ``labels`` (B,).
        pool: the row of a sample: "cls", the token that a classification head reads (the first real
            token, in decoders the last), or "mean", the mean of its real tokens.

    Returns:
        (L+1,) float64 on the CPU; entry 0 is the embeddings' output.

    Raises:
        ValueError: no labelled samples, no list of blocks, or values that are not finite.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_hidden_layers=3)
    >>> ids, labels = torch.arange(48).view(4, 12), torch.tensor([0, 1, 1, 0])
    >>> batch = {"input_ids": ids, "labels": labels}
    >>> layer_intra_class_similarity(BertModel(config), [batch]).shape
    torch.Size([4])
    """
    classes = IntraClassSums(pool)
    stream([model], batches, None, [classes], gather=gather, group=group)
    if not classes.counts:
        raise ValueError("batches must hold labelled samples with a real token, got none")
    values = classes.value()
    if not bool(values.isfinite().all()):
        raise ValueError("model: its hidden states hold NaN or inf; check its weights")
    return values


def check_layers(
    moments: Moments,
    counts: Sequence[int],
    measures: Sequence[str] = ("svcca",),
    models: Sequence[str] = ("model", "other model"),
) -> None:
    """Raise unless the models, of these names in the error, gave enough tokens, all finite."""
    names = [
        f"layer {i} of the {model}"
        for model, count in zip(models, counts, strict=False)
        for i in range(count)
    ]
    check_moments(moments, measures, names, "real tokens in the batches")


def stream(
    models: Sequence[nn.Module],
    batches: Batches,
    moments: Moments | None,
    classes: Sequence[IntraClassSums] = (),
    *,
    gather: bool = False,
    group: Group = None,
) -> tuple[Any, list[int]]:
    """Add all batches to ``moments``, and to ``classes`` of the first models, in one pass.

    Returns the moments, with ``gather`` of all processes, and the number of layers of each model.
    """
    backbones = [backbone_of(model, "model") for model in models]
    counts: list[int] = []
    waiting: list[list[Tensor]] = []  # rows are added in large blocks, which is faster
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for model in models:
            stack.enter_context(in_eval_mode(model))
        for given in batches:
            tokens: list[Tensor] = []
            counts = []
            for number, backbone in enumerate(backbones):
                known = {*backbone.known_inputs, *NOT_INPUTS} if number else given.keys()
                own = {name: x for name, x in given.items() if name in known}
                batch = batch_of(backbone, own, "model")
                outputs = all_layers(backbone, batch)
                mask = _real_tokens(outputs, batch)
                if number < len(classes) and given.get("labels") is not None:
                    classes[number].update(outputs, mask, given["labels"], backbone)
                # mps has no float64.
                hidden = [outputs.hidden[layer] for layer in sorted(outputs.hidden)]
                hidden = [x.cpu() if x.device.type == "mps" else x for x in hidden]
                tokens += [x[mask.to(x.device)] for x in hidden]
                counts.append(len(hidden))
                if len(tokens[-1]) != len(tokens[0]):
                    raise ValueError(
                        f"other: it reads {len(tokens[-1])} tokens where model reads "
                        f"{len(tokens[0])}; both must read the same tokens"
                    )
            if moments is not None:
                waiting.append([x.to(tokens[0].device) for x in tokens])
                if sum(len(parts[0]) for parts in waiting) >= 2 * max(x.shape[1] for x in tokens):
                    moments.update([torch.cat(parts) for parts in zip(*waiting, strict=True)])
                    waiting = []
    if moments is not None and waiting:
        moments.update([torch.cat(parts) for parts in zip(*waiting, strict=True)])
    return gathered(moments, counts, classes, group) if gather else (moments, counts)


def gathered(
    moments: Moments | None,
    counts: list[int],
    classes: Sequence[IntraClassSums] = (),
    group: Group = None,
) -> tuple[Any, list[int]]:
    """Results of `stream`, merged over the processes."""
    if world_size(group) == 1:
        return moments, counts
    moments = None if moments is None else moments.gathered(group)
    parts: list[Any] = [None] * world_size(group)
    dist.all_gather_object(parts, (counts, list(classes)), group=group)
    for number, whole in enumerate(classes):
        whole.clear()
        for part in parts:
            whole.merge(part[1][number])
    return moments, max(part[0] for part in parts)  # a process may have had no batch


def _real_tokens(outputs: Outputs, batch: Batch) -> Tensor:
    """Mask (B, N) of the real tokens of the hidden states."""
    first = outputs.hidden[0]
    shape, mask = first.shape[:2], batch.feature_mask
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=first.device)
    if mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} but the layers have {tuple(shape)} "
            "tokens; pass a mask of the model's own tokens"
        )
    return mask.to(first.device)
