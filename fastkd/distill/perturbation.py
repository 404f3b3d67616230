"""LRC-BERT's gradient perturbation: the student runs again on perturbed embeddings (eqs. 7-8)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import upcast, zero_padding
from fastkd.distill.batch import Batch
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import replaced_embeddings


def perturbed_embeddings(
    student: Backbone, shift: Tensor | None
) -> contextlib.AbstractContextManager[Any]:
    """Context in which ``shift``, unless None, is added to the student's embeddings."""
    if shift is None:
        return contextlib.nullcontext()
    return replaced_embeddings(student, lambda emb: emb + shift)


def unit_gradient(
    student: Backbone, batch: Batch, compute_loss: Callable[[], tuple[Any, ...]]
) -> Tensor:
    """g / ‖g‖ of each sample, g the gradient of the loss at the embeddings (LRC-BERT, eqs. 7-8).

    It is 0 for padding, since DeBERTa's convolution reads the token after the last real one.
    ``compute_loss`` runs the student; the loss is its first result.
    """
    if student.compiled:
        raise ValueError(
            "perturb=True: the embeddings are perturbed inside the student, which a compiled "
            "student doesn't allow; pass the student uncompiled, or set perturb=False"
        )
    with replaced_embeddings(student, lambda emb: emb.detach().requires_grad_()) as embeddings:
        loss = compute_loss()[0]
    if not embeddings:
        raise ValueError(
            "perturb=True: the output of the embedding layer is perturbed, but the student didn't "
            "compute it; pass input_ids, or set perturb=False"
        )
    # float16 gradients underflow without a scale. Dividing by the norm removes it.
    device, dtype = loss.device.type, embeddings[0].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    scale = 2.0**12 if torch.float16 in (dtype, embeddings[0].dtype) else 1.0
    (g,) = torch.autograd.grad(loss * scale, embeddings[0])
    samples, documents = student.batch_dim, batch.documents
    sample_dims = [d for d in range(g.dim()) if d != samples]
    mask = batch.mask.T if batch.mask is not None and samples else batch.mask
    if mask is not None and mask.shape == g.shape[:2]:
        g = zero_padding(g, mask)
    if documents is not None and documents.packed:
        norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
    else:
        norm = torch.linalg.vector_norm(upcast(g), dim=sample_dims, keepdim=True)
    usable = norm.isfinite() & (norm > 0)
    return torch.where(usable, g / norm, 0).to(g.dtype)
