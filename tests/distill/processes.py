"""Functions run by several processes that gloo connects."""

import datetime
import multiprocessing
import os
import traceback

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, not by every process.
CONTEXT.set_forkserver_preload(
    ["tests.distill.models", "tests.cli.launched", "fastkd.cli.study_command", "sklearn.metrics"]
)


def run_ranks(function, world, directory, *arguments):
    """``function(rank, *arguments)`` in ``world`` processes; their results by rank."""
    directory.mkdir(parents=True, exist_ok=True)
    processes = [
        CONTEXT.Process(target=_rank, args=(function, rank, world, str(directory), arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    results = []
    for rank in range(world):
        path = directory / f"{rank}.pt"
        assert path.exists(), f"rank {rank} left no result"
        ok, result = torch.load(path, weights_only=False)
        assert ok, result
        results.append(result)
    return results


def _rank(function, rank, world, directory, arguments):
    torch.set_num_threads(1)
    # accelerate and transformers.Trainer read these variables.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    store = dist.FileStore(f"{directory}/store", world)
    patience = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    try:
        result = True, function(rank, *arguments)
        dist.barrier()
    except Exception:
        result = False, f"rank {rank}\n{traceback.format_exc()}"
    torch.save(result, f"{directory}/{rank}.pt")
    # Destroying the process group has hung after the work was done.
    os._exit(0)
