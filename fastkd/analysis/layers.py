"""Similarity between the layers of one model, from covariances streamed over a data set."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastkd._checks import check_number

Batches = Iterable[Mapping[str, Any]]


class LayerMoments:
    """Count, means and cross-covariances of several layers over a stream of observations.

    Updates are centred (Chan, Golub, LeVeque): each batch is centred by its own mean and the
    shift between the two means is added, so no digits are lost when |mean| is much larger than
    the spread. Only ``pairs`` of layers are kept, each one a D×D matrix in float64; the memory
    does not depend on the number of batches.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.pairs = sorted({(min(i, j), max(i, j)) for i, j in pairs})
        self.count = 0
        self.means: dict[int, Tensor] = {}
        self._sums: dict[tuple[int, int], Tensor] = {}

    def update(self, layers: Sequence[Tensor]) -> None:
        """Add the rows of ``layers``, each ``(n, D_l)``: the same n observations in every layer."""
        n = layers[0].shape[0]
        if n == 0:
            return
        total = self.count + n
        centred, shift = {}, {}
        for i in sorted({i for pair in self.pairs for i in pair}):
            x = layers[i].double()
            mean = x.mean(0)
            centred[i] = x - mean
            shift[i] = mean - self.means[i] if self.count else torch.zeros_like(mean)
            self.means[i] = self.means[i] + shift[i] * (n / total) if self.count else mean
        for i, j in self.pairs:
            new = centred[i].T @ centred[j]  # (D_i, D_j)
            if self.count:
                new.addr_(shift[i], shift[j], alpha=self.count * n / total).add_(self._sums[i, j])
            self._sums[i, j] = new
        self.count = total

    def covariance(self, i: int, j: int) -> Tensor:
        """Sample covariance ``(D_i, D_j)`` between layers i and j."""
        sums = self._sums[i, j] if i <= j else self._sums[j, i].T
        return sums / (self.count - 1)


def adjacent_layer_cca(model: nn.Module, batches: Batches, *, variance: float = 0.99) -> Tensor:
    """Canonical correlation of every layer with the layer before it (MC3KD, eq. 2).

    C(l) = CCA(T_{l-1}, T_l), l = 1..L, with layer 0 the embeddings: the entries beside the
    diagonal of `svcca_matrix`, from 2L + 1 covariances instead of all pairs.

    Args:
        model: as in `svcca_matrix`.
        batches: as in `svcca_matrix`.
        variance: as in `svcca_matrix`.

    Returns:
        (L,) float64 on the CPU, in [0, 1]: entry l-1 belongs to layer l.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> ids = torch.arange(48).view(4, 12)
        >>> batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
        >>> adjacent_layer_cca(BertModel(config), batches).shape
        torch.Size([3])
    """
    check_variance(variance)
    moments, layers = stream(model, batches, adjacent_only=True)
    directions = [_whitening(moments.covariance(i, i), variance) for i in range(layers)]
    return torch.stack(
        [
            _mean_correlation(moments.covariance(i, i + 1), directions[i], directions[i + 1])
            for i in range(layers - 1)
        ]
    ).cpu()


def svcca_matrix(model: nn.Module, batches: Batches, *, variance: float = 0.99) -> Tensor:
    """SVCCA between all layers of a model: mean canonical correlation of the main directions.

    Each layer is reduced to the leading singular directions that hold ``variance`` of its
    variance; entry (i, j) is the mean of the canonical correlations between layers i and j
    (Raghu et al. 2017; MC3KD, section 3.2). Every real token is one observation. One pass over
    the data under ``no_grad`` and in eval mode (the training mode comes back afterwards).

    Args:
        model: any transformers model with hidden states, with or without a head.
        batches: dicts of model inputs; ``attention_mask`` (B, N), if there, marks real tokens.
            Tensors are moved to the model's device; ``labels`` are left out.
        variance: share of the variance to keep, in (0, 1]; 1 keeps all (plain CCA).

    Returns:
        (L+1, L+1) float64 on the CPU, symmetric, in [0, 1]; row 0 is the embeddings' output.

    Raises:
        ValueError: fewer than two real tokens, no hidden states, or values that are not finite.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> ids = torch.arange(48).view(4, 12)
        >>> svcca_matrix(BertModel(config), [{"input_ids": ids}]).diagonal()
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    check_variance(variance)
    moments, layers = stream(model, batches)
    return svcca_from_moments(moments, layers, variance)


def cka_matrix(model: nn.Module, batches: Batches) -> Tensor:
    """Linear CKA between all layers of a model: ‖Σ_xy‖²_F / (‖Σ_xx‖_F ‖Σ_yy‖_F).

    Kornblith et al. 2019. Arguments, result and errors as in `svcca_matrix`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3,
        ...                     num_attention_heads=2, intermediate_size=32)
        >>> ids = torch.arange(48).view(4, 12)
        >>> cka_matrix(BertModel(config), [{"input_ids": ids}]).shape
        torch.Size([4, 4])
    """
    moments, layers = stream(model, batches)
    return cka_from_moments(moments, layers)


def rccc(matrix: Tensor) -> float:
    """The representative entry of an SVCCA matrix, A_1m: first layer against last (MC3KD, 3.2).

    Smaller means larger linear differences between a model's layers.

    Example:
        >>> rccc(torch.tensor([[1.0, 0.25], [0.25, 1.0]]))
        0.25
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"matrix must be square and not empty, got shape {tuple(matrix.shape)}")
    return float(matrix[0, -1])


