"""The training library behind the command: data, models, the loop, saving and resuming."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastkd.train.config import DistillConfig
    from fastkd.train.distillation import run_distillation

__all__ = ["DistillConfig", "run_distillation"]


def __getattr__(name: str) -> Any:
    # TrainingArguments takes seconds to import, and the list of commands reads this package.
    if name == "DistillConfig":
        from fastkd.train.config import DistillConfig

        return DistillConfig
    if name == "run_distillation":
        from fastkd.train.distillation import run_distillation

        return run_distillation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
