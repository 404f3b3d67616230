"""The specification of a study: data sets, variants of methods, seeds and one training budget.

A file has the fields of `Study`, a table ``tasks`` and a table ``methods``. An entry of ``methods``
has the options of one method: the method that ``method`` names, or else the entry's own name. A
list of values makes one variant for each value:

    seeds = 4
    steps = 80
    [methods]
    labels = {}
    fcd = {alpha = [0.1, 1.0]}
    "FCD, top layers" = {method = "fcd", layers = "top"}
    [tasks.sst2]
    task = "sst2"
    train = "SST-2/train.tsv"
    eval = "SST-2/dev.tsv"
    max_train_rows = 3000
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastkd.distill.baselines import NAMES
from fastkd.distill.method import Method
from fastkd.models.layer_map import SCHEMES
from fastkd.study.study_settings import StudySettings
from fastkd.train.errors import InputError, nearest
from fastkd.train.glue import GLUE_TASKS
from fastkd.train.models import attention_for, make_method
from fastkd.train.options import (
    Checked,
    check_name,
    check_tables,
    check_types,
    errors_with_file_keys,
    fits,
    given,
    option,
    paths_of,
    read_options_file,
    resolve_path,
    same_option,
)
from fastkd.train.settings import (
    SELECT,
    ColumnOptions,
    DistillOptions,
    Pairing,
    Source,
    TrainingOptions,
)
from fastkd.train.tasks import NAMES as NAMED_TASKS

PACKAGED = "packaged"
STUDENTS = ("teacher", "pretrained")


@dataclasses.dataclass(frozen=True)
class Variant(Checked):
    """One row of a result table: a method, its options, and the student's initial layers."""

    name: str
    method: str
    options: dict[str, Any]
    teacher_layers: Any = "uniform"  # layers that the student is made of
    attention: str | None = same_option(Pairing, "attention")
    student: str | None = None  # overrides the study's ``student``

    @property
    def eager(self) -> bool:
        """Whether the models run with eager attention, which returns attention maps."""
        return attention_for(self.method, self.attention).get("attn_implementation") == "eager"

    @property
    def compares_selected(self) -> bool:
        """Whether the method compares the layers that MC3KD's Algorithm 1 selects."""
        layers = self.options.get("layers")
        return layers == SELECT or (self.method == "mc3kd" and layers is None)

    @property
    def selects(self) -> bool:
        """Whether Algorithm 1 has to run, for the method or for the student's initial layers."""
        return self.compares_selected or self.teacher_layers == SELECT

    def json(self) -> dict[str, Any]:
        """Everything that a result depends on; with defaults, since these may change."""
        layers = self.options.get("layers")
        valid = {"layers": "uniform"} if layers is not None else {}  # SELECT is unknown to methods
        defaults = build(self.method, {**self.options, **valid}).hyperparameters()
        given = {k: v for k, v in self.options.items() if k != "preset"}
        return {
            "method": self.method,
            "options": {**defaults, **given},
            "teacher_layers": self.teacher_layers,
            **({} if self.attention is None else {"attention": self.attention}),
        }


def build(name: str, options: Mapping[str, Any]) -> Method:
    """A method or baseline by name; ``options`` may have a ``preset``.

    Raises:
        InputError: an unknown name, or an option that the method doesn't have.
    """
    rest = {option: value for option, value in options.items() if option != "preset"}
    return make_method(name, rest, options.get("preset", "default"))


@dataclasses.dataclass(frozen=True)
class TaskSpec(Checked):
    """A data set and its teacher's training.

    ``source`` is None for docstrings of Python's library, or with ``pairs`` for pairs of them.
    """

    name: str
    source: Source | None
    # Training and held-out docstrings of each area, or pairs of each grade.
    rows: tuple[int, int] = (350, 60)
    pairs: bool = False
    labelled: int | None = option(
        None,
        "Number of rows with labels for the student, drawn again for each seed; the other rows "
        "are unlabelled. The teacher learns from all labels.",
        least=1,
    )
    max_length: int = same_option(Pairing, "max_length", 32)
    teacher_steps: int = option(300, "Steps of the teacher's fine-tuning.", least=1)
    teacher_learning_rate: float = same_option(DistillOptions, "teacher_learning_rate", 1e-4)

    def json(self) -> dict[str, Any]:
        """Everything that a result depends on, except the rows."""
        return {"labelled": self.labelled, "max_length": self.max_length}


