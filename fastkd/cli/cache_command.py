"""`fastkd cache`: a teacher's outputs on every training row, stored for `--teacher-cache`.

The directory holds the files of `fastkd.distill.TeacherCache`, the initial student with its
tokenizer, and `MANIFEST`, written last, with settings, scores and sizes of the teacher.
"""

import contextlib
import dataclasses
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from fastkd.cli.display import RichDisplay
from fastkd.distill import verify as checks
from fastkd.distill.cache import ABOUT, TeacherCache
from fastkd.distributed import world_size
from fastkd.integrations.top_k_files import rows_of
from fastkd.integrations.top_k_files import write as write_rows
from fastkd.train import processes
from fastkd.train.arrow_rows import fingerprint_of
from fastkd.train.assembling import Models, assemble, select
from fastkd.train.config import AUTO, Config
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.fitting import save_model
from fastkd.train.loading import encode, load_data, say_match, settled_method
from fastkd.train.models import make_method
from fastkd.train.options import as_json
from fastkd.train.processes import Computation
from fastkd.train.progress import Display, counted
from fastkd.train.run_directory import rows_of as sets_of_rows
from fastkd.train.run_directory import size_text
from fastkd.train.saving import (
    LOCK,
    MANIFEST,
    STUDENT,
    TEACHERS_TOKENIZER,
    free_bytes,
    locked,
    save_tokenizer,
    saving,
    write_json,
)
from fastkd.train.scoring import Judged, Run, judge

KEPT = "the same command goes on with what is there"


def write(config: Config, display: RichDisplay) -> None:
    """Run or resume `fastkd cache`, in any number of processes.

    Raises:
        InputError: an option cannot be used, or the directory holds another cache.
    """
    out = config.out
    with contextlib.ExitStack() as stack:
        processes.join(config.device_name)
        processes.on_first_process(lambda: stack.enter_context(locked(out)))
        stack.enter_context(display)
        with processes.errors_on_all():
            others = [p for p in out.iterdir() if p.name != LOCK and not _is_partial(p)]
            if others and not (out / ABOUT).exists():
                raise InputError(
                    f"--out {out} holds other files than a cache's; give another --out"
                )
            run, models = begin(config, display)
            nn.Module.to(models.teacher, run.computation.device)
            models.distiller.to(run.computation.device)
        processes.on_first_process(lambda: _remove_partial(out))
        # As `DistillationTrainer` does: the first batches choose the layers that MC3KD compares.
        rows, size, device = run.sets.all, config.batch_size, run.computation.device
        first = rows.batches(run.sets.collate, size, rows.by_length, device=device)
        models.distiller.prepare(itertools.islice(first, 64))
        judged, scored = Judged(), sum(map(len, run.sets.evals.values()))
        if models.teacher_model is not None:  # a server has no scores
            display.say(f"the teacher's scores, on {scored} evaluation rows ...")
            judged = judge(run, models.teacher, who="teacher", teacher=True)
        processes.on_first_process(lambda: check_room(run, models))
        _fill(run, models)
        if config.export is not None:
            own = rows.batches(run.sets.collate, size, rows.by_length, shared=True, device=device)
            with processes.errors_on_all(), saving(config.export, KEPT):
                found = map(models.distiller.read, own)
                write_rows(
                    rows_of(TeacherCache(out), found, models.distiller.method), config.export
                )
        processes.on_first_process(lambda: _complete(run, models, judged.scores))
        cache = TeacherCache(out)
        used = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        display.say(f"{len(cache)} different samples, {used / 2**20:.1f} MiB in {out}")


def begin(config: Config, display: Display) -> tuple[Run, Models]:
    """Rows and models of a command that trains nothing."""
    computation = Computation.of(config, world_size())
    if config.method != AUTO:
        make_method(config.method, config.options, config.preset)
    data = load_data(config, display)
    config = settled_method(config, data, display)
    models = assemble(config, data, display)
    run = Run(config, computation, data, encode(config, data, models.max_length), display)
    if selected := select(run, models):
        models = assemble(config, data, Display(), models.teacher, selected)
    if data.match is not None:
        say_match(data.match, run.sets.train, display)
    return run, models


