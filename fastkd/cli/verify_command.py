"""`fastkd verify`: one step of the user's distillation, computed in every equivalent way."""

import dataclasses

from rich.console import Console

from fastkd.cli.cache_command import begin
from fastkd.cli.command_settings import VerifySettings
from fastkd.cli.display import RichDisplay
from fastkd.distill import verify as checks
from fastkd.train.errors import RunFailed
from fastkd.train.progress import counted


def verify(settings: VerifySettings, console: Console) -> bool:
    """Run `fastkd verify`; returns whether all equivalent ways agree.

    Raises:
        InputError: an option cannot be used.
    """
    with RichDisplay(console) as display:
        # No row is evaluated, but a corpus has some.
        evals = settings.evals or settings.train
        few = dataclasses.replace(settings, max_train_rows=settings.rows, evals=evals)
        job = begin(few, settings.rows, display)
        job.load(fresh_head=True)
        distiller = job.assemble(job.select()).to(job.device)
        rows = job.train_rows
        inputs = next(rows.batches(job.collate, len(rows), device=job.device))
        display.say(f"{len(rows)} rows, device {job.device}, float64, without dropout")
        try:
            distiller.prepare([inputs])
            number, each = checks.begin(distiller, inputs, ranks=settings.ranks)
            found = list(counted(each, display, "checks", number))
        except (RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()
            raise RunFailed(f"the step can't be checked: {reason[-1]}") from error
        display.say(checks.table(found))
    return all(check.ok for check in found)
