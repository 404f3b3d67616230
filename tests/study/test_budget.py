"""`fastkd study --budget`: what is searched within some hours."""

import pytest

from fastkd.study import budget, grid, grid_runs
from fastkd.study.budget import Search
from fastkd.study.grid import StudySettings
from fastkd.study.grid_runs import GridRuns, write_result
from fastkd.train.progress import Display
from tests.study.test_grid import FILE, replaced
from tests.support.tiny import run

CHANGES = {
    "[1, 2]": "1", "epochs = 4": "steps = 40", "finetune_teacher = 1\n": "",
    "[1e-4, 1e-3]": "[1e-4, 2e-4, 5e-4, 1e-3]", "[0.1, 1.0]": "[0.1, 0.2, 0.5, 1.0]",
}  # fmt: skip


@pytest.fixture
def path(tiny, tmp_path):
    """The file of test_grid.py with four values in each list."""
    for name in ("teacher", "train.tsv", "dev.tsv"):
        (tmp_path / name).symlink_to(tiny / name)
    path = tmp_path / "grid.toml"
    path.write_text(replaced(FILE, CHANGES))
    return path


@pytest.fixture
def study(path):
    return grid.read(StudySettings(spec=path))


@pytest.mark.parametrize(("limit", "expected"), [
    (1600, None),  # 2 seeds of 16 and 4 candidates, 40 seconds each
    (1599, Search(16, 2)),  # a sixteenth of 16, a quarter of 4, then 2 seeds; labels: of 4
    (279, Search(4, 2)),
    (239, Search(1, 2)),
    (159, Search(1, 1)),
    (40, Search(1, 1, 0.5)),
])  # fmt: skip
def test_the_widest_search_that_fits(study, limit, expected):
    arms = budget.arms_of(study)
    assert [len(cells) for cells in arms.values()] == [4, 16]
    seconds = dict.fromkeys(arms, 40.0)
    assert budget.plan(study, seconds, limit) == expected
    assert Search(16, 2).rungs(16) == [(16, 1 / 16), (4, 1 / 4)]
    assert Search(16, 2).cost(16, 40.0) + Search(16, 2).cost(4, 40.0) == 280


def test_the_best_quarter_goes_on(study, tmp_path, monkeypatch):
    """Scores rise with alpha and learning rate, and with the steps."""
    trained, said = [], []

    def train(self, jobs):
        (self.out / "runs").mkdir(parents=True, exist_ok=True)
        trained.append([cell.options.get("training_steps") for cell in self.grid.cells])
        for cell in self.grid.cells:
            score = cell.options["learning_rate"] + cell.options["options"].get("alpha", 0)
            result = {"scores": {"accuracy": score}, "lower_is_better": []}
            write_result(self.path(cell), result)
        return True

    monkeypatch.setattr(GridRuns, "train", train)
    monkeypatch.setattr(GridRuns, "steps", lambda self, cell: (40, 1.0))
    display = Display()
    display.say = said.append
    found = budget.searched(GridRuns(study, tmp_path, display), 1500 / 3600, 1).grid
    assert trained == [[10] * 4 + [2] * 16, [10] * 4]
    assert [(c.variant, c.seed, c.options["training_steps"]) for c in found.cells] == [
        ("labels", 0, 40), ("labels", 1, 40), ("fcd", 0, 40), ("fcd", 1, 40)
    ]  # fmt: skip
    assert found.cells[-1].values == {"learning_rate": 1e-3, "--set alpha": 1.0}
    assert found.notes[1] == (
        "fcd on own: 16 of 16 values searched, best learning_rate=0.001, alpha=1.0."
    )
    assert said[1].startswith("all 40 runs take about 0.44 hours; these 0.078: at most 16 values")


def test_the_first_values_and_a_small_budget(path, tmp_path, monkeypatch):
    monkeypatch.setattr(grid_runs, "TIMED", (1, 2))
    first = grid.read(StudySettings(spec=path, grid="first"))
    assert len(first.cells) == 4 and first.cells[-1].options["options"] == {"alpha": 0.1}
    small = {"budget": 1e-15, "grid": "first", "methods": "labels"}
    output = run("study", path, out=tmp_path / "out", **small)
    assert "then 1 seed with 0% of the steps" in output
    assert len(list((tmp_path / "out" / "runs").glob("*.json"))) == 1
    assert "labels on own" not in output  # nothing was searched
