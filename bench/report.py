"""Result files to pages: ``python -m fastkd.bench.report`` writes docs/benchmarks.md and pictures.

``python -m fastkd.bench.report --readme`` fills README.md between its two marker comments. Nothing
on those pages is typed by hand.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from . import suite
from .harness import REFERENCE
from .table import (
    cells,
    dtype,
    error,
    families,
    mebibytes,
    milliseconds,
    sizes,
    speed_up,
    swept,
    times,
    width,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
FASTKD = ("fastkd, CUDA graph", "fastkd triton", "fastkd cpp", "fastkd torch", "fastkd")
NOT_MEASURED = "not measured"

HOW = """\
How to read the tables. Every time is in milliseconds, the median of interleaved rounds; ± is half
the distance between the quartiles. "vs" says how many times as fast as that; ratios are taken
within a round. The reference and fastkd are timed in several passes, each in its own process, of
whose figures the median stands here; torch.compile (the reference, in several graphs where one
breaks, which then is said) and the peers in the first pass. *Floor* is the
larger of bytes over the copy bandwidth and operations over the matrix rate, both measured on the
machine in the same run; what fits into a cache can beat it. Operations are products and sums: the
exponentials and logarithms of soft targets, two to eight for a pair of logits and each twelve
vector instructions or more on a CPU, are not among them, and the product of a matrix with its own
transpose, as relations need it, counts half. *Memory* is the peak of the operation
itself, beyond its inputs, gradients included. *Error* is the distance of value and gradients from
the reference in float64, whichever is larger; a provider that is wrong is not timed, but for the
reference itself (CCA's in float32, see [math.md](math.md)). "Own objective": a peer with another
loss, whose time alone compares. On CUDA each sample starts from an idle GPU with a cold L2 cache,
so launch costs count; *launches* are device kernels, on the CPU dispatched tensor operations.

What the kernels should take on a GPU, from their compiled code, is in
[estimates.md](estimates.md): `python -m tools.estimate --device h200`, predicted and not measured.

Make your own: `make bench`, or `fastkd bench` where fastkd is installed; then
`python -m fastkd.bench.report`. `python -m fastkd.bench.compare A.json B.json` says what of fastkd
got worse.
"""
# Steps of `words`.
MODES = {
    "none": "both models, gradients of the student, no loss",
    "heads": "`Distiller`",
    "logits": "`Distiller(keep_logits=True)`",
}
COLUMNS = (
    "case", "provider", "forward", "backward", "both", "±",
    "vs reference", "memory MiB", "launches", "× floor", "error",
)  # fmt: skip


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All result files, GPUs first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        words = folder / "words" / path.name
        found.append(json.loads(path.read_text()))
        if words.is_file():
            found[-1]["words"] = json.loads(words.read_text())
    return sorted(found, key=lambda r: ("gpu" not in r["machine"], r["machine"]["name"]))


def page(results: list[dict[str, Any]], pictures: dict[str, list[Path]], folder: Path) -> str:
    """docs/benchmarks.md."""
    parts = ["# Benchmarks", HOW]
    for result in results:
        parts += [*machine_section(result), *step_section(result), *words_section(result)]
        for loss in suite.LOSSES:
            parts += loss_section(result, loss)
        for picture in pictures.get(result["machine"]["name"], []):
            parts.append(f"![{picture.stem}]({picture.relative_to(folder).as_posix()})")
        parts += [*growth_section(result), *skipped_section(result)]
    parts += unmeasured_section(results)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _device(result: dict[str, Any]) -> str:
    return str(result["machine"].get("gpu") or result["machine"]["cpu"])


def _where(result: dict[str, Any]) -> str:
    """The device, and of a CPU how many threads were used."""
    if "gpu" in result["machine"]:
        return _device(result)
    threads = result["machine"]["threads"]
    return f"{_device(result)}, {threads} {'thread' if threads == 1 else 'threads'}"


def machine_section(result: dict[str, Any]) -> list[str]:
    """Machine, versions, commit and limits."""
    machine, limits = result["machine"], result["roofline"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rates = ", ".join(
        f"{name.removesuffix('_ops_per_s')} {rate / 1e12:.3g} T operations/s"
        for name, rate in limits.items()
        if name.endswith("_ops_per_s")
    )
    return [
        f"## {_where(result)}",
        f"Commit {result['commit']}, {result['date']}; {machine['system']}; {versions}. "
        f"Copy {limits['copy_bytes_per_s'] / 1e9:.3g} GB/s; {rates}.",
    ]


def loss_section(result: dict[str, Any], loss: str) -> list[str]:
    """One table: a line for each case and provider."""
    rows = [row for row in result["rows"] if row["loss"] == loss and loss != "step"]
    if not rows:
        return []
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for row in rows:
        first = f"{row['title']}, {sizes(row)}, {row['dtype']}"
        for name, r in row["providers"].items():
            if "both" in r:
                lines.append(f"| {' | '.join([first, *cells(row, name, r)])} |")
                first = ""
    return [f"### {loss}", "\n".join(lines)]


def step_section(result: dict[str, Any]) -> list[str]:
    """Whole steps: time relative to cross-entropy with the teacher's forward pass."""
    parts = []
    for row in (row for row in result["rows"] if row["loss"] == "step"):
        lines = [
            "| method | ms a step | of the plain step's time | memory MiB |",
            "|---|---:|---:|---:|",
        ]
        for name, r in row["providers"].items():
            if "both" in r:
                label = "cross-entropy, teacher forward" if name == REFERENCE else name
                ratio = "-"
                if "ratio" in r:
                    ratio = f"{r['ratio']['median']:.2f}× ± {width(r['ratio'])}"
                lines.append(
                    f"| {label} | {milliseconds(r['both']['median'])} | {ratio} | {mebibytes(r)} |"
                )
        parts += [
            "### A whole training step",
            f"{sizes(row)}, {row['dtype']}; forward, backward and AdamW. LRCBERT's perturbation is "
            "a second pass of the student by its definition.",
            "\n".join(lines),
        ]
    return parts


def words_section(result: dict[str, Any]) -> list[str]:
    """Peak memory of a step of two language models, and their heads beside what else there is."""
    if "words" not in result:
        return []
    words = result["words"]
    peaks, sizes = words["peak_mib"], words["sizes"]
    lines = ["| a step of | peak MiB | of the models' |", "|---|---:|---:|"]
    lines += [
        f"| {MODES[mode]} | {peak} | {peak / peaks['none']:.2f}× |" for mode, peak in peaks.items()
    ]
    named = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return [
        "### Memory of a step of two language models",
        f"Decoders of Qwen2's form in float32, {named} (hidden sizes, tokens in 2 rows); the whole "
        f"process's peak, Python and torch included. Commit {words['commit']}, {words['date']}.",
        "\n".join(lines),
        *heads_section(words),
    ]


def heads_section(words: dict[str, Any]) -> list[str]:
    """Milliseconds, memory and error of every loss from a head: a line a size, a column a peer."""
    parts = []
    for title in dict.fromkeys(row["title"] for row in words.get("rows", ())):
        rows = [row for row in words["rows"] if row["title"] == title]
        names = list(dict.fromkeys(
            name for row in rows for name, r in row["providers"].items() if "both" in r
        ))  # fmt: skip
        shown = ("plain torch" if name == REFERENCE else name for name in names)
        lines = [
            f"| rows, V, dtype | {' | '.join(shown)} |",
            "|---|" + "---|" * len(names),
        ]
        for row in rows:
            size = f"{row['sizes']['rows']}, {row['sizes']['V']}, {dtype(row)}"
            cells = (_of_head(row["providers"].get(name, {})) for name in names)
            lines.append(f"| {size} | {' | '.join(cells)} |")
        parts += [f"#### {title[0].upper()}{title[1:]}", "\n".join(lines)]
    if parts:
        parts.insert(
            0,
            "Losses and their gradients, 256 features a side: milliseconds of forward and "
            "backward, peak MiB beyond the inputs, and in brackets the error against float64. "
            f"{words['machine']['threads']} threads, the median of at least 3 interleaved rounds; "
            "plain torch multiplies in the inputs' dtype, and so rounds logits in bf16, as do its "
            "own function and the peers; fastkd's leave the product in float32.",
        )
    return parts


def _of_head(r: dict[str, Any]) -> str:
    if "both" not in r:
        return "refused: wrong" if "refused" in r else "-"
    return f"{milliseconds(r['both']['median'])} ms, {mebibytes(r)} ({error(r)})"


def growth_section(result: dict[str, Any]) -> list[str]:
    """How time grows along each sweep: the exponent between its smallest and largest size."""
    lines = []
    for (loss, title, sweep), rows in families(result["rows"]).items():
        first, last = rows[0], rows[-1]
        a, b = swept(first), swept(last)
        exponents = [
            f"{name} {math.log(later['both']['median'] / r['both']['median'], b / a):.2f}"
            for name, r in first["providers"].items()
            if "both" in r and "both" in (later := last["providers"].get(name, {}))
        ]
        if b > a and exponents:
            lines.append(
                f"- {loss}: {title}, {sweep} from {a} to {b}, time ∝ {sweep}^x with x = "
                f"{', '.join(exponents)}"
            )
    return ["### Growth", "\n".join(lines)] if lines else []


def skipped_section(result: dict[str, Any]) -> list[str]:
    """What did not run there, and why; the same reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, r in row["providers"].items():
            if "both" not in r:
                reason = r.get("refused") or r["skipped"]
                reasons.setdefault((name, reason), []).append(f"{row['loss']}: {row['title']}")
    lines = []
    for (name, reason), where in reasons.items():
        places = "everywhere" if len(where) > 12 else "; ".join(dict.fromkeys(where))
        lines.append(f"- {name}: {reason} ({places})")
    return ["### Did not run here", "\n".join(lines)] if lines else []


def unmeasured_section(results: list[dict[str, Any]]) -> list[str]:
    """Cases of the suite that no result file holds; those for GPUs have to come from one."""
    rows = [(r, row) for r in results for row in (*r["rows"], *r.get("words", {}).get("rows", ()))]
    measured = {("gpu" in r["machine"], row["key"]) for r, row in rows}
    anywhere = {key for _, key in measured}
    missing: dict[str, list[str]] = {}
    for case in suite.every_case():
        on_gpu = case.set in suite.CUDA_SETS
        if (case.key not in anywhere) if not on_gpu else ((True, case.key) not in measured):
            missing.setdefault(case.set, []).append(case.key)
    if not missing:
        return []
    parts = ["## Not measured yet", "No result file holds these cases."]
    if not any("gpu" in result["machine"] for result in results):
        parts.append("No GPU was at hand: every figure of the Triton backend is among them.")
    for name, keys in missing.items():
        cells = "\n".join(f"- {key.replace('/', ', ')}" for key in keys)
        head = f"<summary>set {name}: {len(keys)} cases</summary>"
        parts.append(f"<details>{head}\n\n{cells}\n\n</details>")
    return parts


def readme_table(results: list[dict[str, Any]]) -> str:
    """The headline rows of every machine; of a CPU, with the most threads."""
    parts = []
    most: dict[str, dict[str, Any]] = {}
    for result in results:
        best = most.setdefault(_device(result), result)
        if result["machine"]["threads"] > best["machine"]["threads"]:
            most[_device(result)] = result
    for result in most.values():
        versions = result["versions"]
        lines = [
            "| loss | sizes | reference ms | fastkd ms | vs reference | vs torch.compile "
            "| memory, of the reference's |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for row in result["rows"]:
            if row.get("headline") and row["loss"] != "step":
                lines.append(headline(row))
        parts += [
            f"{_where(result)}, torch {versions['torch']}, commit {result['commit']}, "
            f"{result['date']}:",
            "\n".join(lines),
            *(_steps_sentence(row) for row in result["rows"] if row["loss"] == "step"),
        ]
    if not any("gpu" in result["machine"] for result in results):
        parts.append("GPU figures: not measured yet (`make gpu-check` makes them).")
    return "\n\n".join(parts)


def headline(row: dict[str, Any]) -> str:
    """One line of the README's table: the fastest of fastkd's backends."""
    providers = row["providers"]
    ours = [providers[n] for n in FASTKD if "both" in providers.get(n, {})]
    best: dict[str, Any] = min(ours, key=lambda r: r["both"]["median"], default={})
    reference = providers[REFERENCE]
    compiled = providers.get("torch.compile", {})
    against = NOT_MEASURED
    if "ratio" in compiled and "ratio" in best:
        # Both against the reference of the same rounds: fastkd has more passes.
        against = times(compiled["ratio"]["median"] / best["ratio"]["median"])
        against += f" ± {width(compiled['ratio'])}"
    against_reference = share = NOT_MEASURED
    if "ratio" in best:
        against_reference = f"{speed_up(best)} ± {width(best['ratio'])}"
    with_memory: dict[str, Any] = next((r for r in ours if "peak_bytes" in r), {})
    if with_memory and reference.get("peak_bytes"):
        share = f"{with_memory['peak_bytes'] / reference['peak_bytes']:.0%}"
    return (
        f"| {row['loss']}: {row['title']} | {sizes(row)}, {dtype(row)} | {_median(reference)} "
        f"| {_median(best)} | {against_reference} "
        f"| {against} | {share} |"
    )


def fill_readme(text: str, table: str) -> str:
    """``text`` with everything between the markers replaced by ``table``."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"README.md needs the two lines {START} and {END}, in this order")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{table}\n{END}{after}"


def _median(result: dict[str, Any]) -> str:
    return milliseconds(result["both"]["median"]) if "both" in result else NOT_MEASURED


def _steps_sentence(row: dict[str, Any]) -> str:
    steps = (
        f"{name} {r['ratio']['median']:.2f}×"
        for name, r in row["providers"].items()
        if "ratio" in r and name != REFERENCE
    )
    return (
        f"A whole training step ({sizes(row)}, {row['dtype']}) against cross-entropy with the "
        f"teacher's forward pass: {', '.join(steps)}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or fill the README."""
    parser = argparse.ArgumentParser(prog="python -m fastkd.bench.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--readme", action="store_true", help="fill README.md instead")
    options = parser.parse_args(arguments)
    results = load(options.results)
    if not results:
        print(f"no result file in {options.results}; run make bench first", file=sys.stderr)
        return 2
    if options.readme:
        path = ROOT / "README.md"
        try:
            path.write_text(fill_readme(path.read_text(), readme_table(results)))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(path)
        return 0
    from .plots import draw

    folder = options.out.parent
    pictures = {result["machine"]["name"]: draw(result, folder / "pictures") for result in results}
    folder.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(results, pictures, folder))
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
