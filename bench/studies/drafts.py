"""Draft heads for speculative decoding: which divergence, and whether later steps weigh less.

The plan is in docs/studies/drafts.md and was committed before the runs.

`python -m bench.studies.drafts` trains the missing draft heads of examples/draft_model.py, writes
their results to docs/studies/drafts/runs.json, and the page's tables and picture.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.draft_model import (
    GAMMA,
    DraftHead,
    accepted_tokens,
    source_text,
    train_decoder,
    train_draft,
)
from fastkd import Divergence
from fastkd._core.machine import describe
from fastkd.analysis.pictures import new_figure
from fastkd.study.statistics import holm, paired_difference, verdict

PAGE = Path(__file__).parents[2] / "docs/studies/drafts.md"
DIVERGENCES = {
    "forward KL": "forward_kl",
    "reverse KL": "reverse_kl",
    "TV": "total_variation",
    "−log α": "negative_log_acceptance",
    "LK": "lk",
}
BASE, ADVISED = "forward KL", "LK"
SEEDS = range(8)
MEASUREMENTS = 4  # calls of accepted_tokens for one draft head, which need less memory than one


class Sizes(NamedTuple):
    decoder_steps: int = 800
    draft_steps: int = 250
    rows: int = 8
    contexts: int = 256  # of one of the MEASUREMENTS


PLANNED = Sizes()


def arms() -> dict[str, tuple[str, float]]:
    """Divergence and γ of each draft head, by name."""
    return {
        named(name, gamma): (divergence, gamma)
        for gamma in (1.0, GAMMA)
        for name, divergence in DIVERGENCES.items()
    }


def named(name: str, gamma: float) -> str:
    return name if gamma == 1.0 else f"{name}, γ = {gamma}"


def key(arm: str, seed: int) -> str:
    return f"{arm}; seed {seed}"


def train(file: Path, seeds: Sequence[int] = SEEDS, sizes: Sizes = PLANNED) -> dict[str, Any]:
    """All runs; those that ``file`` lacks are made, and written to it one by one."""
    found = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    found.setdefault("where", describe(torch.device("cpu")))
    text = source_text()
    learnt, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    for seed in seeds:
        missing = [arm for arm in ("untrained", *arms()) if key(arm, seed) not in found["runs"]]
        if not missing:
            continue
        torch.manual_seed(seed)
        decoder = train_decoder(learnt, sizes.decoder_steps, sizes.rows)
        for arm in missing:
            torch.manual_seed(seed)  # the same first weights and rows for every arm
            began = time.process_time()
            if arm == "untrained":
                draft = DraftHead(decoder.config.hidden_size)
            else:
                divergence, gamma = arms()[arm]
                draft = train_draft(
                    decoder, learnt, sizes.draft_steps, Divergence(divergence), gamma, sizes.rows,
                    state_weight=0.0,
                )  # fmt: skip
            seconds = time.process_time() - began
            torch.manual_seed(seed)  # the same contexts and draws
            counts = [
                accepted_tokens(decoder, draft, held_out, sizes.contexts)
                for _ in range(MEASUREMENTS)
            ]
            accepted = torch.cat(counts).float()
            error = accepted.std().item() / len(accepted) ** 0.5
            run = {"accepted": accepted.mean().item(), "error": error, "seconds": seconds}
            found["runs"][key(arm, seed)] = run
            part = file.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            part.replace(file)
            print(key(arm, seed), run, flush=True)
    return found


def scores(found: dict[str, Any], seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Mean accepted tokens of each arm, (seeds,)."""
    runs = found["runs"]
    return {
        arm: np.array([runs[key(arm, seed)]["accepted"] for seed in seeds])
        for arm in ("untrained", *arms())
    }


