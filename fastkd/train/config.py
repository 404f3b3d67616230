"""`Config`: every option of `fastkd distill`, `fastkd cache` and `fastkd verify`.

It needs neither torch nor transformers, so that the help and the errors of a command are quick.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fastkd.train import files, recipes, tasks
from fastkd.train.conversations import KEEP, THINKING
from fastkd.train.errors import InputError, nearest
from fastkd.train.files import Columns, settle_columns
from fastkd.train.glue import GLUE_TASKS, Glue
from fastkd.train.options import (
    COMPLETIONS,
    SERVED,
    STORED,
    Checked,
    as_paths,
    check_place,
    check_types,
    data_option,
    file_keys,
    method_option,
    model_option,
    option,
    options_of,
    resolve_path,
    row_option,
    run_option,
    set_flags,
    teaching_option,
    training_option,
    without_weights,
)
from fastkd.train.packaged_teacher import NAME as PACKAGED
from fastkd.train.packaged_teacher import resolved
from fastkd.train.recipes import MAKES, RECIPES
from fastkd.train.row_teachers import teachers_of

# Methods by name and the default of --labelled-share, as in `fastkd.distill`, which needs torch.
NAMES = (
    "labels", "soft_targets", "fcd", "knn", "lrc_bert", "mc3kd", "lrkd", "tinybert", "pkd",
    "distilbert", "minilm", "minilmv2", "embeddings", "gold", "margin_mse",
)  # fmt: skip
LABELLED_SHARE = 0.25
# --method: the one that suits the kind of task, see `fastkd.train.models`.
AUTO = "auto"
# Default of --max-length, lowered where a model reads less.
MAX_LENGTH = 128
# --teacher-layers: chosen from data (MC3KD, Algorithm 1).
SELECT = "select"
# Options beside --stages; all others belong into its file.
OF_ALL_STAGES = (
    "stages", "out", "resume", "overwrite", "checkpoint_every", "report_to", "log_json",
)  # fmt: skip
# Begins a --teacher of a stage: the student of an earlier stage.
STAGES = "stages."
WRITING, EVERY = ("distill", "cache"), ("distill", "cache", "verify")


def device() -> Any:
    return training_option(
        "auto",
        "Device of the models: auto (cuda if there is one), cpu or cuda.",
        flag="--device",
        key="device",
        choices=("auto", "cpu", "cuda"),
        commands=EVERY,
    )


def seed() -> Any:
    return training_option(
        0, "Seed of all random numbers.", least=0, most=2**32 - 1, commands=EVERY
    )


def precision() -> Any:
    return training_option(
        "fp32",
        "Precision of the models: fp32, bf16 or fp16.",
        choices=("fp32", "bf16", "fp16"),
        commands=EVERY,
    )


def remote_code(panel: str | None = None) -> Any:
    return option(False, "Allow code from a model's hub repository to run.", panel=panel)


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(Checked):
    """Columns of text and label in a file or data set."""

    text_column: str | None = data_option(None, "Column of the text; the task's own if not given.")
    text_pair_column: str | None = data_option(
        None, "Column of the second text, for tasks on pairs; the task's own if not given."
    )
    label_column: str | None = data_option(None, 'Column of the label; "label" if not given.')
    no_header: bool = data_option(
        False, "Files have no header line; columns are 0, 1, 2 and so on."
    )

    @property
    def columns(self) -> Columns:
        """The given columns."""
        label = self.label_column
        return Columns(self.text_column, self.text_pair_column, label, not self.no_header)


@dataclass(frozen=True, kw_only=True)
class DataOptions(ColumnOptions):
    """Source of the rows: a GLUE task, a data set on the hub, or files."""

    task: str | None = data_option(
        None, f"A GLUE task ({', '.join(GLUE_TASKS)}), or the kind of task: {tasks.KINDS}."
    )
    data: str | None = data_option(None, "Data set on the Hugging Face hub, instead of files.")
    data_config: str | None = data_option(None, "Configuration (subset) of the data set --data.")
    train_split: str = data_option("train", "Split of the hub data set to train on.")
    eval_split: str | None = data_option(
        None, 'Split of the hub data set to evaluate on; "validation" if not given.'
    )
    train: Path | None = data_option(
        None, "File of training rows: .tsv, .csv, .json, .jsonl or .parquet, also as .gz."
    )
    evals: Path | None = data_option(
        None, "File of evaluation rows, which select the best student.", flag="--eval"
    )
    test: list[Path] | None = data_option(
        None,
        "File of test rows, on which the selected student is scored once, at the end; repeatable, "
        "and scores of several files end in the file's name.",
        metavar="PATH",
    )
    unlabelled: Path | None = data_option(
        None, "File of further training rows without labels; a .txt file has one text a line."
    )
    labelled: int | None = row_option(
        None,
        "Number of training rows whose label the student reads, balanced over classes; "
        "--finetune-teacher reads all labels; default: all.",
        least=1,
    )
    labels: str = data_option(
        "auto",
        "Meaning of the labels: classes, numbers (regression), or auto (by their values).",
        choices=("auto", "classes", "numbers"),
    )
    thinking: str = data_option(
        KEEP,
        "Thoughts of chat answers (<think>, reasoning_content): keep (trained), drop (left out) or "
        "prompt (read, not trained).",
        choices=THINKING,
    )
    label_order: str | None = data_option(
        None,
        "Classes of the data in the order of the teacher's outputs; needed if the names differ.",
        metavar="NAME,NAME",
    )
    metric: str | None = data_option(
        None,
        "Metric that selects the best student: accuracy, mcc, f1, pearson, spearman, mse, or a "
        "metric of the task; the task's first if not given.",
    )
    max_train_rows: int | None = data_option(
        None, "Number of labelled rows to train on, drawn at random; default: all.", least=2
    )
    max_eval_rows: int | None = data_option(
        None, "Number of rows to evaluate on, drawn at random; default: all.", least=1
    )
    max_new_tokens: int | None = row_option(
        None,
        "Maximum number of tokens of a generated text; chat and seq2seq; default: 128.",
        least=1,
    )
    sample: float = row_option(
        0.0,
        "Temperature at which generated text is sampled for the scores, by --seed; 0: the most "
        "probable tokens; chat and seq2seq.",
        metavar="TEMPERATURE",
        least=0,
    )

    @property
    def glue(self) -> Glue | None:
        """The GLUE task that --task or --data names, if any."""
        return GLUE_TASKS.get(self.task or "", GLUE_TASKS.get(self.data or ""))


@dataclass(frozen=True, kw_only=True)
class Config(DataOptions):
    """The options of `fastkd distill`, `fastkd cache` and `fastkd verify`, and their checks.

    >>> config = Config.of(teacher="bert-base-uncased", task="sst2", method="fcd")
    >>> config.num_train_epochs, config.weight_decay
    (3.0, 0.01)
    """

    #: The command: some options belong to one of the three only.
    command: str = "distill"

    teacher: str | None = model_option(
        None,
        "Teacher model: a directory, a hub name, packaged (the demo's), a server's URL, a "
        "directory of top-k files, or completions (the logprobs of chat rows).",
    )
    teacher_model: str | None = model_option(
        None, "Name of the model in the server of --teacher.", metavar="NAME", commands=WRITING
    )
    top_k: int | None = model_option(
        None,
        "Tokens of each position that the server of --teacher returns (default: 20), or that "
        "`fastkd cache` stores, 8 bytes each (default: the inputs of the LM head instead).",
        least=1,
        commands=WRITING,
    )
    export: Path | None = model_option(
        None,
        "Directory for the stored --top-k tokens with their rows' token ids too, for other tools.",
        metavar="DIR",
        commands=("cache",),
    )
    teacher_columns: str = teaching_option(
        "input_ids,top_ids,top_log_probs",
        "Columns of the files in --teacher DIR: token ids, most probable ids, log-probabilities.",
        metavar="A,B,C",
    )
    teachers: Path | None = teaching_option(
        None,
        "TOML file of several teachers, each for the rows that name it: a directory, a server or a "
        "cache for each name.",
        metavar="FILE",
    )
    teacher_column: str = row_option("teacher", "Column of each row's teacher, for --teachers.")
    teacher_cache: Path | None = teaching_option(
        None, "Directory written by `fastkd cache`, instead of a teacher.", metavar="DIR"
    )
    teacher_offload: bool = teaching_option(
        False, "Keep the teacher's weights in the host's memory, on the device only while it runs."
    )
    finetune_teacher: float = teaching_option(
        0.0,
        "Number of epochs to fine-tune the teacher on the task first.",
        metavar="EPOCHS",
        least=0,
    )
    teacher_learning_rate: float = teaching_option(
        5e-5, "Peak learning rate of --finetune-teacher.", above=0
    )
    teacher_lora: Mapping[str, Any] = teaching_option(
        {},
        "Fine-tune LoRA adapters on the teacher instead of its weights, as --lora on the student.",
        metavar="r=16,alpha=32",
        joined=True,
    )
    trust_remote_code: bool = remote_code("Teacher and student")
    tokenizer: str | None = model_option(
        None,
        "Tokenizer of both models, for a teacher folder without one; it must give the ids that the "
        "teacher was trained on.",
    )
    student: str | None = model_option(
        None, "Student model: a directory or a hub name; made of teacher layers if not given."
    )
    student_layers: int | None = model_option(
        None, "Number of teacher layers that make the student; default: half of them.", least=1
    )
    teacher_layers: str = model_option(
        "uniform",
        "Teacher layers that make the student: uniform, top, bottom, numbers such as 2,4,6, or "
        "select, the layers that differ most from the layer before.",
    )
    student_config: Mapping[str, Any] = model_option(
        {},
        "Sizes of a narrower student, such as hidden_size=256,num_attention_heads=4; all other "
        "sizes are the teacher's.",
        metavar="NAME=NUMBER,...",
        joined=True,
    )
    student_weights: str = model_option(
        "cut",
        "Initial weights of the student: cut (from the teacher's) or random.",
        choices=("cut", "random"),
    )
    lora: Mapping[str, Any] = model_option(
        {},
        "Train LoRA adapters on the student instead of its weights: r, alpha, dropout, and targets "
        "such as q_proj+v_proj (default: all linear layers).",
        metavar="r=16,alpha=32",
        joined=True,
    )
    unmatched: str = model_option(
        "renormalise",
        "Student with another tokenizer: how soft targets treat tokens that only one model has; "
        "renormalise leaves them out, bucket makes them one outcome, sorted also compares their "
        "sorted probabilities.",
        choices=("renormalise", "bucket", "sorted"),
    )
    attention: str | None = model_option(
        None,
        "Attention implementation of both models: eager (returns attention maps, for a method of "
        "your own that compares them) or sdpa; transformers' choice if not given.",
        choices=("eager", "sdpa"),
    )
    method: str = method_option(
        AUTO,
        f"Method: auto (by the kind of task), {', '.join(NAMES)}, or your own as "
        "package.module:Class.",
    )
    preset: str = method_option(
        "default",
        "Hyper-parameters and training to start from: fastkd's (default), or those of the "
        "method's paper (paper).",
        choices=("default", "paper"),
    )
    recipe: str | None = method_option(
        None,
        f"Paper whose training --preset paper takes, if not the method's: {', '.join(RECIPES)}.",
        choices=RECIPES,
    )
    options: Mapping[str, Any] = method_option(
        {},
        "Value of one hyper-parameter of the method; repeatable.",
        flag="--set",
        metavar="NAME=VALUE",
    )
    num_train_epochs: float = training_option(
        3.0, "Number of passes over the training rows.", flag="--epochs", key="epochs", above=0
    )
    training_steps: int | None = training_option(
        None,
        "Number of training steps, instead of --epochs; default: as --epochs says.",
        flag="--steps",
        key="steps",
        least=1,
    )
    batch_size: int = training_option(
        32,
        "Rows of a training step for each process; in `fastkd cache` of a forward pass.",
        least=1,
        commands=WRITING,
    )
    accumulate: int = training_option(
        1, "Split each batch into N parts to save memory; same gradient, slower.", least=1
    )
    learning_rate: float = training_option(5e-5, "Peak learning rate of AdamW.", above=0)
    weight_decay: float = training_option(0.01, "Weight decay of AdamW.", least=0)
    warmup: float = training_option(
        0.1,
        "Share of the steps, 0 to 1, in which the learning rate rises to its peak.",
        least=0,
        most=1,
    )
    schedule: str | None = training_option(
        None,
        "Schedule of the learning rate: cosine, constant_with_warmup or another one of "
        "transformers; linear if not given.",
    )
    labelled_share: float = training_option(
        LABELLED_SHARE,
        "With few labels: repeat labelled rows until they are this share of each batch; 0: never.",
        least=0,
        most=1,
    )
    max_length: int = training_option(
        MAX_LENGTH,
        "Maximum length of a text in tokens; the default is lowered to what both models can read.",
        least=4,
        commands=EVERY,
    )
    seed: int = seed()
    precision: str = precision()
    device_name: str = device()
    pack: bool = training_option(
        False, "Pack several conversations into each row of --max-length tokens; chat only."
    )
    on_policy: float = training_option(
        0.0,
        "Share of steps on answers generated by the student (GKD); chat only.",
        metavar="SHARE",
        least=0,
        most=1,
    )
    gather: bool = training_option(
        False, "Gather the samples of all processes in losses that compare samples."
    )
    shard: bool = training_option(
        False, "Shard teacher and student over the processes (FSDP2).", flag="--fsdp", saved=False
    )
    trainer_args: Path | Mapping[str, Any] | None = training_option(
        None, "YAML file with further fields of transformers.TrainingArguments.", metavar="FILE"
    )
    out: Path = run_option(
        Path("runs/distill"),
        "Output directory: the student with its report, or the cache.",
        commands=WRITING,
    )
    checkpoint_every: int | None = run_option(
        None,
        "Number of steps between checkpoints; default: only at the end of each epoch.",
        metavar="STEPS",
        least=1,
    )
    report_to: str | None = run_option(
        None, "Trackers to report losses to, such as tensorboard, separated by commas."
    )
    log_json: Path | None = run_option(None, "File to write the progress to, as lines of JSON.")
    stages: Path | None = run_option(
        None,
        "TOML file with the options of several runs; each trains the student of the run before.",
        metavar="FILE",
    )
    resume: bool = run_option(False, "Continue an interrupted run, with the same options.")
    overwrite: bool = run_option(
        False, "Replace an existing student in --out when the new one is complete."
    )
    rows: int = run_option(8, "Rows of the verified step.", least=2, commands=("verify",))
    ranks: int = run_option(
        2,
        "Processes that share the step (Linux only); 0: do not test several processes.",
        least=0,
        commands=("verify",),
    )
    follows: str | None = option(
        None, "Ids of the runs whose students a stage of --stages starts from.", commands=()
    )

    @classmethod
    def of(
        cls, given: Mapping[str, Any] | None = None, command: str = "distill", **options: Any
    ) -> "Config":
        """The ``given`` ``options``, above those of a paper's recipe, above the defaults."""
        options = {**(given or {}), **options}
        known = [field.name for field in fields(cls)]
        for name in options.keys() - {*known}:
            raise TypeError(
                f"Config has no option {name!r}, {nearest(name, known)}; arguments of "
                "transformers' trainer go into trainer_args"
            )
        given = {}
        for name, value in options.items():  # paths and text are exchanged, as the field needs
            option = options_of(cls).get(name)
            if option is not None and option.several:
                value = as_paths(value)
            elif option is not None and option.is_path and isinstance(value, str):
                value = Path(value)
            elif name in MODELS and isinstance(value, Path):
                value = str(value)
            elif name == "report_to" and isinstance(value, list | tuple):
                value = ",".join(value)
            given[name] = resolved(value) if name == "teacher" and value == PACKAGED else value
        config = cls(command=command, **given)
        if config.resume and config.overwrite:
            raise InputError("--resume and --overwrite exclude each other")
        if config.stages is not None:
            others = (name for name in options_of(cls) if name not in OF_ALL_STAGES)
            for flag in set_flags(config, *others):
                raise InputError(f"--stages and {flag} exclude each other: write it into the file")
            return config
        if config.preset == "paper":
            entries = recipes.entries_of(config, given)
            config = replace(
                config, **{n: e["value"] for n, e in entries.items() if n not in given}
            )
        check_data(config)
        check_models(config)
        if command == "distill":
            check_training(config)
        return config

    @property
    def passed(self) -> Mapping[str, Any]:
        """Arguments of --trainer-args, once its file is read."""
        return self.trainer_args if isinstance(self.trainer_args, Mapping) else {}


