"""Count the kernels that a loss would launch on a GPU, without one.

fastkd's launches are counted where Triton starts a kernel; between them every dispatched tensor
operation counts as one kernel, unless it only makes a view or allocates.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
NO_KERNEL = (*ALLOCATIONS, "promote_types")


class Launches(list):
    """Names in launch order: fastkd's kernels by function, operations as "library.name"."""

    paused = False

    def of_triton(self) -> list[str]:
        return [name for name in self if "." not in name]


class _CountOperations(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (self.launches.paused or func.is_view or func._opname in NO_KERNEL):
            self.launches.append(str(func))
        return result


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Context that records launches; works on CUDA and in Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches = Launches()

    def counted(run):
        def wrapper(self, *args, **kwargs):
            if launches.paused:  # a kernel called from the launch of another
                return run(self, *args, **kwargs)
            launches.append(self.fn.__name__)
            with mock.patch.object(launches, "paused", True):  # the interpreter copies by PyTorch
                return run(self, *args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "run", counted(kind.run)))
        stack.enter_context(_CountOperations(launches))
        yield launches
