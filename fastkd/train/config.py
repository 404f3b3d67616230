"""`DistillConfig`: every option of `fastkd distill`, as transformers.TrainingArguments."""

import contextlib
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.training_args import TrainingArguments

from fastkd._core.extras import require
from fastkd.distributed import world_size
from fastkd.train import processes
from fastkd.train.computation import Computation, choose_device
from fastkd.train.errors import InputError, nearest
from fastkd.train.options import (
    Checked,
    as_json,
    check_types,
    defaults_of,
    jsonable,
    lists_of,
    paths_of,
)
from fastkd.train.settings import DistillOptions, TrainingOptions


@dataclass(kw_only=True)
class TrainingConfig(TrainingOptions, Computation, TrainingArguments):  # type: ignore[misc]
    """Length, speed, precision and device of a training, as ``transformers.TrainingArguments``.

    ``batch_size`` is the number of rows of a batch over all processes once a run has begun, and
    that of one process on the command line. ``gradient_accumulation_steps`` is the number of
    batches of a step. A process computes its rows of a batch in ``accumulate`` micro-batches.
    ``labelled_share`` is the least fraction of labelled rows in a batch.

    Like TrainingArguments, it joins the process group of a launched process.

    Raises:
        InputError: an option is out of its bounds, or the device is missing.
    """

    # Derived from the options of `TrainingOptions`.
    output_dir: str = field(default="", init=False)
    per_device_train_batch_size: int = field(default=0, init=False)
    warmup_steps: float = field(default=0, init=False)
    bf16: bool = field(default=False, init=False)
    fp16: bool = field(default=False, init=False)
    use_cpu: bool = field(default=False, init=False)
    # A NaN is reported, not smoothed over.
    logging_nan_inf_filter: bool = False
    remove_unused_columns: bool = False
    disable_tqdm: bool | None = True
    save_strategy: Any = "no"
    #: Arguments of `PASSED` that are given, most often by the file --trainer-args.
    passed: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.training_steps is not None:
            self.max_steps = self.training_steps
        processes.join(self.device_name)
        self.use_cpu = choose_device(self.device_name, self.precision).type == "cpu"
        self.bf16, self.fp16 = self.precision == "bf16", self.precision == "fp16"
        self.per_device_train_batch_size = self.own_rows
        TrainingArguments.__post_init__(self)
        # One device per process: each replica of DataParallel would see a part of a batch.
        self._n_gpu = min(self._n_gpu, 1)

    def steps(self, rows: int) -> tuple[int, int]:
        """Steps in all, and steps of an epoch, for this number of rows."""
        batches = math.ceil(rows / self.batch_size)
        per_epoch = math.ceil(batches / self.gradient_accumulation_steps)
        total = self.max_steps if self.max_steps > 0 else self.num_train_epochs * per_epoch
        return math.ceil(total), per_epoch

    def to_dict(self) -> dict[str, Any]:
        """See ``TrainingArguments.to_dict``; paths are strings, for trackers that write JSON."""
        return {k: jsonable(v) for k, v in super().to_dict().items()}


@dataclass(kw_only=True)
class DistillConfig(DistillOptions, TrainingConfig):  # type: ignore[misc]
    """Options of `fastkd distill`, as TrainingArguments; `DistillOptions` lists them.

    Raises:
        InputError: an option is out of its bounds, or options exclude each other.

    >>> config = DistillConfig(teacher="bert-base-uncased", task="sst2", method="fcd",
    ...                        finetune_teacher=3, num_train_epochs=2, device_name="cpu")
    >>> config.num_train_epochs, config.weight_decay
    (2, 0.01)
    """

    def __post_init__(self) -> None:
        for name in {*paths_of(DistillOptions)} - {*lists_of(DistillOptions)}:
            value = getattr(self, name)
            setattr(self, name, None if value is None else Path(value))
        DistillOptions.__post_init__(self)
        if self.stages is not None:  # the options of its trainings are in that file
            return
        self._check_trackers()
        default = defaults_of(self)
        # TrainingArguments turns some defaults into False.
        given = {name: value for name in PASSED if (value := getattr(self, name)) is not False}
        changed = {name: x for name, x in given.items() if x is not None and x != default[name]}
        self.passed = {**changed, **read_trainer_args(self.trainer_args)}
        if self.schedule is not None:
            if self.passed.get("lr_scheduler_type", self.schedule) != self.schedule:
                raise InputError("--schedule and lr_scheduler_type of --trainer-args differ")
            self.passed["lr_scheduler_type"] = self.schedule
        vars(self).update(self.passed)
        with _errors_of(self.trainer_args, self.schedule):
            TrainingConfig.__post_init__(self)
            if self.passed:
                _try(self)
        self._check_accumulation()

    def saved(self) -> dict[str, Any]:
        """The options that the result depends on, for the file of a run."""
        return {**as_json(self), "trainer_args": self.passed}

    def _check_trackers(self) -> None:
        given: Any = self.report_to or []
        names = [x for x in given.split(",") if x] if isinstance(given, str) else given
        integrations: Any = require("transformers.integrations", "train")
        known = integrations.get_available_reporting_integrations() if names else []
        for name in names:
            if name not in known:
                have = f"installed: {', '.join(known)}" if known else "none is installed"
                raise InputError(f"--report-to {name}: this tracker is not installed; {have}")
        vars(self)["report_to"] = names

    def _check_accumulation(self) -> None:
        if self.accumulate > 1 and self.gradient_accumulation_steps > 1:
            raise InputError(
                "--accumulate and gradient_accumulation_steps of --trainer-args exclude each other"
            )
        if self.accumulate > 1 and world_size() > 1 and not self.gather:
            raise InputError(
                "--accumulate: several processes share a step; pass --gather, which computes the "
                "loss over all its rows"
            )


