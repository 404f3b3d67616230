"""The training library behind the command: data, models, the loop, saving and resuming."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastkd.train.config import Config
    from fastkd.train.distillation import run_distillation

__all__ = ["Config", "run_distillation"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and the list of commands reads this package.
    if name == "Config":
        from fastkd.train.config import Config

        return Config
    if name == "run_distillation":
        from fastkd.train.distillation import run_distillation

        return run_distillation
    if name == "DistillConfig":
        raise ImportError("fastkd.train.DistillConfig(...) is now Config.of(...)")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
