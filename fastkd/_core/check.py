"""Input checks of the public functions, with one error sentence for each mistake: `check.shape`."""

import difflib
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastkd._core.numerics import saveable, values_readable, working_dtype
from fastkd._core.warn import warn_caller

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def floating(name: str, x: Tensor, ndim: int | None = None, min_ndim: int = 1) -> None:
    """Raise unless ``x`` is a tensor of a supported floating dtype and number of dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise RuntimeError(
            f"{name} is a tensor of torch.func.grad, vmap or jvp, under which fastkd's losses "
            "don't run; pass a whole batch, and take gradients by torch.autograd.grad"
        )
    if hasattr(x, "full_tensor"):
        raise TypeError(f"{name} must be whole in this process, got a DTensor; use full_tensor()")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got layout {x.layout}; pad it, and pass a mask")
    if x.dtype not in FLOATING:
        raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
    if ndim is not None and x.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(x.shape)}")
    if x.dim() < min_ndim:
        raise ValueError(f"{name} must have at least {min_ndim} dimensions, got {tuple(x.shape)}")


def pair(student: Tensor, teacher: Tensor, ndim: int | None = None, min_ndim: int = 1) -> None:
    """Raise unless both are floating, of one dtype and device, and the teacher without gradient."""
    floating("student", student, ndim, min_ndim)
    floating("teacher", teacher, ndim, min_ndim)
    like("teacher", teacher, "student", student)
    no_grad("teacher", teacher)


def device(
    name: str, x: Tensor, like_name: str, like: Tensor | torch.device, verb: str = "is"
) -> None:
    """Raise unless ``x`` is on the device ``like``, or of ``like``."""
    expected = like if isinstance(like, torch.device) else like.device
    if x.device != expected:
        raise ValueError(f"{name} is on {x.device} but {like_name} {verb} on {expected}")


def like(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise unless ``x`` has the dtype and device of ``like``."""
    device(name, x, like_name, like)
    if x.dtype != like.dtype:
        raise TypeError(
            f"{name} is {x.dtype} but {like_name} is {like.dtype}; convert one, "
            f"for example {name}.to({like_name}.dtype)"
        )


def no_grad(name: str, x: Tensor) -> None:
    """Raise if ``x`` requires grad: a teacher gets no gradient."""
    if x.requires_grad:
        raise ValueError(
            f"{name} requires grad; run it under torch.no_grad() or pass {name}.detach()"
        )


