"""One run in several processes, as torchrun starts them.

Every process runs the same command; the first one speaks and writes. What only one of them does,
or what may end differently in each, is told to all, so that none waits for another in vain.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastkd._core.extras import MissingExtra
from fastkd.distributed import world_size
from fastkd.train.errors import InputError, RunFailed
from fastkd.train.launcher import first, launched, rank

Result = TypeVar("Result")

# Errors that are one sentence, and may be raised again in another process.
TOLD = (InputError, RunFailed, MissingExtra, OSError)

# Seconds in which a launcher ends the other processes of one that failed.
PATIENCE = 10


def join(device: str) -> None:
    """Meet the other processes of this run; ``device`` is that of --device."""
    if not launched() or dist.is_initialized():
        return
    if device == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise InputError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', local + 1)} processes on a machine with {there} "
            "CUDA devices: start one for each, or pass --device cpu"
        )
    torch.cuda.set_device(local)
    # What the processes tell each other is on the CPU, and doesn't wait for the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl")


def by_first(work: Callable[[], Result]) -> Result:
    """``work()``, done by the first process; what it returns or raises, in all."""
    if world_size() == 1:
        return work()
    told: list[Any] = [None, None]
    if first():
        try:
            told[0] = work()
        except TOLD as error:
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]


@contextlib.contextmanager
def in_first(context: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """``context``, entered by the first process; an error as it is entered is raised in all."""
    with contextlib.ExitStack() as stack:
        by_first(lambda: stack.enter_context(context))
        yield


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """An error of one process within is raised in all."""
    error: Exception | None = None
    try:
        yield
    except TOLD as caught:
        error = caught
    if world_size() > 1:
        error = next(filter(None, gathered(error)), None)
    if error is not None:
        raise error


def gathered(x: Result) -> list[Result]:
    """``x`` of every process, by rank."""
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
    """Whether this process is the one that says why the run fails: none has before it."""
    if not launched():
        return True
    if not dist.is_initialized():
        # Nothing tells yet who was first. What all of them meet the first process says, and the
        # launcher then ends the others; it would end the first as well if one of them were faster.
        if not first():
            time.sleep(PATIENCE + rank())
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("fastkd failed", 1) == 1
    except RuntimeError:  # the process that keeps the count is gone, and has spoken
        return False


def is_loss_of_others(error: BaseException) -> bool:
    """Whether ``error`` says no more than that another process has ended."""
    if world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
