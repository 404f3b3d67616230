"""One run in several processes, as torchrun starts them: collective operations, and the device.

Every process runs the same command; the first one prints and writes files. Results and errors of
one process are broadcast, so that no process waits for one that has failed.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastkd._core.extras import MissingExtra
from fastkd.distributed import world_size
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.launcher import launched, rank

Result = TypeVar("Result")

# Errors with a one-sentence message, which are raised again in the other processes.
SHARED_ERRORS = (InputError, RunFailed, MissingExtra, OSError)

# Seconds that a launcher needs to end the other processes after one failed.
GRACE_SECONDS = 10


def join(device: str) -> None:
    """Initialise the process group of a launched run; ``device`` is the value of --device."""
    if not launched() or dist.is_initialized():
        return
    if device == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise InputError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', local + 1)} processes on a machine with {there} "
            "CUDA devices; start one process for each device, or pass --device cpu"
        )
    torch.cuda.set_device(local)
    # Objects are exchanged on the CPU, without waiting for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl")


def on_first_process(work: Callable[[], Result]) -> Result:
    """Call ``work`` in the first process; its result or error reaches all processes."""
    if world_size() == 1:
        return work()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except SHARED_ERRORS as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def errors_on_all() -> Iterator[None]:
    """Context in which an error of one process is raised in all processes."""
    error: Exception | None = None
    try:
        yield
    except SHARED_ERRORS as caught:
        error = caught
    if world_size() > 1:
        error = next(filter(None, all_gather(error)), None)
    if error is not None:
        raise error


def all_gather(x: Result) -> list[Result]:
    """``x`` of every process, ordered by rank."""
    if world_size() == 1:
        return [x]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, x)
    return found


def largest(x: int) -> int:
    """The largest ``x`` of all processes."""
    if world_size() == 1:
        return x
    found = torch.tensor(x)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def first_to_fail() -> bool:
    """Whether this process reports the failure: no other process has reported one."""
    if not launched():
        return True
    if not dist.is_initialized():
        # No shared counter exists yet. The first process reports an error that all processes have;
        # the others wait, since the launcher ends all processes as soon as one of them exits.
        if rank() > 0:
            time.sleep(GRACE_SECONDS + rank())
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("fastkd failed", 1) == 1
    except RuntimeError:  # the process that holds the counter has ended, and has reported
        return False


def is_loss_of_others(error: BaseException) -> bool:
    """Whether ``error`` only means that another process has ended."""
    if world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str, precision: str) -> torch.device:
    """The device called ``name``, or auto: CUDA if there is one; checks ``precision`` on it."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here (see `fastkd doctor`)")
    chosen = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    if precision == "fp16" and chosen == "cpu":
        raise InputError("--precision fp16 needs a CUDA device; use fp32 or bf16 on the CPU")
    return torch.device(chosen)


@dataclass(frozen=True)
class Computation:
    """Device, precision, and the rows of a batch over all processes."""

    device: torch.device
    precision: str
    batch_size: int

    @classmethod
    def of(cls, options: Any, processes: int = 1) -> "Computation":
        """That of a command's ``options``, with --batch-size rows for each process."""
        device = choose_device(options.device_name, options.precision)
        return cls(device, options.precision, options.batch_size * processes)

    @property
    def own_rows(self) -> int:
        """Rows of a batch in one process."""
        return -(-self.batch_size // world_size())

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context of the precision, as Trainer applies it in training."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=PRECISIONS[self.precision])
