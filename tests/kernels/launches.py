"""Count the kernels that a loss would launch on a GPU, without one.

fastkd's launches are counted where Triton starts a kernel; between them every dispatched tensor
operation counts as one kernel, unless it only makes a view or allocates.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
NO_TENSORS = ("promote_types",)


class Launches(list):
    """Names in launch order: fastkd's kernels by function, operations as "library.name"."""

    def of_triton(self) -> list[str]:
        return [name for name in self if "." not in name]


class _CountOperations(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (self.paused or func.is_view or func._opname in ALLOCATIONS + NO_TENSORS):
            self.launches.append(str(func))
        return result


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Context that records launches; works on CUDA and in Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches = Launches()
    operations = _CountOperations(launches)

    def counted(run):
        def wrapper(self, *args, **kwargs):
            if operations.paused:  # a kernel called from the launch of another
                return run(self, *args, **kwargs)
            launches.append(self.fn.__name__)
            operations.paused = True  # the interpreter copies tensors with PyTorch
            try:
                return run(self, *args, **kwargs)
            finally:
                operations.paused = False

        return wrapper

    with (
        mock.patch.object(JITFunction, "run", counted(JITFunction.run)),
        mock.patch.object(InterpretedFunction, "run", counted(InterpretedFunction.run)),
        operations,
    ):
        yield launches
