"""A study: a grid of `fastkd distill` runs.

The keys of its file are options of `fastkd distill`, as in a file of ``--stages``, and `OWN`:

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
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastkd.train.config import (
    AUTO,
    STAGES,
    ColumnOptions,
    Config,
    check_inputs,
    device,
    option_values,
)
from fastkd.train.errors import InputError, nearest
from fastkd.train.glue import FILES, GLUE_TASKS
from fastkd.train.options import (
    check_name,
    check_tables,
    errors_with_file_keys,
    file_keys,
    fits,
    option,
    options_of,
    read_options_file,
    run_option,
    set_flags,
    training_option,
)
from fastkd.train.recipes import MAKES
from fastkd.train.tasks import NAMES as NAMED_TASKS

comparison_option = functools.partial(option, panel="What is compared")


@dataclass(frozen=True, kw_only=True)
class StudySettings(ColumnOptions):
    """The options of `fastkd study`; an option overrides the field of the study's file.

    The column options apply to every data set of ``tasks``.
    """

    spec: Path | None = option(
        None,
        "File of the study, .toml or .yaml; paper:NAME is a paper's table, and paper: lists them.",
        flag="SPEC",
        saved=False,
    )
    out: Path = run_option(Path("runs/study"), "Output directory for the runs and the report.")
    runs: Path | None = run_option(
        None, "Directory of runs and teachers, which several studies may share; --out if not given."
    )
    methods: str | None = comparison_option(None, "Methods to compare, separated by commas.")
    options: Mapping[str, Any] = comparison_option(
        {},
        "Values of a method's hyper-parameter or option, one run for each; repeatable.",
        flag="--set",
        metavar="METHOD.NAME=VALUE,VALUE",
    )
    tasks: Mapping[str, Any] = comparison_option(
        {},
        "Data set: NAME=TRAIN,EVAL,TEST,... (files; NAME may be a task), NAME=hub (a GLUE task), "
        "NAME=docstrings or NAME=pairs (of docstrings); or names of the study's, separated by "
        "commas; repeatable.",
        metavar="NAME=FILES",
        names=True,
    )
    glue: Path | None = option(
        None,
        "Folder of GLUE's own download, instead of the hub.",
        metavar="DIR",
        panel="What is compared",
    )
    seeds: int | None = comparison_option(
        None, "Number of seeds; default: those of the study's file, or 4.", least=1
    )
    teacher: str | None = comparison_option(
        None, "Teacher model: a directory, a hub name, or packaged (the demo's)."
    )
    student: str | None = comparison_option(
        None, "Student model of every run: a directory or a hub name."
    )
    finetune_teacher: float | None = comparison_option(
        None,
        "Number of epochs to fine-tune the teacher first; default: as the study's file says, or 0.",
        metavar="EPOCHS",
        least=0,
    )
    steps: int | None = training_option(
        None,
        "Training steps of each run; of a paper's table a small try: one value of each searched "
        "list, one step of the teacher; default: as the study's file says, or 3 epochs.",
        least=1,
    )
    seconds: float | None = training_option(
        None, "Training time of each run in seconds, instead of --steps; default: none.", above=0
    )
    grid: str = training_option(
        "all", "Values of each searched list: all, or the first.", choices=("all", "first")
    )
    budget: float | None = training_option(
        None,
        "Hours for the whole study: a search by successive halving, then the seeds, as far as they "
        "fit; default: every run.",
        metavar="HOURS",
        above=0,
    )
    device_name: str = device()
    jobs: int = run_option(1, "Number of runs at a time, each in its own process.", least=1)


#: Options whose value is a list.
LISTS = [name for name, option in options_of(Config).items() if option.several]
PAPERS = Path(__file__).with_name("papers")
PAPER = "paper:"
#: Keys of a study beside the options of `fastkd distill`.
OWN = (
    "title", "baseline", "seeds", "seconds", "cache", "select", "grid", "methods", "tasks",
    "paper",
)  # fmt: skip
TYPES = {"title": str, "baseline": str, "seconds": float, "cache": bool, "grid": Mapping}
#: Methods of a study that names none.
METHODS = ("labels", "soft_targets", "fcd", "knn", "lrc_bert", "mc3kd", "lrkd")
#: Options of `fastkd distill` for each set of docstrings.
SETS: Mapping[str, Mapping[str, str]] = {
    "areas": {"task": "classification"},
    "pairs": {"task": "regression", "text_pair_column": "text_pair", "metric": "spearman"},
}
#: Options of a teacher's fine-tuning.
OF_FINETUNING = ("finetune_teacher", "teacher_learning_rate", "teacher_lora")
#: Epochs of a teacher that take one step.
ONE_STEP = 1e-9
#: Options of a task that remain with other files.
KEPT = ("task", "max_length", "metric")
#: Training and held-out docstrings of each area, or pairs of each grade.
ROWS = [350, 60]


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
    """A study's cells and how they are trained and reported.

    ``seconds``: the budget of a run in training time. ``cache``: whether the teacher's outputs are
    stored for all runs. ``paper``: a paper's table, see `fastkd.study.paper_table`. ``teacher`` is
    that of all runs, if they have one. ``notes``: sentences on a search, for the report.
    """

    title: str
    baseline: str
    seeds: tuple[int, ...]
    select: str
    cells: tuple[Cell, ...]
    paper: Mapping[str, Any] | None = None
    seconds: float | None = None
    cache: bool = False
    teacher: str | None = None
    notes: tuple[str, ...] = ()

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


def early(settings: StudySettings) -> str:
    """The list of all tables for ``paper:``; else checks files and columns, and returns "".

    It imports neither torch nor transformers.
    """
    if str(settings.spec) == PAPER:
        titles = {x: read_options_file(PAPERS / f"{x}.toml")["title"] for x in names_of_papers()}
        return "\n".join(f"{PAPER}{name}  {title}" for name, title in titles.items())
    found, folder = _content(settings)
    written = _written(settings)
    fields = {n for n, x in options_of(Config).items() if x.panel == "Data"}
    shared = {k: v for k, v in found.items() if k not in OWN}
    shared = option_values("the study", shared, folder, OWN)
    for name, options in _tasks(found.get("tasks", {}), settings, folder).items():
        both = {**shared, **options}
        known = {k: v for k, v in both.items() if k in fields and not _is_axis(k, v)}
        if written not in known.get("train", Path()).parents:  # docstrings, which a run writes
            with errors_with_file_keys(f"tasks.{name}", Config):
                check_inputs(Config.of(known, "verify"))
    return ""


def _written(settings: StudySettings) -> Path:
    """Folder of the rows of docstrings, which `GridRuns` writes."""
    return (settings.runs or settings.out) / "data"


def read(settings: StudySettings) -> Grid:
    """The grid of a file, or of the command's options alone, which override those of the file."""
    return make(*_content(settings), settings)


