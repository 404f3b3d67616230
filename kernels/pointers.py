"""Pointers of the layers of one launch: a kernel receives a tuple and selects one."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

# Layers in one launch: their pointers are kernel arguments.
LAYERS_PER_LAUNCH = 8


def slots(layers: int) -> int:
    """Number of pointers in a launch of ``layers``; only two values, for few compiled forms."""
    return 1 if layers == 1 else LAYERS_PER_LAUNCH


def padded(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The layers' tensors, with the last one repeated in unused slots."""
    return (*tensors, *tensors[-1:] * (slots(len(tensors)) - len(tensors)))


@triton.jit
def pick(pointers, index, SLOTS: tl.constexpr):
    """``pointers[index]`` for an index known only at run time."""
    pointer = pointers[0]
    for i in tl.static_range(1, SLOTS):
        pointer = tl.where(index == i, pointers[i], pointer)
    return pointer


def layer_groups(layers: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Indices of the layers of each launch: equal shapes and dtypes, at most LAYERS_PER_LAUNCH."""
    groups: list[tuple[list, list[int]]] = []
    for i, layer in enumerate(layers):
        kind = [(x.shape, x.dtype) for x in layer]
        for other, indices in groups:  # no dict: a hash would fix the sizes in a compiled graph
            if kind == other and len(indices) < LAYERS_PER_LAUNCH:
                indices.append(i)
                break
        else:
            groups.append((kind, [i]))
    return [indices for _, indices in groups]
