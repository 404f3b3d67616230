"""Tables of docs/studies/method_by_task.md.

`python -m bench.studies.method_by_task_page runs` collects the runs of the study in this folder
into docs/studies/method_by_task/runs.csv, then writes the tables; without a folder it writes them
from runs.csv alone.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastkd.study.statistics import holm, paired_difference
from fastkd.train.saving import csv_text

PAGE = Path(__file__).parents[2] / "docs/studies/method_by_task.md"
RUNS = PAGE.with_suffix("") / "runs.csv"
DEFAULT_METHOD = PAGE.parent / "default_method/runs.csv"
#: Settings of each kind, and their metrics; those of the study of the default method last.
KINDS = {
    "classification": {
        "classes_sst2": "accuracy", "classes_sst2_100": "accuracy", "classes_docs": "accuracy",
        "classes": "accuracy", "classes_100": "accuracy",
    },
    "regression": {
        "regression_sst2": "pearson", "regression": "pearson", "regression_100": "pearson"
    },
    "token-classification": {"tokens_conll": "f1", "tokens_conll_100": "f1"},
    "embedding": {"docs": "agreement", "sst2": "agreement", "embeddings": "agreement"},
    "causal-lm": {
        "lm_sources": "perplexity", "lm_wikitext": "perplexity", "decoder": "perplexity"
    },
}  # fmt: skip
#: Settings of the trial of MC3KD's memory, by the batch size.
MEMORY = {16: ["classes_sst2", "classes_docs"], 32: ["classes_sst2_32", "classes_docs_32"]}
METRICS = {name: metric for kind in KINDS.values() for name, metric in kind.items()}
METRICS.update(dict.fromkeys(MEMORY[32], "accuracy"))
CANDIDATES = ("soft_targets", "fcd", "lrc_bert", "mc3kd", "lrkd")
BASE, WITHOUT = "soft_targets", "mc3kd_batch"
FIELDS = ("task", "variant", "seed", "metric", "score", "seconds", "commit")
LEVEL = 0.05

#: Score and seconds by setting, variant and seed.
Runs = Mapping[tuple[str, str, int], tuple[float, float]]


def collected(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of runs.csv."""
    for study in ("method_by_task", "method_by_task_decoder"):
        for path in sorted((folder / study / "runs").glob("*.json")):
            found = json.loads(path.read_text())
            about, measured = found["run"], found["measured"]
            task, name = about["task"], about["method"]
            if about["batch_size"] == 32:
                task += "_32"
            if task not in METRICS:  # left out by the plan's amendment
                continue
            # A decoder's batch holds more tokens than "auto" asks for: no memory, the same bits.
            memory = about["options"].get("memory") or task in KINDS["causal-lm"]
            if name == "mc3kd" and not memory:
                name = WITHOUT
            metric = METRICS[task]
            yield dict(
                task=task, variant=name, seed=about["seed"], metric=metric,
                score=found["scores"][metric], seconds=measured["seconds"],
                commit=measured["machine"]["commit"],
            )  # fmt: skip
    for run in json.loads((folder / "embeddings/embeddings.json").read_text()):
        yield {name: run.get(name, "agreement") for name in FIELDS}


def read() -> Runs:
    """The runs of runs.csv, and those of the study of the default method."""
    found = {}
    for path in (DEFAULT_METHOD, RUNS):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                task, name = row["task"], row["variant"]
                if name == "fcd" and path == DEFAULT_METHOD and task != "embeddings":
                    continue  # without soft targets
                name = "fcd" if name == "FCD + soft targets" else name
                if task in METRICS and row["seed"]:
                    where = float(row["score"]), float(row["seconds"])
                    found[task, name, int(row["seed"])] = where
    return found


def value(runs: Runs, task: str, variant: str, seed: int) -> float:
    """A score of which more is better: minus the logarithm of a perplexity."""
    score = runs[task, variant, seed][0]
    return -math.log(score) if METRICS[task] == "perplexity" else score


