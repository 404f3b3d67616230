"""The options of every command but `fastkd distill`, whose are the run's own."""

from dataclasses import dataclass
from pathlib import Path

from fastkd.analysis.similarity_measures import MEASURES
from fastkd.train import tasks
from fastkd.train.errors import InputError, nearest
from fastkd.train.options import Checked, data_option, given, option, run_option
from fastkd.train.settings import (
    MAX_LENGTH,
    ColumnOptions,
    Pairing,
    device,
    precision,
    remote_code,
    seed,
)


@dataclass(kw_only=True)
class CacheSettings(Pairing):
    out: Path = run_option(Path("runs/teacher-cache"), "Directory of the cache.")
    batch_size: int = run_option(32, "Rows at a time.", least=1)
    top_k: int | None = run_option(
        None,
        "Of a language model's soft targets keep so many most probable tokens, 8 bytes each.",
        least=1,
    )


@dataclass(kw_only=True)
class VerifySettings(Pairing):
    rows: int = run_option(8, "Rows of the step.", least=2)
    ranks: int = run_option(2, "Processes to share it (Linux only); 0: none.", least=0)


@dataclass(kw_only=True)
class DemoSettings(Checked):
    out: Path = option(Path("runs/demo"), "Directory for the table and the pictures.")
    steps: int | None = option(None, "Training steps of every student.", least=1)
    seed: int = seed()
    device: str = device()
    fast: bool = option(False, "A few steps on a few rows, as a check.")


@dataclass(kw_only=True)
class AnalyzeSettings(ColumnOptions):
    model: str = option(..., "Model, a teacher for instance: a directory or a hub name.")
    student: str | None = option(None, "A student to compare with it.")
    before: str | None = option(
        None, "The student before distillation, if `fastkd distill` didn't make it of --model."
    )
    text: Path | None = data_option(None, "Text file, one text a line.")
    data: Path | None = data_option(None, "Labelled rows: .tsv, .csv, .jsonl, ...")
    task: str | None = data_option(
        None, "GLUE task: its validation split, or the columns of --data; or a task."
    )
    rows: int | None = data_option(None, "Use only the first rows.", least=1)
    sentence: str | None = data_option(
        None, "Sentence whose relation maps are drawn, instead of the first text."
    )
    measures: str = option(
        "svcca,cka", f"Which of {', '.join(MEASURES)}; separated by commas.", metavar="NAME,NAME"
    )
    variance: float = option(0.99, "Share of the variance SVCCA keeps.", above=0, most=1)
    pool: str = option(
        "cls",
        "What stands for a row in the intra-class similarity: the token that a head reads, or the "
        "mean of all.",
        choices=("cls", "mean"),
    )
    out: Path = option(Path("runs/analyze"), "Directory for the numbers and pictures.")
    batch_size: int = option(32, "Texts in a batch.", least=1)
    max_length: int = option(
        MAX_LENGTH, "Longest text, in tokens; less by default where a model reads less.", least=4
    )
    device: str = device()
    trust_remote_code: bool = remote_code()

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)
        if (self.text is None) == (self.task is None and self.data is None):
            raise InputError("give one of --text FILE, --data FILE and --task NAME")
        if tasks.kind_of(self.task) is not None and self.data is None and self.text is None:
            raise InputError(f"--task {self.task} needs --data FILE")
        if self.data is None:
            columns = given(self, "text_column", "text_pair_column", "label_column", "no_header")
            if columns:
                raise InputError(f"{columns[0]} is about --data FILE")
        if self.sentence is not None and not self.sentence.strip():
            raise InputError("--sentence holds no text")
        if self.before is not None and self.student is None:
            raise InputError("--before needs --student")
        for name in self.measures.split(","):
            if name not in MEASURES:
                raise InputError(f"--measures {name!r}: {nearest(name, MEASURES)}")


@dataclass(kw_only=True)
class PredictSettings(ColumnOptions):
    """The options of `fastkd predict`, and most of `fastkd evaluate`."""

    model: str = option(..., "Model: a student's directory, or a hub name.")
    data: Path = option(..., "Rows: .tsv, .csv, .jsonl, .json, .parquet, also .gz; or .txt.")
    onnx: Path | None = option(None, "Run this ONNX export of the model.")
    task: str | None = option(
        None,
        "GLUE task: the columns of its files; or what the model answers, where it doesn't say: "
        f"{', '.join(tasks.NAMES)}, or your own as package.module:Class.",
    )
    batch_size: int = option(32, "Rows at a time.", least=1)
    max_length: int | None = option(None, "Longest text, in tokens; as it was trained.", least=4)
    precision: str = precision()
    device: str = device()
    trust_remote_code: bool = remote_code()
    out: Path | None = option(None, "File for the result: .tsv, .csv, .json or .jsonl.")
    overwrite: bool = option(False, "Replace the file in --out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)


@dataclass(kw_only=True)
class EvaluateSettings(PredictSettings):
    metric: str | None = option(None, "Score to compute as well.")
    label_order: str | None = option(
        None,
        "The data's labels in the order of the model's classes, where names don't tell.",
        metavar="NAME,NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check_metric(self.task, self.metric)


@dataclass(kw_only=True)
class ExportSettings(Checked):
    model: str = option(..., "Model: a student's directory, or a hub name.")
    out: Path | None = option(None, "The ONNX file; model.onnx beside the model.")
    task: str | None = option(None, "What the model answers, where it doesn't say.")
    overwrite: bool = option(False, "Replace the file in --out.")
    trust_remote_code: bool = remote_code()

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)
