"""Measurements of a run besides its scores: layer similarities, machine, peak memory."""

import ctypes
import functools
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import fastkd
from fastkd._core import machine
from fastkd.analysis import layer_intra_class_similarity, rccc, svcca_matrix
from fastkd.models.backbone import Backbone
from fastkd.train.arrow_rows import UNLABELLED
from fastkd.train.scoring import Run

SIMILARITY_ROWS = 256


def without_labels(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of ``model``; the decoder of an encoder-decoder reads the labels, shifted right."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    backbone = Backbone(model, "model")
    if not backbone.writes:
        return inputs
    labels = batch["labels"]
    mask = (labels != UNLABELLED).long()
    return backbone.with_decoder_inputs({**inputs, "decoder_attention_mask": mask}, labels)


def similarities(run: Run, student: PreTrainedModel) -> dict[str, float]:
    """RCCC and, if each row has one class, M_ICS of ``student`` on the first held-out rows.

    RCCC is from MC3KD, section 3.2.
    """
    inputs = [without_labels(student, batch) for batch in _first_rows(run)]
    return {"rccc": rccc(svcca_matrix(student, inputs)), **intra_class(run, student)}


def intra_class(run: Run, student: PreTrainedModel) -> dict[str, float]:
    """M_ICS of the last layer (intra-class KNN, section 2); empty unless each row has one class."""
    batches = _first_rows(run)
    if run.data.corpus.names is None or batches[0]["labels"].dim() != 1:
        return {}
    return {"intra_class_similarity": float(layer_intra_class_similarity(student, batches)[-1])}


def _first_rows(run: Run) -> list[dict[str, Tensor]]:
    rows = run.sets.evals[""]
    first = range(min(SIMILARITY_ROWS, len(rows)))
    # `run.sets.collate` may add the teacher's tokens.
    collate, device = run.data.task.collator(run.data.tokenizer), run.computation.device
    return list(rows.batches(collate, 32, first, device=device))


@functools.cache
def machine_of(device: str) -> dict[str, Any]:
    """Processor or GPU, versions and commit of this process, with fastkd's version."""
    return {**machine.describe(torch.device(device)), "fastkd": fastkd.__version__}


class PeakMemory:
    """Peak memory of a run in bytes, above the memory in use before it."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: int | None = torch.cuda.memory_allocated(device)
        else:
            self.before = self._reset()

    def _reset(self) -> int | None:
        """Reset the kernel's peak counter of this process; return the bytes in use.

        None where the operating system has no such counter (all but Linux).
        """
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # or memory freed by the last run would hide the peak
            Path("/proc/self/clear_refs").write_text("5")
        except (OSError, AttributeError):
            return None
        return self._status("VmRSS")

    def read(self) -> int | None:
        """Peak above the bytes in use at the start; None if it can't be measured."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = 0 if self.before is None else self._status("VmHWM")
        return None if self.before is None else peak - self.before

    @staticmethod
    def _status(name: str) -> int:
        """A field of the process's status file, in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
