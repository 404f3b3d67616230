"""`fastkd evaluate`: the scores of a finished model on a file."""

from rich.console import Console

from fastkd.cli.display import say
from fastkd.cli.settings import EvaluateSettings
from fastkd.cli.tables import FORMATS, begin
from fastkd.train.data import to_classes, to_reals, with_labels, without
from fastkd.train.errors import InputError, nearest
from fastkd.train.finished import Finished
from fastkd.train.progress import format_scores
from fastkd.train.rows import Rows
from fastkd.train.saving import write_file, write_json
from fastkd.train.score import evaluate as score
from fastkd.train.tasks import CLASSIFICATION_METRICS, REGRESSION_METRICS


def evaluate(settings: EvaluateSettings, console: Console) -> dict[str, float]:
    """Print the scores on labelled rows, and write them to --out."""
    model = begin(settings)
    regression = model.classes is None
    possible: tuple[str, ...] = REGRESSION_METRICS if regression else CLASSIFICATION_METRICS
    metrics = possible[:2] if regression else possible[:1]
    if settings.metric is not None:
        if settings.metric not in possible:
            known = nearest(settings.metric, possible)
            raise InputError(f"--metric {settings.metric} doesn't score this model; {known}")
        metrics = tuple(dict.fromkeys((settings.metric, *metrics)))
    rows = _labelled(model, settings, console)
    scores = score(metrics, *model.logits(rows, settings.max_length), model.positive)
    say(console, f"{len(rows)} rows:  {format_scores(scores)}")
    if settings.out is not None:
        found = {"rows": len(rows), **scores}
        if settings.out.suffix == ".json":
            write_json(settings.out, found)
        else:
            write_file(settings.out, FORMATS[settings.out.suffix]([found]))
    return scores


def _labelled(model: Finished, settings: EvaluateSettings, console: Console) -> Rows:
    """The rows of --data with the model's labels; how these were read, and what has none, is said.

    Raises:
        InputError: --label-order doesn't fit the model's classes.
    """
    rows = model.read(settings.data, settings.columns, settings.task, labelled=True)
    names = model.classes
    order = None
    if settings.label_order is not None:
        order = [name.strip() for name in settings.label_order.split(",")]
        if names is None or len(set(order)) != len(order) or len(order) != len(names):
            has = "it predicts a number" if names is None else f"they are {', '.join(names)}"
            raise InputError(
                f"--label-order {settings.label_order}: must name the data's label for each class "
                f"of the model, and {has}"
            )
    if names is None:
        return to_reals(rows)
    rows, bare = with_labels(rows)
    if bare is not None:
        say(console, without(rows, bare))
    rows, reading = to_classes(rows, names, order)
    if reading:
        say(console, reading)
    return rows