@dataclasses.dataclass(frozen=True)
class Study(Checked):
    """A whole study."""

    tasks: tuple[TaskSpec, ...]
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    title: str = "Study"
    #: Name of the variant that all other variants are compared with.
    baseline: str = "labels"
    teacher: str = PACKAGED
    student_layers: int = same_option(Pairing, "student_layers", 3)
    #: Source of the student's weights. "teacher": layers and head of the fine-tuned teacher.
    #: "pretrained": layers of the teacher before fine-tuning, with a new head. A directory or hub
    #: name: that model unchanged, with a new head if it has none for the task.
    student: str = "teacher"
    #: Sizes of the student that differ from the teacher's.
    student_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    student_weights: str = same_option(Pairing, "student_weights")
    steps: int | None = option(80, "Training steps of every run.", least=1)
    seconds: float | None = option(None, "Training time of every run.", above=0)
    evaluations: int = option(4, "Number of evaluations in a run.", least=1)
    batch_size: int = same_option(TrainingOptions, "batch_size")
    learning_rate: float = same_option(TrainingOptions, "learning_rate", 2e-4)
    labelled_share: float = same_option(TrainingOptions, "labelled_share")
    #: Store the teacher's outputs on disk for all runs; otherwise each step runs the teacher.
    cache: bool = True
    device: str = same_option(TrainingOptions, "device_name")
    precision: str = same_option(TrainingOptions, "precision")
    #: A paper's table, printed next to the results: title, columns, and rows by variant.
    paper: Mapping[str, Any] | None = None

    @property
    def shape(self) -> dict[str, Any]:
        """Settings of the student's sizes and weights that are not the default."""
        found: dict[str, Any] = {}
        if self.student_config:
            found["student_config"] = dict(self.student_config)
        if self.student_weights != "cut":
            found["student_weights"] = self.student_weights
        return found

    @property
    def budget(self) -> str:
        """The training budget as text."""
        return f"{self.steps} steps" if self.seconds is None else f"{self.seconds:g} seconds"


FIELDS = {field.name: field for field in dataclasses.fields(Study)}
COLUMNS = tuple(field.name for field in dataclasses.fields(ColumnOptions))
OWN_TASK_FIELDS = ("rows", "labelled", "max_length", "teacher_steps", "teacher_learning_rate")


def read(settings: StudySettings) -> Study:
    """The study that a file and the command's options specify.

    Raises:
        InputError: an invalid field or option; the message names it.
    """
    spec = {} if settings.spec is None else {**read_options_file(settings.spec)}
    folder = Path() if settings.spec is None else settings.spec.parent
    shared = ("seeds", "teacher", "steps", "seconds", "device")
    spec.update({k: v for k in shared if (v := getattr(settings, k)) not in (None, "auto")})
    if settings.seconds is not None and settings.steps is None:
        spec["steps"] = None
    elif settings.steps is not None and settings.seconds is None:
        spec["seconds"] = None
    if settings.methods is not None:
        spec["methods"] = {name.strip(): {} for name in settings.methods.split(",")}
    methods = {**check_tables("methods", spec.get("methods") or {name: {} for name in NAMES})}
    for flag, values in settings.options.items():
        method, dot, name = flag.partition(".")
        if not dot or method not in methods:
            raise InputError(
                f"--set {flag}: write METHOD.OPTION=VALUES; {nearest(method, methods)}"
            )
        listed = values.split(",") if isinstance(values, str) else values
        methods[method] = {**methods[method], name: listed}
    spec["methods"] = methods
    columns = given(settings, *COLUMNS)
    if columns and not settings.tasks:
        raise InputError(
            f"{columns[0]}: applies to --tasks NAME=FILES only; write columns in the study's file"
        )
    if settings.tasks:
        named = {name: x for name in COLUMNS if (x := getattr(settings, name))}
        spec["tasks"] = {
            name: {**_task_from_option(name, value), **named}
            for name, value in settings.tasks.items()
        }
        folder = Path()
    return make(spec, folder)


