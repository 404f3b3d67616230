"""Plots: heat maps of layer similarity, and relation maps of student and teacher."""

import math
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastkd._core import check
from fastkd._core.extras import require
from fastkd.analysis.moments import EPS
from fastkd.losses.relation import NORMALIZE, normalized

# Smallest range of a colour scale: smaller differences should not stand out.
LEAST_SPAN = 0.05


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
    names: tuple[str, str] = ("layer", "layer"),
) -> Any:
    """Draw a matrix of layer similarities, of one model or two, as a heat map; returns the figure.

    The colour scale runs from the smallest to the largest value.

    Args:
        matrix: (L, M), values in [0, 1], from `layer_similarity`, `svcca_matrix` or `cka_matrix`.
        path: file to save to, whose suffix chooses the format; None saves nothing.
        ax: matplotlib axes to draw into; None makes a new figure.
        title: heading.
        names: models of the rows and of the columns.

    >>> figure = plot_layer_similarity(torch.eye(4), title="SVCCA")
    >>> len(figure.axes)  # the map and its colour bar
    2
    """
    if matrix.dim() != 2 or not matrix.numel():
        raise ValueError(f"matrix must be (L, M) and not empty, got {tuple(matrix.shape)}")
    rows, columns = matrix.shape
    if ax is None:
        width, height = (max(3.6, 0.42 * layers + 1.6) for layers in (columns, rows))
        ax = new_figure(width + 0.9, height).subplots()
    image = _heat_map(ax, matrix, _scale([matrix]), names)
    if title:
        ax.set_title(title, parse_math=False)
    ax.figure.colorbar(image, ax=ax, fraction=0.046)
    _save(ax.figure, path)
    return ax.figure


