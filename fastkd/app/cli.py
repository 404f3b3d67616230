"""The `fastkd` command. Each command imports what it needs when it runs."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastkd._extras import MissingExtra, require

typer: Any = require("typer", "train")
Console: Any = require("rich.console", "train").Console

app = typer.Typer(
    name="fastkd",
    help="Distil language models into smaller ones with the losses of five papers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Option = typer.Option


def main() -> None:
    """Entry point of the console script."""
    app()


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Errors of use as one sentence on stderr: exit code 2 for bad input, 1 for the machine's."""
    from fastkd.app.data import InputError

    try:
        yield
    except InputError as error:
        _fail(str(error), 2)
    except MissingExtra as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("stopped; a student saved before is intact, --resume continues the run", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}; a student saved before is intact", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def _require_training() -> None:
    """Say what is missing before an hour of training has passed."""
    for module in ("transformers", "accelerate", "safetensors", "sklearn", "scipy"):
        require(module, "train")


@app.command()
def distill(
    teacher: Annotated[str, Option(help="Teacher: a directory or a hub name.")],
    out: Annotated[Path, Option(help="Directory for the student and its report.")] = Path(
        "runs/distill"
    ),
    task: Annotated[
        str | None,
        Option(help="GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte."),
    ] = None,
    data: Annotated[str | None, Option(help="Data set on the hub.")] = None,
    data_config: Annotated[str | None, Option(help="Its configuration.")] = None,
    train_split: Annotated[str, Option(help="Split to train on.")] = "train",
    eval_split: Annotated[str | None, Option(help="Split to evaluate on (validation).")] = None,
    train: Annotated[Path | None, Option(help="Training rows: .tsv, .csv or .jsonl.")] = None,
    eval_file: Annotated[
        Path | None, Option("--eval", help="Rows to evaluate on: .tsv, .csv or .jsonl.")
    ] = None,
    text_column: Annotated[str | None, Option(help="Column of the text.")] = None,
    text_pair_column: Annotated[str | None, Option(help="Column of the second text.")] = None,
    label_column: Annotated[str | None, Option(help="Column of the label (label).")] = None,
    no_header: Annotated[
        bool, Option("--no-header", help="The files have no header; columns are 0, 1, 2, ...")
    ] = False,
    labels: Annotated[
        str, Option(help="What labels are: auto, classes, or numbers (regression).")
    ] = "auto",
    metric: Annotated[
        str | None,
        Option(help="Score that picks the best: accuracy, mcc, f1, pearson, spearman or mse."),
    ] = None,
    max_train_rows: Annotated[int | None, Option(help="Train on a random part.")] = None,
    max_eval_rows: Annotated[int | None, Option(help="Evaluate on a random part.")] = None,
    tokenizer: Annotated[str | None, Option(help="Tokenizer, if not the teacher's.")] = None,
    student: Annotated[
        str | None, Option(help="Student: a directory or a hub name, instead of teacher layers.")
    ] = None,
    student_layers: Annotated[
        int | None, Option(help="How many teacher layers make the student (half of them).")
    ] = None,
    teacher_layers: Annotated[
        str, Option(help="Which teacher layers: uniform, top, bottom, or numbers such as 2,4,6.")
    ] = "uniform",
    method: Annotated[str, Option(help="fcd, knn, lrc_bert, mc3kd, lrkd or soft_targets.")] = "fcd",
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="Hyper-parameter of the method; repeatable."),
    ] = None,
    finetune_teacher: Annotated[
        float, Option(metavar="EPOCHS", help="Fine-tune the teacher on the task first.")
    ] = 0.0,
    teacher_learning_rate: Annotated[float, Option(help="Learning rate of that.")] = 5e-5,
    epochs: Annotated[float, Option(help="Epochs of distillation.")] = 3.0,
    batch_size: Annotated[int, Option(help="Rows in a step.")] = 32,
    learning_rate: Annotated[float, Option(help="Peak learning rate.")] = 5e-5,
    weight_decay: Annotated[float, Option(help="Weight decay of AdamW.")] = 0.01,
    warmup: Annotated[float, Option(help="Share of the steps that warms up.")] = 0.1,
    max_length: Annotated[int, Option(help="Longest text, in tokens.")] = 128,
    precision: Annotated[str, Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, Option(help="Seed of everything random.")] = 0,
    checkpoint_every: Annotated[
        int | None, Option(metavar="STEPS", help="Checkpoints within an epoch, too.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Continue an interrupted run; give the same options.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the student in --out once a new one is complete.")
    ] = False,
) -> None:
    """Distil a teacher into a smaller student.

    For example, on a GLUE task from the hub:

        fastkd distill --teacher bert-base-uncased --finetune-teacher 3 --task sst2 --method fcd

    or on local files:

        fastkd distill --teacher ./teacher --train train.tsv --eval dev.tsv --method knn --set k=3
    """
    with one_sentence():
        _require_training()
        from fastkd.app import run
        from fastkd.app.data import Source
        from fastkd.app.loop import Interrupted, TrainingFailed

        settings = run.Settings(
            teacher=teacher,
            out=out,
            source=Source(
                task=task,
                data=data,
                data_config=data_config,
                train=train,
                evals=eval_file,
                train_split=train_split,
                eval_split=eval_split,
                text_column=text_column,
                text_pair_column=text_pair_column,
                label_column=label_column,
                header=not no_header,
                labels=labels,
                metric=metric,
                max_train_rows=max_train_rows,
                max_eval_rows=max_eval_rows,
                seed=seed,
            ),
            method=method,
            options=run.parse_options(set_ or []),
            tokenizer=tokenizer,
            student=student,
            student_layers=student_layers,
            teacher_layers=teacher_layers,
            finetune_teacher=finetune_teacher,
            teacher_learning_rate=teacher_learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup=warmup,
            max_length=max_length,
            precision=precision,
            device=device,
            seed=seed,
            checkpoint_every=checkpoint_every,
            resume=resume,
            overwrite=overwrite,
        )
        console = Console()
        try:
            report = run.distill(settings, console)
        except Interrupted as error:
            _fail(f"stopped after step {error}, which is saved; --resume continues from it", 130)
        except TrainingFailed as error:
            _fail(str(error), 1)
        run.show(report, out, console)


