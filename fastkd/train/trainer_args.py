"""--trainer-args: what transformers.TrainingArguments offers beyond fastkd's own options."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastkd._core.extras import require
from fastkd.train.errors import InputError, nearest
from fastkd.train.option_fields import fits

# Fields that options of ours set, and these options.
OURS = {
    "output_dir": "--out",
    "num_train_epochs": "--epochs",
    "max_steps": "--epochs",
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
# Fields that are passed through. The others are about work that fastkd does itself (evaluating,
# saving, the order of the rows), or would change what is trained on behind the method's back.
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


def read(path: Path | None) -> dict[str, Any]:
    """The fields in a YAML file, none without one.

    Raises:
        InputError: it can't be read, or holds a name or a value that can't be passed on.
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
    arguments: Any = require("transformers", "train").TrainingArguments
    kinds = typing.get_type_hints(arguments)
    known = [name for name in PASSED if name in kinds]
    for name, value in found.items():
        if name in OURS:
            raise InputError(f"{option}: {name} is what {OURS[name]} sets")
        if name not in kinds:
            raise InputError(f"{option}: {name} is no training argument; {nearest(name, known)}")
        if name.startswith("fsdp"):
            raise InputError(f"{option}: {name} is what --fsdp sets")
        if name not in known:
            raise InputError(f"{option}: {name} is settled by fastkd itself; leave it out")
        if not fits(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise InputError(f"{option}: {name} must be {kind}, got {value!r}")
    _try(option, arguments, found)
    return found


def _try(option: str, arguments: Any, found: Mapping[str, Any]) -> None:
    """Raise now what TrainingArguments, optimizer, schedule or loader would raise later."""
    if found.get("gradient_accumulation_steps", 1) < 1:
        raise InputError(f"{option}: gradient_accumulation_steps must be at least 1")
    if found.get("dataloader_num_workers", 0) < 0:
        raise InputError(f"{option}: dataloader_num_workers must be at least 0")
    if found.get("dataloader_persistent_workers") and not found.get("dataloader_num_workers"):
        raise InputError(f"{option}: dataloader_persistent_workers needs dataloader_num_workers")
    transformers: Any = require("transformers", "train")
    accelerate: Any = require("accelerate.utils", "train")
    try:
        args = arguments(output_dir="unused", report_to="none", use_cpu=True, **found)
        kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
        if kind.__module__.startswith(("torch.", "transformers.")):  # others want groups of weights
            kind([torch.zeros(1)], **options)
        if (backend := found.get("torch_compile_backend")) is not None:
            accelerate.DynamoBackend(backend.upper())
        transformers.get_scheduler(
            args.lr_scheduler_type,
            torch.optim.SGD([torch.zeros(1)]),
            num_warmup_steps=1,
            num_training_steps=10,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise InputError(f"{option}: {error}") from error