# Fields of TrainingArguments that an option of fastkd sets, and this option.
OURS = {
    "output_dir": "--out",
    "num_train_epochs": "--epochs",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--batch-size",
    "learning_rate": "--learning-rate",
    "weight_decay": "--weight-decay",
    "warmup_steps": "--warmup",
    "bf16": "--precision",
    "fp16": "--precision",
    "use_cpu": "--device",
    "seed": "--seed",
    "data_seed": "--seed",
    "report_to": "--report-to",
    "save_strategy": "--checkpoint-every",
    "save_steps": "--checkpoint-every",
    "resume_from_checkpoint": "--resume",
    "metric_for_best_model": "--metric",
}
# Fields that --trainer-args may set. All others concern work that fastkd does itself (evaluation,
# saving, the order of the rows), or would change the loss without the method's knowledge.
PASSED = (
    "lr_scheduler_type", "lr_scheduler_kwargs", "optim", "optim_args", "optim_target_modules",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "gradient_accumulation_steps",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "activation_checkpointing_kwargs", "tf32", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "torch_empty_cache_steps", "neftune_noise_alpha", "full_determinism",
    "logging_steps", "logging_first_step", "run_name", "project", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_static_graph", "ddp_timeout",
)  # fmt: skip


def read_trainer_args(path: Path | None) -> dict[str, Any]:
    """Fields of TrainingArguments in the file --trainer-args; none without a file.

    Raises:
        InputError: it cannot be read, or holds a name or a value that cannot be passed on.
    """
    if path is None:
        return {}
    yaml: Any = require("yaml", "train")
    option = f"--trainer-args {path}"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{option}: can't be read ({error})") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InputError(f"{option}: must hold names and values, one 'name: value' a line")
    kinds = typing.get_type_hints(TrainingArguments)
    known = [name for name in PASSED if name in kinds]
    for name in found:
        if name in OURS:
            raise InputError(f"{option}: {name} is what {OURS[name]} sets")
        if name not in kinds:
            raise InputError(f"{option}: {name} is no training argument; {nearest(name, known)}")
        if name.startswith("fsdp"):
            raise InputError(f"{option}: {name} is what --fsdp sets")
        if name not in known:
            raise InputError(f"{option}: {name} is settled by fastkd itself; leave it out")
    check_types(f"{option}: ", found, TrainingArguments)
    if found.get("gradient_accumulation_steps", 1) < 1:
        raise InputError(f"{option}: gradient_accumulation_steps must be at least 1")
    if found.get("dataloader_num_workers", 0) < 0:
        raise InputError(f"{option}: dataloader_num_workers must be at least 0")
    if found.get("dataloader_persistent_workers") and not found.get("dataloader_num_workers"):
        raise InputError(f"{option}: dataloader_persistent_workers needs dataloader_num_workers")
    return found


@contextlib.contextmanager
def _errors_of(trainer_args: Path | None, schedule: str | None) -> Iterator[None]:
    """Context in which an error of TrainingArguments names --trainer-args or --schedule."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if trainer_args is schedule is None:
            raise
        option = (
            f"--schedule {schedule}" if trainer_args is None else f"--trainer-args {trainer_args}"
        )
        raise InputError(f"{option}: {error}") from error


def _try(config: DistillConfig) -> None:
    """Raise now the errors of optimizer, schedule and compiler, which would be raised later."""
    transformers: Any = require("transformers", "train")
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(config)
    if kind.__module__.startswith(("torch.", "transformers.")):  # others need groups of weights
        kind([torch.zeros(1)], **options)
    if config.passed.get("torch_compile_backend") is not None:
        accelerate: Any = require("accelerate.utils", "train")
        accelerate.DynamoBackend(str(config.torch_compile_backend).upper())
    transformers.get_scheduler(
        config.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )
