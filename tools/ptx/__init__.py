"""PTX executed on the CPU, checked for hazards and counted.

    from tools.ptx import launch, Hazard
    counts = launch(ptx, grid=(3,), threads=256, shared=4096, args=[student, teacher, out, 3, 1.0])

`parse` reads the text, `machine` executes CTAs with every register a numpy array over their
threads, `memory` finds hazards, `counting` counts instructions and accesses. The instructions are
in `arithmetic`, `movement`, `warps` and `tensor`. `executing` makes Triton launch here. `count`
writes the page of counts.
"""

from .compiled import executing
from .counting import Counts
from .launches import launch
from .memory import Hazard
from .parse import UnknownInstruction, entries

__all__ = ["Counts", "Hazard", "UnknownInstruction", "entries", "executing", "launch"]