def check_variance(variance: float) -> None:
    """Raise unless ``variance`` is in (0, 1]."""
    check_number("variance", variance, above=0.0)
    if variance > 1:
        raise ValueError(f"variance must be at most 1, got {variance}")


def svcca_from_moments(moments: LayerMoments, layers: int, variance: float = 0.99) -> Tensor:
    """`svcca_matrix` of moments that hold all pairs of ``layers`` layers."""
    directions = [_whitening(moments.covariance(i, i), variance) for i in range(layers)]
    matrix = torch.empty(layers, layers, dtype=torch.float64)
    for i in range(layers):
        matrix[i, i] = 1.0 if directions[i].shape[1] else 0.0
        for j in range(i + 1, layers):
            value = _mean_correlation(moments.covariance(i, j), directions[i], directions[j])
            matrix[i, j] = matrix[j, i] = value
    return matrix


def cka_from_moments(moments: LayerMoments, layers: int) -> Tensor:
    """`cka_matrix` of moments that hold all pairs of ``layers`` layers."""
    norms = [moments.covariance(i, i).norm() for i in range(layers)]
    matrix = torch.empty(layers, layers, dtype=torch.float64)
    for i in range(layers):
        for j in range(i, layers):
            scale = norms[i] * norms[j]
            value = moments.covariance(i, j).square().sum() / scale if scale > 0 else 0.0
            matrix[i, j] = matrix[j, i] = value
    return matrix


def stream(
    model: nn.Module, batches: Batches, adjacent_only: bool = False
) -> tuple[LayerMoments, int]:
    """Moments of all layers of ``model`` over ``batches``, and the number of layers (L + 1)."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    moments: LayerMoments | None = None
    count = 0
    try:
        with torch.no_grad():
            for batch in batches:
                layers = _real_tokens(model, batch)
                if moments is None:
                    count = len(layers)
                    reach = 2 if adjacent_only else count
                    moments = LayerMoments(
                        (i, j) for i in range(count) for j in range(i, min(count, i + reach))
                    )
                moments.update(layers)
    finally:
        for module, training in modes.items():
            module.training = training
    if moments is None or moments.count < 2:
        seen = 0 if moments is None else moments.count
        raise ValueError(f"batches must hold at least two real tokens, got {seen}")
    for i, mean in moments.means.items():
        if not bool(mean.isfinite().all()):
            raise ValueError(f"layer {i} of the model gave values that are not finite")
    return moments, count


def _real_tokens(model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
    """Hidden states of the batch's real tokens, one (n, D_l) per layer, embeddings first."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }
    hidden = getattr(model(**inputs, output_hidden_states=True), "hidden_states", None)
    if hidden is None:
        raise ValueError(
            f"{type(model).__name__} returns no hidden_states; pass an encoder or a decoder"
        )
    mask = inputs.get("attention_mask")
    # mps has no float64.
    keep = torch.device("cpu") if device.type == "mps" else device
    if mask is None:
        return [x.flatten(0, 1).to(keep) for x in hidden]
    for i, x in enumerate(hidden):
        if mask.dim() != 2 or x.shape[:2] != mask.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} but layer {i} has "
                f"{tuple(x.shape[:2])} tokens"
            )
    return [x[mask.bool()].to(keep) for x in hidden]


def _whitening(covariance: Tensor, variance: float) -> Tensor:
    """V_k Λ_k^{-1/2}, (D, k): the leading k directions that hold ``variance`` of the variance."""
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > values[0] * len(values) * torch.finfo(values.dtype).eps).sum())
    if rank == 0 or not values[0] > 0:
        return vectors[:, :0]
    held = values[:rank].cumsum(0) / values[:rank].sum()
    kept = min(rank, int((held < variance - 1e-12).sum()) + 1)
    return vectors[:, :kept] * values[:kept].rsqrt()


def _mean_correlation(cross: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Mean canonical correlation from a cross-covariance and both sides' whitening."""
    if min(left.shape[1], right.shape[1]) == 0:
        return cross.new_zeros(())
    return torch.linalg.svdvals(left.T @ cross @ right).clamp(0, 1).mean()
