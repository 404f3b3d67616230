"""Documents of packed rows: where they are, their features, and whether a model separates them.

A model that reads packed rows is tested once: does each document get the result of its own row?
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import values_readable
from fastkd.models.backbone import Backbone
from fastkd.models.inputs import in_eval_mode
from fastkd.models.outputs import LayerRequest, Outputs, model_outputs

# Largest change of a document's hidden states, relative to their norm, if its neighbour's tokens
# change but it doesn't read them. Rounding errors are below this, even in bfloat16.
SAME = 1e-2
# Fresh weights respond less. A change is then significant if it exceeds float32's rounding error
# and this fraction of the change that the document's own tokens cause.
ROUNDING, FRACTION = 1e-5, 0.05


class MixedDocuments(ValueError):
    """A model's tokens read tokens of other documents in their row."""


@dataclass
class Documents:
    """Tokens of S documents, each starting at position 0.

    ``index`` (S, L) are the tokens' positions in the flattened batch (B·N), ``mask`` (S, L) marks
    real tokens, ``document_ids`` (B, N) is the document of each token (S for padding).
    """

    index: Tensor
    mask: Tensor
    document_ids: Tensor
    packed: bool

    def unpack(self, x: Tensor) -> Tensor:
        """Features (B, N, ...) as (S, L, ...)."""
        rows = x.flatten(0, 1).index_select(0, self.index.flatten())
        return rows.unflatten(0, self.index.shape)

    def unpack_maps(self, x: Tensor) -> Tensor:
        """Attention maps (B, H, N, N) as (S, H, L, L)."""
        N = x.shape[-1]
        rows = self.index[:, :, None] // N
        queries, keys = self.index[:, :, None] % N, self.index[:, None, :] % N
        return x.permute(0, 2, 3, 1)[rows, queries, keys].permute(0, 3, 1, 2)

    def norms(self, x: Tensor) -> Tensor:
        """Euclidean norm (B, N, 1) over the document of each token of ``x`` (B, N, D)."""
        squares = x.square().sum(-1).flatten()
        totals = squares.new_zeros(len(self.mask) + 1)
        totals = totals.index_put((self.document_ids.flatten(),), squares, accumulate=True)
        return totals.sqrt()[self.document_ids][..., None]

    def unpack_outputs(self, outputs: Outputs) -> Outputs:
        """Outputs whose features have each document in a row of its own."""

        def unpack(x: Tensor, tokens: int) -> Tensor:
            if tokens == 2:
                return self.unpack_maps(x)
            # Hidden states (B, N, D); queries, keys or values (B, H, N, D).
            return (
                self.unpack(x) if x.dim() == 3 else self.unpack(x.transpose(1, 2)).transpose(1, 2)
            )

        return outputs.features(unpack)


def find_documents(
    shape: tuple[int, int] | None,
    mask: Tensor | None,
    batch: dict[str, Any],
    segments: Tensor | None,
    *,
    at_front: bool = False,
) -> Documents | None:
    """Documents of a (B, N) batch; None if each row is one document that starts at position 0.

    ``segments`` (B, N) are document ids. Without them the documents come from a padding-free
    collator's ``seq_idx``, ``cu_seq_lens_q``, or ``position_ids`` that restart. With ``at_front``
    no row has left padding.
    """
    if shape is None:
        return None
    if segments is None:
        ends = batch.get("cu_seq_lens_q")
        if isinstance(batch.get("seq_idx"), Tensor):
            segments = batch["seq_idx"].expand(shape)
        elif isinstance(ends, Tensor):
            tokens = torch.arange(shape[0] * shape[1], device=ends.device, dtype=ends.dtype)
            segments = torch.bucketize(tokens, ends, right=True).view(shape)
    elif tuple(segments.shape) != shape:
        raise ValueError(
            f"segments must have the tokens' shape {shape}, got {tuple(segments.shape)}"
        )
    positions = batch.get("position_ids")
    # Without `in`, which Dynamo doesn't evaluate for dynamic sizes.
    if (
        segments is None
        and isinstance(positions, Tensor)
        and (positions.numel() == shape[1] or positions.numel() == shape[0] * shape[1])
    ):
        positions = positions.reshape(-1, shape[1]).expand(shape)
    else:
        positions = None  # none, or several per token (M-RoPE)
    if segments is None and positions is None:
        if mask is None or at_front:
            return None
        if not values_readable(mask):
            return _moved_to_front(mask)
        if bool(mask[:, 0].all()):
            return None
    sample = next(x for x in (segments, positions, mask) if x is not None)
    real = torch.ones(shape, dtype=torch.bool, device=sample.device) if mask is None else mask
    rows, columns = real.nonzero(as_tuple=True)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    first_of_row = starts.clone()
    if segments is not None:
        values = segments[rows, columns]
        starts[1:] |= values[1:] != values[:-1]
    elif positions is not None:
        values = positions[rows, columns]
        starts[1:] |= values[1:] <= values[:-1]
    packed = bool((starts != first_of_row).any())
    if not packed and not bool((columns[starts] > 0).any()):
        return None
    # With one document per row, document ids are row numbers, also for empty rows.
    numbers = starts.cumsum(0) - 1 if packed else rows
    offsets = columns - columns[starts][starts.cumsum(0) - 1]
    size = (int(starts.sum()) if packed else shape[0], int(offsets.max()) + 1)
    index = torch.zeros(size, dtype=torch.int64, device=sample.device)
    index[numbers, offsets] = rows * shape[1] + columns
    real_tokens = torch.zeros(size, dtype=torch.bool, device=sample.device)
    real_tokens[numbers, offsets] = True
    document_ids = torch.full(shape, size[0], dtype=torch.int64, device=sample.device)
    document_ids[rows, columns] = numbers
    return Documents(index, real_tokens, document_ids, packed)


