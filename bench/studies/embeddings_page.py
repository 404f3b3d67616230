"""Writes the tables of docs/studies/embeddings.md from the runs of `bench.studies.embeddings`.

`python -m bench.studies.embeddings_page`, at any time.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from bench.studies.embeddings import BATCHES, LARGE, MAIN, SEEDS, STUDENTS, Variant, key
from fastkd.study.statistics import holm, paired_difference, verdict

PAGE = Path(__file__).parents[2] / "docs/studies/embeddings.md"


def tables(found: dict[str, Any]) -> str:
    """Tables of means and comparisons, over seeds for which all variants of a table have runs."""
    where, planned = found["where"], len(MAIN + BATCHES) * len(SEEDS)
    lines = [
        f"{len(found['runs'])} of {planned} runs are finished. Teacher, pairs: "
        f"{found['teacher']['pairs']:.3f}. {where['machine']['cpu']}, one thread, torch "
        f"{where['versions']['torch']}, commit {where['commit']}."
    ]
    for student in STUDENTS:
        variants = [variant for variant in MAIN if variant.student == student]
        names = {v: v.loss or "cut alone" for v in variants}
        compared = {v: (v, variants[1]) for v in variants[2:]}
        lines += ["", f"**{student.capitalize()}**", "", *table(found, names, compared, "− MSE")]
    names = {v: f"{v.loss}, {v.steps} × {v.texts}, among {v.compared}" for v in BATCHES}
    most = {v.loss: v for v in BATCHES if v.compared == LARGE}
    compared = {v: (most[v.loss], v) for v in BATCHES if v.compared != LARGE}
    lines += ["", "**2 layers: loss, steps × texts, how many are compared with each other**", ""]
    return "\n".join(lines + table(found, names, compared, "512 − this"))


def table(
    found: dict[str, Any],
    names: dict[Variant, str],
    compared: dict[Variant, tuple[Variant, Variant]],
    what: str,
) -> list[str]:
    """One line for each variant; until some seed is complete, from the runs that are finished."""
    runs = found["runs"]
    seeds = [seed for seed in SEEDS if all(key(v, seed) in runs for v in names)]
    made = {v: [runs[key(v, s)] for s in seeds or SEEDS if key(v, s) in runs] for v in names}
    tests = {}
    for variant, pair in compared.items():
        one, other = ([run["agreement"] for run in made[v]] for v in pair)
        if seeds:
            tests[variant] = paired_difference(np.subtract(one, other).tolist())
    p = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    titles = ["", "seeds", "agreement", "neighbours@10", "pairs", "ms a step", what, "95%"]
    lines = ["| " + " | ".join([*titles, "p (Holm)", "verdict"]) + " |", "|---" * 10 + "|"]
    for variant, name in names.items():
        if not (rows := made[variant]):
            continue
        mean = {score: np.mean([row[score] for row in rows]) for score in rows[0]}
        milliseconds = 1000 * np.median([row["seconds"] for row in rows])
        cells = [name, len(rows), f"{mean['agreement']:.4f}", f"{mean['neighbours']:.3f}"]
        cells += [f"{mean['pairs']:.3f}", f"{milliseconds:.0f}"]
        if test := tests.get(variant):
            cells += [f"{test.mean:+.4f}", "", "", verdict(test, p[variant], None)]
            if len(seeds) > 1:
                cells[-3:-1] = [f"[{test.low:+.4f}, {test.high:+.4f}]", f"{p[variant]:.2g}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |" * (11 - len(cells)))
    return lines


def main() -> None:
    """Write the tables into the page, between its two comments."""
    found = json.loads((PAGE.with_suffix("") / "runs.json").read_text())
    marks = r"(?<=<!-- tables -->\n).*?(?=\n<!-- end -->)"
    before, after = re.split(marks, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(before + tables(found) + after)


if __name__ == "__main__":
    main()
