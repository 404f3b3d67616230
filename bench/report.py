"""Pages of results: ``python -m bench.report`` fills README.md and docs/benchmarks.md.

Results are pytest-benchmark's JSON, a file a machine, in bench/results/. Files named as arguments
(``--benchmark-json``) are joined into their machine's file first. A figure is the median of all
runs that a file holds.
"""

import argparse
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastkd._core.registry import LOSSES
from fastkd.analysis.pictures import new_figure

from . import suite
from .case import COMPILED, COMPILED_GRAPH, REFERENCE, Case

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README, PAGE, PICTURES = ROOT / "README.md", ROOT / "docs/benchmarks.md", ROOT / "docs/pictures"
GRAPH = "fastkd, CUDA graph"
CHANGED = "† These kernels have changed since that commit."
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
# One colour for each provider (Okabe and Ito); peers share one and differ in line style.
COLOURS = {
    REFERENCE: "#999999",
    COMPILED: "#E69F00",
    COMPILED_GRAPH: "#F0E442",
    "fastkd torch": "#0072B2",
    "fastkd cpp": "#D55E00",
    "fastkd triton": "#009E73",
    GRAPH: "#56B4E9",
    "fastkd": "#D55E00",
}
PEER = "#CC79A7"
PEER_STYLES = ("-", "--", "-.", ":")


def load(path: Path) -> dict[str, Any]:
    """A result file with ``groups``: every group's providers by name, runs joined."""
    result = json.loads(path.read_text())
    runs: dict[str, dict[str, list[dict]]] = {}
    for bench in result["benchmarks"]:
        of_group = runs.setdefault(bench["group"], {})
        of_group.setdefault(bench["extra_info"]["backend"], []).append(bench)
    result["groups"] = {
        group: {name: _joined(found) for name, found in providers.items()}
        for group, providers in runs.items()
    }
    return result


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """``extra_info`` of a provider, with ``ms`` and ``ratio`` as medians over its runs."""
    found = dict(runs[-1]["extra_info"])
    found["ms"] = 1e3 * statistics.median(run["stats"]["median"] for run in runs)
    ratios = [run["extra_info"]["ratio"] for run in runs if "ratio" in run["extra_info"]]
    if ratios:
        found["ratio"] = {
            name: statistics.median(ratio[name] for ratio in ratios) for name in ratios[0]
        }
    return found


