"""`python -m tools.pictures` draws the site's pictures by calling the losses.

The start page's picture shows `docs/pictures/demo.json`, written by `fastkd demo`.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from scipy.linalg import hessenberg

import fastkd
from fastkd.cli.demo import TITLES

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STUDENT, TEACHER, GREY, LIGHT = "#00897b", "#5e35b1", "#9aa0a6", "#e8eaed"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fastkd",
    "font.size": 9,
    "font.family": "sans-serif",
}


def panels(
    count: int, width: float = 6.4, height: float = 2.1, **options: Any
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def bare(ax: Any, title: str, note: str = "") -> None:
    """No axes: a title above and a note below."""
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(note)


def arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str, **style: Any):
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "shrinkA": 2, "shrinkB": 2, **style}
    ax.add_patch(FancyArrowPatch(start, end, color=colour, **style))


def box(
    ax: Any, x: float, y: float, text: str, colour: str, w: float = 1.0, h: float = 0.6
) -> None:
    """A labelled box around (x, y)."""
    ax.add_patch(
        Rectangle((x - w / 2, y - h / 2), w, h, facecolor="white", edgecolor=colour, lw=1.4)
    )
    ax.text(x, y, text, ha="center", va="center", fontsize=8)


def map_of(ax: Any, values: torch.Tensor, title: str, note: str = "", **style: Any) -> None:
    ax.imshow(values.numpy(), interpolation="nearest", **{"cmap": "viridis", **style})
    bare(ax, title, note)


def relation(x: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(x, dim=-1)
    return unit @ unit.mT


def relations() -> Figure:
    torch.manual_seed(0)
    kinds = torch.randn(3, 24).repeat_interleave(4, 0)
    teacher = kinds + 0.5 * torch.randn(12, 24)
    near, far = teacher[:, :16] + 0.4 * torch.randn(12, 16), torch.randn(12, 16)
    figure, axes = panels(3)
    map_of(axes[0], relation(teacher), "teacher, 24 wide")
    for ax, student, name in zip(axes[1:], (far, near), ("a student", "a better one"), strict=True):
        loss = fastkd.relation_loss(student[None], teacher[None]).item()
        map_of(ax, relation(student), f"{name}, 16 wide", f"loss {loss:.2f}")
    return figure


def neighbours() -> Figure:
    torch.manual_seed(3)
    labels = torch.arange(2).repeat_interleave(7)
    centres = torch.tensor([[0.0, 0.0], [2.6, 0.6]])[labels]
    teacher, student = centres + 0.5 * torch.randn(14, 2), centres + 0.9 * torch.randn(14, 2)
    figure, (ax,) = panels(1, 4.4, 2.6)
    for row, label in zip(student, labels, strict=True):
        same = teacher[labels == label]
        for near in same[(same - row).norm(dim=1).topk(2, largest=False).indices]:
            arrow(ax, tuple(row.tolist()), tuple(near.tolist()), GREY, mutation_scale=6, lw=0.7)
    for label, marker in enumerate("os"):
        for rows, colour in ((teacher, TEACHER), (student, STUDENT)):
            ax.scatter(*rows[labels == label].T.tolist(), c=colour, marker=marker, s=26, zorder=3)
    ax.set_aspect("equal")
    bare(ax, "each student row (green) and the two nearest\nteacher rows (violet) of its class")
    return figure


def cos_nce() -> Figure:
    figure, (ax,) = panels(1, 3.6, 2.6)
    ax.add_patch(Circle((0, 0), 1, fill=False, edgecolor=GREY, lw=0.8))
    turns = {"teacher": (60, TEACHER), "student": (20, STUDENT)}
    for name, (degrees, colour) in turns.items():
        at = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        arrow(ax, (0, 0), at, colour, lw=1.6, shrinkA=0, shrinkB=0)
        ax.text(1.08 * at[0], 1.08 * at[1], name, color=colour, va="center")
    for degrees in (-35, -75, 160, 215):
        at = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        arrow(ax, (0, 0), at, GREY, lw=1, shrinkA=0, shrinkB=0)
    ax.text(-0.98, -0.95, "other samples", color="#5f6368", ha="center")
    arrow(ax, (0.98, 0.45), (0.68, 0.82), STUDENT, connectionstyle="arc3,rad=0.25", lw=1)
    arrow(ax, (1.02, 0.2), (1.0, -0.35), GREY, connectionstyle="arc3,rad=-0.2", arrowstyle="<|-")
    ax.set_xlim(-1.5, 1.7)
    ax.set_ylim(-1.15, 1.15)
    ax.set_aspect("equal")
    bare(ax, "turn towards the teacher, away from the others")
    return figure


def cca() -> Figure:
    torch.manual_seed(0)
    teacher = torch.randn(400, 12)
    mixed = teacher[:, :8] @ torch.randn(8, 8)
    figure, axes = panels(3, sharey=True)
    for ax, student, title in zip(
        axes,
        (torch.randn(400, 8), mixed + 4 * torch.randn(400, 8), mixed),
        ("unrelated", "a noisy linear map of it", "any linear map of it"),
        strict=True,
    ):
        values = fastkd.canonical_correlations(student, teacher)
        ax.bar(range(1, 9), values.numpy(), color=STUDENT)
        ax.set_title(f"student: {title}", fontsize=9)
        ax.set_ylim(0, 1.05)
        ax.set_xticks([])
        loss = fastkd.cca_loss(student, teacher).item()
        ax.set_xlabel(f"its 8 correlations: loss {loss:.2f}")
    return figure


def dual_projection() -> Figure:
    figure, (ax,) = panels(1, 5.4, 2.0)
    box(ax, 0.7, 1.2, "student\n(B, Ds)", STUDENT)
    box(ax, 5.3, 1.2, "teacher\n(B, Dt)", TEACHER)
    for y, name, colour, start, end in (
        (1.9, r"$P_s$", STUDENT, 0.7, 5.3), (0.5, r"$P_t$", TEACHER, 5.3, 0.7),
    ):  # fmt: skip
        box(ax, 3, y, f"{name}, orthogonal", colour, w=1.5, h=0.42)
        inner = 2.2 if start < end else 3.8
        arrow(ax, (start, 1.55 if y > 1.2 else 0.85), (inner, y), colour, lw=1.2)
        arrow(ax, (6 - inner, y), (end, 1.55 if y > 1.2 else 0.85), colour, lw=1.2)
    ax.text(3, 1.2, "LayerNorm, then squared difference, at both ends", ha="center", va="center")
    ax.set_xlim(0, 6)
    ax.set_ylim(0.1, 2.3)
    bare(ax, "each side is carried into the other's space")
    return figure


def attention() -> Figure:
    torch.manual_seed(1)
    near = -0.35 * (torch.arange(10)[:, None] - torch.arange(10)).abs()
    teacher = (near + 1.2 * torch.randn(10, 10)).softmax(-1)
    student = (0.4 * near + 0.8 * torch.randn(10, 10)).softmax(-1)
    loss = fastkd.attention_loss(student[None, None], teacher[None, None]).item()
    figure, axes = panels(3)
    map_of(axes[0], teacher, "teacher's head")
    map_of(axes[1], student, "student's head")
    map_of(
        axes[2],
        (student - teacher).square(),
        "squared difference",
        f"mean {loss:.4f}",
        cmap="magma",
    )
    return figure


def soft_targets() -> Figure:
    logits = torch.tensor([[4.0, 2.6, 1.0, 0.2, -1.0], [3.2, 0.8, 1.8, -0.6, -0.4]])
    figure, axes = panels(2, sharey=True)
    for ax, tau in zip(axes, (1.0, 3.0), strict=True):
        for shift, row, colour in ((-0.2, logits[0], TEACHER), (0.2, logits[1], STUDENT)):
            ax.bar(
                (torch.arange(5) + shift).tolist(),
                (row / tau).softmax(-1).tolist(),
                0.38,
                color=colour,
            )
        loss = fastkd.soft_target_loss(logits[1:], logits[:1], temperature=tau).item()
        ax.set_xticks([])
        ax.set_title(f"temperature {tau:g}", fontsize=9)
        ax.set_xlabel(f"words of teacher (violet) and student: loss {loss:.2f}")
    return figure


def vocabulary_heads() -> Figure:
    figure, (ax,) = panels(1, 5.6, 2.1)
    ax.add_patch(Rectangle((0, 0), 0.7, 3, facecolor=STUDENT, alpha=0.25))
    ax.text(0.35, 1.5, "hidden\nstates\n(tokens, D)", ha="center", va="center", fontsize=8)
    ax.text(0.95, 1.5, "× head (V, D) =", va="center", fontsize=8)
    for chunk in range(6):
        colour = STUDENT if chunk == 2 else LIGHT
        place = 2.7, 2.5 - 0.5 * chunk
        ax.add_patch(Rectangle(place, 4, 0.5, facecolor=colour, edgecolor="white"))
    ax.text(4.7, 1.75, "in memory now: loss and gradient, then gone", ha="center",
            va="center", color="white", fontsize=8)  # fmt: skip
    ax.text(
        4.7, 2.75, "(tokens, V) logits: never all of them", ha="center", va="center", fontsize=8
    )
    ax.set_xlim(-0.1, 6.8)
    ax.set_ylim(-0.1, 3.1)
    bare(ax, "a few tokens' logits at a time")
    return figure


def relation_tiles() -> Figure:
    figure, (ax,) = panels(1, 5.6, 2.6)
    n = 6
    for i in range(n):
        for j in range(n):
            colour = STUDENT if j < i else TEACHER if i == j else LIGHT
            ax.add_patch(Rectangle((j, n - 1 - i), 1, 1, facecolor=colour, edgecolor="white"))
    for y, text in (
        (5.2, "rows: scaled to length 1, centred, once"),
        (4.0, "tiles on and below the diagonal: made, summed,\nkept for the gradient"),
        (2.6, "tiles above: the same numbers, never made"),
        (1.4, "three sums a tile, added in a second pass:\nno atomics, the same bits every run"),
        (0.2, "A = b − ρa from the tiles; gradient = A × rows"),
    ):
        ax.text(n + 0.5, y, text, fontsize=8, va="center")
    ax.set_xlim(0, 17)
    ax.set_ylim(-0.3, n + 0.1)
    ax.set_aspect("equal")
    bare(ax, "one relation of a long group, in tiles")
    return figure


def selection() -> Figure:
    figure, (ax,) = panels(1, 6.4, 2.4)
    for i in range(8):
        same = 2 <= i < 5
        ax.add_patch(Rectangle((0.9 * i, 2.2), 0.8, 0.5, facecolor=TEACHER if same else LIGHT))
    ax.text(3.6, 2.95, "the bank, sorted by label: tiles of other labels are skipped", ha="center",
            fontsize=8)  # fmt: skip
    box(ax, 1.2, 1.2, "search: products of tiles,\nbest 8, 16 or 64 in registers", STUDENT, w=2.3)
    box(ax, 4.0, 1.2, "settle: candidates again, by\ndifferences in float64", STUDENT, w=2.3)
    box(ax, 6.7, 1.2, "gradient: row and its k\nneighbours, read again", STUDENT, w=2.1)
    arrow(ax, (2.4, 2.15), (1.4, 1.55), TEACHER)
    arrow(ax, (2.4, 1.2), (2.82, 1.2), GREY)
    arrow(ax, (5.18, 1.2), (5.62, 1.2), GREY)
    ax.text(4.0, 0.55, "a proof says that the choice is exact;\nelse all within reach are compared",
            ha="center", va="center", fontsize=8)  # fmt: skip
    ax.set_xlim(0, 7.8)
    ax.set_ylim(0.2, 3.2)
    bare(ax, "the k nearest rows of one label, without a matrix of distances")
    return figure


def roots() -> Figure:
    """Steps of the root of a small matrix."""
    torch.manual_seed(0)
    x = torch.randn(12, 12, dtype=torch.float64)
    a = x @ x.mT
    banded = torch.from_numpy(hessenberg(a.numpy()))
    root = fastkd.sqrtm(a)
    figure, axes = panels(4, 7.0, 2.3)
    for ax, values, title, note in zip(
        axes,
        (a, banded, torch.linalg.eigvalsh(a).diag(), root),
        ("A", "three diagonals", "eigenvalues", "its root"),
        ("symmetric", "reflections", "QL rotations", "vectors × √λ × vectorsᵀ"),
        strict=True,
    ):
        reach = values.abs().max().item()
        map_of(ax, values, title, note, cmap="PuOr", vmin=-reach, vmax=reach)
    return figure


def inverses() -> Figure:
    """Residuals of Newton's step for (I − Q)⁻¹, from the last inverse and from a cold start."""
    torch.manual_seed(0)
    q = torch.randn(32, 32, dtype=torch.float64) * 0.15
    q = q - q.mT
    eye = torch.eye(32, dtype=torch.float64)
    change = 0.01 * torch.randn(32, 32, dtype=torch.float64)
    new = eye - (q + change - change.mT)
    figure, (ax,) = panels(1, 4.8, 2.4)
    cold = new.mT / (1 + (eye - new).square().sum() / 2)
    for s, name, colour in (
        (torch.linalg.inv(eye - q), "from the last step's inverse", STUDENT),
        (cold, "from the transpose", TEACHER),
    ):
        residuals = []
        for _ in range(14):
            r = eye - new @ s
            residuals.append(r.norm().item())
            s = s + s @ r
        ax.semilogy(residuals, marker="o", ms=3, color=colour, label=name)
    ax.axhline(1e-6, color=GREY, lw=0.8, ls=":")
    ax.set_ylim(1e-14, 1e4)
    ax.set_xlabel("steps S + S(I − (I − Q)S), two products each")
    ax.set_ylabel("‖I − (I − Q)S‖")
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def demo() -> Figure:
    """Scores of the demo's students and teacher."""
    report = json.loads((PICTURES / "demo.json").read_text())
    students = sorted(report["students"].items(), key=lambda item: item[1]["accuracy"])
    figure, (ax,) = panels(1, 6.4, 2.6)
    scores = [100 * row["accuracy"] for _, row in students]
    spread = [100 * row["spread"] for _, row in students]
    ax.barh(range(len(scores)), scores, xerr=spread, color=STUDENT, height=0.65, ecolor="black")
    teacher = 100 * report["teacher"]["scores"]["accuracy"]
    ax.axvline(teacher, color=TEACHER, lw=1.6)
    ax.text(teacher + 1, 0, f"teacher {teacher:.0f}", color=TEACHER, va="center", fontsize=8)
    ax.set_yticks(range(len(scores)), [TITLES[name] for name, _ in students])
    size = report["size"]
    ax.set_xlabel(
        f"accuracy, %, mean and spread of {len(report['seeds'])} seeds: {size['labelled']} labels, "
        f"{report['rows']['train']} texts"
    )
    ax.set_xlim(0, 100)
    return figure


LOSSES: dict[str, Callable[[], Figure]] = {
    f.__name__: f
    for f in (
        relations, neighbours, cos_nce, cca, dual_projection, attention, soft_targets,
        vocabulary_heads,
    )
}  # fmt: skip
KERNELS: dict[str, Callable[[], Figure]] = {
    f.__name__: f for f in (relation_tiles, selection, roots, inverses)
}


def write(figure: Figure, path: Path) -> None:
    """An SVG whose bytes depend on the drawing alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        for folder, drawings in (("losses", LOSSES), ("kernels", KERNELS)):
            for name, draw in drawings.items():
                write(draw(), options.out / folder / f"{name}.svg")
        write(demo(), options.out / "demo.svg")


if __name__ == "__main__":
    main()
