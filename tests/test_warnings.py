"""Warnings point at the line that called fastkd, not into fastkd or torch."""

import pytest
import torch

from fastkd._core import check
from fastkd.distill import LRCBERT, Distiller
from fastkd.losses.cca import CCALoss
from fastkd.losses.relation import FCDLoss
from tests.distill.models import batch, pair


def saturated():
    CCALoss(pool="cls")(torch.randn(2, 3, 4), torch.randn(2, 3, 4))


def nothing_real():
    check._warn_of_empty_mask.cache_clear()
    FCDLoss()(torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.zeros(2, 3))


def without_schedule():
    Distiller(*pair(), LRCBERT(first_stage=0.5))(**batch())


@pytest.mark.parametrize("call", [saturated, nothing_real, without_schedule])
def test_warning_points_at_its_caller(call, recwarn):
    call()
    ours = [w for w in recwarn if issubclass(w.category, UserWarning)]
    assert [w.filename for w in ours] == [__file__]