def check_data(config: Config) -> None:
    """Raise for options of the rows that exclude each other."""
    if config.test and len(files.names_of(config.test)) < len(config.test):
        raise InputError(
            "--test: two files have the same name, which their scores end in; rename one"
        )
    tasks.check(config.task, config.metric)
    hub = set_flags(config, "data", "data_config", "train_split", "eval_split")
    local = set_flags(config, "train", "evals")
    remote = config.glue is not None or config.data is not None
    for wrong, message in (
        (not local and config.no_header, "--no-header is about files; give --train and --eval"),
        (not local and not remote and config.unlabelled is not None,
         "--eval is missing: name rows, or text alone, to evaluate on"),
        (not local and not remote,
         "no data: pass --task NAME, --data HUB_NAME, or --train and --eval FILE"),
        (local and hub, f"{''.join(local[:1])} and {''.join(hub[:1])} exclude each other: give "
         "files or a hub name"),
        (config.task in GLUE_TASKS and config.data is not None,
         "--task and --data exclude each other"),
        (config.data_config is not None and (config.data is None or config.data in GLUE_TASKS),
         "--data-config belongs to --data, a data set that is no GLUE task"),
    ):  # fmt: skip
        if wrong:
            raise InputError(message)


def check_models(config: Config) -> None:
    """Raise for options of teacher, student and method that exclude each other."""
    makes, drawn = set_flags(config, *MAKES[1:]), config.student_weights == "random"
    method = set_flags(config, "preset", "options") if config.method == AUTO else []
    kind = without_weights(config.teacher)
    served = kind == SERVED
    for wrong, message in (
        (config.recipe is not None and config.preset != "paper", "--recipe needs --preset paper"),
        (method, f"{''.join(method[:1])} needs --method NAME: --method {AUTO} takes another method "
         "for another kind of task"),
        (len({*filter(str.strip, config.teacher_columns.split(","))}) != 3,
         "--teacher-columns: give three names, separated by commas"),
        (config.student is not None and makes,
         f"--student and {''.join(makes[:1])} exclude each other"),
        (drawn and set_flags(config, "teacher_layers"),
         "--teacher-layers and --student-weights random exclude each other"),
        ("num_hidden_layers" in config.student_config,
         "--student-config num_hidden_layers: give --student-layers"),
        (config.lora and drawn,
         "--lora and --student-weights random exclude each other: adapters alone learn"),
        (config.unlabelled is not None and config.method == "labels",
         "--unlabelled and --method labels exclude each other"),
        (config.command == "cache" and config.teacher_model is not None and not served,
         "--teacher-model needs --teacher URL, a server"),
        (config.command == "verify" and served,
         f"--teacher {config.teacher}: a server teaches `fastkd distill` and `fastkd cache`"),
        (config.export is not None and config.top_k is None, "--export needs --top-k"),
        (config.command != "distill" and kind == STORED,
         f"--teacher {config.teacher}: stored log-probabilities teach `fastkd distill` alone"),
    ):  # fmt: skip
        if wrong:
            raise InputError(message)
    if kind:
        _check_no_weights(config, served)
    for flag, adapters in (("--lora", config.lora), ("--teacher-lora", config.teacher_lora)):
        if adapters:
            from fastkd.train import lora

            lora.read(adapters, flag)


