"""Test of a model on packed rows: does each document get the result of a row of its own?"""

from typing import Any

import torch
from torch import Tensor

from fastkd.analysis.model_inputs import in_eval_mode
from fastkd.distill.backbone import Backbone
from fastkd.distill.batch import Documents
from fastkd.distill.outputs import LayerRequest, model_outputs

# Largest change of a document's hidden states, relative to their norm, if its neighbour's tokens
# change but it doesn't read them. Rounding errors are below this, even in bfloat16.
SAME = 1e-2
# Fresh weights respond less. A change is then significant if it exceeds float32's rounding error
# and this fraction of the change that the document's own tokens cause.
ROUNDING, FRACTION = 1e-5, 0.05


class MixedDocuments(ValueError):
    """A model's tokens read tokens of other documents in their row."""


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