def _fill(run: Run, models: Models) -> None:
    """Write the teacher's outputs on this process's share of the rows."""
    config, data, out = run.config, run.data, run.config.out
    rows, size, device = run.sets.all, config.batch_size, run.computation.device
    number = len(range(processes.rank() * size, len(rows), world_size() * size))
    own = rows.batches(run.sets.collate, size, rows.by_length, shared=True, device=device)
    own = counted(own, run.display, "teacher", number)
    read = data.teacher_tokenizer or data.tokenizer
    with processes.errors_on_all(), saving(out, KEPT), run.computation.autocast():
        try:
            if number:
                models.distiller.cache_teacher(own, out, tokenizer=read, top_k=config.top_k)
        except ValueError as error:  # another teacher's cache, or a method that has none
            path = str(error).startswith(str(out))
            option = f"--method {config.method}:"
            if str(error).startswith("top_k"):
                option = "--top-k:"
            what = "--out" if path else option
            raise InputError(f"{what} {error}") from error


def check_room(run: Run, models: Models) -> None:
    """Raise if the disk lacks room for the cache, by the outputs on rows of all lengths."""
    rows, config, out = run.sets.all, run.config, run.config.out
    order = rows.by_length
    some = order[:: max(1, len(order) // config.batch_size)][: config.batch_size]
    batches = rows.batches(run.sets.collate, len(some), some, device=run.computation.device)
    with tempfile.TemporaryDirectory() as folder, run.computation.autocast():
        try:
            models.distiller.cache_teacher(batches, folder, top_k=config.top_k)
        except ValueError:  # which the cache itself raises
            return
        used = _bytes_in(Path(folder))
    student = models.student.get_memory_footprint(return_buffers=False)
    needed = used * len(rows) // len(some) + student
    needed, free = needed - _bytes_in(out), free_bytes(out)
    if needed > free:
        raise InputError(
            f"--out {out}: the cache takes about {size_text(needed)}, and the disk has "
            f"{size_text(free)} left"
        )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_partial(path: Path) -> bool:
    """Whether a file was left incomplete by a killed process, by its temporary name."""
    return re.fullmatch(r"\.[0-9a-f]{32}", path.name) is not None


def _remove_partial(out: Path) -> None:
    for path in filter(_is_partial, out.iterdir()):
        path.unlink()


def _complete(run: Run, models: Models, scores: dict[str, float]) -> None:
    """Write the student, and the report, with which the cache is complete."""
    data, out, teacher = run.data, run.config.out, models.teacher_model
    save_model(out / STUDENT, models.student, data.tokenizer, {}, data.task)
    if data.teacher_tokenizer is not None:
        save_tokenizer(data.teacher_tokenizer, out / TEACHERS_TOKENIZER)
    sizes = {}
    if teacher is not None:
        memory = teacher.get_memory_footprint(return_buffers=False)
        sizes = {"parameters": teacher.num_parameters(), "bytes": memory}
    with saving(out, KEPT):
        report = {
            "settings": {**as_json(run.config), "max_length": models.max_length},
            "fingerprints": {
                name: fingerprint_of(rows) for name, rows in sets_of_rows(data.corpus).items()
            },
            "teacher": scores,
            **sizes,
            "selected": models.selected,
            "samples": len(TeacherCache(out)),
        }
        write_json(out / MANIFEST, report)


def verify(config: Config, display: RichDisplay) -> bool:
    """Run `fastkd verify`; returns whether all equivalent ways agree."""
    with display:
        # No row is evaluated, but a corpus has some.
        evals = config.evals or config.train
        few: dict[str, Any] = {"max_train_rows": config.rows, "batch_size": config.rows}
        run, models = begin(dataclasses.replace(config, **few, evals=evals), display)
        device, distiller = run.computation.device, models.distiller.to(run.computation.device)
        train = run.sets.train
        inputs = next(train.batches(run.sets.collate, len(train), device=device))
        display.say(f"{len(train)} rows, device {device}, float64, without dropout")
        try:
            distiller.prepare([inputs])
            number, each = checks.begin(distiller, inputs, ranks=config.ranks)
            found = list(counted(each, display, "checks", number))
        except (RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()
            raise RunFailed(f"the step can't be checked: {reason[-1]}") from error
        display.say(checks.table(found))
    return all(check.ok for check in found)