def join(paths: Iterable[Path], folder: Path = RESULTS) -> Path:
    """The file of the machine on which all of ``paths`` were measured, with their benchmarks."""
    files = [json.loads(path.read_text()) for path in paths]
    result = dict(files[-1], benchmarks=[bench for file in files for bench in file["benchmarks"]])
    names = {file["machine_info"]["name"] for file in files}
    if len(names) > 1:
        raise ValueError(f"results of several machines: {', '.join(sorted(names))}")
    # The floor is what the hardware can do: the best of all runs.
    result["limits"] = {
        name: max(file["limits"].get(name, 0.0) for file in files)
        for name in {name for file in files for name in file["limits"]}
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{names.pop()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def best(providers: dict[str, Any]) -> dict[str, Any]:
    """The fastest of fastkd's backends outside of CUDA graphs, or an empty entry."""
    own = [p for name, p in providers.items() if name.startswith("fastkd") and name != GRAPH]
    return min(own, key=lambda p: p["ms"], default={})


def floor_ms(result: dict[str, Any], p: dict[str, Any]) -> float:
    limits = result["limits"]
    return 1e3 * max(p["bytes"] / limits["copy"], p["operations"] / limits[p["dtype"]])


def milliseconds(p: dict[str, Any]) -> str:
    """Three significant digits."""
    if "ms" not in p:
        return ""
    return f"{p['ms']:.0f}" if p["ms"] >= 100 else f"{p['ms']:.3g}"


def times(value: float) -> str:
    """A factor, with fewer decimals the larger it is."""
    return f"{value:.{2 if value < 3 else 1 if value < 20 else 0}f}×"


def faster(p: dict[str, Any], than: dict[str, Any] | None = None) -> str:
    """Speed relative to the reference, or to another provider of the group."""
    if "ratio" not in p or (than is not None and "ratio" not in than):
        return ""
    other = than["ratio"] if than is not None else p["ratio"]
    width = 50 * (other["q3"] - other["q1"]) / other["median"]
    value = (than["ratio"]["median"] if than is not None else 1.0) / p["ratio"]["median"]
    return f"{times(value)} ± {width:.0f}%"


def memory(p: dict[str, Any], reference: dict[str, Any]) -> str:
    """Peak memory as a percentage of the reference's."""
    if not (p.get("peak_bytes") and reference.get("peak_bytes")):
        return ""
    return f"{100 * p['peak_bytes'] / reference['peak_bytes']:.0f}%"


def mebibytes(p: dict[str, Any]) -> str:
    return f"{p['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in p else ""


def error(p: dict[str, Any]) -> str:
    """The larger error; "" for a provider with an objective of its own."""
    if "value_error" not in p:
        return ""
    errors = (p["value_error"], p["gradient_error"])
    return "not finite" if None in errors else f"{max(errors):.0e}"


def sizes(p: dict[str, Any] | Case) -> str:
    given = p.sizes if isinstance(p, Case) else p["sizes"]
    kind = str(p.dtype).removeprefix("torch.") if isinstance(p, Case) else p["dtype"]
    short = {"float32": "fp32", "bfloat16": "bf16"}.get(kind, kind)
    return f"{' '.join(f'{name}={value}' for name, value in given.items())}, {short}"


def table(columns: str, rows: Iterable[tuple[str, ...]], text: int = 2) -> str:
    """A Markdown table whose first ``text`` columns are text, and the rest numbers."""
    count = columns.count("|") + 1
    lines = [f"| {columns} |", "|" + "---|" * text + "---:|" * (count - text)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def where(result: dict[str, Any]) -> str:
    """Processor and, of a CPU, the number of threads."""
    machine = result["machine_info"]
    if "gpu" in machine:
        return machine["gpu"]
    return f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"


def commit(result: dict[str, Any]) -> str:
    found = next(iter(result["benchmarks"]))["extra_info"]["commit"]
    return f"commit {found}, {result['datetime'][:10]}"


@functools.cache
def mark(loss: str, measured: str) -> str:
    """A mark if the kernels of a loss aren't those of the measured commit, or git can't tell."""
    files = [f"kernels/{x}.py" for row in LOSSES if row.name == loss for x in row.kernel_files]
    files += ["csrc/linalg"] * (loss in ("cca", "linalg"))
    git = shutil.which("git")
    command = [git, "diff", "--quiet", measured.rstrip("+"), "--", *(files or ["kernels"])]
    equal = git and subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    return "" if equal else " †"


def marked(loss: str, result: dict[str, Any]) -> str:
    """`mark` of a GPU's result."""
    measured = next(iter(result["benchmarks"]))["extra_info"]["commit"]
    return mark(loss, measured) if "gpu" in result["machine_info"] else ""


def readme(results: list[dict[str, Any]]) -> str:
    """README's tables: the headline groups that were measured on a GPU, and those of a CPU.

    The CPU's has empty cells without results. A CUDA graph has a column of its own, since no other
    provider's step is one.
    """
    on_gpu, on_cpu = (
        next((r for r in results if ("gpu" in r["machine_info"]) == gpu), None)
        for gpu in (True, False)
    )
    parts = [_headline_table(on_gpu, suite.CUDA_SETS)] if on_gpu else []
    return "\n\n".join([*parts, _headline_table(on_cpu, suite.CPU_SETS)])


def _headline_table(result: dict[str, Any] | None, sets: Sequence[str]) -> str:
    rows = []
    of_gpu = result is not None and "gpu" in result["machine_info"]
    for case in (c for c in suite.cases(sets) if c.headline):
        group = result["groups"].get(case.key, {}) if result else {}
        if of_gpu and not group:
            continue
        graph = group.get(GRAPH, {})
        own = best(group)
        reference = group.get(REFERENCE, {})
        cells = (
            milliseconds(reference), milliseconds(own), *([milliseconds(graph)] * of_gpu),
            faster(own), faster(own, group.get(COMPILED, {})), memory(own, reference),
        )  # fmt: skip
        sign = marked(case.loss, result) if result else ""
        rows.append((f"{case.loss}: {case.title}{sign}", sizes(case), *cells))
    columns = f"loss | sizes | reference ms | fastkd ms {'| in a CUDA graph ' * of_gpu}"
    columns += "| vs reference | vs torch.compile | memory, of the reference's"
    about = "Not measured yet: `make bench`."
    if result:
        torch = result["machine_info"]["versions"]["torch"]
        about = f"{where(result)}, torch {torch}, {commit(result)}:"
    return f"{about}\n\n{with_note(table(columns, rows))}"


def with_note(text: str) -> str:
    return f"{text}\n\n{CHANGED}" if "†" in text else text


def fill(text: str, part: str, start: str = START, end: str = END) -> str:
    """``text`` with everything between the markers replaced by ``part``."""
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"the page needs the two lines {start} and {end}, in this order")
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{part}\n{end}{rest.partition(end)[2]}"


def headlines(result: dict[str, Any]) -> str:
    """The headline groups of one machine; CUDA graphs are compared with CUDA graphs."""
    rows, of_gpu = [], "gpu" in result["machine_info"]
    for providers in result["groups"].values():
        reference = providers.get(REFERENCE, {})
        if reference.get("headline"):
            own = best(providers)
            timed = providers.get(GRAPH, own)
            floor = f"{timed['ms'] / floor_ms(result, timed):.1f}" if timed else ""
            graphs = [milliseconds(providers.get(name, {})) for name in (COMPILED_GRAPH, GRAPH)]
            rows.append((
                f"{reference['loss']}: {reference['title']}{marked(reference['loss'], result)}",
                sizes(reference),
                milliseconds(reference), milliseconds(providers.get(COMPILED, {})),
                milliseconds(own), own.get("backend", "").removeprefix("fastkd").strip(" ,"),
                faster(own), floor, mebibytes(own), memory(own, reference), error(own),
                *graphs * of_gpu,
            ))  # fmt: skip
    columns = "loss | sizes | reference ms | torch.compile ms | fastkd ms | backend | vs reference "
    columns += "| × floor | MiB | of the reference's | error"
    return with_note(table(columns + " | torch.compile, graph | fastkd, graph" * of_gpu, rows))


def peers(result: dict[str, Any]) -> str:
    """Every other package, against fastkd in the same group."""
    rows = []
    for providers in result["groups"].values():
        own = best(providers)
        for name, p in providers.items():
            if p["loss"] not in ("heads", "step") and _is_peer(name) and own:
                rows.append((
                    f"{p['loss']}: {p['title']}", sizes(p), name, milliseconds(p),
                    milliseconds(own), faster(own, p), mebibytes(p), mebibytes(own), error(p),
                ))  # fmt: skip
    columns = "loss | sizes | package | its ms | fastkd ms | fastkd vs it | its MiB | fastkd MiB "
    return table(columns + "| its error", rows, text=3) if rows else ""


def _is_peer(name: str) -> bool:
    return name not in COLOURS and not name.startswith("reference")


def heads(result: dict[str, Any]) -> str:
    """LM heads: milliseconds, MiB and error, with sizes as lines and providers as columns."""
    parts = []
    groups = [g for g in result["groups"].values() if next(iter(g.values()))["loss"] == "heads"]
    for title in dict.fromkeys(next(iter(group.values()))["title"] for group in groups):
        chosen = [g for g in groups if next(iter(g.values()))["title"] == title]
        names = list(dict.fromkeys(name for group in chosen for name in group))
        rows = [
            (sizes(next(iter(group.values()))), *(_head(group.get(name)) for name in names))
            for group in chosen
        ]
        parts += [f"**{title}**", table(" | ".join(["sizes", *names]), rows, text=1)]
    return "\n\n".join(parts)


def _head(p: dict[str, Any] | None) -> str:
    return f"{milliseconds(p)} ms, {mebibytes(p)} MiB ({error(p)})" if p else ""


def steps(result: dict[str, Any]) -> str:
    """Whole steps, relative to the reference step."""
    parts = []
    for providers in result["groups"].values():
        first = next(iter(providers.values()))
        if first["loss"] == "step":
            rows = []
            for name, p in providers.items():
                ratio = p.get("ratio")
                of_plain = f"{ratio['median']:.2f}×" if ratio and name != REFERENCE else ""
                reference = providers.get(REFERENCE, {})
                rows.append((name, milliseconds(p), of_plain, mebibytes(p), memory(p, reference)))
            columns = "step | ms | of the reference's time | MiB | of the reference's memory"
            parts += [f"**{first['title']}**, {sizes(first)}", table(columns, rows, text=1)]
    return "\n\n".join(parts)


def growth(result: dict[str, Any], loss: str, folder: Path) -> str:
    """Picture of time and memory against the growing size of ``loss``, or "" without a sweep."""
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for providers in result["groups"].values():
        first = next(iter(providers.values()))
        if first["loss"] == loss and first["sweep"]:
            families.setdefault((first["title"], first["sweep"]), []).append(providers)
    families = {family: groups for family, groups in families.items() if len(groups) > 1}
    if not families:
        return ""
    figure = new_figure(8.6, 3.1 * len(families) + 0.5)
    axes = figure.subplots(len(families), 2, squeeze=False)
    for row, ((title, sweep), groups) in zip(axes, families.items(), strict=True):
        quantities: list[tuple[str, Callable[[dict], float | None]]] = [
            ("ms, forward + backward", lambda p: p["ms"]),
            ("peak MiB", lambda p: p.get("peak_bytes", 0) / 2**20 or None),
        ]
        for ax, (text, value) in zip(row, quantities, strict=True):
            _curves(ax, groups, sweep, value)
            ax.set_xlabel(sweep)
            ax.set_ylabel(text)
            ax.set_title(f"{loss}: {title}", fontsize=10)
            ax.grid(alpha=0.3, which="both")
        floors = [floor_ms(result, next(iter(group.values()))) for group in groups]
        row[0].plot([_swept(g, sweep) for g in groups], floors, "k:", label="floor", lw=1)
        row[0].legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"growth-{loss}.png"
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    return f"![Growth of {loss} with size](pictures/{path.name})"


def _curves(ax: Any, groups: list[dict], sweep: str, value: Callable[[dict], float | None]) -> None:
    styles = itertools.cycle(PEER_STYLES)
    for name in dict.fromkeys(name for group in groups for name in group):
        style = "-" if name in COLOURS else next(styles)
        points = [
            (_swept(group, sweep), found)
            for group in groups
            if name in group and (found := value(group[name]))
        ]
        if points:
            colour = COLOURS.get(name, PEER)
            ax.plot(*zip(*points, strict=True), "o" + style, color=colour, label=name, ms=4)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [_swept(group, sweep) for group in groups]
    ax.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)


def _swept(group: dict[str, Any], sweep: str) -> int:
    """Value of the growing size; D stands for the hidden sizes of teacher and student."""
    given = next(iter(group.values()))["sizes"]
    return given.get(sweep, given.get("Ds"))


def page(results: list[dict[str, Any]], pictures: Path) -> str:
    """Sections of docs/benchmarks.md; growth is drawn from the first result of a CPU."""
    parts = []
    for result in results:
        limits = dict(result["limits"])
        copy = limits.pop("copy") / 1e9
        rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in sorted(limits.items()))
        versions = ", ".join(f"{n} {v}" for n, v in result["machine_info"]["versions"].items())
        parts += [
            f"## {where(result)}",
            f"{commit(result)[0].upper()}{commit(result)[1:]}; {versions}. Copy {copy:.3g} GB/s; "
            f"matrix products {rates} T operations/s.",
            headlines(result),
        ]
        for title, section in (
            ("Beside other packages", peers(result)),
            ("Heads of language models", heads(result)),
            ("Whole training steps", steps(result)),
        ):
            if section:
                parts += [f"### {title}: {where(result)}", TEXTS.get(title, ""), section]
    for result in [r for r in results if "gpu" not in r["machine_info"]][:1]:
        drawn = [growth(result, loss, pictures) for loss in suite.LOSSES]
        if any(drawn):
            parts += [f"## Growth with size: {where(result)}", *drawn]
    if not results:
        parts.append("No result file is there yet: `make bench` writes one.")
    return "\n\n".join(part for part in parts if part)