def _check_no_weights(config: Config, served: bool) -> None:
    """Raise for options that need the weights of a teacher in a server or in files."""
    url = f"--teacher {config.teacher}"
    if config.student is None or (served and config.teacher_model is None):
        what, more = ("a server's model", ", and --teacher-model NAME") if served else (
            "a teacher without weights", ""
        )  # fmt: skip
        raise InputError(
            f"{url}: {what} can't be cut; pass --student, which reads its tokens{more}"
        )
    for flag in set_flags(config, "finetune_teacher", "student_layers", "student_config"):
        raise InputError(
            f"{flag}: needs the teacher's weights, and {url} is "
            + ("a server" if served else "stored log-probabilities")
        )
    if config.method == AUTO:
        whose = "a server's" if served else "stored"
        raise InputError(
            f"{url}: {whose} log-probabilities have temperature 1; pass --method soft_targets "
            "--set temperature=1"
        )
    if config.teacher == COMPLETIONS and not served and config.pack:
        raise InputError(f"{url} and --pack exclude each other")
    if config.on_policy and not served:
        raise InputError(
            f"{url} and --on-policy exclude each other: nothing is stored on text that the student "
            "generates"
        )


def check_training(config: Config) -> None:
    """Raise for options of `fastkd distill` that exclude each other."""
    cache, shard = config.teacher_cache is not None, config.shard
    kind = without_weights(config.teacher)
    no_tuning = [] if config.finetune_teacher else set_flags(
        config, "teacher_learning_rate", "teacher_lora"
    )  # fmt: skip
    if config.teachers is not None:
        for flag in set_flags(
            config, "teacher", "teacher_model", "top_k", "teacher_cache", "finetune_teacher",
            "pack", "on_policy", "shard", "student_layers", "student_config",
        ):  # fmt: skip
            raise InputError(f"--teachers and {flag} exclude each other")
        if config.student is None:
            raise InputError("--teachers: pass --student, which reads the tokens of all teachers")
    for wrong, message in (
        (not cache and config.teacher is None and config.teachers is None,
         "--teacher is missing: a directory or a hub name"),
        (cache and config.on_policy, "--on-policy and --teacher-cache exclude each other: a "
         "cache has no outputs on text that the student generates"),
        (cache and config.finetune_teacher, "--teacher-cache and --finetune-teacher exclude each "
         "other: the teacher of a cache is fine-tuned already"),
        (shard and config.teacher_layers == SELECT, f"--fsdp and --teacher-layers {SELECT} "
         "exclude each other: selecting layers needs a whole teacher; name the layers"),
        (shard and config.precision == "fp16", "--fsdp and --precision fp16 exclude each other: "
         "take bf16"),
        (shard and config.on_policy and config.gather, "--fsdp, --gather and --on-policy exclude "
         "each other: a process without rows cannot take part in generating text"),
        (no_tuning, f"{''.join(no_tuning[:1])} needs --finetune-teacher EPOCHS"),
        (config.teacher_offload and (cache or kind),
         "--teacher-offload: this teacher has no weights here; leave it out"),
        (config.teacher_offload and (shard or config.finetune_teacher),
         f"--teacher-offload and {'--fsdp' if shard else '--finetune-teacher'} exclude each other"),
        (config.teachers is None and set_flags(config, "teacher_column"),
         "--teacher-column needs --teachers FILE"),
        (kind != SERVED and set_flags(config, "teacher_model", "top_k"),
         "--teacher-model and --top-k need --teacher URL, a server"),
        (config.accumulate > config.batch_size,
         f"--accumulate {config.accumulate}: a step of {config.batch_size} rows has no more "
         "micro-batches than rows; give a larger --batch-size"),
    ):  # fmt: skip
        if wrong:
            raise InputError(message)
    if config.log_json is not None:
        log, arguments = config.log_json.resolve(), config.trainer_args  # behind links
        read = (config.train, config.evals, *(config.test or ()), config.unlabelled, arguments)
        if log in [each.resolve() for each in read if isinstance(each, Path)]:
            raise InputError(f"--log-json {config.log_json} is a file that the run reads")
        for name in ("student", "teacher", "unfinished"):
            if log.is_relative_to((config.out / name).resolve()):
                raise InputError(f"--log-json {config.log_json} lies in what the run replaces")


