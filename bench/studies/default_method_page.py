"""Ranks, tables and picture of docs/studies/default_method.md.

`python -m bench.studies.default_method_page runs/default` collects the runs of both studies and of
`bench.studies.default_method` into docs/studies/default_method/runs.csv, then writes the page's
tables and its picture; without a folder it writes them from runs.csv alone.
"""

import argparse
import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from fastkd.analysis.pictures import new_figure
from fastkd.study.statistics import holm, paired_difference, verdict
from fastkd.train.saving import csv_text

PAGE = Path(__file__).parents[2] / "docs/studies/default_method.md"
FOLDER = PAGE.with_suffix("")
METRICS = {
    "classes": "accuracy",
    "classes_100": "accuracy",
    "regression": "pearson",
    "regression_100": "pearson",
    "decoder": "perplexity",
    "embeddings": "agreement",
}
LOWER_IS_BETTER = {"decoder"}
BASE, TEACHER = "labels", "teacher"
#: Candidates, with the variant that has their runs for embeddings, where a model has no head.
CANDIDATES = {
    "soft_targets": None,
    "fcd": "fcd",
    "FCD + soft targets": "fcd",
    "FCD, samples 0.1, + soft targets": "FCD, samples 0.1, + soft targets",
    "lrc_bert": "lrc_bert",
    "LRC-BERT + soft targets": "lrc_bert",
    "mc3kd": "mc3kd",
    "MC3KD + soft targets": "mc3kd",
    "lrkd": "lrkd",
    "LRKD + soft targets": "lrkd",
    "tinybert": "tinybert",
    "TinyBERT + soft targets": "tinybert",
}
#: Ranked, but needs attention maps, which not every model has.
NEVER = ("tinybert", "TinyBERT + soft targets")

#: Scores by setting, variant and seed.
Scores = Mapping[str, Mapping[str, Mapping[int, float]]]


def collected(runs: Path) -> Iterator[dict[str, Any]]:
    """Rows of runs.csv: every run, and each teacher's score with an empty seed."""
    for study in ("encoder", "decoder"):
        for manifest in sorted((runs / study / "teachers").glob("*/fastkd.json")):
            task = manifest.parent.name.rpartition("-")[0]
            score = json.loads(manifest.read_text())["scores"][METRICS[task]]
            yield _row(task, TEACHER, "", score, "")
        with (runs / study / "runs.csv").open(encoding="utf-8") as file:
            for run in csv.DictReader(file):
                score = run[METRICS[run["task"]]]
                yield _row(run["task"], run["variant"], run["seed"], score, run["seconds"])
    for run in json.loads((runs / "embeddings.json").read_text())["runs"]:
        yield _row("embeddings", run["variant"], run["seed"], run["agreement"], run["seconds"])


def _row(task: str, variant: str, seed: Any, score: Any, seconds: Any) -> dict[str, Any]:
    metric = METRICS[task]
    found = {"task": task, "variant": variant, "seed": seed, "metric": metric, "score": score}
    return {**found, "seconds": seconds}


