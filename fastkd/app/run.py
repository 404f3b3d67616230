"""The job behind `fastkd distill`: check everything, fine-tune the teacher, train the student.

What lands in the output directory:
    student/       the best student so far, its tokenizer, and fastkd.json
    teacher/       the fine-tuned teacher (with --finetune-teacher)
    checkpoints/   what --resume continues from; removed when the run is complete
    settings.json  the options the run was started with
"""

import ast
import dataclasses
import functools
import inspect
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    set_seed,
)
from transformers.utils import logging as transformers_logging

import fastkd
from fastkd._extras import MissingExtra
from fastkd.app import data
from fastkd.app.data import Corpus, Encoded, InputError, Source, nearest
from fastkd.app.loop import Display, Plan, choose_device, format_scores, predict, train
from fastkd.app.saving import read_json, recover_directory, replace_directory, write_json
from fastkd.distill.distiller import Distiller
from fastkd.distill.layers import layer_map
from fastkd.distill.methods import METHODS, Method
from fastkd.distill.student import student_from_teacher
from fastkd.distill.trainer import DistillationTrainer

REPORT = "fastkd.json"


@dataclass(frozen=True)
class Settings:
    """The options of `fastkd distill`, by the names they have there."""

    teacher: str
    out: Path
    source: Source
    method: str = "fcd"
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    student: str | None = None
    student_layers: int | None = None
    teacher_layers: str = "uniform"
    finetune_teacher: float = 0.0
    teacher_learning_rate: float = 5e-5
    epochs: float = 3.0
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    warmup: float = 0.1
    max_length: int = 128
    precision: str = "fp32"
    device: str = "auto"
    seed: int = 0
    checkpoint_every: int | None = None
    resume: bool = False
    overwrite: bool = False

    def as_json(self) -> dict[str, Any]:
        """Everything that the result depends on, in JSON's types."""
        values = dataclasses.asdict(self)
        for name in ("resume", "overwrite", "checkpoint_every", "out"):
            del values[name]
        return _jsonable(values)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _jsonable(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def distill(settings: Settings, console: Console) -> dict[str, Any]:
    """Run `fastkd distill`; returns what fastkd.json holds.

    Raises:
        InputError: something given can't be used; raised before anything is trained.
    """
    started = time.perf_counter()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _check_numbers(settings)
    device = choose_device(settings.device, settings.precision)
    method_class = find_method(settings.method)
    options = check_options(settings.method, settings.options)
    done = _check_out(settings)
    if done is not None:
        console.print(f"{settings.out}: this run is already complete")
        return done

    corpus = data.load(settings.source)
    tokenizer = load_tokenizer(settings)
    teacher, names = load_teacher(settings, corpus, tokenizer)
    corpus = _in_order_of(names, corpus)
    train_rows = _encode(corpus.train, tokenizer, settings, teacher)
    eval_rows = {k: _encode(rows, tokenizer, settings, teacher) for k, rows in corpus.evals.items()}
    collate = DataCollatorWithPadding(tokenizer)
    plan = Plan(
        settings.epochs,
        -1,
        settings.batch_size,
        settings.learning_rate,
        settings.weight_decay,
        settings.warmup,
        settings.precision,
        device,
        settings.seed,
    )

    def assemble() -> Distiller:
        set_seed(settings.seed)
        student = make_student(settings, teacher, tokenizer)
        try:
            method = method_class(**options)
        except (TypeError, ValueError) as error:
            raise InputError(f"--method {settings.method}: {error}") from error
        try:
            return Distiller(teacher, student, method)
        except (TypeError, ValueError) as error:
            raise InputError(f"--method {settings.method} with this student: {error}") from error

    assemble()  # a mistake shows now, not after the teacher's fine-tuning
    settings.out.mkdir(parents=True, exist_ok=True)
    write_json(settings.out / "settings.json", settings.as_json())

    def score(model: nn.Module) -> dict[str, float]:
        scores = {}
        for suffix, rows in eval_rows.items():
            found = data.evaluate(corpus.metrics, *predict(model, rows, collate, plan))
            scores.update({f"{k}_{suffix}" if suffix else k: v for k, v in found.items()})
        return scores

    with Display(console) as display:
        display.say(
            f"{len(train_rows)} training rows, "
            f"{sum(map(len, eval_rows.values()))} to evaluate on, device {device}"
        )
        nn.Module.to(teacher, device)
        if settings.finetune_teacher:
            _finetune(
                teacher,
                tokenizer,
                train_rows,
                collate,
                plan,
                settings,
                display,
                lambda: score(teacher),
                corpus.metrics[0],
            )
        teacher_scores = score(teacher)
        display.say(f"teacher:  {format_scores(teacher_scores)}")
        distiller = assemble().to(device)
        student = cast(PreTrainedModel, distiller.student)

        report: dict[str, Any] = {
            "fastkd": fastkd.__version__,
            "torch": torch.__version__,
            "complete": False,
            "settings": settings.as_json(),
            "rows": {"train": len(train_rows), "eval": sum(map(len, eval_rows.values()))},
            "parameters": {"teacher": count(teacher), "student": count(student)},
            "teacher": teacher_scores,
        }

        def keep(entry: dict[str, Any], history: list[dict]) -> None:
            report.update(student=entry["scores"], best=entry, history=history)
            save_model(settings.out / "student", student, tokenizer, report)

        history = train(
            functools.partial(DistillationTrainer, model=distiller),
            train_rows,
            collate,
            plan,
            display,
            settings.method,
            evaluate=lambda: score(student),
            main=corpus.metrics[0],
            keep=keep,
            checkpoints=settings.out / "checkpoints",
            resume=settings.resume,
            checkpoint_every=settings.checkpoint_every,
        )
    best = [entry for entry in history if entry["best"]][-1]
    report.update(
        complete=True,
        student=best["scores"],
        best=best,
        history=history,
        seconds={"training": history[-1]["seconds"], "total": time.perf_counter() - started},
    )
    write_json(settings.out / "student" / REPORT, report)
    shutil.rmtree(settings.out / "checkpoints", ignore_errors=True)
    return report


def show(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print the end of a run: teacher against best student."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "parameters", *report["student"]):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("teacher", "student"):
        scores = (f"{value:.4f}" for value in report[name].values())
        table.add_row(name, f"{report['parameters'][name]:,}", *scores)
    console.print(table)
    seconds, best = report["seconds"], report["best"]
    console.print(
        f"best student: epoch {best['epoch']:g}, {format_scores(best['losses'])}\n"
        f"{seconds['training']:.0f} s of training, {seconds['total']:.0f} s in all; "
        f"saved in {out / 'student'}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(
    target: Path, model: PreTrainedModel, tokenizer: Any, report: dict[str, Any]
) -> None:
    """Save model, tokenizer and report under ``target``, all or nothing."""

    def write(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        write_json(directory / REPORT, report)

    replace_directory(target, write)


def find_method(name: str) -> type[Method]:
    """The method called ``name`` on the command line."""
    if name not in METHODS:
        raise InputError(f"--method {name!r} is not a method; {nearest(name, METHODS)}")
    return METHODS[name]


def check_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters given with --set; their names are those of the method's arguments."""
    known = list(inspect.signature(find_method(method)).parameters)
    for name in options:
        if name not in known:
            raise InputError(f"--set {name}: {method} has no such option; {nearest(name, known)}")
    return dict(options)


def parse_options(assignments: list[str]) -> dict[str, Any]:
    """``["alpha=0.5", "pool=cls"]`` as a dictionary; values are Python literals or plain words."""
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"--set {assignment!r} is not of the form name=value")
        if name in options:
            raise InputError(f"--set {name} is given twice")
        options[name] = _literal(value.strip())
    return options


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return list(value) if isinstance(value, tuple) else value


def _check_numbers(settings: Settings) -> None:
    for option, value, bound in (
        ("--epochs", settings.epochs, 0),
        ("--learning-rate", settings.learning_rate, 0),
        ("--teacher-learning-rate", settings.teacher_learning_rate, 0),
    ):
        if not bound < value < float("inf"):
            raise InputError(f"{option} must be greater than {bound}, got {value}")
    bounds: tuple[tuple[str, float | None, int], ...] = (
        ("--finetune-teacher", settings.finetune_teacher, 0),
        ("--weight-decay", settings.weight_decay, 0),
        ("--batch-size", settings.batch_size, 1),
        ("--max-length", settings.max_length, 4),
        ("--max-train-rows", settings.source.max_train_rows, 2),
        ("--max-eval-rows", settings.source.max_eval_rows, 1),
        ("--checkpoint-every", settings.checkpoint_every, 1),
        ("--student-layers", settings.student_layers, 1),
    )
    for option, given, least in bounds:
        if given is not None and not least <= given < float("inf"):
            raise InputError(f"{option} must be at least {least}, got {given}")
    if not 0 <= settings.warmup <= 1:
        raise InputError(f"--warmup is a share of the steps, from 0 to 1, got {settings.warmup}")
    if settings.student is not None and settings.student_layers is not None:
        raise InputError("--student and --student-layers exclude each other")


def _check_out(settings: Settings) -> dict[str, Any] | None:
    """Heal what an interruption left; refuse to replace a student unasked.

    Returns the report if the run to resume is already complete.
    """
    out = settings.out
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: there is a file of that name")
    if not out.exists():
        return None
    for name in ("student", "teacher"):
        recover_directory(out / name)
    if settings.resume:
        _check_unchanged(read_json(out / "settings.json"), settings)
        return _complete_report(out / "student", settings)
    if (out / "student").exists() and not settings.overwrite:
        raise InputError(
            f"--out {out} already holds a student; pass --resume to continue that run, "
            "--overwrite to replace it once a better one is complete, or another --out"
        )
    for leftover in ("checkpoints", "teacher-checkpoints"):
        shutil.rmtree(out / leftover, ignore_errors=True)
    return None


def _check_unchanged(before: dict[str, Any] | None, settings: Settings) -> None:
    if before is None:
        return
    now = settings.as_json()
    then, now = ({**values, **values["source"], "source": None} for values in (before, now))
    for name, value in now.items():
        if then.get(name) != value:
            raise InputError(
                f"--resume: the run in {settings.out} was started with {name} = "
                f"{then.get(name)!r}, now it is {value!r}; give the same options, or another --out"
            )


def _load(option: str, name: str, load: Callable[[], Any]) -> Any:
    """``load()``, with what transformers and the hub raise turned into one sentence."""
    local = Path(name)
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"{option} {name}: no such directory")
    if local.is_file():
        raise InputError(
            f"{option} {name}: this is a file; give the directory that holds the model"
        )
    try:
        return load()
    except MissingExtra:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{option} {name}: can't be loaded from {'there' if local.exists() else 'the hub'} "
            f"({reason})"
        ) from error


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer from a path or hub name, the teacher's if none is given; able to pad."""
    option = "--teacher" if settings.tokenizer is None else "--tokenizer"
    name = settings.tokenizer or settings.teacher
    tokenizer = _load(option, name, lambda: AutoTokenizer.from_pretrained(name))
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{option} {name}: its tokenizer has no padding and no end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_teacher(
    settings: Settings, corpus: Corpus, tokenizer: Any
) -> tuple[PreTrainedModel, list[str] | None]:
    """The teacher with a head for this corpus, and the class names in the head's order."""
    name = settings.teacher
    finished = settings.out / "teacher"
    if settings.resume and settings.finetune_teacher and _complete_report(finished, settings):
        name = str(finished)
    config = _load("--teacher", name, lambda: AutoConfig.from_pretrained(name))
    names = corpus.names
    fitting = config.num_labels == corpus.num_labels
    if fitting and names is not None:
        names = _order_of_head(config, names)
    config.num_labels = corpus.num_labels
    if names is not None:
        config.id2label = dict(enumerate(names))
        config.label2id = {label: i for i, label in enumerate(names)}
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    set_seed(settings.seed)
    teacher, loaded = _load(
        "--teacher",
        name,
        lambda: AutoModelForSequenceClassification.from_pretrained(
            name, config=config, ignore_mismatched_sizes=True, output_loading_info=True
        ),
    )
    fresh = sorted(loaded["missing_keys"]) + sorted(key[0] for key in loaded["mismatched_keys"])
    if fresh and not settings.finetune_teacher:
        what = "no classification head" if fitting else f"no head for {corpus.num_labels} labels"
        raise InputError(
            f"--teacher {name}: it has {what} ({', '.join(fresh[:3])} would be random); "
            "pass --finetune-teacher EPOCHS to train it first"
        )
    if len(tokenizer) > teacher.config.vocab_size:
        raise InputError(
            f"--tokenizer has {len(tokenizer)} tokens but the teacher's vocabulary has "
            f"{teacher.config.vocab_size}"
        )
    return teacher, names