def shape(name: str, x: Tensor, sizes: Sequence[int], meaning: str) -> None:
    """Raise unless ``x`` is a Tensor of the shape ``sizes``, which ``meaning`` explains."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(sizes):
        raise ValueError(f"{name} must have shape {tuple(sizes)} ({meaning}), got {tuple(x.shape)}")


def mask(
    mask: Tensor | None,
    sizes: Sequence[int],
    on: torch.device,
    name: str = "mask",
    of: str = "student",
    warn_if_empty: bool = True,
) -> Tensor | None:
    """``mask`` as bool (True = real token), or None; ``sizes`` are (B, N) of the features.

    A mask without a real token causes a warning, unless ``warn_if_empty`` is False: the mask of an
    empty memory bank has none.
    """
    if mask is None:
        return None
    shape(name, mask, sizes, f"the leading dimensions of {of}")
    device(name, mask, of, on)
    if mask.dtype == torch.bool:
        real = saveable(mask)
    else:
        if values_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"{name} must hold only 0 (padding) and 1 (real token)")
        real = mask != 0
    if warn_if_empty and values_readable(real) and real.numel() > 0 and not bool(real.any()):
        _warn_of_empty_mask(name)
    return real


def weights(
    weights: Tensor | None,
    sizes: Sequence[int],
    like: Tensor,
    counted: Tensor | None = None,
    of: str = "student",
    remedy: str = 'multiply the losses of reduction="none"',
) -> Tensor | None:
    """``weights`` in the working dtype of ``like``, 0 outside ``counted`` (bool), or None.

    Raises unless they are floating, without gradient, and have the shape ``sizes``.
    """
    if weights is None:
        return None
    floating("weights", weights, min_ndim=0)
    shape("weights", weights, sizes, f"the leading dimensions of {of}")
    device("weights", weights, of, like)
    if weights.requires_grad:
        raise ValueError(
            f"weights requires grad, and gets none; {remedy}, or pass weights.detach()"
        )
    weights = saveable(weights).to(working_dtype(like))
    return weights if counted is None else weights.masked_fill(~counted, 0)


@functools.cache  # warns once a process
def _warn_of_empty_mask(name: str) -> None:
    warn_caller(
        f"{name} has no real token: in a Distiller all labels of the batch are −100; elsewhere 1 "
        "or True is a real token: pass ~key_padding_mask, or additive_mask == 0"
    )


def token_ids(name: str, ids: Tensor, sizes: Sequence[int], V: int, on: torch.device) -> None:
    """Raise unless ``ids`` are integers of the shape ``sizes`` on a device, 0 to V − 1."""
    integers(name, ids)
    shape(name, ids, sizes, "the leading dimensions of hidden, and K tokens or none")
    device(name, ids, "hidden", on)
    ids_below(name, ids, V)


def integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {x.dtype}")


def ids_below(name: str, ids: Tensor, end: int, what: str = "token ids") -> None:
    """Raise unless ``ids`` are from 0 to ``end`` - 1, where they can be read."""
    if not values_readable(ids) or ids.numel() == 0:
        return
    least, largest = (int(x) for x in ids.aminmax())
    if least < 0 or largest >= end:
        wrong = least if least < 0 else largest
        raise ValueError(f"{name} must be {what} 0 to {end - 1}, got {wrong}")


def labels(name: str, labels: Tensor, size: int | Sequence[int], on: torch.device) -> None:
    """Raise unless ``labels`` has ``size`` entries, or the shape ``size``, on a device."""
    sizes = size if isinstance(size, Sequence) else (size,)
    shape(name, labels, sizes, "one label per row")
    device(name, labels, "the features", on, "are")
    if labels.dtype.is_complex:
        raise TypeError(f"{name} must be integers or real numbers, got {labels.dtype}")


def vocabulary_part(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raise unless ``ids`` (n,) are int64, below ``vocabulary``, and none is repeated."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(ids).__name__}")
    if ids.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {ids.dtype}")
    if ids.dim() != 1 or len(ids) == 0:
        raise ValueError(
            f"{name} must have shape (n,) with n of at least 1, got {tuple(ids.shape)}"
        )
    if not values_readable(ids):
        return
    ids_below(name, ids, vocabulary)
    if int(ids.bincount().max()) > 1:
        ascending = bool((ids[1:] >= ids[:-1]).all())
        offsets = "; of offsets such as EAGLE's pass d2t + torch.arange(len(d2t))"
        raise ValueError(f"{name} must not have a token twice{offsets if ascending else ''}")


def choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise unless ``value`` is one of ``choices``; the error suggests the most similar one."""
    choices = tuple(choices)
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    words = ", ".join(map(repr, choices))
    raise ValueError(f"{name} must be one of {words}, got {shown(value)}{hint}")


def shown(value: object) -> str:
    """``value`` in one line."""
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)


def integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be an int of 64 bits, got {value}")


def positive_int(name: str, value: int) -> None:
    """Raise unless ``value`` is an int of at least 1."""
    integer(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def sizes_to_project(student_dim: int | None, teacher_dim: int | None) -> None:
    """Raise unless each is a size, or None."""
    for name, dim in (("student_dim", student_dim), ("teacher_dim", teacher_dim)):
        if dim is not None:
            positive_int(name, dim)


def number(
    name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> None:
    """Raise unless ``value`` is a finite real number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -float("inf") < value < float("inf"):
        raise ValueError(f"{name} must be finite, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be greater than {above}, got {value}")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def fraction(name: str, value: float) -> None:
    """Raise unless ``value`` is a number from 0 to 1."""
    number(name, value, at_least=0)
    if value > 1:
        raise ValueError(f"{name} must be at most 1, got {value}")


def layer_pairs(
    student: Tensor | Sequence[Tensor], teacher: Tensor | Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Student and teacher features of each layer; a single Tensor is one layer."""
    layers = []
    for name, x in (("student", student), ("teacher", teacher)):
        given = (x,) if isinstance(x, Tensor) else x
        if not isinstance(given, (list, tuple)) or not all(isinstance(y, Tensor) for y in given):
            kind = type(x).__name__
            if isinstance(x, (list, tuple)):
                kind += " of " + " and ".join(sorted({type(layer).__name__ for layer in x}))
            raise TypeError(f"{name} must be a Tensor or a list of Tensors, got {kind}")
        layers.append(list(given))
    students, teachers = layers
    if len(students) != len(teachers):
        raise ValueError(
            f"student has {len(students)} layers but teacher has {len(teachers)}; "
            "pass one teacher layer for each student layer"
        )
    if not students:
        raise ValueError("student and teacher are empty lists; pass at least one layer")
    return list(zip(students, teachers, strict=True))
