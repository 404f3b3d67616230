"""How a kernel module tells `bench.compile_report` what a public call can start."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One compiled form of a kernel.

    ``signature`` gives the type of every run-time argument: ``"*bf16"``, ``"i32"``, ``"i64"``,
    ``"fp32"``, or a tuple of these for a tuple argument; ``constexprs`` the value of every other.
    Pointers count as 16-byte aligned, and so do the integers named in ``aligned`` (multiples of
    16), as at launch. ``tensor_cores`` demands that the PTX uses them. ``capabilities`` names the
    architectures that get this form, where its launch options depend on them; empty is all.
    """

    kernel: Any
    signature: dict[str, str | tuple[str, ...]]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: bool = False
    aligned: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = ()


def aligned_form(
    kernel: Any,
    types: dict[str, str | tuple[str, ...] | None],
    constexprs: dict[str, Any],
    **options: Any,
) -> Variant:
    """One choice of types and constexprs, at sizes that are multiples of 16.

    Arguments that ``types`` leaves out are float32 arrays or 32-bit integers by their names; a
    type of None stands for an argument that is None.
    """
    constexprs = dict(constexprs)
    signature: dict[str, str | tuple[str, ...]] = {}
    for name in kernel.arg_names:
        kind = types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        if name in constexprs:
            continue
        if kind is None:
            constexprs[name] = None
        else:
            signature[name] = kind
    sizes = tuple(n for n, kind in signature.items() if kind == "i32" and n not in fixed(kernel))
    return Variant(kernel, signature, constexprs, **options, aligned=sizes)


def forms(
    kernel: Any,
    types: dict[str, str | tuple[str, ...] | None],
    constexprs: dict[str, Any],
    **options: Any,
) -> Iterator[Variant]:
    """`aligned_form` and, if sizes change the code, the form for others, without wide loads.

    Left out: Triton makes further forms where only some sizes are multiples of 16, as strides of
    sliced features may be, and where features are single numbers.
    """
    variant = aligned_form(kernel, types, constexprs, **options)
    yield variant
    if variant.aligned:
        yield variant._replace(aligned=())


def fixed(kernel: Any) -> tuple[str, ...]:
    """Arguments whose values never change the code."""
    # The interpreter's functions keep the decorator's arguments.
    owner = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    return tuple(owner["do_not_specialize"] or ())
