"""``python -m tests.kernels.compiled [consumer]``: compiled forms of the kernels, as JSON.

One process for all tests, without Triton's interpreter, which compiles nothing.
"""

import json
import re
import sys

import torch

from fastkd.kernels import cayley
from tools.compile_report import chosen, largest, modules, report
from tools.dry_cuda import Device


def ends_with_barriers() -> int:
    """Ends of loops that have a barrier in the Cayley kernel's rounds.

    In Triton's last intermediate form: in PTX other barriers, for shared memory, hide that one.
    """
    device = Device()
    with device.running():
        skew = torch.empty(1, 48, 48, device="cuda")
        cayley.cayley_inverse(skew, [skew])
    (finish,) = (form for form in device.forms if form.name == "cayley_finish_kernel")
    return len(re.findall(r"barrier[^\n]*\n *scf\.yield", finish.compiled().asm["ttgir"]))


# Kernels whose largest blocks need more than 60 kB of a consumer card's 99 kB, and their modules.
LARGE = {
    "cayley_step_kernel": "cayley",
    "knn_sorted_search_kernel": "knn",
    "relation_gradient_kernel": "relation_long",
    "relation_tiles_kernel": "relation_long",
}


def main() -> None:
    if sys.argv[1:]:
        forms = [largest(module, name, 120) for name, module in LARGE.items()]
    else:
        forms = chosen(modules(), [90], every=False)
    print(json.dumps({"forms": report(forms, workers=1), "barriers": ends_with_barriers()}))


if __name__ == "__main__":
    main()