def make(spec: Mapping[str, Any], folder: Path) -> Study:
    """The study of a file's content, in which paths are relative to ``folder``."""
    known = ["methods", *(field for field in FIELDS if field != "variants")]
    for name in spec:
        if name not in known:
            raise InputError(f"a study has no field {name!r}; {nearest(name, known)}")
    values = {k: v for k, v in spec.items() if k in FIELDS and k not in ("tasks", "seeds")}
    check_types("", values, Study)
    if spec.get("seconds") is not None:
        values["steps"] = spec.get("steps")
    tasks = check_tables("tasks", spec.get("tasks") or {})
    if not tasks:
        raise InputError(
            "a study needs a data set: [tasks.NAME] in the file, or --tasks NAME=FILES"
        )
    methods = check_tables("methods", spec.get("methods") or {name: {} for name in NAMES})
    seeds = spec.get("seeds", 4)
    if not fits(seeds, int | list):
        raise InputError(f"seeds must be a number or a list of seeds, got {seeds!r}")
    if "student" in values:
        values["student"] = _student_source("student", values["student"], folder)
    values["tasks"] = tuple(_task(name, table, folder) for name, table in tasks.items())
    values["variants"] = tuple(_variants(methods, folder))
    values["seeds"] = tuple(range(seeds) if isinstance(seeds, int) else seeds)
    with errors_with_file_keys("the study", Study):
        study = Study(**values)
    _check(study)
    return study


def _student_source(where: str, given: Any, folder: Path) -> str:
    """Where students get their weights: one of STUDENTS, a directory or a hub name."""
    if given in STUDENTS:
        return str(given)
    path = resolve_path(where, given, folder)
    is_path = path.is_dir() or given.startswith((".", "/", "$", "~"))
    return str(path) if is_path else str(given)


def _check(study: Study) -> None:
    names = [variant.name for variant in study.variants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"methods: {min(twice)!r} is listed twice; rename one")
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise InputError(f"seeds must be at least one, and none twice, got {list(study.seeds)}")
    for seed in study.seeds:
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise InputError(f"seeds must be whole numbers from 0 to 2**32 - 1, got {seed!r}")
    if (study.steps is None) == (study.seconds is None):
        raise InputError("steps and seconds exclude each other: give the budget as one of them")
    if "num_hidden_layers" in study.student_config:
        raise InputError("student_config.num_hidden_layers: set student_layers instead")
    if study.paper is not None:
        for name, kind in (("title", str), ("columns", list), ("rows", Mapping)):
            if not isinstance(study.paper.get(name), kind):
                raise InputError("paper must have a title, a list columns and a table rows")
    if study.baseline not in names and study.baseline != "labels":
        raise InputError(f"baseline {study.baseline!r}: {nearest(study.baseline, names)}")
    for task in study.tasks:
        if min(task.rows) < 1:
            raise InputError(f"tasks.{task.name}: rows must be two positive numbers")
        unlabelled = None if task.source is None else task.source.unlabelled
        if task.labelled is not None and unlabelled is not None:
            raise InputError(f"tasks.{task.name}: labelled and unlabelled exclude each other")
    for variant in study.variants:
        layers = variant.options.get("layers")
        build(variant.method, {**variant.options, **({"layers": "uniform"} if layers else {})})
        for scheme in (layers, variant.teacher_layers):
            if isinstance(scheme, str) and scheme not in (*SCHEMES, SELECT):
                raise InputError(
                    f"{variant.name}: layers {scheme!r}; {nearest(scheme, (*SCHEMES, SELECT))}"
                )