def read() -> tuple[Scores, dict[str, float]]:
    """Scores of candidates and baseline, and scores of the teachers."""
    scores: dict[str, dict[str, dict[int, float]]] = {task: {} for task in METRICS}
    teachers = {}
    with (FOLDER / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["variant"] == TEACHER:
                teachers[row["task"]] = float(row["score"])
            else:
                found = scores[row["task"]].setdefault(row["variant"], {})
                found[int(row["seed"])] = float(row["score"])
    own = scores["embeddings"]
    scores["embeddings"] = {name: own[of] for name, of in CANDIDATES.items() if of}
    return scores, teachers


def ranks(scores: Scores, draws: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Ranks of the candidates in each setting, (settings,): 1 is the best mean over these seeds.

    Equal means share the mean of their ranks. A candidate without runs is last.
    """
    columns = []
    for task in METRICS:
        sign = 1 if task in LOWER_IS_BETTER else -1
        means = [
            sign * np.mean([runs[seed] for seed in draws[task]])
            if (runs := scores[task].get(name))
            else np.inf
            for name in CANDIDATES
        ]
        columns.append(rankdata(means))
    return dict(zip(CANDIDATES, np.column_stack(columns), strict=True))


def order(ranked: Mapping[str, np.ndarray]) -> list[str]:
    """Candidates by worst rank, then by mean rank."""
    return sorted(ranked, key=lambda name: (ranked[name].max(), ranked[name].mean()))


def firsts(scores: Scores, seeds: Mapping[str, list[int]]) -> dict[str, float]:
    """Fraction of all samples of seeds, with replacement, in which a candidate ranks first."""
    counts = dict.fromkeys(CANDIDATES, 0)
    most = max(map(len, seeds.values()))
    draws = list(itertools.product(range(most), repeat=most))
    for draw in draws:
        chosen = {task: [own[i % len(own)] for i in draw] for task, own in seeds.items()}
        counts[order(ranks(scores, chosen))[0]] += 1
    return {name: count / len(draws) for name, count in counts.items()}


def tables(scores: Scores, teachers: Mapping[str, float]) -> str:
    """Table of ranks, and for each setting scores with differences to baseline and winner."""
    seeds = {task: sorted(next(iter(runs.values()))) for task, runs in scores.items()}
    ranked = ranks(scores, seeds)
    first, won = order(ranked), firsts(scores, seeds)
    lines = ["## Ranks", "", f"| | worst | mean | first in draws | {' | '.join(METRICS)} |"]
    lines.append("|---" + "|---:" * (3 + len(METRICS)) + "|")
    for name in first:
        each = " | ".join(f"{rank:g}" for rank in ranked[name])
        worst, mean = ranked[name].max(), ranked[name].mean()
        lines.append(f"| {name} | {worst:g} | {mean:.1f} | {won[name]:.0%} | {each} |")
    winner = next(name for name in first if name not in NEVER)
    for task, metric in METRICS.items():
        less = " (lower is better)" if task in LOWER_IS_BETTER else ""
        about = f"{metric}{less}, seeds {', '.join(map(str, seeds[task]))}"
        about += f", teacher {teachers[task]:.4f}" if task in teachers else ""
        lines += ["", f"## {task}", "", about + ".", ""]
        lines += _table(scores[task], winner, len(seeds[task]))
    return "\n".join(lines)


def _table(runs: Mapping[str, Mapping[int, float]], winner: str, count: int) -> list[str]:
    against = {BASE: f"− {BASE}", winner: f"− {winner}"}
    against = {name: title for name, title in against.items() if name in runs}
    cells = {
        name: [f"{np.mean(list(x.values())):.4f} ± {np.std(list(x.values()), ddof=1):.4f}"]
        for name, x in runs.items()
    }
    for other in against:
        names = [name for name in runs if name not in (other, BASE)]
        tests = [
            paired_difference([runs[name][s] - runs[other][s] for s in runs[other]])
            for name in names
        ]
        corrected = holm([test.p for test in tests])
        compared = {
            name: [f"{t.mean:+.4f}", f"{p:.2g}", verdict(t, p, None)]
            for name, t, p in zip(names, tests, corrected, strict=True)
        }
        for name, row in cells.items():
            row += compared.get(name, ["", "", ""])
    titles = " | ".join(f"{title} | p (Holm) | verdict" for title in against.values())
    lines = [f"| | mean ± sd of {count} seeds | {titles} |", "|---" * (2 + 3 * len(against)) + "|"]
    return lines + [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]


def draw(scores: Scores) -> Any:
    """Picture of the mean scores by candidate and setting, coloured by rank."""
    seeds = {task: sorted(next(iter(runs.values()))) for task, runs in scores.items()}
    ranked = ranks(scores, seeds)
    names = order(ranked)
    figure = new_figure(9, 0.6 + 0.42 * len(names))
    ax = figure.subplots()
    table = np.array([ranked[name] for name in names])
    image = ax.imshow(table, cmap="RdYlGn_r", vmin=1, vmax=len(names), aspect="auto", alpha=0.75)
    for (row, column), rank in np.ndenumerate(table):
        runs = scores[list(METRICS)[column]].get(names[row])
        score = f"{np.mean(list(runs.values())):.3f}" if runs else "none"
        ax.text(column, row, f"{score}  (#{rank:g})", ha="center", va="center", fontsize=8)
    labels = [f"{name}   worst #{ranked[name].max():g}" for name in names]
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    titles = [
        f"{task}\n{metric}{' (lower is better)' if task in LOWER_IS_BETTER else ''}"
        for task, metric in METRICS.items()
    ]
    ax.set_xticks(range(len(titles)), titles, fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    figure.colorbar(image, ax=ax, label="rank among the candidates")
    return figure


def main() -> None:
    """Collect the runs, then write the picture, and the tables between the page's two comments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?")
    runs = parser.parse_args().runs
    FOLDER.mkdir(exist_ok=True)
    if runs is not None:
        (FOLDER / "runs.csv").write_text(csv_text(collected(runs)), encoding="utf-8")
    scores, teachers = read()
    draw(scores).savefig(FOLDER / "ranks.png", dpi=130)
    marks = r"(?<=<!-- tables -->\n).*?(?=\n<!-- end -->)"
    before, after = re.split(marks, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    PAGE.write_text(before + tables(scores, teachers) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