def _content(settings: StudySettings) -> tuple[dict[str, Any], Path]:
    """Content of the study's file with the command's options, and the folder of the file."""
    path = path_of(settings.spec)
    found: dict[str, Any] = {"select": "none"} if path is None else {**read_options_file(path)}
    for name in ("seeds", "seconds"):
        if (value := vars(settings)[name]) is not None:
            found[name] = value
    if settings.seconds is not None and settings.steps is None:
        found.pop("steps", None)
    if settings.steps is not None and settings.seconds is None:
        found.pop("seconds", None)
    if settings.methods is not None:
        known = check_tables("methods", found.get("methods", {}))
        names = [name.strip() for name in settings.methods.split(",")]
        found["methods"] = {name: known.get(name, {}) for name in names}
    methods = check_tables("methods", found.get("methods", {key: {} for key in METHODS}))
    for flag, values in settings.options.items():
        method, dot, name = flag.partition(".")
        if not dot or method not in methods:
            raise InputError(
                f"--set {flag}: write METHOD.OPTION=VALUES; {nearest(method, methods)}"
            )
        listed = values.split(",") if isinstance(values, str) else values
        methods = {**methods, method: {**methods[method], name: listed}}
    found["methods"] = methods
    return found, Path() if path is None else path.parent


def make(found: Mapping[str, Any], folder: Path, settings: StudySettings) -> Grid:
    """The grid of a file's content; paths are relative to ``folder``."""
    for name, kind in TYPES.items():
        if name in found and not fits(found[name], kind):
            raise InputError(f"{name} must be {kind.__name__}, got {found[name]!r:.40}")
    select = found.get("select", "dev")
    if select not in ("dev", "none"):
        raise InputError(f'select must be "dev" or "none", got {select!r}')
    seeds = _seeds(found.get("seeds", 4))
    if found.get("seconds") is not None and "steps" in found:
        raise InputError("steps and seconds exclude each other: give the budget as one of them")
    paper = _paper(found.get("paper"))
    tasks = _tasks(found.get("tasks", {}), settings, folder)
    small = settings.steps is not None and folder == PAPERS
    searching = found.get("grid", {})
    top = {k: v for k, v in found.items() if k not in OWN}
    shared = option_values("the study", {"teacher": "packaged", **top}, folder, OWN)
    common = {k: v for k, v in searching.items() if k not in file_keys(Config, "distill")}
    searched = {k: v for k, v in searching.items() if k not in common}
    searched = option_values("grid", searched, folder, OWN)
    unknown = set(common)
    if settings.teacher is not None:
        shared["teacher"] = settings.teacher
        shared.pop("tokenizer", None)  # of the file's teacher
    if settings.student is not None:
        shared = {k: v for k, v in shared.items() if k not in MAKES}
    cells = []
    for entry, table in check_tables("methods", found.get("methods", {})).items():
        method, own, options, stages = _entry(entry, table, folder)
        known = _parameters(method)
        options = {**{k: v for k, v in common.items() if k in known}, **options}
        unknown -= set(known)
        over = {**searched, **own, **{f"--set {k}": v for k, v in options.items()}}
        tops = {k: v for k, v in shared.items() if k not in over}
        for task, top in itertools.product(tasks, _products(tops)):
            at = {k: v for k, v in over.items() if k not in tasks[task]}
            name = _named(entry, {k: v for k, v in top.items() if _is_axis(k, tops[k])})
            for chosen in _products(at, first=small or settings.grid == "first"):
                values = {k: v for k, v in chosen.items() if _is_axis(k, at[k])}
                variant = name if select == "dev" else _named(name, values)
                for seed in seeds:
                    run = {**top, **chosen, **tasks[task], "method": method, "seed": seed}
                    run["options"] = {
                        k.removeprefix("--set "): run.pop(k) for k in list(run) if k[0] == "-"
                    }
                    run = _overridden(run, settings, small)
                    if stages:
                        run = _staged(run, stages, task, tasks[task], settings)
                    cells.append(Cell(variant, task, seed, values, run))
    if unknown:
        raise InputError(f"grid: {min(unknown)!r} is no option, nor of a method of the study")
    if not cells:
        raise InputError(
            "a study needs a data set: [tasks.NAME] in the file, or --tasks NAME=FILES"
        )
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    baseline = _baseline(found, variants, settings)
    taught = {cell.options.get("teacher") for cell in cells}
    teacher = taught.pop() if len(taught) == 1 else None
    given = found.get("title") or "Study", baseline, seeds, select, tuple(cells), paper
    return Grid(*given, found.get("seconds"), bool(found.get("cache")), teacher)


