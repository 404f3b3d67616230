"""Options of the losses' Modules, which are checked whenever they are set."""

from dataclasses import fields

import pytest
import torch

import fastkd
from fastkd._core.registry import LOSSES

SIZES = {"student_dim": 4, "teacher_dim": 6, "in_dim": 4, "out_dim": 6}
# Options without a wrong value: flags, and a group of processes.
FREE = {"gather", "group", "persistent", "scale_by_t2"}


@pytest.mark.parametrize("name", [name for loss in LOSSES for name in loss.modules])
def test_an_option_set_later_is_checked(name):
    kind = getattr(fastkd, name)
    options = {field.name for field in fields(kind)}
    module = kind(**{key: size for key, size in SIZES.items() if key in options})
    for option in options - FREE:
        before = getattr(module, option)
        with pytest.raises((ValueError, TypeError), match=f"{option} (must be|is fixed)"):
            setattr(module, option, -5 if isinstance(before, float) else "typo")
        assert getattr(module, option) is before


def test_fcd_refuses_two_weights_of_zero():
    message = "alpha and beta are both 0"
    with pytest.raises(ValueError, match=message):
        fastkd.FCDLoss(alpha=0, beta=0)
    module = fastkd.FCDLoss(beta=0)
    module.alpha = 0.0
    with pytest.raises(ValueError, match=message):
        module(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