def _variants(methods: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterable[Variant]:
    """The variants of all entries: one for each combination of listed values."""
    for entry, table in methods.items():
        options = dict(table)
        method = options.pop("method", entry)
        grid = {name: _choices(name, value) for name, value in options.items()}
        varied = [name for name, values in grid.items() if len(values) > 1]
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            name = ", ".join([entry, *(f"{k}={_value_text(chosen[k])}" for k in varied)])
            initial = chosen.pop("teacher_layers", "uniform")
            attention = chosen.pop("attention", None)
            student = chosen.pop("student", None)
            if student is not None:
                student = _student_source(f"methods.{entry}: student", student, folder)
            with errors_with_file_keys(name, Variant):
                variant = Variant(name, method, chosen, initial, attention, student)
            yield variant


def _choices(name: str, value: Any) -> list[Any]:
    """The values of an option; a list of layer numbers is one value."""
    if not isinstance(value, list):
        return [value]
    if name in ("layers", "teacher_layers") and all(isinstance(i, int) for i in value):
        return [value]
    return value or [value]


def _value_text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _task(name: str, table: Mapping[str, Any], folder: Path) -> TaskSpec:
    """The data set of one table of a study's file."""
    own = {k: v for k, v in table.items() if k in OWN_TASK_FIELDS}
    rest = {("evals" if k == "eval" else k): v for k, v in table.items() if k not in own}
    where = f"tasks.{name}: "
    rows = own.pop("rows", None)
    if rows is not None:
        if not (isinstance(rows, list) and len(rows) == 2 and all(fits(x, int) for x in rows)):
            raise InputError(f"{where}rows must be two whole numbers, got {rows!r:.40}")
        own["rows"] = tuple(rows)
    check_types(where, {k: v for k, v in own.items() if k != "rows"}, TaskSpec)
    docstrings = rest.pop("docstrings", False)
    if not isinstance(docstrings, bool):
        raise InputError(f"{where}docstrings must be true, got {docstrings!r:.40}")
    pairs = rest.pop("pairs", None)
    if pairs not in (None, "docstrings"):
        raise InputError(f'{where}pairs must be "docstrings", got {pairs!r:.40}')
    if docstrings or pairs:
        field = "pairs" if pairs else "docstrings"
        others = [*rest, *(["docstrings"] if docstrings and pairs else [])]
        if others:
            raise InputError(f"{where}{field} and {min(others)} exclude each other")
        source, own["pairs"] = None, bool(pairs)
    else:
        own.pop("rows", None)
        # A study's teacher has a new head, so that no order of classes is fixed before. No
        # evaluation selects a student, so the held-out rows are the test rows.
        sources = {field.name for field in dataclasses.fields(Source)} - {"label_order", "test"}
        for field in rest:
            if field not in sources:
                known = sorted(
                    {*sources - {"evals"}, "eval", "docstrings", "pairs", *OWN_TASK_FIELDS}
                )
                raise InputError(f"tasks.{name} has no field {field!r}; {nearest(field, known)}")
        paths = {field: rest.pop(field) for field in paths_of(Source) if field in rest}
        check_types(where, rest, Source)
        for field, path in paths.items():
            rest[field] = resolve_path(f"{where}{field}", path, folder)
        with errors_with_file_keys(f"tasks.{name} of the study", Source):
            source = Source(**rest)
    check_name(f"tasks.{name}", name)
    with errors_with_file_keys(f"tasks.{name}", TaskSpec):
        return TaskSpec(name, source, **own)


def _task_from_option(name: str, value: Any) -> dict[str, Any]:
    """The table of a data set that `--tasks NAME=VALUE` describes."""
    parts = str(value).split(",")
    known = {"task": name} if name in (*GLUE_TASKS, *NAMED_TASKS) else {}
    if parts == ["docstrings"]:
        return {"docstrings": True}
    if parts == ["pairs"]:
        return {"pairs": "docstrings"}
    if parts == ["hub"]:
        return known if name in GLUE_TASKS else {"data": name}
    if len(parts) != 2:
        raise InputError(
            f"--tasks {name}={value}: give files TRAIN,EVAL, or hub, docstrings, pairs"
        )
    return {**known, "train": parts[0], "eval": parts[1]}
