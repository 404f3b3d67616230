"""This process's place among those that a launcher such as torchrun started.

Read from the environment, without torch.
"""

import os


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The number of this process, 0 in a run of one."""
    return int(os.environ["RANK"]) if launched() else 0


def first() -> bool:
    """Whether this process speaks and writes."""
    return rank() == 0