# Options that name a model: a directory, or a name on the hub.
MODELS = ("teacher", "student", "tokenizer")


def option_values(
    where: str, table: Mapping[str, Any], folder: Path, study: Sequence[str] = ()
) -> dict[str, Any]:
    """Fields of `Config` by the keys of a file's ``table``, but those beside --stages.

    Paths are relative to the ``folder`` of the file. ``study``: the further keys of a study's file,
    where a value may be a list of values.
    """
    keys = {k: n for k, n in file_keys(Config, "distill").items() if n not in OF_ALL_STAGES}
    options, found = options_of(Config), {}
    for key, value in table.items():
        if key not in keys:
            raise InputError(f"{where} has no option {key!r}; {nearest(key, [*study, *keys])}")
        name, several = keys[key], isinstance(value, list) and bool(study)
        whole, is_path = options[name].several, options[name].is_path  # whole: a list is one value
        many = value if several and not whole else [value]
        if is_path:
            many = [resolve_path(f"{where}: {key}", each, folder, whole) for each in many]
        elif name in MODELS:
            many = [_model_in(f"{where}: {key}", folder, each) for each in many]
        for each in many if not is_path else ():
            check_types(f"{where}: ", {name: each}, Config)
        found[name] = many if several and not whole else many[0]
    return found


