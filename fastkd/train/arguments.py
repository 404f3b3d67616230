"""Arguments of transformers.Trainer, from the options of `fastkd distill`."""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers.training_args import TrainingArguments

from fastkd._core.extras import require
from fastkd.distributed import world_size
from fastkd.train import processes
from fastkd.train.config import Config
from fastkd.train.errors import InputError, nearest
from fastkd.train.options import as_json, check_types
from fastkd.train.processes import Computation


@dataclass
class Arguments(TrainingArguments):
    """Arguments of transformers' Trainer, and the ``options`` of the run, which trackers record."""

    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """See ``TrainingArguments.to_dict``."""
        found = super().to_dict()
        return {**found.pop("options"), **found}


def settled(config: Config) -> Config:
    """``config`` with the content of the file --trainer-args, after all arguments are checked.

    Joins the process group of a launched process.

    Raises:
        InputError: an argument of the trainer, a tracker or the device cannot be used.
    """
    processes.join(config.device_name)
    computation = Computation.of(config)
    if config.report_to is not None:
        integrations: Any = require("transformers.integrations", "train")
        known = integrations.get_available_reporting_integrations()
        for name in filter(None, config.report_to.split(",")):
            if name not in known:
                have = f"installed: {', '.join(known)}" if known else "none is installed"
                raise InputError(f"--report-to {name}: this tracker is not installed; {have}")
    passed = {} if config.trainer_args is None else read_trainer_args(config.trainer_args)
    if config.schedule is not None:
        if passed.get("lr_scheduler_type", config.schedule) != config.schedule:
            raise InputError("--schedule and lr_scheduler_type of --trainer-args differ")
        passed["lr_scheduler_type"] = config.schedule
    found = replace(config, trainer_args=passed)
    try:
        arguments = arguments_of(found, computation, config.out)
        if passed:
            _try(arguments, passed)
    except (TypeError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, InputError) or config.trainer_args is config.schedule is None:
            raise
        given = f"--schedule {config.schedule}"
        if config.trainer_args is not None:
            given = f"--trainer-args {config.trainer_args}"
        raise InputError(f"{given}: {error}") from error
    several = arguments.gradient_accumulation_steps > 1
    if config.accumulate > 1 and several:
        raise InputError(
            "--accumulate and gradient_accumulation_steps of --trainer-args exclude each other"
        )
    if config.accumulate > 1 and world_size() > 1 and not config.gather:
        raise InputError(
            "--accumulate: several processes share a step; pass --gather, which computes the "
            "loss over all its rows"
        )
    return found


def arguments_of(
    config: Config, computation: Computation, folder: Path, rows: int = 1
) -> Arguments:
    """The arguments of one training on this number of ``rows``, with checkpoints in ``folder``."""
    total, _ = steps_of(config, computation.batch_size, rows)
    found = Arguments(
        **{
            "options": as_json(config),
            "output_dir": str(folder),
            "num_train_epochs": config.num_train_epochs,
            "max_steps": config.training_steps or -1,
            "per_device_train_batch_size": computation.own_rows,
            "learning_rate": config.learning_rate,
            "weight_decay": config.weight_decay,
            "warmup_steps": round(config.warmup * total),
            "logging_steps": max(1, min(10, total // 50)),
            "seed": config.seed,
            "bf16": config.precision == "bf16",
            "fp16": config.precision == "fp16",
            "use_cpu": computation.device.type == "cpu",
            "report_to": [*filter(None, (config.report_to or "").split(","))],
            "save_strategy": "no",  # `fastkd.train.fitting.TrainingCallback` says when
            "logging_nan_inf_filter": False,  # a NaN is reported, not smoothed over
            "remove_unused_columns": False,
            "disable_tqdm": True,
            **config.passed,
        }
    )
    # One device per process: each replica of DataParallel would see a part of a batch.
    found._n_gpu = min(found._n_gpu, 1)
    return found


def steps_of(config: Config, batch_size: int, rows: int) -> tuple[int, int]:
    """Steps in all, and steps of an epoch, for this number of rows."""
    batches = math.ceil(rows / batch_size)
    per_epoch = math.ceil(batches / config.passed.get("gradient_accumulation_steps", 1))
    total = config.training_steps or config.num_train_epochs * per_epoch
    return math.ceil(total), per_epoch


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
#: Value of train_sampling_strategy: batches of rows of similar length.
GROUPED = "group_by_length"
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
    "ddp_static_graph", "ddp_timeout", "train_sampling_strategy",
)  # fmt: skip


def read_trainer_args(given: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Fields of TrainingArguments from --trainer-args: a file, or a dictionary in Python."""
    found: Any = given
    option = f"--trainer-args {given}" if isinstance(given, Path) else "--trainer-args"
    if isinstance(given, Path):
        yaml: Any = require("yaml", "train")
        try:
            found = yaml.safe_load(given.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"{option}: can't be read ({error})") from None
    if not found:
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
    if found.get("train_sampling_strategy", "random") not in ("random", GROUPED):
        raise InputError(f"{option}: train_sampling_strategy must be random or {GROUPED}")
    if found.get("dataloader_num_workers", 0) < 0:
        raise InputError(f"{option}: dataloader_num_workers must be at least 0")
    if found.get("dataloader_persistent_workers") and not found.get("dataloader_num_workers"):
        raise InputError(f"{option}: dataloader_persistent_workers needs dataloader_num_workers")
    return dict(found)


def _try(arguments: TrainingArguments, passed: Mapping[str, Any]) -> None:
    """Raise now the errors of optimizer, schedule and compiler, which would be raised later."""
    transformers: Any = require("transformers", "train")
    kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments)
    if kind.__module__.startswith(("torch.", "transformers.")):  # others need groups of weights
        kind([torch.zeros(1)], **options)
    if passed.get("torch_compile_backend") is not None:
        accelerate: Any = require("accelerate.utils", "train")
        accelerate.DynamoBackend(str(arguments.torch_compile_backend).upper())
    transformers.get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
