"""Where the documents of a batch lie: packed rows hold several, left padding moves them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import values_readable
from fastkd.analysis.model_inputs import IGNORED, in_eval_mode
from fastkd.distill.backbone import Backbone
from fastkd.distill.outputs import QKV, LayerRequest, Outputs, model_outputs

# Of a norm: rounding is below, even in bfloat16, and what a document tells another mostly above.
SAME = 1e-2
# Fresh weights tell less. Then it is, beyond float32's rounding, a share of what a document tells
# itself: its own tokens move it as much as another's would.
ROUNDING, SHARE = 1e-5, 0.05


# Inputs that hold what a decoder reads.
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds")


class MixedDocuments(ValueError):
    """A model's tokens see those of other documents in their row."""


@dataclass
class Documents:
    """The tokens of S documents, each from position 0 on.

    ``index`` (S, L) numbers them in the flattened batch (B·N), ``mask`` (S, L) says which are
    real, ``document_ids`` (B, N) which document each token belongs to (S for padding).
    """

    index: Tensor
    mask: Tensor
    document_ids: Tensor
    packed: bool

    def unpack(self, x: Tensor) -> Tensor:
        """Features (B, N, ...) as (S, L, ...)."""
        rows = x.flatten(0, 1).index_select(0, self.index.flatten())
        return rows.unflatten(0, self.index.shape)

    def unpack_heads(self, x: Tensor) -> Tensor:
        """Queries, keys or values (B, H, N, D) as (S, H, L, D)."""
        return self.unpack(x.transpose(1, 2)).transpose(1, 2)

    def unpack_maps(self, x: Tensor) -> Tensor:
        """Attention maps (B, H, N, N) as (S, H, L, L)."""
        N = x.shape[-1]
        rows = self.index[:, :, None] // N
        queries, keys = self.index[:, :, None] % N, self.index[:, None, :] % N
        return x.permute(0, 2, 3, 1)[rows, queries, keys].permute(0, 3, 1, 2)

    def norms(self, x: Tensor) -> Tensor:
        """Euclidean norm of each document's part of ``x`` (B, N, D), at its tokens: (B, N, 1)."""
        squares = x.square().sum(-1).flatten()
        totals = squares.new_zeros(len(self.mask) + 1)
        totals = totals.index_put((self.document_ids.flatten(),), squares, accumulate=True)
        return totals.sqrt()[self.document_ids][..., None]


@torch.compiler.disable  # `find_documents` has broken the graph before
def check_apart(model: Backbone, name: str, inputs: dict[str, Any], documents: Documents) -> None:
    """Raise unless the model reads each document of packed rows as if it stood alone.

    Encoders of words don't. Of others it depends on family, attention and inputs, so it is tried
    out, once for inputs of these names: other tokens in a document must leave the one behind it as
    it is.
    """
    if model.mixes_documents:
        raise _mixed(model, name, inputs)
    kind = (*sorted(inputs), len(documents.document_ids) == 1)
    if kind in model.known_apart:
        return
    # Sharded models run in all processes or none, and another's batch may hold nothing packed.
    if any(hasattr(p, "device_mesh") for p in model.inner.parameters()):
        return
    tokens = "input_ids" if isinstance(inputs.get("input_ids"), Tensor) else "inputs_embeds"
    numbers = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    given = inputs.get(tokens)
    # Of a text with images other tokens would not fit these.
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
    torch.clear_autocast_cache()  # weights that it has cast here would get no gradient later
    told, norm = (seen - by_another).norm(), seen.norm()
    own = (seen - by_itself).norm()
    if told > SAME * norm or (own > 0 and told > SHARE * own and told > ROUNDING * norm):
        raise _mixed(model, name, inputs)
    model.known_apart.add(kind)


def _with_other_tokens(given: Tensor, row: int, where: Tensor) -> Tensor:
    """The batch with other tokens in these places (N,) of a row."""
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
    """A row, and which of its tokens (N,) belong to a document and to the one behind it."""
    document_ids, nobody = documents.document_ids, len(documents.mask)
    border = (
        (document_ids[:, :-1] != document_ids[:, 1:])
        & (document_ids[:, :-1] < nobody)
        & (document_ids[:, 1:] < nobody)
    )
    row, column = border.nonzero()[0].tolist()
    document_ids = document_ids[row].to(device)
    return row, document_ids == document_ids[column], document_ids == document_ids[column + 1]


def decoder_tokens(
    batch: dict[str, Any], labels: Any
) -> tuple[Tensor | None, tuple[int, int]] | None:
    """Mask and shape (B, M) of the tokens that a decoder reads, where it has inputs of its own.

    Real are those that ``decoder_attention_mask`` and labels other than −100 say.
    """
    given = (batch.get(name) for name in DECODER_TOKENS)
    tokens = next((x for x in given if isinstance(x, Tensor)), None)
    if tokens is None:
        return None
    rows, length = tokens.shape[:2]
    mask = batch.get("decoder_attention_mask")
    mask = None if mask is None else mask.bool()
    if isinstance(labels, Tensor) and labels.shape == (rows, length):
        known = labels != IGNORED
        mask = known if mask is None else mask & known
    return mask, (rows, length)


def find_documents(
    shape: tuple[int, int] | None,
    mask: Tensor | None,
    batch: dict[str, Any],
    segments: Tensor | None,
    *,
    at_front: bool = False,
) -> Documents | None:
    """The documents of a (B, N) batch, or None where each row is one from its first position on.

    ``segments`` (B, N) numbers each row's documents; without it they come from what a padding-free
    collator adds: ``seq_idx``, ``cu_seq_lens_q``, or ``position_ids`` that start again. With
    ``at_front`` no row is padded on the left.
    """
    if shape is None:
        return None
    if segments is None:
        segments = _given_segments(shape, batch)
    elif tuple(segments.shape) != shape:
        raise ValueError(
            f"segments must have the tokens' shape {shape}, got {tuple(segments.shape)}"
        )
    positions = batch.get("position_ids")
    if segments is None and isinstance(positions, Tensor) and _one_a_token(positions, shape):
        positions = positions.reshape(-1, shape[1]).expand(shape)
    else:
        positions = None  # none, or several a token (M-RoPE)
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
    # Rows of one document each keep their number, the empty ones among them.
    numbers = starts.cumsum(0) - 1 if packed else rows
    offsets = columns - columns[starts][starts.cumsum(0) - 1]
    size = (int(starts.sum()) if packed else shape[0], int(offsets.max()) + 1)
    index = torch.zeros(size, dtype=torch.int64, device=sample.device)
    index[numbers, offsets] = rows * shape[1] + columns
    there = torch.zeros(size, dtype=torch.bool, device=sample.device)
    there[numbers, offsets] = True
    document_ids = torch.full(shape, size[0], dtype=torch.int64, device=sample.device)
    document_ids[rows, columns] = numbers
    return Documents(index, there, document_ids, packed)


def _one_a_token(positions: Tensor, shape: tuple[int, int]) -> bool:
    # Not by `in`: Dynamo takes sizes that change for others than their product.
    return positions.numel() == shape[1] or positions.numel() == shape[0] * shape[1]


def _moved_to_front(mask: Tensor) -> Documents:
    """Each row's tokens from the first real one on, without a look at the mask's values.

    Rows are turned: no token has two places, so that gradients are added nowhere.
    """
    B, N = mask.shape
    rows = torch.arange(B, device=mask.device)[:, None]
    first = mask.to(torch.uint8).argmax(1, keepdim=True)  # (B, 1), 0 where none is real
    index = rows * N + (torch.arange(N, device=mask.device) + first) % N  # (B, N)
    there = mask.flatten()[index]
    return Documents(index, there, torch.where(mask, rows, B), packed=False)


def _given_segments(shape: tuple[int, int], batch: dict[str, Any]) -> Tensor | None:
    if isinstance(batch.get("seq_idx"), Tensor):
        return batch["seq_idx"].expand(shape)
    ends = batch.get("cu_seq_lens_q")
    if isinstance(ends, Tensor):
        tokens = torch.arange(shape[0] * shape[1], device=ends.device, dtype=ends.dtype)
        return torch.bucketize(tokens, ends, right=True).view(shape)
    return None


def unpacked(outputs: Outputs, documents: Documents) -> Outputs:
    """Outputs whose features have each document of packed rows in a row of its own."""
    return dataclasses.replace(
        outputs,
        hidden={layer: documents.unpack(x) for layer, x in outputs.hidden.items()},
        attentions={layer: documents.unpack_maps(x) for layer, x in outputs.attentions.items()},
        qkv={layer: QKV(*map(documents.unpack_heads, x)) for layer, x in outputs.qkv.items()},
    )