@app.command()
def demo(
    out: Annotated[Path, Option(help="Directory for the table and the pictures.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, Option(help="Training steps of every student.")] = None,
    seed: Annotated[int, Option(help="Seed of everything random.")] = 0,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    fast: Annotated[bool, Option("--fast", help="A few steps on a few rows, as a check.")] = False,
) -> None:
    """Distil a real teacher with every method, offline, in a few minutes."""
    with one_sentence():
        _require_training()
        require("matplotlib", "train")
        from fastkd.app.demo import run_demo

        run_demo(out, Console(), steps=steps, seed=seed, device=device, fast=fast)


@app.command()
def doctor() -> None:
    """Say what is installed, which backends run and why not, and check them."""
    from fastkd.app.doctor import examine

    if not examine(Console()):
        raise typer.Exit(1)


@app.command()
def bench(
    set: Annotated[str, Option(help="Size sets, separated by commas; by device if empty.")] = "",
    only: Annotated[str, Option(help="Losses, separated by commas; all if empty.")] = "",
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path, Option(help="Result file, or a directory for <machine>.json.")] = Path(
        "runs/bench"
    ),
    plot: Annotated[Path | None, Option(help="Directory for pictures.")] = None,
    seconds: Annotated[float, Option(help="Timing budget of one case.")] = 1.5,
    passes: Annotated[
        int | None, Option(help="How often every case is timed; by device if not given.", min=1)
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
) -> None:
    """Time every loss here: reference, torch.compile, fastkd's backends and peers."""
    with one_sentence():
        from fastkd.app.data import InputError
        from fastkd.bench import runner

        if plot is not None:
            require("matplotlib", "train")
        try:
            runner.run(
                runner.split(set),
                runner.split(only),
                None if device == "auto" else device,
                out,
                plot,
                resume=resume,
                seconds=seconds,
                passes=passes,
            )
        except runner.WrongChoice as error:
            raise InputError(str(error)) from error
        except runner.PassFailed as error:
            _fail(str(error), 1)


@app.command()
def analyze(
    model: Annotated[str, Option(help="Model: a directory or a hub name.")],
    text: Annotated[Path | None, Option(help="Text file, one text a line.")] = None,
    task: Annotated[str | None, Option(help="GLUE task, its validation split.")] = None,
    out: Annotated[Path, Option(help="Directory for the numbers and pictures.")] = Path(
        "runs/analyze"
    ),
    rows: Annotated[int | None, Option(help="Use only the first rows.", min=1)] = None,
    batch_size: Annotated[int, Option(help="Texts in a batch.", min=1)] = 32,
    max_length: Annotated[int, Option(help="Tokens of a text.", min=1)] = 128,
    variance: Annotated[float, Option(help="Share of the variance SVCCA keeps.")] = 0.99,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """How alike a model's layers are: SVCCA and CKA as numbers and pictures."""
    with one_sentence():
        require("transformers", "train")
        require("matplotlib", "train")
        from fastkd.app import analyze as report
        from fastkd.app.data import InputError
        from fastkd.app.loop import choose_device

        if (text is None) == (task is None):
            raise InputError("give either --text FILE or --task NAME")
        if not 0 < variance <= 1:
            raise InputError(f"--variance must be above 0 and at most 1, got {variance}")
        texts, pairs = (report.read_lines(text), None) if text else report.read_task(str(task))
        loaded, tokenizer = report.load_model(model, choose_device(device, "fp32"))
        second = None if pairs is None else pairs[:rows]
        batches = report.batches_of(tokenizer, texts[:rows], second, batch_size, max_length)
        console = Console()
        result = report.analyze(loaded, batches, out, model, variance)
        console.print(report.table(result), highlight=False)
        console.print(f"{out}/layers.json, svcca.png, cka.png", highlight=False)


if __name__ == "__main__":
    main()
