"""`fastkd distill`: check everything, fine-tune the teacher, train the student, report."""

import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import nn
from transformers import set_seed

import fastkd
from fastkd._core.extras import require
from fastkd.distill.cache import TeacherCache, teacher_request
from fastkd.distill.distiller import Distiller
from fastkd.distill.methods import Labels
from fastkd.distributed import world_size
from fastkd.integrations.top_k_files import TopKRows
from fastkd.models.hooks import offload
from fastkd.models.student import SCHEMES
from fastkd.train import data as rows_of_source
from fastkd.train import lora, processes, recipes, sharding, tasks
from fastkd.train.arrow_rows import fingerprint, fingerprint_of
from fastkd.train.assembling import Models, assemble, check_classes, layers_of, load_teacher, select
from fastkd.train.config import AUTO, SELECT, Config
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import names_of
from fastkd.train.fitting import fit, load_best, servers_of, settled, steps_of
from fastkd.train.generation import Generation
from fastkd.train.glue import GLUE_TASKS
from fastkd.train.loading import Data, encode, load_data, say_match, settled_method
from fastkd.train.models import be_quiet, make_method
from fastkd.train.options import set_flags
from fastkd.train.processes import Computation
from fastkd.train.progress import Display, clock, compared, format_scores
from fastkd.train.run_directory import (
    CHECKPOINTS,
    EVAL_ROWS,
    Checkpoints,
    RunDirectory,
    Training,
    is_complete,
    rows_of,
)
from fastkd.train.saving import MANIFEST, locked, read_json, saving, write_manifest
from fastkd.train.scoring import Judged, Run, judge, rows_by_teacher, seconds_a_batch
from fastkd.train.tasks.base import reorder_classes

filelock: Any = require("filelock", "train")
# The student's model card and its template.
CARD = "README.md"
CARD_TEXT = Path(__file__).with_name("card.md.jinja")
#: Measurements of a run's teacher and best student, by name.
Measure = Callable[[Run, Any, Any, Judged], dict[str, Any]]