def _model_in(where: str, folder: Path, name: Any) -> Any:
    """A name on the hub, or a directory beside a file; $NAME is an environment variable."""
    if not isinstance(name, str):
        return name
    path = resolve_path(where, name, folder)
    return str(path) if path.is_dir() or name.startswith(("$", "~")) else name


# Checks of files, columns and models by name, before torch and transformers are imported. Whatever
# is not checked here is checked when it is read.

# Fields of options with a path of rows, and with the name of a model.
ROWS = ("train", "evals", "test", "unlabelled", "data", "text")
NAMED = (*MODELS, "model", "before", "mlm")
# Files whose first row is read within milliseconds, and their bytes at most where they are read
# whole.
QUICK, WHOLE, MOST = (".tsv", ".csv", ".jsonl"), ".json", 2**24
# Tasks whose rows are those of the file, in columns that are given or have default names.
PLAIN = (*tasks.NO_KIND, "classification", "regression")


def check_inputs(settings: Any) -> None:
    """Raise for a file that is missing, unreadable or without its columns, or a wrong directory.

    ``settings`` are the options of a command.
    """
    flags = {name: option.flag for name, option in options_of(type(settings)).items()}
    values, run = vars(settings), isinstance(settings, Config)
    columns = settings.columns if isinstance(settings, ColumnOptions) else None
    kind = values.get("task")
    given = {name: values.get(name) for name in ROWS}
    paths = [
        (name, path)
        for name, value in given.items()
        for path in (value if isinstance(value, list) else [value])
        if isinstance(path, Path)
    ]
    for name, path in paths:
        ending, option = files.kind_of(path), flags[name]
        known = path.is_file() and ending in files.READERS
        if not path.exists() or (kind in PLAIN and known):
            files.check_file(path, option)
        small = ending == WHOLE and path.stat().st_size <= MOST
        quick = path.is_file() and option != "--text" and (ending in QUICK or small)
        if columns is None or not quick or kind == "question-answering":
            continue
        _, record = next(files.records(path, columns.header, option), (0, None))
        if record is None:
            continue
        # `fastkd predict` reads no label.
        labelled = name != "unlabelled" and "label_order" in values
        wanted = replace(columns, label=columns.label if labelled else None)
        search = run and wanted.header and kind in PLAIN and settings.glue is None
        if search and labelled and settings.train is not None:  # text alone may have no labels
            wanted = replace(wanted, label=wanted.label or "label")
        settle_columns(wanted, record, str(path), search)
    if values.get("teachers") is not None:
        teachers_of(values["teachers"])
    for name in NAMED:
        value = values.get(name)
        if isinstance(value, str) and not without_weights(value):
            check_place(flags[name], value)
