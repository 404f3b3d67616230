"""LRC-BERT's gradient perturbation: the student runs again on moved embeddings (eqs. 7-8)."""

import contextlib

import torch
from torch import Tensor

from fastkd._core.numerics import upcast, zero_padding
from fastkd.distill.backbone import Backbone
from fastkd.distill.batch import Batch
from fastkd.distill.hooks import replaced_embeddings


def leaf_embeddings(student: Backbone) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Context in which the student runs from embeddings that receive a gradient."""
    if student.compiled:
        raise ValueError(
            "perturb=True moves the embeddings inside the student, which compiled code doesn't "
            "allow; pass the student uncompiled, or set perturb=False"
        )
    return replaced_embeddings(student, lambda emb: emb.detach().requires_grad_())


def moved_embeddings(
    student: Backbone, shift: Tensor | None
) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Context in which ``shift`` is added to the student's embeddings, if there is one."""
    if shift is None:
        return contextlib.nullcontext([])
    return replaced_embeddings(student, lambda emb: emb + shift)


def unit_gradient(
    student: Backbone, loss: Tensor, embeddings: list[Tensor], batch: Batch
) -> Tensor:
    """g / ‖g‖ per sample, g the gradient of the loss at the embeddings (LRC-BERT, eqs. 7-8).

    Padding is not moved: DeBERTa's convolution reads the token behind the last one.
    """
    if not embeddings:
        raise ValueError(
            "perturb=True moves the embedding layer's output, which the student didn't compute; "
            "pass input_ids, or set perturb=False"
        )
    # float16 gradients vanish without a scale; the norm takes it out again.
    scale = 2.0**12 if torch.float16 in (_autocast_dtype(loss), embeddings[0].dtype) else 1.0
    (g,) = torch.autograd.grad(loss * scale, embeddings[0])
    samples, documents = student.batch_dim, batch.documents
    others = [d for d in range(g.dim()) if d != samples]
    mask = batch.mask.T if batch.mask is not None and samples else batch.mask
    if mask is not None and mask.shape == g.shape[:2]:
        g = zero_padding(g, mask)
    if documents is not None and documents.packed:
        norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
    else:
        norm = torch.linalg.vector_norm(upcast(g), dim=others, keepdim=True)
    usable = norm.isfinite() & (norm > 0)
    return torch.where(usable, g / norm, 0).to(g.dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