class Comparison:
    """The candidates of a kind, each compared with ``base``, and what the plan's rule takes.

    A seed of a setting counts if all candidates have a run of it.
    """

    def __init__(self, runs: Runs, tasks: Sequence[str], names: Sequence[str], base: str | None):
        self.runs, self.names = runs, list(names)
        seeds = sorted({seed for _, _, seed in runs})
        self.seeds = {
            t: found
            for t in tasks
            if (found := [s for s in seeds if all((t, n, s) in runs for n in names)])
        }
        pairs = [(task, seed) for task, found in self.seeds.items() for seed in found]
        if not pairs:
            return
        self.values = {n: np.array([value(runs, t, n, s) for t, s in pairs]) for n in self.names}
        self.seconds = {n: float(np.mean([runs[t, n, s][1] for t, s in pairs])) for n in self.names}
        best = max(self.names, key=lambda name: self.values[name].mean())
        self.base = base or best
        self.tests, self.p = self._compare(self.base)
        self.taken = self._taken()

    def _compare(self, base: str) -> tuple[dict[str, Any], dict[str, float]]:
        others = [name for name in self.names if name != base]
        found = {n: paired_difference(list(self.values[n] - self.values[base])) for n in others}
        return found, dict(zip(others, holm([x.p for x in found.values()]), strict=True))

    def _taken(self) -> str:
        above = self.names
        if self.base == BASE:
            above = [n for n, x in self.tests.items() if self.p[n] < LEVEL and x.mean > 0]
        if not above:
            return self.base
        best = max(above, key=lambda name: self.values[name].mean())
        _, p = self._compare(best)
        alike = [n for n in above if n == best or not p[n] < LEVEL]
        return min(alike, key=lambda name: self.seconds[name])

    def table(self) -> list[str]:
        """One line for each candidate: its mean scores, and the difference to the base."""
        lines = [
            f"| | {' | '.join(self.seeds)} | − {self.base} | 95% | p (Holm) | seconds |",
            "|---" + "|---:" * (len(self.seeds) + 4) + "|",
        ]
        for name in self.names:
            means = [
                f"{np.mean([self.runs[t, name, s][0] for s in seeds]):.4f}"
                for t, seeds in self.seeds.items()
            ]
            cells = ["", "", ""]
            if name in self.tests:
                x = self.tests[name]
                cells = [f"{x.mean:+.4f}", f"{x.low:+.4f} to {x.high:+.4f}", f"{self.p[name]:.2g}"]
            shown = f"**{name}**" if name == self.taken else name
            lines.append(f"| {' | '.join([shown, *means, *cells, f'{self.seconds[name]:.0f}'])} |")
        return lines


def tables(runs: Runs) -> str:
    """A table for each kind, and those of the memory's trial."""
    lines = []
    for kind, settings in KINDS.items():
        base = None if kind == "embedding" else BASE
        names = [name for name in CANDIDATES if base or name != BASE]
        found = Comparison(runs, list(settings), names, base)
        lines += [f"### {kind}", "", *_section(found, ", ".join(dict.fromkeys(settings.values())))]
    lines += ["### The memory of MC3KD", ""]
    for batch, tasks in MEMORY.items():
        trial = Comparison(runs, tasks, (BASE, "mc3kd", WITHOUT), WITHOUT)
        trial.taken = ""
        lines += _section(trial, f"Batches of {batch}, accuracy")
    return "\n".join(lines).rstrip()


def _section(found: Comparison, what: str) -> list[str]:
    if not found.seeds:
        return [f"{what}: no complete seed.", ""]
    seeds = ", ".join(f"{len(s)} of {task}" for task, s in found.seeds.items())
    return [f"{what}; seeds: {seeds}.", "", *found.table(), ""]


def main() -> None:
    """Collect the runs, if a folder is given, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", type=Path)
    given = parser.parse_args()
    if given.runs is not None:
        RUNS.parent.mkdir(exist_ok=True)
        RUNS.write_text(csv_text(collected(given.runs)), encoding="utf-8")
    begin, end = "<!-- tables -->\n", "<!-- end of tables -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{tables(read())}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
