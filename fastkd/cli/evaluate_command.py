"""`fastkd evaluate`: the scores of a trained model on a file."""

from rich.console import Console

from fastkd.cli.command_settings import EvaluateSettings
from fastkd.cli.display import say, stderr_display
from fastkd.cli.tables import begin, table
from fastkd.train.errors import InputError, nearest
from fastkd.train.evaluation import score
from fastkd.train.progress import format_scores
from fastkd.train.saving import write_file, write_json


def evaluate(settings: EvaluateSettings, console: Console) -> dict[str, float]:
    """Print the scores on labelled rows, and write them to --out."""
    model = begin(settings)
    known = model.task.metrics
    if settings.metric not in (None, *known):
        listed = nearest(settings.metric or "", known)
        raise InputError(f"--metric {settings.metric} doesn't score this model; {listed}")
    rows = model.read(settings.data, settings.columns, settings.task, labelled=True)
    model.task, rows, lines, _ = model.task.prepare(rows, order=settings.label_order)
    metrics = model.task.select_metrics(settings.metric)
    for line in (*lines, *model.task.explain(metrics)):
        say(console, line)
    answers = model.answers(rows, settings.max_length, stderr_display())
    scores = score(model.task, metrics, *answers)
    say(console, f"{len(rows)} rows:  {format_scores(scores)}")
    if settings.out is not None:
        found = {"rows": len(rows), **scores}
        if settings.out.suffix == ".json":
            write_json(settings.out, found)
        else:
            write_file(settings.out, table(settings.out.suffix, [found]))
    return scores
