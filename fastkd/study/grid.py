"""A study that is a grid of `fastkd distill` runs.

A file with a table ``grid`` is one. Its keys are options of `fastkd distill`, as in a file of
``--stages``, and those of `Grid`:

    teacher = ["bert-base-uncased", "roberta-base"]
    finetune_teacher = 3
    preset = "paper"
    seeds = 4
    select = "dev"
    [grid]
    learning_rate = [2e-5, 3e-5, 5e-5]
    [methods]
    labels = {}
    fcd = {alpha = [0.1, 1.0]}
    [tasks]
    glue = ["rte", "mrpc"]

A list at the top makes variants of the study. A list in ``grid``, or in an entry of ``methods``, is
searched: of its values the one with the best score on the evaluation rows counts, for each task and
seed (``select = "dev"``); ``"none"`` reports each. ``[tasks.NAME]`` has options of its own. An
entry of ``methods`` has hyper-parameters of its method beside options, and ``grid`` those of any
method. ``baseline`` is the first variant unless the file names another.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastkd.study.study_settings import StudySettings
from fastkd.train.errors import InputError, nearest
from fastkd.train.glue import GLUE_TASKS
from fastkd.train.models import method_class
from fastkd.train.options import (
    check_name,
    check_tables,
    check_types,
    file_keys,
    paths_of,
    read_options_file,
    resolve_path,
)
from fastkd.train.recipes import MAKES
from fastkd.train.settings import OF_ALL_STAGES, DistillOptions

PAPERS = Path(__file__).with_name("papers")
PAPER = "paper:"
#: Keys of a study beside the options of `fastkd distill`.
OWN = ("title", "baseline", "seeds", "select", "grid", "methods", "tasks", "paper", "why_not")
#: GLUE's own folders and files: training, evaluation and test rows that have labels.
FOLDERS = {
    "cola": ("CoLA", "dev.tsv", None),
    "sst2": ("SST-2", "dev.tsv", None),
    "mrpc": ("MRPC", "dev.tsv", None),
    "stsb": ("STS-B", "dev.tsv", None),
    "qqp": ("QQP", "dev.tsv", None),
    "mnli": ("MNLI", "dev_matched.tsv", "dev_mismatched.tsv"),
    "qnli": ("QNLI", "dev.tsv", None),
    "rte": ("RTE", "dev.tsv", None),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a variant, a task, a seed, the searched ``values``, and all options of the run."""

    variant: str
    task: str
    seed: int
    values: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Grid:
    """A study's cells and how they are reported."""

    title: str
    baseline: str
    seeds: tuple[int, ...]
    select: str
    cells: tuple[Cell, ...]
    #: A paper's table: title, columns, rows by variant.
    paper: Mapping[str, Any] | None = None

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in order."""
        return list(dict.fromkeys(cell.variant for cell in self.cells))

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(dict.fromkeys(cell.task for cell in self.cells))


def names_of_papers() -> list[str]:
    """Names of the packaged tables: ``fcd-1``."""
    return sorted(path.stem for path in PAPERS.glob("*.toml"))


def path_of(spec: Path | None) -> Path | None:
    """The file of a study; ``paper:NAME`` is a packaged one."""
    name = "" if spec is None else str(spec)
    if not name.startswith(PAPER):
        return spec
    known = names_of_papers()
    if (short := name.removeprefix(PAPER)) not in known:
        raise InputError(f"{name}: no such table; {nearest(short, known)}")
    return PAPERS / f"{short}.toml"


def is_grid(spec: Path | None) -> bool:
    """Whether the file of a study is a grid."""
    return spec is not None and "grid" in read_options_file(spec)


def read(settings: StudySettings, path: Path) -> Grid:
    """The grid of a file, with the command's options in place of the file's."""
    found = dict(read_options_file(path))
    if "why_not" in found:
        raise InputError(f"{path.stem}: {found['why_not']}")
    if settings.seeds is not None:
        found["seeds"] = settings.seeds
    tasks = _tasks(found.get("tasks", {}), settings, path.parent)
    return make(found, tasks, path.parent, settings)


def make(
    found: Mapping[str, Any], tasks: Mapping[str, dict], folder: Path, settings: StudySettings
) -> Grid:
    """The grid of a file's content; paths are relative to ``folder``."""
    select = found.get("select", "dev")
    if select not in ("dev", "none"):
        raise InputError(f'select must be "dev" or "none", got {select!r}')
    seeds = found.get("seeds", 4)
    seeds = tuple(range(seeds) if isinstance(seeds, int) else seeds)
    shared = _fields("the study", {k: v for k, v in found.items() if k not in OWN}, folder)
    common = {k: v for k, v in found["grid"].items() if k not in file_keys(DistillOptions)}
    searched = {k: v for k, v in found["grid"].items() if k not in common}
    searched = _fields("grid", searched, folder)
    unknown = set(common)
    if settings.teacher is not None:
        shared["teacher"] = settings.teacher
    if settings.student is not None:
        shared = {k: v for k, v in shared.items() if k not in MAKES}
    cells = []
    for entry, table in check_tables("methods", found.get("methods", {})).items():
        method, own, options = _entry(entry, table, folder)
        known = inspect.signature(method_class(method)).parameters
        options = {**{k: v for k, v in common.items() if k in known}, **options}
        unknown -= set(known)
        over = {**searched, **own, **{f"--set {k}": v for k, v in options.items()}}
        tops = {k: v for k, v in shared.items() if k not in over}
        for task, top in itertools.product(tasks, _products(tops)):
            at = {k: v for k, v in over.items() if k not in tasks[task]}
            name = _named(entry, {k: v for k, v in top.items() if _is_axis(k, tops[k])})
            for chosen in _products(at, first=settings.steps is not None):
                values = {k: v for k, v in chosen.items() if _is_axis(k, at[k])}
                variant = name if select == "dev" else _named(name, values)
                for seed in seeds:
                    run = {**top, **chosen, **tasks[task], "method": method, "seed": seed}
                    run["options"] = {
                        k.removeprefix("--set "): run.pop(k) for k in list(run) if k[0] == "-"
                    }
                    run = _overridden(run, settings)
                    cells.append(Cell(variant, task, seed, values, run))
    if unknown:
        raise InputError(f"grid: {min(unknown)!r} is no option, nor of a method of the study")
    if not cells:
        raise InputError("a study needs [methods] and [tasks]")
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    baseline = found.get("baseline", variants[0])
    if settings.teacher is not None or settings.student is not None:  # fewer axes than in the file
        parts = set(baseline.split(", "))
        baseline = next((v for v in variants if set(v.split(", ")) <= parts), baseline)
    grid = Grid(
        found.get("title", "Study"), baseline, seeds, select, tuple(cells), found.get("paper")
    )
    if grid.baseline not in grid.variants:
        raise InputError(f"baseline {grid.baseline!r}: {nearest(grid.baseline, grid.variants)}")
    return grid


