"""The options of every command but `fastkd distill`, whose are the run's own."""

from dataclasses import dataclass
from pathlib import Path

from fastkd.train import tasks
from fastkd.train.config import MAX_LENGTH, ColumnOptions, device, precision, remote_code, seed
from fastkd.train.errors import InputError, nearest
from fastkd.train.glue import TASKS
from fastkd.train.options import Checked, data_option, option, set_flags

# Those of `fastkd.analysis`, which needs torch.
MEASURES = ("svcca", "pwcca", "cca", "cka", "unbiased_cka")


@dataclass(frozen=True, kw_only=True)
class DemoSettings(Checked):
    out: Path = option(Path("runs/demo"), "Output directory for the report and the best student.")
    steps: int | None = option(
        None, "Training steps of each student; default: 40, or 2 with --fast.", least=1
    )
    seed: int = seed()
    device_name: str = device()
    fast: bool = option(False, "Train for a few steps on a few rows, as a check.")


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings(ColumnOptions):
    model: str = option(..., "Model to analyze: a directory or a hub name.")
    student: str | None = option(
        None, "Student to compare with --model: a directory or a hub name."
    )
    before: str | None = option(
        None, "Student before distillation; made of the layers of --model if not given."
    )
    text: Path | None = data_option(None, "Text file with one text a line.")
    data: Path | None = data_option(None, "File of labelled rows, as for `fastkd evaluate`.")
    task: str | None = data_option(
        None, "A GLUE task (its validation split, or the columns of --data), or the kind of task."
    )
    rows: int | None = data_option(
        None, "Number of rows to use, from the first; default: all.", least=1
    )
    sentence: str | None = data_option(
        None, "Sentence for the relation maps; the first text if not given."
    )
    measures: str = option(
        "svcca,cka", f"Measures: {', '.join(MEASURES)}; separated by commas.", metavar="NAME,NAME"
    )
    variance: float = option(
        0.99, "Share of the variance that SVCCA keeps, 0 to 1.", above=0, most=1
    )
    pool: str = option(
        "cls",
        "Vector of a row for the intra-class similarity: cls (the token that a head reads) or mean "
        "(over all tokens).",
        choices=("cls", "mean"),
    )
    out: Path = option(Path("runs/analyze"), "Output directory for the numbers and pictures.")
    batch_size: int = option(32, "Texts of a forward pass.", least=1)
    max_length: int = option(
        MAX_LENGTH,
        "Maximum length of a text in tokens; the default is lowered to what the model can read.",
        least=4,
    )
    device_name: str = device()
    trust_remote_code: bool = remote_code()

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)
        if (self.text is None) == (self.task is None and self.data is None):
            raise InputError("give one of --text FILE, --data FILE and --task NAME")
        if self.task not in tasks.NO_KIND and self.data is None and self.text is None:
            raise InputError(f"--task {self.task} needs --data FILE")
        if self.data is None:
            names = ("text_column", "text_pair_column", "label_column", "no_header")
            if columns := set_flags(self, *names):
                raise InputError(f"{columns[0]} is about --data FILE")
        if self.sentence is not None and not self.sentence.strip():
            raise InputError("--sentence holds no text")
        if self.before is not None and self.student is None:
            raise InputError("--before needs --student")
        for name in self.measures.split(","):
            if name not in MEASURES:
                raise InputError(f"--measures {name!r}: {nearest(name, MEASURES)}")


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(ColumnOptions):
    """Options of `fastkd predict` and `fastkd evaluate`."""

    model: str = option(..., "Model: a directory, such as a student's, or a hub name.")
    data: Path = option(
        ..., "File of rows: .tsv, .csv, .json, .jsonl or .parquet, also as .gz; or .txt."
    )
    onnx: Path | None = option(None, "ONNX file of the model to run instead of the model.")
    task: str | None = option(
        None,
        "A GLUE task (for the columns of its files), or the kind of task, for a model that fastkd "
        f"did not train: {tasks.KINDS}.",
    )
    batch_size: int = option(32, "Rows of a forward pass.", least=1)
    max_length: int | None = option(
        None, "Maximum length of a text in tokens; default: as in the model's training.", least=4
    )
    precision: str = precision()
    device_name: str = device()
    trust_remote_code: bool = remote_code()
    out: Path | None = option(None, "Output file: .tsv, .csv, .json or .jsonl.")
    overwrite: bool = option(False, "Replace an existing --out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task != "ax" or not isinstance(self, PredictSettings):
            tasks.check(self.task)


@dataclass(frozen=True, kw_only=True)
class PredictSettings(AnswerSettings):
    model: str | None = option(  # type: ignore[assignment]
        None, "Model: a directory, such as a student's, or a hub name."
    )
    data: Path | None = option(  # type: ignore[assignment]
        None,
        "File of rows: .tsv, .csv, .json, .jsonl or .parquet, also as .gz; or .txt; with --glue "
        "GLUE's own file or folder, or the hub's test split if not given.",
    )
    glue: Path | None = option(
        None, "Folder for the file of the GLUE server, of a GLUE --task or of ax.", metavar="DIR"
    )
    glue_zip: str | None = option(
        None, "Folders of --glue to pack into --out, a .zip for the GLUE server.", metavar="DIR,DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.glue_zip is not None:
            if more := set_flags(self, "model", "data", "task", "glue"):
                raise InputError(f"--glue-zip and {more[0]} exclude each other")
            if self.out is None or self.out.suffix != ".zip":
                raise InputError("--glue-zip needs --out FILE.zip")
            return
        if self.model is None:
            raise InputError("--model is missing: a directory or a hub name")
        if self.glue is None:
            if self.data is None:
                raise InputError("--data is missing: a file of rows")
            tasks.check(self.task)
        elif self.task not in TASKS:
            raise InputError(f"--glue needs --task NAME, one of {', '.join(TASKS)}")
        elif more := set_flags(self, "out"):
            raise InputError(
                f"--glue and {more[0]} exclude each other: the server's file has a name"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(AnswerSettings):
    metric: str | None = option(None, "Metric to compute besides the task's own.")
    label_order: str | None = option(
        None,
        "Classes of the data in the order of the model's outputs; needed if the names differ.",
        metavar="NAME,NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task, self.metric)


@dataclass(frozen=True, kw_only=True)
class AugmentSettings(ColumnOptions):
    data: Path = option(..., "File of labelled rows: .tsv, .csv, .json, .jsonl or .parquet.")
    task: str | None = option(
        None, "A GLUE task (for the columns of its files), classification, or regression."
    )
    mlm: str = option(..., "Masked language model: a directory or a hub name.")
    times: int = option(20, "Number of copies of each row.", least=1)
    probability: float = option(0.4, "Probability of a word's replacement.", least=0, most=1)
    candidates: int = option(15, "Number of words that a replacement is drawn from.", least=1)
    out: Path = option(..., "Output file: .tsv.", saved=False)
    overwrite: bool = option(False, "Replace an existing --out.", saved=False)
    batch_size: int = option(32, "Masked texts of a forward pass.", least=1, saved=False)
    seed: int = seed()
    device_name: str = device()
    trust_remote_code: bool = remote_code()

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks.check(self.task)
        if self.out.suffix != ".tsv":
            raise InputError(f"--out {self.out}: the result is a .tsv file; name it so")