def run_distillation(
    config: Config,
    display: Display | None = None,
    measure: Measure | None = None,
    cache: Path | None = None,
    at_evaluations: Callable[[Training, Any], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run `fastkd distill`; returns the content of the student's manifest.

    The ``display`` is entered after all options are checked. ``measure`` takes the place of the
    timing of both models; ``at_evaluations`` measures the student at each evaluation. Runs with the
    same directory ``cache`` share their teachers' outputs.

    Raises:
        InputError: an option, file or model cannot be used; raised before training.
    """
    started = time.perf_counter()
    be_quiet()
    with processes.errors_on_all():
        config = check(config)
    display = display or Display()
    with contextlib.ExitStack() as stack:
        processes.on_first_process(lambda: stack.enter_context(locked(config.out)))
        with processes.errors_on_all():
            stack.enter_context(display)
        out = processes.on_first_process(lambda: RunDirectory(config, display.say))
        if config.resume and not (out.manifest or out.done):
            display.say(f"{config.out}: no run to resume; this one begins")
        if config.student is not None and config.student == config.teacher:
            display.say("warning: --student is the teacher; --student-layers makes a smaller one")
        with processes.errors_on_all():
            data = load_data(config, display)
        for line in rows_of_source.describe(data.corpus):
            display.say(line)
        if out.done:
            out.begin(rows_of(reorder_classes(out.done.get("labels"), data.corpus)))
            display.say(f"{config.out}: this run is already complete")
            return out.done
        run, models = begin(config, data, display, out)
        if config.finetune_teacher:
            models = finetune_teacher(run, models)
        models, report = judge_teachers(run, models, cache)
        began = time.perf_counter()
        history = fit(run, models.distiller, out.student, run.sets.all, report, at_evaluations)
        # Of a resumed run a part was trained before.
        before = max(0.0, history[-1]["seconds"] - (time.perf_counter() - began))
        report |= judge_best(run, models, report.get("teachers", {}), measure)
        return publish(run, models, report, history, started - before)


def begin(
    config: Config, data: Data, display: Display, out: RunDirectory
) -> tuple[Training, Models]:
    """Load and check the models, and start the run in the output directory.

    Errors of student and method are raised now, not after the teacher's fine-tuning.
    """
    with processes.errors_on_all():
        config = settled_method(config, data, display, out.manifest.get("method"))
        tuned = out.teacher if config.finetune_teacher and is_complete(out.teacher) else None
        models = assemble(config, data, display, load_teacher(config, data, tuned))
        computation = Computation.of(config, out.processes)
        sets = encode(config, data, models.max_length)
        run = Training(config, computation, data, sets, display, out)
        if data.match is not None:
            say_match(data.match, run.sets.train, display)
        check_training(run, models)
    if config.preset == "paper":
        for line in recipes.lines(recipes.compared(config, models.distiller.method)):
            display.say(line)
    if reading := getattr(models.teacher, "reading", ""):
        display.say(reading)
    size = models.student.get_memory_footprint(return_buffers=False)
    teacher = models.teacher.get_memory_footprint(False) if config.finetune_teacher else 0
    processes.on_first_process(lambda: out.check_room(teacher, size))
    out.begin(_inputs(run, models, tuned), config.method)
    counts = ", ".join(f"{number} {name} rows" for name, number in run.sets.counts.items())
    display.say(f"{counts}, device {computation.device.type}")
    if max(world_size(), out.processes) > 1:
        begun = f", as in the {out.processes} that began" if out.processes != world_size() else ""
        steps = config.passed.get("gradient_accumulation_steps", 1)
        rows = computation.batch_size * steps
        display.say(f"{world_size()} processes: {rows} rows a step in all{begun}")
    if config.teacher_offload:
        each = models.row_teachers.values() or [models.teacher_model]
        for model in each:
            offload(model, computation.device)
    elif not config.shard:
        nn.Module.to(models.teacher, computation.device)
    return run, models


def _inputs(run: Training, models: Models, tuned: Path | None) -> dict[str, Any]:
    """Rows, tokenizers and models on which the result depends, by their names in messages."""
    config, data, teacher = run.config, run.data, models.teacher
    found = rows_of(data.corpus)
    if data.cached:
        found["teacher cache"] = teacher
    elif data.row_teachers:
        each = zip(teacher.names, teacher.models, strict=True)
        found |= {f"teacher {name}": model for name, model in each}
    elif models.teacher_model is None:
        found[teacher.what.removeprefix("the ")] = teacher
    elif tuned is None:
        found["teacher weights"] = teacher
    if data.teacher_tokenizer is not None:
        found["teacher's tokenizer files"] = data.teacher_tokenizer
    found["tokenizer files"] = data.tokenizer
    if config.student is not None:
        found["student weights"] = models.student
    return found


def check_training(run: Training, models: Models) -> None:
    """Raise unless a cache holds every training row, and an on-policy student has a loss."""
    task, distiller = run.data.task, models.distiller
    if run.data.cached or isinstance(models.teacher, TopKRows):
        _check_stored(run, models)
    if not run.config.on_policy:
        return
    if task.generated is None:
        raise InputError(
            f"--on-policy: models of --task {task.name()} do not generate text; leave it out"
        )
    for progress in (0.0, 1.0):
        weights = distiller.method.weights(progress)
        if not any(weight for name, weight in weights.items() if name != "task"):
            raise InputError(
                f"--on-policy: {type(distiller.method).__name__} trains on labels alone, and "
                "generated text has none; take another --method"
            )


def _check_stored(run: Training, models: Models) -> None:
    """Raise unless the teacher's outputs of every training row are stored.

    The processes share the check.
    """
    rows, teacher, size, distiller = run.sets.all, models.teacher, 256, models.distiller

    def stored(batch: dict[str, Any]) -> bool:
        if isinstance(teacher, TopKRows):
            return teacher.has(distiller.read(batch))
        return all(key in teacher for key in distiller.sample_keys(batch))

    option = "--teacher-cache" if run.data.cached else "--teacher"
    rank, ranks = processes.rank(), world_size()
    batches = rows.batches(run.sets.collate, size, shared=True)
    for number, batch in enumerate(batches):
        if stored(batch):
            continue
        for i in range(len(batch["input_ids"])):
            row = {name: x[i : i + 1] for name, x in batch.items()}
            if not stored(row):
                source, number = rows.source_of((number * ranks + rank) * size + i)
                raise InputError(
                    f"{option} {run.config.teacher_cache or run.config.teacher}: {source}, row "
                    f"{number} is not in it; write it from the same rows with the same --max-length"
                )


def finetune_teacher(run: Training, models: Models) -> Models:
    """The models with a teacher that was fine-tuned on the labels, saved as OUT/teacher.

    The student is made again: it had the weights before fine-tuning.
    """
    config, out, teacher = run.config, run.out, models.teacher
    target, device = out.teacher, run.computation.device
    if not processes.on_first_process(lambda: is_complete(target)):
        name = teacher.config.name_or_path
        alone = tuning_of(run, models.max_length)
        if not config.shard and processes.rank() == 0:
            say_estimate(run, alone, {"teacher": teacher, "student": models.student})
        teacher = teacher.requires_grad_(True)
        untaught: Any = NoTeacher(teacher)
        if config.teacher_lora:
            set_seed(config.seed)
            adapters, head = config.teacher_lora, run.data.task.head
            teacher = lora.adapted(teacher, adapters, head, config.teacher, "--teacher-lora")
        distiller = Distiller(untaught, teacher, Labels(), gather=config.gather)
        if config.shard:
            sharding.shard(teacher, device)
        history = fit(alone, distiller, target, alone.sets.teacher, {})
        teacher = load_best(run, target, teacher)
        # The student's adapters name the teacher as it was given, not the folder of a running run.
        teacher.config.name_or_path = name
        if not config.shard:  # which initialises the student from a whole teacher first
            teacher.to(device)

        def complete() -> None:
            report = {**read_json(target / MANIFEST), "complete": True, "history": history}
            with saving(target):
                write_manifest(target, report, ())
                Checkpoints(out.work / CHECKPOINTS["teacher"]).clear()

        processes.on_first_process(complete)
    return assemble(config, run.data, Display(), teacher)


def judge_teachers(
    run: Training, models: Models, cache: Path | None = None
) -> tuple[Models, dict[str, Any]]:
    """The models to train with, and the first part of the run's report."""
    config, data, out = run.config, run.data, run.out
    if config.shard:
        sharding.shard_distiller(models.distiller, run.computation.device)
    judged = Judged()
    if models.teacher_model is not None:
        judged = judge(run, models.teacher_model, who="teacher", teacher=True)
    elif data.cached:  # its scores, if they are of the same rows; a server has none
        prints, before = data.cached["fingerprints"], data.cached["settings"]
        same = prints.get(EVAL_ROWS) == out.manifest["fingerprints"][EVAL_ROWS]
        same = same and before.get("max_length") == models.max_length
        same = same and before.get("precision") == config.precision
        # `fastkd cache` scores greedy text.
        if same and data.task.generation in (None, Generation(seed=config.seed)):
            judged = Judged(data.cached["teacher"])
    _report_teacher(run, judged, f"--teacher {config.teacher}", "teacher")
    by_teacher = judge_row_teachers(run, models) if data.row_teachers else {}
    if config.teacher_layers == SELECT:
        selected = out.once("selected", lambda: select(run, models))
        models = assemble(config, data, Display(), models.teacher, selected)
    outputs = None if cache is None else _cached(run, models, cache)
    if outputs is not None:
        models = assemble(config, data, Display(), models.teacher, models.selected, outputs)
    # Teacher layers that the student was initialised from; None if it was not.
    own = config.student is not None or config.student_weights == "random"
    made = not own and models.teacher_model is not None
    initial = (models.selected or layers_of(config, models.teacher)) if made else None
    report = {
        "fastkd": fastkd.__version__,
        "torch": torch.__version__,
        "rows": run.sets.counts,
        "layers": models.student.config.num_hidden_layers,
        "teacher_layers": initial,
        "task": data.task.name(),
        **data.task.report(),
        "paired": "pair" in data.corpus.train.data.column_names,
        "teacher": judged.scores,
        "warnings": {"teacher": judged.warning} if judged.warning else {},
        **({"teachers": by_teacher} if by_teacher else {}),
    }
    recipe = recipes.compared(config, models.distiller.method) if config.preset == "paper" else {}
    if recipe:
        report["recipe"] = recipe
    return models, report


def _cached(run: Training, models: Models, folder: Path) -> TeacherCache | None:
    """The teacher's outputs on all training rows, of which missing ones are computed.

    None if a method reads more in a training than a cache has.
    """
    config, method = run.config, models.distiller.method
    alone = world_size() == 1 and not config.shard and not config.on_policy
    draws = hasattr(run.sets.collate, "for_epoch")  # inputs of its own in each epoch
    request = teacher_request(method) if method.uses_teacher and method.prepared else {}
    whole = bool(request) and not request["inside"] and models.teacher_model is not None
    if not alone or draws or not whole:
        return None
    parts = (fingerprint_of(models.teacher), json.dumps(request), config.precision)
    path = folder / fingerprint(map(str.encode, parts))
    path.mkdir(parents=True, exist_ok=True)
    rows, device = run.sets.all, run.computation.device
    batches = rows.batches(run.sets.collate, 32, rows.by_length, device=device)
    with filelock.FileLock(path.with_suffix(".lock")), run.computation.autocast():
        return models.distiller.cache_teacher(batches, path)


def judge_row_teachers(run: Training, models: Models) -> dict[str, dict[str, Any]]:
    """For each teacher of --teachers its evaluation rows and scores."""
    found = dict[str, dict[str, Any]]()
    for name, sets in rows_by_teacher(run, models.max_length).items():
        found[name] = {"rows": sum(map(len, sets.values()))}
        if name in models.row_teachers:
            judged = judge(run, models.row_teachers[name], sets, who=f"teacher {name}")
            _report_teacher(run, judged, f"--teachers {name}", f"teacher {name} on its rows")
            found[name]["teacher"] = judged.scores
    return found


def _report_teacher(run: Training, judged: Judged, option: str, who: str) -> None:
    """Print a teacher's scores; raise if they are not finite."""
    if any(map(math.isnan, judged.scores.values())):
        raise InputError(f"{option}: its outputs are not finite")
    if judged.scores:
        run.display.say(f"{who}:  {format_scores(judged.scores)}")


def judge_best(
    run: Training,
    models: Models,
    by_teacher: Mapping[str, dict[str, Any]],
    measure: Measure | None,
) -> dict[str, Any]:
    """Sizes, test scores and seconds per batch of the best student, read from its files."""
    run.display.say("scoring and timing the best student ...")
    best, device = load_best(run, run.out.student, models.student), run.computation.device
    live = {"teacher": models.teacher_model, "student": best}
    found: dict[str, Any] = {"parameters": {}, "bytes": {}}
    if "parameters" in run.data.cached:  # not of a server's cache
        found = {name: {"teacher": run.data.cached[name]} for name in found}
    for who, model in live.items():
        if model is not None:
            found["parameters"][who] = model.num_parameters()
            found["bytes"][who] = model.get_memory_footprint(return_buffers=False)
    if run.config.shard:
        sharding.shard(best, device, trained=False)
    else:
        best.to(device)
    judged = judge(run, best, who="student")
    measured = None if measure is None else measure(run, models.teacher, best, judged)
    several = rows_by_teacher(run, models.max_length) if run.data.row_teachers else {}
    for name, sets in several.items():
        scores = by_teacher[name]["student"] = judge(run, best, sets).scores
        run.display.say(f"student on rows of {name}:  {format_scores(scores)}")
    if run.sets.tests:
        found["test"] = {
            who: judge(run, model, run.sets.tests, teacher=who == "teacher").scores
            for who, model in live.items()
            if model
        }
    if measured is not None:
        return {**found, "seconds_a_batch": {}, **measured}
    seconds = functools.partial(seconds_a_batch, run, best, models.teacher_model)
    if run.config.shard:  # no process runs it alone
        return {**found, "seconds_a_batch": processes.all_gather(seconds())[0]}
    return {**found, "seconds_a_batch": processes.on_first_process(seconds)}


def publish(
    run: Training, models: Models, report: dict[str, Any], history: list[dict], started: float
) -> dict[str, Any]:
    """Complete report and directory of the student, and move the results to --out.

    Returns the whole report, with the scores in the manifest of the saved student. The run
    ``started`` at this time of the clock, less the time of its parts before a resumption.
    """
    out = run.out
    if reading := getattr(models.teacher, "reading", ""):
        report["stored_teacher"] = reading
    if servers := servers_of(models.teacher):
        report["served_teacher"] = ", ".join(x.throughput() for x in servers)
        run.display.say(report["served_teacher"])
    report = {
        # The first process reads it, before it moves the directory.
        **processes.on_first_process(lambda: read_json(out.student / MANIFEST)),
        **report,
        "compared_layers": models.distiller.method.teacher_layers,
        "complete": True,
        "history": history,
        "seconds": {"training": history[-1]["seconds"], "total": time.perf_counter() - started},
    }

    def complete() -> None:
        with saving(run.config.out):
            write_card(out.student, report)
            write_manifest(out.student, report, [CARD])
            out.finish(run.display.say)

    processes.on_first_process(complete)
    run.display.event("complete", **{k: report[k] for k in ("teacher", "student", "seconds")})
    return report


def write_card(directory: Path, report: dict[str, Any]) -> None:
    """Write README.md for the student in ``directory``."""
    hub: Any = require("huggingface_hub", "train")
    settings, task = report["settings"], tasks.named(report.get("task"))
    teacher = settings["teacher"] or settings.get("teacher_cache") or settings["teachers"]
    method = report.get("method", settings["method"])
    sets = {"evaluation": report, "test": report.get("test", {})}
    columns = [(kind, name) for kind, found in sets.items() for name in found.get("student", {})]
    hub_name = settings["task"] if settings["task"] in GLUE_TASKS else settings["data"]
    tests, results = names_of([Path(path) for path in settings["test"] or ()]), []
    for kind, name in columns:
        # The file of the rows, or the data set on the hub; a metric ends in its test file's name.
        dataset = Path(settings["evals"] or ".").name or hub_name
        if kind == "test":
            dataset = tests[max((x for x in tests if name.endswith(x)), key=len)].name
        results.append(
            hub.EvalResult(
                task_type=task.pipeline,
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split=kind,
                metric_type=name,
                metric_value=sets[kind]["student"][name],
            )
        )
    data = hub.ModelCardData(
        library_name=task.library,
        pipeline_tag=task.pipeline,
        tags=["fastkd", "knowledge-distillation"],
        base_model=None
        if Path(teacher).exists() or "stored_teacher" in report
        else settings.get("teacher_model") or teacher,
        model_name=f"{method} student",
        eval_results=results,
    )
    known = {
        **report,
        "data": data.to_yaml(),
        "title": f"{method} student of {Path(teacher).name}",
        "method": method,
        "teacher": teacher,
        "sets": sets,
        "columns": columns,
        "recipe": recipes.sentence(report["recipe"]) if "recipe" in report else "",
        "summary": task.summary.format_map({k: escaped(v) for k, v in report.items()}),
        "usage": Template(task.usage).substitute(
            directory=directory.name,
            head=task.head,
            pipeline=task.pipeline,
            inputs='{"text": "...", "text_pair": "..."}' if report.get("paired") else '"..."',
        ),
        "head": task.head,
        "adapter": lora.ADAPTER,
        "directory": directory.name,
    }
    (directory / CARD).write_text(_card().render(known), encoding="utf-8")


@functools.cache
def _card() -> Any:
    """The template of a card."""
    jinja2: Any = require("jinja2", "train")
    page = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    page.globals.update(compared=compared, escaped=escaped)
    return page.from_string(CARD_TEXT.read_text("utf-8"))


def escaped(value: Any) -> Any:
    """A list of names joined by commas, with Markdown's special characters escaped."""
    if not isinstance(value, list | tuple):
        return value
    names = (" ".join(str(name).split()) for name in value)
    return ", ".join(re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", name) for name in names)


def check_resume(config: Config) -> None:
    """Raise if --resume names no directory."""
    if config.resume and not config.out.exists():
        raise InputError(
            f"--resume: --out {config.out} does not exist; give the directory of the run, or leave "
            "--resume out"
        )


def check(config: Config) -> Config:
    """``config`` with its trainer's arguments; raises for options that do not fit method, task or
    processes, before anything is read."""
    config = settled(config)
    if config.shard and world_size() == 1:
        raise InputError(
            "--fsdp: shards models over processes, but there is one; start several by `torchrun "
            "--nproc-per-node N -m fastkd distill ...`"
        )
    check_resume(config)
    kind = tasks.of_file(config.task, config.train)
    if config.method != AUTO:
        method = make_method(config.method, config.options, config.preset)
        check_classes(config.method, method, kind)
    layers = config.options.get("layers")
    if isinstance(layers, str) and layers not in SCHEMES:
        raise InputError(f"--set layers={layers}: {nearest(layers, SCHEMES)}")
    for flag in set_flags(config, "max_new_tokens", "sample") if kind.generation is None else ():
        raise InputError(
            f"{flag}: models of --task {kind.name()} don't generate the text that is scored; "
            "leave it out"
        )
    if config.finetune_teacher and not kind.supervised:
        raise InputError(
            f"--finetune-teacher: the rows of --task {kind.name()} have no labels to train on"
        )
    return config


class NoTeacher(nn.Module):
    """Stand-in for the teacher of a model that learns from labels alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        vars(self)["model"] = model  # not a submodule, whose parameters would be frozen

    def get_base_model(self) -> nn.Module:
        """The model whose sizes the method reads; see ``peft.PeftModel``."""
        base: nn.Module = vars(self)["model"]
        return base


def tuning_of(run: Training, max_length: int) -> Training:
    """The training of the teacher, on its own tokens."""
    config, data, sets = run.config, run.data, run.sets
    config = dataclasses.replace(
        config,
        num_train_epochs=config.finetune_teacher,
        training_steps=None,
        learning_rate=config.teacher_learning_rate,
    )
    if data.teacher_tokenizer is not None:
        data = dataclasses.replace(
            data, tokenizer=data.teacher_tokenizer, teacher_tokenizer=None, match=None
        )
        sets = encode(config, data, max_length)
    return dataclasses.replace(run, config=config, data=data, sets=sets)


def say_estimate(run: Training, tuning: Training, models: Mapping[str, Any]) -> None:
    """Print the time of the teacher's ``tuning`` and of the ``run``, before both.

    Teacher and student learn a batch from labels twice. The second pass is timed: the first also
    allocates memory. Random numbers and what learns stay as they are.
    """
    size = run.computation.batch_size
    teacher_steps = steps_of(tuning.config, size, len(tuning.sets.teacher))[0]
    student_steps = steps_of(run.config, size, len(run.sets.all))[0]
    seconds = {}
    for who, each in (("teacher", tuning), ("student", run)):
        model = models[who].to(run.computation.device)
        learned = {name for name, x in model.named_parameters() if x.requires_grad}
        training = model.training
        untaught: Any = NoTeacher(model.requires_grad_(True))
        seconds[who] = _seconds(each, Distiller(untaught, model, Labels()))
        model.zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learned)
        model.train(training)
    # A step of distillation also runs the teacher forward, a third of the teacher's own step.
    of_student = student_steps * (seconds["student"] + seconds["teacher"] / 3)
    run.display.say(
        f"about {clock(teacher_steps * seconds['teacher'])} for {teacher_steps} steps of the "
        f"teacher and {clock(of_student)} for {student_steps} of the student, by one batch of each"
    )


def _seconds(run: Training, distiller: Distiller) -> float:
    """Seconds of a step without the optimizer."""
    device, size, sets = run.computation.device, run.computation.batch_size, run.sets
    distiller.to(device).train()
    seconds = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        batch = next(sets.teacher.batches(sets.collate, size, device=device))
        own = {k: x for k, x in batch.items() if not k.startswith("teacher_")}
        own.pop("student_spans", None)
        for _ in range(2):
            began = time.perf_counter()
            with run.computation.autocast():
                loss = distiller(**own).loss
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    return seconds
