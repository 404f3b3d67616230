"""`fastkd cache`: a teacher's outputs on every training row, stored for `--teacher-cache`.

The directory holds the files of `fastkd.distill.TeacherCache`, the initial student with its
tokenizer, and `MANIFEST`, written last, with settings, scores and sizes of the teacher.
"""

import contextlib
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fastkd.cli.command_settings import CacheSettings
from fastkd.cli.display import RichDisplay
from fastkd.distill.cache import ABOUT, TeacherCache
from fastkd.distill.distiller import Distiller
from fastkd.distributed import world_size
from fastkd.train import processes
from fastkd.train.config import TrainingConfig
from fastkd.train.errors import InputError
from fastkd.train.job import Job, save_model, sizes_of
from fastkd.train.models import (
    STUDENT,
    TEACHERS_TOKENIZER,
    make_method,
)
from fastkd.train.options import as_json
from fastkd.train.progress import Display, counted
from fastkd.train.run_directory import row_fingerprints, size_text
from fastkd.train.saving import (
    LOCK,
    MANIFEST,
    free_bytes,
    locked,
    save_tokenizer,
    saving,
    write_json,
)
from fastkd.train.settings import AUTO

KEPT = "the same command goes on with what is there"


def write(settings: CacheSettings, console: Console) -> None:
    """Run or resume `fastkd cache`, in any number of processes.

    Raises:
        InputError: an option cannot be used, or the directory holds another cache.
    """
    out = settings.out
    with contextlib.ExitStack() as stack:
        processes.join(settings.device_name)
        stack.enter_context(processes.enter_on_first_process(locked(out)))
        display = stack.enter_context(RichDisplay(console))
        with processes.errors_on_all():
            others = [p for p in out.iterdir() if p.name != LOCK and not _is_partial(p)]
            if others and not (out / ABOUT).exists():
                raise InputError(
                    f"--out {out} holds other files than a cache's; give another --out"
                )
            job = begin(settings, settings.batch_size, display)
            job.load()
            nn.Module.to(job.teacher, job.device)
            selected = job.select()
            distiller = job.assemble(selected).to(job.device)
        processes.on_first_process(lambda: _remove_partial(out))
        # As `DistillationTrainer` does: the first batches choose the layers that MC3KD compares.
        rows, size = job.all_rows, settings.batch_size
        first = rows.batches(job.collate, size, rows.by_length, device=job.device)
        distiller.prepare(itertools.islice(first, 64))
        scores, judged = dict[str, float](), sum(map(len, job.eval_rows.values()))
        if job.teacher_model is not None:  # a server has no scores
            display.say(f"the teacher's scores, on {judged} evaluation rows ...")
            scores = job.score(job.teacher, who="teacher")
        number, own = rows.shared(job.collate, size, job.device)
        own = counted(own, display, "teacher", number)
        read = job.teacher_tokenizer or job.tokenizer
        processes.on_first_process(lambda: check_room(settings, job, distiller))
        with processes.errors_on_all(), saving(out, KEPT), job.training_config.autocast():
            try:
                if number:
                    distiller.cache_teacher(own, out, tokenizer=read, top_k=settings.top_k)
            except ValueError as error:  # another teacher's cache, or a method that has none
                path = str(error).startswith(str(out))
                option = f"--method {job.settings.method}:"
                if str(error).startswith("top_k"):
                    option = "--top-k:"
                what = "--out" if path else option
                raise InputError(f"{what} {error}") from error
        processes.on_first_process(lambda: _complete(settings, job, distiller, scores, selected))
        cache = TeacherCache(out)
        used = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        display.say(f"{len(cache)} different samples, {used / 2**20:.1f} MiB in {out}")


def check_room(settings: CacheSettings, job: Job, distiller: Distiller) -> None:
    """Raise if the disk lacks room for the cache, by the outputs on rows of all lengths."""
    rows, out = job.all_rows, settings.out
    order = rows.by_length
    some = order[:: max(1, len(order) // settings.batch_size)][: settings.batch_size]
    batches = rows.batches(job.collate, len(some), some, device=job.device)
    with tempfile.TemporaryDirectory() as folder, job.training_config.autocast():
        try:
            distiller.cache_teacher(batches, folder, top_k=settings.top_k)
        except ValueError:  # which the cache itself raises
            return
        used = _bytes_in(Path(folder))
    student: Any = distiller.student
    needed = used * len(rows) // len(some) + student.get_memory_footprint(return_buffers=False)
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


def begin(settings: Any, batch_size: int, display: Display) -> Job:
    """The rows of a command that trains nothing; `Job.load` loads its teacher."""
    training_config = TrainingConfig(
        batch_size=batch_size * world_size(),
        precision=settings.precision,
        device_name=settings.device_name,
        seed=settings.seed,
    )
    if settings.method != AUTO:
        make_method(settings.method, settings.options, settings.preset)
    return Job(settings, training_config, display)


def _complete(
    settings: CacheSettings,
    job: Job,
    distiller: Distiller,
    scores: dict[str, float],
    selected: list[int] | None,
) -> None:
    student: Any = distiller.student
    save_model(settings.out / STUDENT, student, job.tokenizer, {}, job.task)
    if job.teacher_tokenizer is not None:
        save_tokenizer(job.teacher_tokenizer, settings.out / TEACHERS_TOKENIZER)
    with saving(settings.out, KEPT):
        report = {
            "settings": {**as_json(settings), "max_length": job.max_length},
            "fingerprints": row_fingerprints(job.corpus),
            "teacher": scores,
            **({} if job.teacher_model is None else sizes_of(job.teacher)),
            "selected": selected,
            "samples": len(TeacherCache(settings.out)),
        }
        write_json(settings.out / MANIFEST, report)
