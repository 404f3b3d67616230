"""Kernels of public calls compile without spills, and fit.

``python -m tests.kernels.test_compile [consumer]``: compiled forms of the kernels, as JSON. One
process for all, without Triton's interpreter, which compiles nothing.
"""

import json
import re
import sys

import pytest
import torch

pytest.importorskip("triton")

from fastkd.kernels import cayley
from tools.compile_report import chosen, largest, modules, not_interpreted, report
from tools.dry_cuda import Device

# Kernels whose largest blocks need more than 60 kB of a consumer card's 99 kB, and their modules.
LARGE = {"cayley_step_kernel": "cayley", "knn_sorted_search_kernel": "knn"}
LARGE |= dict.fromkeys(("relation_gradient_kernel", "relation_tiles_kernel"), "relation_long")


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


def compiled(*what):
    """Forms, none of which has a problem, and ends of rounds with barriers."""
    found = json.loads(not_interpreted("tests.kernels.test_compile", *what).splitlines()[-1])
    for row in found["forms"]:
        assert not row["problems"], row
    return found["forms"], found["barriers"]


@pytest.mark.thorough
def test_compiles_without_spills():
    """A form of each kernel on sm_90, and the largest on a consumer card's sm_120.

    Rounds end with a barrier: threads load from global memory what other threads stored.
    """
    forms, barriers = compiled()
    missing = set(modules()) - {row["module"].rpartition(".")[2] for row in forms}
    assert not missing, f"no call of tests/losses starts a kernel of {missing}"
    assert barriers == 1
    compiled("consumer")


if __name__ == "__main__":
    if sys.argv[1:]:
        forms = [largest(module, name, 120) for name, module in LARGE.items()]
    else:
        forms = chosen(modules(), [90], every=False)
    print(json.dumps({"forms": report(forms, workers=1), "barriers": ends_with_barriers()}))
