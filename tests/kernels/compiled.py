"""``python -m tests.kernels.compiled``: what Triton's compiler makes of the kernels, as JSON.

One process without Triton's interpreter, in which nothing is compiled, for all tests.
"""

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastkd.kernels import cayley, soft_targets
from tools import calls, widths
from tools.compile_report import (
    PROVEN,
    WIDTHS,
    Form,
    chosen,
    modules,
    not_interpreted,
    report,
    unproven,
    walked,
)
from tools.dry_cuda import Device

CALL = re.compile(r"^ *tl\.debug_barrier\(\).*\n", re.MULTILINE)


def forms() -> dict[str, Form]:
    """By name, one of each kernel that is launched here, on tensors without data."""
    device = Device()
    with device.running():
        logits, skew = torch.empty(4, 700, device="cuda"), torch.empty(1, 48, 48, device="cuda")
        options = "adaptive_kl", 1.0, 1.0, 1.0, 0.0, False
        soft_targets.soft_target_rows(logits, logits, None, None, None, *options)
        cayley.cayley_inverse(skew, [skew])
    return {form.name: form for form in device.forms}


def without_barriers(form: Form, folder: str) -> Form:
    """The same form of a copy of its module."""
    source = Path(sys.modules[form.module].__file__ or "").read_text()
    assert CALL.search(source)
    name = form.module.rpartition(".")[2] + "_without_barriers"
    file = Path(folder, f"{name}.py")
    file.write_text(CALL.sub("", source))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return form._replace(module=name)


def operations(form: Form) -> str:
    ptx = form.compiled().asm["ptx"]
    return " ".join(re.findall(r"\b(?:st\.global|ld\.global|bar\.sync)\b", ptx))


def barriers() -> dict[str, Any]:
    """What tl.debug_barrier becomes.

    The stores, loads and barriers of adaptive KL's PTX in order, as the kernel is and without the
    call; and the end of the loop over rounds of the Cayley kernel, in Triton's last intermediate
    form. (In PTX other barriers, for shared memory, hide that one.)
    """
    found = forms()
    adaptive, finish = found["soft_target_kernel"], found["cayley_finish_kernel"]
    ends = re.findall(r"barrier[^\n]*\n *scf\.yield", finish.compiled().asm["ttgir"])
    with tempfile.TemporaryDirectory() as folder:
        without = operations(without_barriers(adaptive, folder))
    return {"as it is": operations(adaptive), "without": without, "ends": len(ends)}


def main() -> None:
    for loss in calls.FILES:  # for tests/test_dry_cuda.py
        walked(loss)
    known = json.loads(PROVEN.read_text()).get(WIDTHS) == widths.state()
    found = {
        "forms": report(chosen(unproven(modules()), [90], every=False)),
        # In a process of its own: computing keys strips the kernels here of lines it names.
        "narrow": [] if known else json.loads(not_interpreted("tools.widths")),
        "barriers": barriers(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
