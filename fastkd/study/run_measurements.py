"""Measurements of a run besides its scores: peak memory, machine, similarities."""

import ctypes
import functools
import gc
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import fastkd
from fastkd._core import machine
from fastkd.analysis import layer_intra_class_similarity, rccc, svcca_matrix
from fastkd.train.run import Run

SHOWN_ROWS = 256


def similarities(run: Run, student: PreTrainedModel) -> dict[str, float]:
    """RCCC (MC3KD, 3.2) on held-out rows, and M_ICS (intra-class KNN, section 2) of classes."""
    rows = run.eval_rows[""]
    shown = range(min(SHOWN_ROWS, len(rows)))
    batches = list(rows.batches(run.collate, 32, shown, device=run.device))
    found = {"rccc": rccc(svcca_matrix(student, batches))}
    if run.corpus.names is not None and batches[0]["labels"].dim() == 1:
        every = layer_intra_class_similarity(student, batches)
        found["intra_class_similarity"] = float(every[-1])
    return found


@functools.cache
def machine_of(device: str) -> dict[str, Any]:
    return {
        **machine.describe(torch.device(device)),
        "fastkd": fastkd.__version__,
    }


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
        """Reset the kernel's peak counter of this process (Linux); returns the current bytes."""
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)  # or this run would reuse what the last one left
            Path("/proc/self/clear_refs").write_text("5")
        except (OSError, AttributeError):
            return None
        return self._status("VmRSS")

    def read(self) -> int | None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = 0 if self.before is None else self._status("VmHWM")
        return None if self.before is None else peak - self.before

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