def tables(found: dict[str, Any], seeds: Sequence[int] = SEEDS) -> str:
    """Means, and the comparisons of the plan: divergences, then weights."""
    where, by_arm = found["where"], scores(found, seeds)
    error = np.mean([run["error"] for run in found["runs"].values()])
    lines = [
        f"{where['machine']['cpu']}, one thread, torch {where['versions']['torch']}, transformers "
        f"{where['versions']['transformers']}, commit {where['commit']}. Untrained: "
        f"{by_arm['untrained'].mean():.3f}. Standard error of a run over its contexts: {error:.3f}."
    ]
    others = [name for name in DIVERGENCES if name not in (BASE, ADVISED)]
    groups = {
        f"− {BASE}": [(name, BASE) for name in DIVERGENCES if name != BASE],
        f"− {ADVISED}": [(name, ADVISED) for name in others],
        "− the same without weights": [(named(name, GAMMA), name) for name in DIVERGENCES],
    }
    cells = compared(by_arm, groups)
    for title, gamma, columns in (
        ("Without weights", 1.0, list(groups)[:2]),
        (f"Step s weighted {GAMMA}ˢ", GAMMA, list(groups)[2:]),
    ):
        heads = [part for c in columns for part in (c, "95%", "p (Holm)", "verdict")]
        lines += ["", f"**{title}**", ""]
        lines.append("| | " + " | ".join([f"accepted, mean ± sd of {len(seeds)} seeds", *heads]))
        lines[-1] += " |"
        lines.append("|---" + "|---:" * (1 + len(heads)) + "|")
        for name in DIVERGENCES:
            arm = named(name, gamma)
            mean = f"{by_arm[arm].mean():.3f} ± {by_arm[arm].std(ddof=1):.3f}"
            row = [part for c in columns for part in cells.get((c, arm), [""] * 4)]
            lines.append(f"| {arm} | " + " | ".join([mean, *row]) + " |")
    return "\n".join(lines)


def compared(
    by_arm: dict[str, np.ndarray], groups: dict[str, list[tuple[str, str]]]
) -> dict[tuple[str, str], list[str]]:
    """Difference, interval, corrected p and verdict by group and arm; Holm within a group."""
    cells = {}
    for title, pairs in groups.items():
        tests = [paired_difference((by_arm[arm] - by_arm[base]).tolist()) for arm, base in pairs]
        corrected = holm([test.p for test in tests])
        for (arm, _), test, p in zip(pairs, tests, corrected, strict=True):
            interval = f"[{test.low:+.3f}, {test.high:+.3f}]"
            found = [f"{test.mean:+.3f}", interval, f"{p:.2g}", verdict(test, p, None)]
            cells[title, arm] = found
    return cells


def draw(found: dict[str, Any], seeds: Sequence[int] = SEEDS) -> Any:
    """Picture of every run's accepted tokens less those of forward KL of its seed."""
    by_arm = scores(found, seeds)
    figure = new_figure(7, 3.6)
    ax = figure.subplots()
    for at, arm in enumerate(arms()):
        differences = by_arm[arm] - by_arm[BASE]
        ax.plot(differences, [at] * len(seeds), "o", color="tab:blue", alpha=0.4)
        test = paired_difference(differences.tolist())
        ax.plot([test.low, test.high], [at, at], color="black")
        ax.plot(test.mean, at, "|", color="black", markersize=12)
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set_yticks(range(len(arms())), list(arms()))
    ax.invert_yaxis()
    ax.set_xlabel(f"accepted tokens − {BASE}'s of the seed; mean and its 95% interval")
    return figure


def main() -> None:
    """Train what is missing, then write the picture, and the tables between the page's comments."""
    torch.set_num_threads(1)
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    found = train(folder / "runs.json")
    draw(found).savefig(folder / "accepted.png", dpi=130)
    marks = r"(?<=<!-- tables -->\n).*?(?=\n?<!-- end -->)"
    before, after = re.split(marks, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    PAGE.write_text(before + tables(found) + "\n" + after.lstrip("\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
