"""A study within a number of hours: successive halving over the values of its lists.

The candidates of a variant and a task are the combinations of its lists. A plain rung, no search
library: each candidate runs with the first seed for a fraction of its steps, the best quarter goes
on with four times as many, and the last one runs whole with every seed. If that takes too long,
fewer candidates are drawn, then fewer seeds, then fewer steps.
"""

import dataclasses
import math
import random
from typing import Any

from fastkd.study.grid import Cell, Grid
from fastkd.study.grid_report import score_of
from fastkd.study.grid_runs import GridRuns
from fastkd.train.errors import RunFailed

QUARTER = 4
#: Variant and task of a run.
Arm = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Search:
    """Candidates of each arm at most, seeds of the last run, and the fraction of its steps."""

    candidates: int
    seeds: int
    fraction: float = 1.0

    def rungs(self, candidates: int) -> list[tuple[int, float]]:
        """Candidates and fraction of their steps of each rung before the last run."""
        number = min(candidates, self.candidates)
        many = math.ceil(math.log(number, QUARTER))
        return [
            (math.ceil(number / QUARTER**i), self.fraction / QUARTER ** (many - i))
            for i in range(many)
        ]

    def cost(self, candidates: int, seconds: float) -> float:
        """Seconds of an arm whose whole run takes ``seconds``."""
        rungs = sum(number * fraction for number, fraction in self.rungs(candidates))
        return seconds * (rungs + self.seeds * self.fraction)


def arms_of(grid: Grid) -> dict[Arm, list[Cell]]:
    """Candidates of each variant and task: its runs with the first seed."""
    found: dict[Arm, list[Cell]] = {}
    for cell in grid.cells:
        if cell.seed == grid.seeds[0]:
            found.setdefault((cell.variant, cell.task), []).append(cell)
    return found


def plan(grid: Grid, seconds: dict[Arm, float], limit: float) -> Search | None:
    """The widest search within ``limit`` seconds; None if all runs fit."""
    arms = arms_of(grid)
    if len(grid.seeds) * sum(seconds[arm] * len(cells) for arm, cells in arms.items()) <= limit:
        return None
    most = max(map(len, arms.values()))
    tries = [Search(-(-most // QUARTER**i), len(grid.seeds)) for i in range(16)]
    tries += [Search(1, seeds) for seeds in range(len(grid.seeds) - 1, 0, -1)]
    for search in tries:
        if sum(search.cost(len(cells), seconds[arm]) for arm, cells in arms.items()) <= limit:
            return search
    return Search(1, 1, limit / sum(seconds.values()))


def searched(runs: GridRuns, hours: float, jobs: int) -> GridRuns:
    """The runs that fit into ``hours`` after a search; their grid notes what was searched."""
    grid, say = runs.grid, runs.display.say
    arms = arms_of(grid)
    say(f"--budget {hours:g}: timing a step of {len(arms)} arms")
    tuned = (cell for cell in grid.cells if cell.options.get("finetune_teacher"))
    each_teacher = {(cell.task, cell.options["teacher"]): cell for cell in tuned}
    teachers = sum(map(runs.teacher_seconds, each_teacher.values()))
    steps = {arm: runs.steps(cells[0]) for arm, cells in arms.items()}
    seconds = {arm: count * each for arm, (count, each) in steps.items()}
    whole = len(grid.seeds) * sum(seconds[arm] * len(cells) for arm, cells in arms.items())
    search = plan(grid, seconds, max(0.0, hours * 3600 * jobs - teachers))
    begin = f"all {len(grid.cells)} runs take about {_hours(whole / jobs)} hours"
    begin += f", and their teachers {_hours(teachers / jobs)}" * (teachers > 0)
    if search is None:
        say(begin)
        return runs
    costs = {arm: search.cost(len(cells), seconds[arm]) for arm, cells in arms.items()}
    say(
        f"{begin}; these {_hours(sum(costs.values()) / jobs)}: at most {search.candidates} values "
        f"of each arm by successive halving, then {search.seeds} seed{'s' * (search.seeds > 1)}"
        + (f" with {search.fraction:.0%} of the steps" if search.fraction < 1 else "")
    )
    draw, left = random.Random(0), {}
    for arm, cells in arms.items():
        others = draw.sample(cells[1:], min(len(cells), search.candidates) - 1)
        left[arm] = [cells[0], *others]
    most = max(len(search.rungs(len(cells))) for cells in arms.values())
    for number in range(most):
        rung = {}
        for arm, cells in left.items():
            rungs = search.rungs(len(arms[arm]))
            if number < len(rungs):
                part = rungs[number][1]
                rung[arm] = [(cell, _short(cell, steps[arm][0], part)) for cell in cells]
        new = tuple(new for pairs in rung.values() for _, new in pairs)
        short = GridRuns(dataclasses.replace(grid, cells=new), runs.out, runs.display)
        if not short.train(jobs):
            raise RunFailed("a process died; the same command trains the runs that it left")
        for arm, pairs in rung.items():
            pairs.sort(key=lambda pair: _quality(short.result(pair[1])), reverse=True)
            left[arm] = [cell for cell, _ in pairs[: -(-len(pairs) // QUARTER)]]
    chosen = {arm: cells[0] for arm, cells in left.items()}
    seeds, final = grid.seeds[: search.seeds], []
    for cell in grid.cells:
        arm = cell.variant, cell.task
        if cell.values == chosen[arm].values and cell.seed in seeds:
            final.append(_short(cell, steps[arm][0], search.fraction))
    notes = tuple(
        f"{variant} on {task}: {min(len(cells), search.candidates)} of {len(cells)} values "
        f"searched{_values(chosen[variant, task])}."
        for (variant, task), cells in arms.items()
        if len(cells) > 1
    )
    study = dataclasses.replace(grid, cells=tuple(final), seeds=seeds, notes=notes)
    return GridRuns(study, runs.out, runs.display)


def _short(cell: Cell, steps: int, fraction: float) -> Cell:
    """The run with a fraction of its steps."""
    if fraction == 1:
        return cell
    count = max(1, round(steps * fraction))
    return dataclasses.replace(cell, options={**cell.options, "training_steps": count})


def _quality(result: dict[str, Any] | None) -> float:
    return -math.inf if result is None or "failed" in result else score_of(result)


def _values(cell: Cell) -> str:
    values = ", ".join(f"{k.removeprefix('--set ')}={v}" for k, v in cell.values.items())
    return f", best {values}" if values else ""


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2g}"