TEXTS = {
    "Heads of language models": (
        "Losses and their gradients from hidden states and vocabulary heads: milliseconds of "
        "forward and backward, peak MiB beyond the inputs, and in brackets the error. Plain "
        "PyTorch, torch's own function and the peers multiply in the inputs' dtype, which rounds "
        "logits in bf16; fastkd keeps the product in float32."
    ),
    "Whole training steps": (
        "Encoders: forward, backward and AdamW; the reference step runs the teacher and trains on "
        "labels only. LRCBERT's perturbation is a second pass of the student by its definition. "
        "Decoders: forward and backward; the reference runs both bodies without the vocabulary "
        "heads, with the gradient of the student's head."
    ),
}


def order(result: dict[str, Any]) -> tuple[bool, int, str]:
    """GPUs first, then CPUs with most threads, the newest first."""
    machine = result["machine_info"]
    return "gpu" in machine, machine["threads"], result["datetime"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="of pytest's --benchmark-json")
    options = parser.parse_args(arguments)
    if options.files:
        print(join(options.files, RESULTS))
    results = sorted(map(load, RESULTS.glob("*.json")), key=order, reverse=True)
    README.write_text(fill(README.read_text(), readme(results)))
    PAGE.write_text(fill(PAGE.read_text(), page(results, PICTURES)))
    print(README, PAGE, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
