"""LRC-BERT's gradient perturbation: the student runs again on perturbed embeddings (eqs. 7-8)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastkd._core.numerics import upcast, zero_padding
from fastkd.distributed import Ranks
from fastkd.models.backbone import Backbone
from fastkd.models.batch import Batch
from fastkd.models.hooks import replaced_embeddings


def perturbed_embeddings(
    student: Backbone, shift: Tensor | None
) -> contextlib.AbstractContextManager[Any]:
    """Context in which ``shift``, unless None, is added to the student's embeddings."""
    if shift is None:
        return contextlib.nullcontext()
    return replaced_embeddings(student, lambda emb: emb + shift)


def unit_gradients(
    student: Backbone,
    batches: list[Batch],
    losses: list[Callable[[], tuple[Any, ...]]],
    norm: str = "sample",
    ranks: Ranks | None = None,
) -> list[Tensor]:
    """g / ‖g‖ for each micro-batch, g the gradient of the loss at the embeddings (eqs. 7-8).

    It is 0 for padding, since DeBERTa's convolution reads the token after the last real one. A
    function in ``losses`` runs the student on its micro-batch; the loss is its first result.
    ``norm``: of each "sample", or over the whole "batch", in all processes of ``ranks``.
    """
    found = [_gradient(student, *each) for each in zip(batches, losses, strict=True)]
    if norm == "batch":
        total = torch.stack([upcast(g).square().sum() for g in found]).sum()
        whole = (total if ranks is None else ranks.sum(total)).sqrt()
        return [_divided(g, whole) for g in found]
    return [_by_sample(student, batch, g) for batch, g in zip(batches, found, strict=True)]


def _gradient(
    student: Backbone, batch: Batch, compute_loss: Callable[[], tuple[Any, ...]]
) -> Tensor:
    """Gradient of the loss at the embeddings, up to a factor; 0 at padding."""
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
    mask = batch.mask.T if batch.mask is not None and student.batch_dim else batch.mask
    return zero_padding(g, mask) if mask is not None and mask.shape == g.shape[:2] else g


def _by_sample(student: Backbone, batch: Batch, g: Tensor) -> Tensor:
    """``g`` over the norm of each sample, of each document in packed rows."""
    samples, documents = student.batch_dim, batch.documents
    if documents is not None and documents.packed:
        norm = documents.norms(upcast(g).transpose(0, samples)).transpose(0, samples)
    else:
        sample_dims = [d for d in range(g.dim()) if d != samples]
        norm = torch.linalg.vector_norm(upcast(g), dim=sample_dims, keepdim=True)
    return _divided(g, norm)


def _divided(g: Tensor, norm: Tensor) -> Tensor:
    usable = norm.isfinite() & (norm > 0)
    return torch.where(usable, g / norm, 0).to(g.dtype)