def _baseline(found: Mapping[str, Any], variants: list[str], settings: StudySettings) -> str:
    """The variant that others are compared with."""
    baseline = found.get("baseline", variants[0])
    if settings.teacher is not None or settings.student is not None:  # fewer axes than in the file
        parts = set(baseline.split(", "))
        baseline = next((v for v in variants if set(v.split(", ")) <= parts), baseline)
    if baseline not in variants:
        raise InputError(f"baseline {baseline!r}: {nearest(baseline, variants)}")
    return baseline


def _paper(found: Any) -> Mapping[str, Any] | None:
    """The checked table of a paper; a list of columns has no scores here."""
    if found is None:
        return None
    columns = found.get("columns")
    if isinstance(columns, list):
        columns = dict.fromkeys(columns, "")
    known = isinstance(columns, Mapping) and isinstance(found.get("rows"), Mapping)
    if not known or not isinstance(found.get("title"), str):
        raise InputError("paper must have a title, a table columns and a table rows")
    for name, cells in found["rows"].items():
        if not isinstance(cells, list) or len(cells) != len(columns):
            raise InputError(f"paper.rows: {name!r} must be a list of {len(columns)} cells")
    return {**found, "columns": columns}


def _seeds(found: Any) -> tuple[int, ...]:
    """The seeds: a list of them, or all below their number."""
    if not fits(found, int | list):
        raise InputError(f"seeds must be a number or a list of seeds, got {found!r}")
    seeds = tuple(range(found) if isinstance(found, int) else found)
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError(f"seeds must be at least one, and none twice, got {list(seeds)}")
    for seed in seeds:
        if not (fits(seed, int) and 0 <= seed < 2**32):
            raise InputError(f"seeds must be whole numbers from 0 to 2**32 - 1, got {seed!r}")
    return seeds


