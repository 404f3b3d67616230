"""Pictures: heat maps of layer similarity, and relation maps of student and teacher."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastkd._checks import check_shape
from fastkd._extras import require


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure that needs no display and no global state."""
    backend: Any = require("matplotlib.backends.backend_agg", "train")
    figure = require("matplotlib.figure", "train").Figure(
        figsize=(width, height), layout="constrained"
    )
    backend.FigureCanvasAgg(figure)
    return figure


def plot_layer_similarity(
    matrix: Tensor,
    path: str | PathLike | None = None,
    *,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Draw a matrix of layer similarities (`svcca_matrix`, `cka_matrix`) as a heat map.

    Args:
        matrix: (L, L), values in [0, 1].
        path: where to save the picture (the ending names the format); None saves nothing.
        ax: a matplotlib axes to draw into; None makes a new figure.
        title: heading.

    Returns:
        The matplotlib figure.

    Example:
        >>> figure = plot_layer_similarity(torch.eye(4), title="SVCCA")
        >>> len(figure.axes)  # the map and its colour bar
        2
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"matrix must be square, got shape {tuple(matrix.shape)}")
    layers = matrix.shape[0]
    if ax is None:
        side = max(3.6, 0.42 * layers + 1.6)
        ax = new_figure(side + 0.9, side).subplots()
    values = matrix.detach().double().cpu().numpy()
    image = ax.imshow(values, vmin=0.0, vmax=1.0, cmap="viridis")
    if layers <= 13:
        for i in range(layers):
            for j in range(layers):
                colour = "black" if values[i, j] > 0.6 else "white"
                text = f"{values[i, j]:.2f}"
                ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    step = 1 if layers <= 25 else layers // 12
    ax.set_xticks(range(0, layers, step))
    ax.set_yticks(range(0, layers, step))
    ax.set_xlabel("layer (0: embeddings)")
    ax.set_ylabel("layer")
    if title:
        ax.set_title(title)
    ax.figure.colorbar(image, ax=ax, fraction=0.046)
    _save(ax.figure, path)
    return ax.figure


def plot_relations(
    student_features: Tensor,
    teacher_features: Tensor,
    mask: Tensor | None = None,
    path: str | PathLike | None = None,
) -> Any:
    """Draw the token relation maps of student and teacher side by side, one row per sample.

    A map is the matrix of cosines between the tokens' features (FCD, eq. 3 with the ℓ2 norm);
    its Pearson correlation with the teacher's (eq. 6) is written above. Both maps of a row share
    one colour scale.

    Args:
        student_features: (B, N, Ds) or (N, Ds).
        teacher_features: (B, N, Dt) or (N, Dt).
        mask: (B, N) or (N,), 1 = real token; padded tokens are left out of the maps.
        path: where to save the picture; None saves nothing.

    Returns:
        The matplotlib figure.

    Example:
        >>> figure = plot_relations(torch.randn(2, 5, 8), torch.randn(2, 5, 16))
        >>> [ax.get_title() for ax in figure.axes][1]
        'teacher'
    """
    student, teacher = (
        x.detach().double().cpu().reshape(-1, *x.shape[-2:])
        for x in (student_features, teacher_features)
    )
    if student.shape[:2] != teacher.shape[:2] or student_features.dim() not in (2, 3):
        raise ValueError(
            "student_features and teacher_features must be (B, N, D) or (N, D) with equal B and N, "
            f"got {tuple(student_features.shape)} and {tuple(teacher_features.shape)}"
        )
    if mask is None:
        mask = torch.ones(student.shape[:2], dtype=torch.bool)
    else:
        check_shape("mask", mask, student_features.shape[:-1], "the tokens of student_features")
        mask = mask.detach().cpu().bool().reshape(student.shape[:2])
    rows = len(student)
    figure = new_figure(8.4, 3.7 * rows)
    axes = figure.subplots(rows, 2, squeeze=False)
    for row, (s, t, real) in enumerate(zip(student, teacher, mask, strict=True)):
        s, t = (functional.normalize(x[real], dim=-1) for x in (s, t))
        maps = (s @ s.T, t @ t.T)
        if not len(s):
            maps = (torch.zeros(1, 1, dtype=torch.float64),) * 2
        low = min(float(m.min()) for m in maps)
        rho = torch.corrcoef(torch.stack([m.flatten() for m in maps]))[0, 1]
        for ax, name, values in zip(axes[row], ("student", "teacher"), maps, strict=True):
            image = ax.imshow(values.numpy(), vmin=low, vmax=1.0, cmap="viridis")
            ax.set_title(f"{name}, ρ = {rho:.3f}" if name == "student" else name)
            ax.set_xlabel("token")
        axes[row][0].set_ylabel("token")
        figure.colorbar(image, ax=list(axes[row]), fraction=0.03)
    _save(figure, path)
    return figure


def _save(figure: Any, path: str | PathLike | None) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