def _overridden(run: dict[str, Any], settings: StudySettings) -> dict[str, Any]:
    """The options of a run with those of the command."""
    if settings.teacher is not None:
        run["teacher"] = settings.teacher
    if settings.student is not None:
        run = {k: v for k, v in run.items() if k not in MAKES} | {"student": settings.student}
    if settings.steps is not None:
        run["training_steps"] = settings.steps
        if run.get("finetune_teacher"):
            run["finetune_teacher"] = 1e-9  # one step
    if settings.device != "auto":
        run["device_name"] = settings.device
    return run


def _fields(where: str, table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Values of options by field, from the keys of a file; lists are checked by their entries."""
    keys = {k: n for k, n in file_keys(DistillOptions).items() if n not in OF_ALL_STAGES}
    found, paths = {}, paths_of(DistillOptions)
    for key, value in table.items():
        if key not in keys:
            raise InputError(f"{where} has no option {key!r}; {nearest(key, [*keys, *OWN])}")
        name = keys[key]
        many = value if isinstance(value, list) else [value]
        if name in paths:
            many = [resolve_path(f"{where}: {key}", each, folder) for each in many]
        for each in many:
            if name not in paths:
                check_types(f"{where}: ", {name: each}, DistillOptions)
        found[name] = many if isinstance(value, list) else many[0]
    return found


def _entry(
    entry: str, table: Mapping[str, Any], folder: Path
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Method, options and hyper-parameters of an entry of ``methods``."""
    method = table.get("method", entry)
    known = inspect.signature(method_class(method)).parameters
    rest = {k: v for k, v in table.items() if k != "method"}
    options = {k: v for k, v in rest.items() if k in known}
    own = {k: v for k, v in rest.items() if k not in known}
    return method, _fields(f"methods.{entry}", own, folder), options


def _tasks(found: Any, settings: StudySettings, folder: Path) -> dict[str, dict[str, Any]]:
    """Options of each data set, by name."""
    tables = dict(found)
    glue = tables.pop("glue", [])
    tasks = {name: {"task": name} for name in glue}
    for name in glue:
        if name not in GLUE_TASKS:
            raise InputError(f"tasks.glue: {name!r}; {nearest(name, GLUE_TASKS)}")
    for name, table in check_tables("tasks", tables).items():
        check_name(f"tasks.{name}", name)
        own = {"task": name} if name in GLUE_TASKS else {}
        tasks[name] = {**own, **_fields(f"tasks.{name}", table, folder)}
    if settings.tasks:
        named = {}
        for name, value in settings.tasks.items():
            if value is not True:
                train, _, evals = str(value).partition(",")
                own = {"task": name} if name in GLUE_TASKS else {}
                own |= {k: v for k, v in tasks.get(name, {}).items() if k in ("task", "max_length")}
                named[name] = {**own, "train": Path(train), "evals": Path(evals)}
            elif name in tasks:
                named[name] = tasks[name]
            else:
                raise InputError(f"--tasks {name}: {nearest(name, tasks)}")
        tasks = named
    if settings.glue is not None:
        for name, table in tasks.items():
            if table.get("task") in FOLDERS and "train" not in table:
                tasks[name] = {**table, **_official(settings.glue, table["task"])}
    return tasks


def _official(root: Path, task: str) -> dict[str, Any]:
    """Files of a task in GLUE's own download; mismatched MNLI is the test set."""
    folder, evals, test = FOLDERS[task]
    found = {"train": root / folder / "train.tsv", "evals": root / folder / evals}
    return found if test is None else {**found, "test": root / folder / test}


def _is_axis(name: str, value: Any) -> bool:
    """Whether a value is a list of alternatives; layer numbers are one value."""
    layers = name.removeprefix("--set ") == "layers" and isinstance(value, list)
    if layers and all(isinstance(i, int) for i in value):
        return False
    return isinstance(value, list) and bool(value)


def _products(table: Mapping[str, Any], first: bool = False) -> Iterator[dict[str, Any]]:
    """All combinations of the lists in a table, or the first of each."""
    many: list[Sequence[Any]] = []
    for name, value in table.items():
        choices = value if _is_axis(name, value) else [value]
        many.append(choices[:1] if first else choices)
    for values in itertools.product(*many):
        yield dict(zip(table, values, strict=True))


def _named(entry: str, values: Mapping[str, Any]) -> str:
    parts = [f"{k.removeprefix('--set ')}={_text(v)}" for k, v in values.items()]
    return ", ".join([entry, *parts])


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if isinstance(value, Mapping):
        return " ".join(f"{k} {v}" for k, v in value.items())
    return str(value).rpartition("/")[2]