def _overridden(run: dict[str, Any], settings: StudySettings, small: bool) -> dict[str, Any]:
    """The options of a run with those of the command."""
    if settings.teacher is not None:
        run["teacher"] = settings.teacher
    if settings.student is not None:
        run = {k: v for k, v in run.items() if k not in MAKES} | {"student": settings.student}
    if settings.steps is not None:
        run["training_steps"] = settings.steps
        if small and run.get("finetune_teacher"):
            run["finetune_teacher"] = ONE_STEP
    if (epochs := settings.finetune_teacher) is not None:
        run["finetune_teacher"] = epochs
        if not epochs:
            run = {
                k: v for k, v in run.items() if k not in ("teacher_learning_rate", "teacher_lora")
            }
    if settings.device_name != "auto":
        run["device_name"] = settings.device_name
    return run


def _entry(
    entry: str, table: Mapping[str, Any], folder: Path
) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Method, options, hyper-parameters and stages of an entry of ``methods``."""
    method, where = table.get("method", entry), f"methods.{entry}"
    known = _parameters(method)
    rest = {k: v for k, v in table.items() if k not in ("method", "stages")}
    options = {k: v for k, v in rest.items() if k in known}
    own = {k: v for k, v in rest.items() if k not in known}
    stages = {}
    for name, given in check_tables(f"{where}.stages", table.get("stages", {})).items():
        of_stage = {k: v for k, v in given.items() if k != "tasks"}
        stages[name] = {**option_values(f"{where}.stages.{name}", of_stage, folder)}
        if not fits(given.get("tasks", []), list):
            raise InputError(f"{where}.stages.{name}: tasks must be a list of names")
        stages[name]["tasks"] = given.get("tasks")
    return method, option_values(where, own, folder, OWN), options, stages


def _staged(
    run: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any]],
    task: str,
    of_task: Mapping[str, Any],
    settings: StudySettings,
) -> dict[str, Any]:
    """Options of a run in stages: those of all, and ``stages`` with those of each.

    "{task}" in a path of a stage is the data set's name.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, given in stages.items():
        if task not in (given["tasks"] or [task]):
            continue
        own: dict[str, Any] = {
            k: Path(str(v).replace("{task}", task)) if isinstance(v, Path) else v
            for k, v in given.items()
            if k != "tasks"
        }
        alone = own.get("options", {})
        own["options"] = alone if "method" in own else {**run["options"], **alone}
        if "task" in own:
            own = {**dict.fromkeys(of_task), **own}
        if "teacher" in own:
            own = {**dict.fromkeys(OF_FINETUNING), **own}
            if settings.teacher is not None and not own["teacher"].startswith(STAGES):
                own["teacher"] = settings.teacher
        if settings.student is not None and {*MAKES} & own.keys():
            own = {k: v for k, v in own.items() if k not in MAKES} | {"student": settings.student}
        found[name] = own
    # Later stages take the student of the first.
    first = next(iter(found))
    found[first] = {**{k: v for k, v in run.items() if k in MAKES}, **found[first]}
    return {**{k: v for k, v in run.items() if k not in MAKES}, "stages": found}


def _parameters(method: str) -> Mapping[str, Any]:
    """Hyper-parameters of a method, by name."""
    if method == AUTO:
        return {}
    from fastkd.train.models import method_class  # imports torch

    return inspect.signature(method_class(method)).parameters