def _heat_map(ax: Any, matrix: Tensor, scale: tuple[float, float], names: tuple[str, str]) -> Any:
    values = matrix.detach().double().cpu().numpy()
    rows, columns = values.shape
    low, high = scale
    image = ax.imshow(values, vmin=low, vmax=high, cmap="viridis")
    if max(rows, columns) <= 13:
        for i in range(rows):
            for j in range(columns):
                colour = "black" if values[i, j] > low + 0.6 * (high - low) else "white"
                text = f"{values[i, j]:.2f}"
                ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
    for layers, set_ticks in ((columns, ax.set_xticks), (rows, ax.set_yticks)):
        set_ticks(range(0, layers, 1 if layers <= 25 else layers // 12))
    ax.set_xlabel(f"{names[1]} (0: embeddings)")
    ax.set_ylabel(names[0])
    return image


def _scale(matrices: Sequence[Tensor]) -> tuple[float, float]:
    """Range of the colour scale: all values, and at least LEAST_SPAN."""
    low = min(float(matrix.min()) for matrix in matrices)
    high = max(float(matrix.max()) for matrix in matrices)
    return min(low, high - LEAST_SPAN), high


def plot_layer_panels(
    rows: Sequence[Sequence[tuple[str, tuple[str, str], Tensor]]],
    path: str | PathLike | None = None,
    *,
    title: str,
) -> Any:
    """Draw several matrices of layer similarities with one colour scale; returns the figure.

    Args:
        rows: rows of panels, the longest first. A panel is a heading, the models of its rows and
            columns, and the matrix (L, M).
        path: file to save to; None saves nothing.
        title: label of the colour bar.
    """
    matrices = [matrix for row in rows for *_, matrix in row]
    side = max(3.4, 0.42 * max(map(len, matrices)) + 1.2)  # inches
    columns = len(rows[0])
    figure = new_figure(columns * side + 1.2, len(rows) * side)
    grid = figure.add_gridspec(len(rows), 2 * columns)
    scale, axes = _scale(matrices), []
    for i, row in enumerate(rows):
        for j, (heading, names, matrix) in enumerate(row):
            first = columns - len(row) + 2 * j  # shorter rows are centred
            axes.append(figure.add_subplot(grid[i, first : first + 2]))
            image = _heat_map(axes[-1], matrix, scale, names)
            axes[-1].set_title(heading, parse_math=False)
    figure.colorbar(image, ax=axes, label=title, fraction=0.03, aspect=30)
    _save(figure, path)
    return figure


def relation_maps(features: Tensor) -> dict[str, Tensor]:
    """Relations F·Fᵀ between tokens (FCD, eq. 3) with each normalisation of `relation_loss`.

    Args:
        features: (N, D).

    Returns:
        "l2", "layer_norm", "softmax", "none" (Table 4): (N, N) each, float64 on the CPU.

    >>> relation_maps(torch.eye(2))["l2"]
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    check.floating("features", features, ndim=2)
    x = features.detach().double().cpu()
    features_by_name = {name: normalized(x, name) for name in NORMALIZE}
    return {name: y @ y.T for name, y in features_by_name.items()}


def relation_agreement(student: Tensor, teacher: Tensor) -> dict[str, float]:
    """Pearson's ρ (FCD, eq. 6) of a sentence's relation maps, for each normalisation.

    It equals 1 - `fastkd.relation_loss` of this sample with ``eps=0``: softmax's relations may
    be as small as the default eps. 0 for a constant map; NaN for a single token.

    Args:
        student: (N, Ds).
        teacher: (N, Dt).

    >>> x = torch.randn(5, 8, dtype=torch.float64)
    >>> round(relation_agreement(2 * x, x)["l2"], 6)
    1.0
    """
    check.floating("student", student, ndim=2)
    check.floating("teacher", teacher, ndim=2)
    check.shape("teacher", teacher, (len(student), teacher.shape[1]), "a row for each of student's")
    if len(student) < 2:
        return dict.fromkeys(NORMALIZE, math.nan)
    s, t = relation_maps(student), relation_maps(teacher)
    return {name: _correlation(s[name], t[name]) for name in NORMALIZE}


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's ρ of two maps; 0 if one is constant up to rounding error."""
    if x.numel() < 2:
        return math.nan
    (a, small_a), (b, small_b) = (
        ((m - m.mean()).flatten(), 8 * EPS * m.abs().max() * m.shape[0]) for m in (x, y)
    )
    if bool(a.norm() <= small_a) or bool(b.norm() <= small_b):
        return 0.0
    return float((a / a.norm()) @ (b / b.norm()))


def plot_sentence(
    features: Mapping[str, Tensor], tokens: Sequence[str], path: str | PathLike | None = None
) -> Any:
    """Draw a sentence's relation maps with the four normalisations, one row for each model.

    Returns the figure. The first model is the teacher. The title of each other map is its Pearson
    correlation with the teacher's (FCD, eq. 6), which doesn't depend on scale: every map has its
    own colour bar.

    Args:
        features: name → features (N, D) of each model, for example the teacher and the student
            before and after distillation.
        tokens: the sentence's N tokens, written beside the maps; at most 48 are shown.
        path: file to save to; None saves nothing.

    >>> features = {"teacher": torch.randn(3, 8), "student": torch.randn(3, 4)}
    >>> len(plot_sentence(features, ["[CLS]", "word", "[SEP]"]).axes)
    16
    """
    if not features or not tokens:
        raise ValueError("features and tokens must not be empty")
    for name, x in features.items():
        if x.dim() != 2 or len(x) != len(tokens):
            raise ValueError(
                f"features of {name!r} must be (N, D) with a row for each of the {len(tokens)} "
                f"tokens, got {tuple(x.shape)}"
            )
    side = min(max(2.4, 0.17 * len(tokens)), 6.0)  # inches
    ticks, labels = _ticks(tokens, 48)
    figure = new_figure(len(NORMALIZE) * (side + 0.6) + 1.2, len(features) * (side + 0.4) + 0.6)
    axes = figure.subplots(len(features), len(NORMALIZE), squeeze=False)
    teacher = next(iter(features.values()))
    for row, (name, x) in zip(axes, features.items(), strict=True):
        rho = relation_agreement(x, teacher)
        for ax, (kind, values) in zip(row, relation_maps(x).items(), strict=True):
            image = ax.imshow(values.numpy(), cmap="viridis")
            bar = figure.colorbar(image, ax=ax, fraction=0.046, pad=0.02)
            bar.ax.tick_params(labelsize=7)
            title = kind if x is teacher else f"{kind}, ρ = {rho[kind]:.3f}"
            ax.set_title(title, fontsize=9)
            ax.set_xticks([])
            ax.set_yticks([])
            if ax in axes[-1]:
                ax.set_xticks(ticks, labels, rotation=90, fontsize=7, parse_math=False)
        row[0].set_yticks(ticks, labels, fontsize=7, parse_math=False)
        row[0].set_ylabel(name)
    _save(figure, path)
    return figure


def plot_relations(
    student_features: Tensor,
    teacher_features: Tensor,
    mask: Tensor | None = None,
    path: str | PathLike | None = None,
    *,
    tokens: Sequence[Sequence[str]] | None = None,
) -> Any:
    """Draw the token relation maps of student and teacher side by side, one row per sample.

    Returns the figure. A map is the matrix of cosines between the tokens' features (FCD, eq. 3 with
    the ℓ2 norm). The student's title has its Pearson correlation with the teacher's map (eq. 6).
    The maps of a row share one colour scale.

    Args:
        student_features: (B, N, Ds) or (N, Ds).
        teacher_features: (B, N, Dt) or (N, Dt).
        mask: (B, N) or (N,), 1 = real token; padded tokens are left out of the maps.
        path: file to save to; None saves nothing.
        tokens: the N tokens of each sample, written beside the maps; None numbers them from 0.

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
        mask = torch.ones(student.shape[:2], dtype=torch.bool, device="cpu")
    else:
        check.shape("mask", mask, student_features.shape[:-1], "the tokens of student_features")
        mask = mask.detach().cpu().bool().reshape(student.shape[:2])
    rows = len(student)
    if tokens is not None and [len(x) for x in tokens] != [student.shape[1]] * rows:
        raise ValueError(
            f"tokens must have {student.shape[1]} tokens for each of {rows} samples, got "
            f"{[len(x) for x in tokens]}"
        )
    figure = new_figure(8.4, 3.7 * rows)
    axes = figure.subplots(rows, 2, squeeze=False)
    for row, (s, t, real) in enumerate(zip(student, teacher, mask, strict=True)):
        names: Sequence[Any] = range(len(real)) if tokens is None else tokens[row]
        names = [token for token, is_real in zip(names, real, strict=True) if is_real]
        ticks, labels = _ticks(names, 16 if tokens is None else 32)
        s, t = (functional.normalize(x[real], dim=-1) for x in (s, t))
        maps = (s @ s.T, t @ t.T)
        if not len(s):
            maps = (torch.zeros(1, 1, dtype=torch.float64, device="cpu"),) * 2
        low = min(float(m.min()) for m in maps)
        rho = _correlation(*maps)
        for ax, who, values in zip(axes[row], ("student", "teacher"), maps, strict=True):
            image = ax.imshow(values.numpy(), vmin=low, vmax=1.0, cmap="viridis")
            ax.set_title(f"{who}, ρ = {rho:.3f}" if who == "student" else who)
            ax.set_xlabel("token")
            ax.set_xticks(ticks, labels, rotation=90, fontsize=7, parse_math=False)
            ax.set_yticks(ticks, labels, fontsize=7, parse_math=False)
        axes[row][0].set_ylabel("token")
        figure.colorbar(image, ax=list(axes[row]), fraction=0.03)
    _save(figure, path)
    return figure


def _ticks(tokens: Sequence[Any], most: int) -> tuple[range, list[str]]:
    """Positions and texts of at most ``most`` tokens to write beside a map."""
    places = range(0, len(tokens), max(1, -(-len(tokens) // most)))
    return places, [str(tokens[i]) for i in places]


def _save(figure: Any, path: str | PathLike | None) -> None:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a script that is not in the font
            figure.savefig(path, dpi=130, bbox_inches="tight")
