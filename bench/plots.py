"""Pictures of a result file: speed-up, memory, growth and distance from the hardware's floor."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fastkd.analysis.pictures import new_figure

from .harness import REFERENCE
from .table import dtype, families, swept

# One colour for each provider, the same in all pictures (Okabe and Ito).
COLOURS = {
    REFERENCE: "#999999",
    "torch.compile": "#E69F00",
    "fastkd torch": "#0072B2",
    "fastkd cpp": "#D55E00",
    "fastkd triton": "#009E73",
    "fastkd, CUDA graph": "#56B4E9",
    "fastkd": "#0072B2",
}
PEER = "#CC79A7"


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """All pictures that ``results`` has rows for."""
    folder.mkdir(parents=True, exist_ok=True)
    name = results["machine"]["name"]
    rows = [row for row in results["rows"] if any("both" in r for r in row["providers"].values())]
    single = [row for row in rows if not row["sweep"] and row["loss"] != "step"]
    written = []
    for kind, figure in (
        ("speed", speed_ups(single)),
        ("memory", memory(single)),
        ("growth", growth(rows)),
        ("floor", floor(single)),
    ):
        if figure is not None:
            path = folder / f"{name}-{kind}.png"
            figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
            written.append(path)
    return written


def label(row: dict[str, Any]) -> str:
    """Short name of a row for an axis, in two lines."""
    sizes = " ".join(f"{name}{value}" for name, value in row["sizes"].items())
    return f"{row['loss']}: {row['title']}\n{sizes}, {dtype(row)}"


def speed_ups(rows: list[dict[str, Any]]) -> Any:
    return _bars(
        rows,
        lambda row, r: 1 / r["ratio"]["median"] if "ratio" in r else None,
        "times faster than the reference (the line), forward + backward",
        without=REFERENCE,
    )


def memory(rows: list[dict[str, Any]]) -> Any:
    def share(row: dict[str, Any], result: dict[str, Any]) -> float | None:
        base = row["providers"].get(REFERENCE, {}).get("peak_bytes")
        return result["peak_bytes"] / base if base and result.get("peak_bytes") else None

    text = "peak memory, times the reference's (the line)"
    return _bars(rows, share, text, without=REFERENCE)


def floor(rows: list[dict[str, Any]]) -> Any:
    return _bars(
        rows,
        lambda row, r: r["both"]["median"] / row["floor_ms"] if row.get("floor_ms") else None,
        "times the hardware's floor (the line)",
    )


def growth(rows: list[dict[str, Any]]) -> Any:
    """Time against the size that grows, one panel a family."""
    panels = {family: members for family, members in families(rows).items() if len(members) > 1}
    if not panels:
        return None
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.4 * lines + 0.4)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax, ((loss, title, sweep), members) in zip(axes, panels.items(), strict=False):
        sizes = [swept(row) for row in members]
        for name in _providers(members, "both"):
            points = [
                (size, row["providers"][name]["both"]["median"])
                for size, row in zip(sizes, members, strict=True)
                if "both" in row["providers"].get(name, {})
            ]
            ax.plot(*zip(*points, strict=True), "o-", color=_colour(name), label=name, ms=4)
        ax.plot(sizes, [row["floor_ms"] for row in members], "k:", label="floor", lw=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        ax.set_xlabel(sweep)
        ax.set_ylabel("ms, forward + backward")
        ax.set_title(f"{loss}: {title}", fontsize=10)
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize=7)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return figure


def _bars(
    rows: list[dict[str, Any]],
    value: Callable[[dict[str, Any], dict[str, Any]], float | None],
    text: str,
    without: str = "",
) -> Any:
    """Horizontal bars from 1 on a log scale, a group for each row."""
    groups = []
    for row in rows:
        bars = [
            (name, found)
            for name, result in row["providers"].items()
            if name != without and "both" in result
            if (found := value(row, result)) is not None
        ]
        if bars:
            groups.append((label(row), bars))
    if not groups:
        return None
    count = sum(len(bars) + 0.6 for _, bars in groups)
    figure = new_figure(8.5, 1.2 + 0.19 * max(count, 2.0 * len(groups)))
    ax = figure.subplots()
    place, ticks, kinds = 0.0, [], {}
    for _, bars in groups:
        # A group is at least as high as its two lines of text.
        height = max(len(bars) + 0.6, 2.0)
        ticks.append(place + height / 2)
        first = ticks[-1] - (len(bars) - 1) / 2
        for k, (name, width) in enumerate(bars):
            kind = name if name in COLOURS else "peer"
            kind = "fastkd torch" if kind == "fastkd" else kind
            # Bars start at 1: which side of it they reach is what matters.
            kinds[kind] = ax.barh(first + k, width - 1, 0.9, left=1, color=_colour(name))
            shown = f"{width:.2g}" if width < 10 else f"{width:.0f}"
            ax.annotate(
                f"{shown} {name}" if kind == "peer" else shown,
                (width, first + k),
                xytext=(3 if width >= 1 else -3, 0),
                textcoords="offset points",
                va="center",
                ha="left" if width >= 1 else "right",
                fontsize=7,
            )
        place += height
    ax.set_xscale("log")
    widths = [1.0, *(width for _, bars in groups for _, width in bars)]
    # Room for the text beyond the bars.
    ax.set_xlim(min(widths) / 2.5, max(widths) * 4)
    ax.axvline(1, color="black", lw=0.8)
    ax.set_yticks(ticks, [name for name, _ in groups], fontsize=7)
    ax.set_ylim(place, 0)
    ax.set_xlabel(text)
    ax.grid(axis="x", alpha=0.3)
    figure.legend(kinds.values(), kinds, fontsize=8, loc="outside upper center", ncols=6)
    return figure


def _providers(rows: Iterable[dict[str, Any]], key: str) -> list[str]:
    """Names that have ``key`` somewhere, in the order of `COLOURS`, peers last."""
    found = {name for row in rows for name, r in row["providers"].items() if key in r}
    order = list(COLOURS)
    return sorted(found, key=lambda n: (order.index(n) if n in order else len(order), n))


def _colour(name: str) -> str:
    return COLOURS.get(name, PEER)