def _order_of_head(config: Any, names: list[str]) -> list[str]:
    """The data's class names in the order of the teacher's head, if it names the same classes."""
    ours = {name.casefold(): name for name in names}
    theirs = [str(config.id2label[i]).casefold() for i in range(config.num_labels)]
    return [ours[name] for name in theirs] if sorted(theirs) == sorted(ours) else names


def _in_order_of(names: list[str] | None, corpus: Corpus) -> Corpus:
    if names is None or corpus.names is None or names == corpus.names:
        return corpus
    new = {corpus.names.index(name): i for i, name in enumerate(names)}

    def renumber(rows: data.Rows) -> data.Rows:
        return dataclasses.replace(rows, labels=[new[label] for label in rows.labels])

    evals = {k: renumber(rows) for k, rows in corpus.evals.items()}
    return dataclasses.replace(corpus, train=renumber(corpus.train), evals=evals, names=names)


def _encode(
    rows: data.Rows, tokenizer: Any, settings: Settings, teacher: PreTrainedModel
) -> Encoded:
    limit = tokenizer.model_max_length
    positions = getattr(teacher.config, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet has -1: no limit
        limit = min(limit, positions)
    if settings.max_length > limit:
        raise InputError(f"--max-length {settings.max_length}: the teacher reads at most {limit}")
    return Encoded(rows, tokenizer, settings.max_length)


def make_student(settings: Settings, teacher: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    """The student: a path or hub name, or layers of the teacher."""
    if settings.student is not None:
        return _student_from_path(settings.student, teacher, tokenizer)
    depth = teacher.config.num_hidden_layers
    layers: Any = settings.teacher_layers
    if layers not in ("uniform", "top", "bottom"):
        try:
            layers = [int(part) for part in layers.split(",")]
        except ValueError:
            raise InputError(
                f"--teacher-layers {layers!r}: neither a scheme nor layer numbers such as 2,4,6; "
                f"{nearest(layers, ('uniform', 'top', 'bottom'))}"
            ) from None
        if settings.student_layers not in (None, len(layers)):
            raise InputError(
                f"--teacher-layers names {len(layers)} layers but --student-layers is "
                f"{settings.student_layers}"
            )
    else:
        wanted = settings.student_layers or max(1, depth // 2)
        if wanted > depth:
            raise InputError(f"--student-layers {wanted}: the teacher has only {depth} layers")
        layers = layer_map(layers, depth, wanted)
    try:
        return cast(PreTrainedModel, student_from_teacher(teacher, layers))
    except (TypeError, ValueError) as error:
        raise InputError(f"--teacher-layers {settings.teacher_layers}: {error}") from error


def _student_from_path(name: str, teacher: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    config = _load("--student", name, lambda: AutoConfig.from_pretrained(name))
    if config.vocab_size != teacher.config.vocab_size:
        raise InputError(
            f"--student {name}: its vocabulary has {config.vocab_size} tokens, the teacher's "
            f"{teacher.config.vocab_size}; both must read the same tokens"
        )
    for key in ("num_labels", "id2label", "label2id"):
        setattr(config, key, getattr(teacher.config, key))
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    return _load(
        "--student",
        name,
        lambda: AutoModelForSequenceClassification.from_pretrained(
            name, config=config, ignore_mismatched_sizes=True
        ),
    )


def _finetune(
    teacher: PreTrainedModel,
    tokenizer: Any,
    rows: Encoded,
    collate: Callable,
    plan: Plan,
    settings: Settings,
    display: Display,
    evaluate: Callable[[], dict[str, float]],
    main: str,
) -> None:
    """Fine-tune ``teacher`` in place to its best evaluation, saved under OUT/teacher."""
    saved = settings.out / "teacher"
    if settings.resume and _complete_report(saved, settings):
        return
    teacher.requires_grad_(True).train()
    report: dict[str, Any] = {"complete": False, "settings": settings.as_json()}
    plan = dataclasses.replace(
        plan, epochs=settings.finetune_teacher, learning_rate=settings.teacher_learning_rate
    )
    history = train(
        functools.partial(Trainer, model=teacher),
        rows,
        collate,
        plan,
        display,
        "teacher",
        evaluate=evaluate,
        main=main,
        keep=lambda entry, history: save_model(
            saved, teacher, tokenizer, {**report, "best": entry, "history": history}
        ),
        checkpoints=settings.out / "teacher-checkpoints",
        resume=settings.resume,
        checkpoint_every=settings.checkpoint_every,
    )
    best = type(teacher).from_pretrained(saved)
    teacher.load_state_dict(best.state_dict())
    write_json(saved / REPORT, {**report, "complete": True, "history": history})
    shutil.rmtree(settings.out / "teacher-checkpoints", ignore_errors=True)


def _complete_report(directory: Path, settings: Settings) -> dict[str, Any] | None:
    """The report of a finished model in ``directory``, if these settings made it."""
    report = read_json(directory / REPORT)
    if report is None or not report["complete"] or report["settings"] != settings.as_json():
        return None
    return report