def _moved_to_front(mask: Tensor) -> Documents:
    """Documents that start at each row's first real token, without reading the mask's values.

    Rows are rotated: each token has one place, so that no gradients are added up.
    """
    B, N = mask.shape
    rows = torch.arange(B, device=mask.device)[:, None]
    first = mask.to(torch.uint8).argmax(1, keepdim=True)  # (B, 1), 0 where none is real
    index = rows * N + (torch.arange(N, device=mask.device) + first) % N  # (B, N)
    return Documents(index, mask.flatten()[index], torch.where(mask, rows, B), packed=False)


@torch.compiler.disable  # `find_documents` has broken the graph already
def check_apart(model: Backbone, name: str, inputs: dict[str, Any], documents: Documents) -> None:
    """Raise unless the model reads each document of packed rows separately.

    Text encoders don't. For other models it depends on family, attention and inputs, and is tested
    once for each set of input names: other tokens in one document must not change the hidden states
    of the next one.
    """
    if model.mixes_documents:
        raise _mixed(model, name, inputs)
    kind = (*sorted(inputs), len(documents.document_ids) == 1)
    if kind in model.known_apart:
        return
    # A sharded model runs in all processes at once, and other processes may have no packed rows.
    if any(hasattr(p, "device_mesh") for p in model.inner.parameters()):
        return
    tokens = "input_ids" if isinstance(inputs.get("input_ids"), Tensor) else "inputs_embeds"
    numbers = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    given = inputs.get(tokens)
    # Other tokens would not fit the images of a multimodal batch.
    if given is None or given.shape[:2] != documents.document_ids.shape or numbers - {tokens}:
        return
    row, first, second = _neighbours(documents, given.device)
    begins = second & (second.cumsum(0) <= second.sum() // 2)
    rest = second & ~begins
    others = _with_other_tokens(given, row, first)
    if torch.equal(others, given):
        return
    last = model.num_layers
    with torch.no_grad(), in_eval_mode(model.model):
        request = LayerRequest((last,))
        seen, by_another, by_itself = (
            model_outputs(model, {**inputs, tokens: x}, request).hidden[last][row, rest].float()
            for x in (given, others, _with_other_tokens(given, row, begins))
        )
    torch.clear_autocast_cache()  # weights cast under no_grad would get no gradient later
    change, norm = (seen - by_another).norm(), seen.norm()
    own = (seen - by_itself).norm()
    if change > SAME * norm or (own > 0 and change > FRACTION * own and change > ROUNDING * norm):
        raise _mixed(model, name, inputs)
    model.known_apart.add(kind)


def _with_other_tokens(given: Tensor, row: int, where: Tensor) -> Tensor:
    """The inputs with other tokens at the positions ``where`` (N,) of a row."""
    changed = given.clone()
    changed[row, where] = given.flatten(0, 1).flip(0)[: int(where.sum())]
    return changed


def _mixed(model: Backbone, name: str, inputs: dict[str, Any]) -> MixedDocuments:
    takes_positions = not model.mixes_documents and model.takes("position_ids")
    lacking = takes_positions and "position_ids" not in inputs
    return MixedDocuments(
        f"rows are packed with several documents, which the {name} ({model.class_name}) reads as "
        f"one; {'pass position_ids that start again, ' if lacking else ''}give each document a row "
        "of its own, or pass segments of zeros if a row is one document"
    )


def _neighbours(documents: Documents, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """A row, and masks (N,) of the tokens of one of its documents and of the next one."""
    document_ids, nobody = documents.document_ids, len(documents.mask)
    border = (
        (document_ids[:, :-1] != document_ids[:, 1:])
        & (document_ids[:, :-1] < nobody)
        & (document_ids[:, 1:] < nobody)
    )
    row, column = border.nonzero()[0].tolist()
    document_ids = document_ids[row].to(device)
    return row, document_ids == document_ids[column], document_ids == document_ids[column + 1]
