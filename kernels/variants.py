"""How a kernel module tells `bench.compile_report` what a public call can start."""

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
