"""Distil one transformers model into a smaller one."""

from typing import Any

from fastkd.distill import methods
from fastkd.distill.by_row import ByRow
from fastkd.distill.cache import TeacherCache
from fastkd.distill.distiller import Distiller, DistillerOutput
from fastkd.distill.merged_spans import merged_span_loss, span_likelihood_loss
from fastkd.distill.method import Method
from fastkd.distill.methods import (
    FCD,
    LRCBERT,
    LRKD,
    MC3KD,
    METHODS,
    AttentionMSE,
    IntraClassKNN,
    Labels,
    SoftTargets,
    method_by_name,
    resolve,
    select_layers,
)
from fastkd.distill.several import Several
from fastkd.distill.spans import TwoTokenizers, align_spans
from fastkd.distill.step import Step
from fastkd.distill.teachers import EMATeacher
from fastkd.models.backbone import Blocks
from fastkd.models.hooks import offload
from fastkd.models.student import layer_map, student_from_teacher

__all__ = [
    "FCD", "LRCBERT", "LRKD", "MC3KD", "METHODS", "AttentionMSE", "Blocks", "ByRow",
    "DistillationTrainer", "Distiller", "DistillerOutput", "EMATeacher", "IntraClassKNN", "Labels",
    "Method", "Several", "SoftTargets", "Step", "TeacherCache", "TwoTokenizers", "align_spans",
    "layer_map", "merged_span_loss", "method_by_name", "methods", "offload", "resolve",
    "select_layers", "span_likelihood_loss", "student_from_teacher",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # transformers.Trainer takes seconds to import, and only this class needs it.
    if name == "DistillationTrainer":
        from fastkd.distill.trainer import DistillationTrainer

        return DistillationTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
