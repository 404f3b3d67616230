"""PTX made for tests: a few instructions between loads and a store."""

import torch

from tools.ptx import launch

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel({parameters})
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<80>;
    .reg .b64 %d<16>;
{body}
    ret;
}}
"""
# Registers of each width, and the shift from a thread's number to its element.
REGISTERS = {1: ("%h", 0), 2: ("%h", 1), 4: ("%r", 2), 8: ("%d", 3)}


def kernel(body: str, pointers: int) -> str:
    parameters = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    return HEAD.format(parameters=parameters, body=body)


def elementwise(instructions: str, *inputs: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """What instructions make of inputs, each thread of its own elements.

    ``{0}``, ``{1}``, ... are the inputs' registers, ``{out}`` the result's; a warp or more threads.
    """
    threads = len(inputs[0])
    lines, names = ["mov.u32 %r79, %tid.x;"], {}
    for number, x in enumerate(inputs):
        kind, shift = REGISTERS[x.element_size()]
        register = f"{kind}{number + 1}"
        lines += address(number, shift)
        lines.append(f"ld.global.b{8 * x.element_size()} {register}, [%d15];")
        names[str(number)] = register
    out = torch.zeros(threads, dtype=result)
    kind, shift = REGISTERS[out.element_size()]
    names["out"] = f"{kind}9"
    for name, register in names.items():
        instructions = instructions.replace(f"{{{name}}}", register)
    lines += [instructions, *address(len(inputs), shift)]
    lines.append(f"st.global.b{8 * out.element_size()} [%d15], {names['out']};")
    text = kernel("\n".join(lines), len(inputs) + 1)
    launch(text, grid=(1,), threads=threads, shared=4096, args=[*inputs, out])
    return out


def address(parameter: int, shift: int) -> list[str]:
    """%d15 becomes the address of the thread's element of a parameter."""
    return [
        f"ld.param.u64 %d15, [p{parameter}];",
        "cvt.u64.u32 %d14, %r79;",
        f"shl.b64 %d14, %d14, {shift};",
        "add.s64 %d15, %d15, %d14;",
    ]
