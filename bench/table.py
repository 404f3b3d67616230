"""The result table as plain text."""

from typing import Any

HEADER = (
    "provider",
    "forward",
    "backward",
    "both ms",
    "±",
    "speed-up",
    "peak MiB",
    "launches",
    "× floor",
    "error",
)


def row_lines(row: dict[str, Any]) -> list[str]:
    """One case: a title line, then a line for each provider."""
    lines = [title(row)]
    table = [list(HEADER)]
    notes = []
    for name, result in row["providers"].items():
        if "both" in result:
            table.append(cells(row, name, result))
        else:
            notes.append(f"  {name}: {result.get('refused') or result.get('skipped')}")
    if len(table) > 1:
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        for line in table:
            first = line[0].ljust(widths[0])
            rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
            lines.append("  " + "  ".join([first, *rest]))
    return lines + notes


def title(row: dict[str, Any]) -> str:
    """Loss, sizes, floor and what was predicted in one line."""
    floor = f", floor {milliseconds(row['floor_ms'])} ms" if "floor_ms" in row else ""
    if "predicted_ms" in row:
        floor += f", predicted {milliseconds(row['predicted_ms'])} ms"
    return f"{row['loss']}: {row['title']} ({sizes(row)}, {row['dtype']}{floor})"


def sizes(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in row["sizes"].items())


def dtype(row: dict[str, Any]) -> str:
    """Short name of the row's dtype."""
    return {"float32": "fp32", "bfloat16": "bf16"}.get(row["dtype"], row["dtype"])


def cells(row: dict[str, Any], name: str, result: dict[str, Any]) -> list[str]:
    """The columns of `HEADER` for one provider."""
    both = result["both"]
    launches = result.get("launches", result.get("operations_dispatched"))
    breaks = result.get("graph_breaks", 0)
    return [
        f"{name}, {breaks} graph break{'s' * (breaks > 1)}" if breaks else name,
        milliseconds(result["forward"]["median"]) if "forward" in result else "-",
        milliseconds(result["backward"]["median"]) if "backward" in result else "-",
        milliseconds(both["median"]),
        width(both),
        speed_up(result),
        mebibytes(result),
        str(launches) if launches is not None else "-",
        f"{both['median'] / row['floor_ms']:.1f}" if row.get("floor_ms") else "-",
        error(result),
    ]


def width(figure: dict[str, Any]) -> str:
    """Half the distance between the quartiles."""
    return f"{50 * (figure['q3'] - figure['q1']) / figure['median']:.0f}%"


def mebibytes(result: dict[str, Any]) -> str:
    return f"{result['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in result else "-"


def error(result: dict[str, Any]) -> str:
    """The larger of both errors."""
    if "value_error" not in result:
        return "own objective"
    worst = max(result["value_error"], result["gradient_error"])
    return "not finite" if worst == float("inf") else f"{worst:.0e}"


def speed_up(result: dict[str, Any]) -> str:
    """How many times faster than the reference."""
    return times(1 / result["ratio"]["median"]) if "ratio" in result else "-"


def times(value: float) -> str:
    """A factor, with fewer decimals the larger it is."""
    decimals = 2 if value < 3 else 1 if value < 20 else 0
    return f"{value:.{decimals}f}×"


def milliseconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def families(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Loss, title and the size that grows, and the rows of each such sweep."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["sweep"]:
            found.setdefault((row["loss"], row["title"], row["sweep"]), []).append(row)
    return found


def swept(row: dict[str, Any]) -> int:
    """The value of a sweep's growing size; D stands for the hidden sizes of both sides."""
    return row["sizes"].get(row["sweep"], row["sizes"].get("Ds"))