def _tasks(found: Any, settings: StudySettings, folder: Path) -> dict[str, dict[str, Any]]:
    """Options of each data set, by name."""
    tables = {**check_tables("tasks", {k: v for k, v in dict(found).items() if k != "glue"})}
    names = found.get("glue", []) if isinstance(found, Mapping) else []
    for name in names:
        if name not in GLUE_TASKS:
            raise InputError(f"tasks.glue: {name!r}; {nearest(name, GLUE_TASKS)}")
    tables = {**{name: {} for name in names}, **tables}
    columns = {k: v for k in _COLUMNS if (v := vars(settings)[k])}
    if columns and not settings.tasks:
        raise InputError(
            f"{set_flags(settings, *columns)[0]}: applies to --tasks NAME=FILES only; write "
            "columns in the study's file"
        )
    if settings.tasks:
        tables = {
            name: tables[name] if value is True and name in tables
            else {**_task_of_option(name, value, tables), **columns}
            for name, value in settings.tasks.items()
        }  # fmt: skip
    written = _written(settings)
    tasks = {name: _task(name, table, folder, written) for name, table in tables.items()}
    if settings.glue is not None:
        for name, table in tasks.items():
            if table.get("task") in GLUE_TASKS and "train" not in table:
                tasks[name] = {**table, **official(settings.glue, table["task"])}
    return tasks


_COLUMNS = tuple(field.name for field in dataclasses.fields(ColumnOptions))


def _task(name: str, table: Mapping[str, Any], folder: Path, written: Path) -> dict[str, Any]:
    """Options of one data set; docstrings are files that `GridRuns` writes."""
    check_name(f"tasks.{name}", name)
    table, where = dict(table), f"tasks.{name}"
    kind, rows = table.pop("docstrings", None), table.pop("rows", ROWS)
    if kind is None:
        named = {"task": name} if name in (*GLUE_TASKS, *NAMED_TASKS) else {}
        return {**named, **option_values(where, table, folder, OWN)}
    if kind not in SETS:
        raise InputError(f"{where}: docstrings must be {' or '.join(SETS)}, got {kind!r:.40}")
    if not (isinstance(rows, list) and len(rows) == 2 and all(fits(x, int) for x in rows)):
        raise InputError(f"{where}: rows must be two whole numbers, got {rows!r:.40}")
    if min(rows) < 1:
        raise InputError(f"{where}: rows must be two positive numbers, got {rows}")
    others = set(table) & {"task", "train", "eval", "data", "text_column", "text_pair_column"}
    if others:
        raise InputError(f"{where}: docstrings and {min(others)} exclude each other")
    place = written / "-".join([kind, *map(str, rows)])
    files = {"train": place / "train.jsonl", "evals": place / "eval.jsonl"}
    return {**SETS[kind], **files, **option_values(where, table, folder, OWN)}


def _task_of_option(name: str, value: Any, tables: Mapping[str, Mapping]) -> dict[str, Any]:
    """The table of a data set that `--tasks NAME=VALUE` describes."""
    if value is True:
        raise InputError(f"--tasks {name}: {nearest(name, tables)}")
    parts = str(value).split(",")
    if value in ("docstrings", "pairs"):
        return {"docstrings": "areas" if value == "docstrings" else "pairs"}
    if parts == ["hub"]:
        return {"task": name} if name in GLUE_TASKS else {"data": name}
    if len(parts) < 2:
        raise InputError(
            f"--tasks {name}={value}: give files TRAIN,EVAL,TEST,..., or hub, docstrings, pairs"
        )
    kept = {k: v for k, v in tables.get(name, {}).items() if k in KEPT}
    train, evals, *tests = (str(Path(part).absolute()) for part in parts)
    return {**kept, "train": train, "eval": evals, **({"test": tests} if tests else {})}


def official(root: Path, task: str) -> dict[str, Any]:
    """Files of a task in GLUE's own download; mismatched MNLI is the test set."""
    name = next(name for name, found in FILES.items() if found.task == task)
    folder, splits = root / name.removesuffix("-m"), GLUE_TASKS[task].eval_splits
    evals, *test = (folder / f"{split.replace('validation', 'dev')}.tsv" for split in splits)
    return {"train": folder / "train.tsv", "evals": evals, **({"test": test[0]} if test else {})}


def _is_axis(name: str, value: Any) -> bool:
    """Whether a value is a list of alternatives; layer numbers and test files are one value."""
    layers = name.removeprefix("--set ") == "layers" and isinstance(value, list)
    if name in LISTS or (layers and all(isinstance(i, int) for i in value)):
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
