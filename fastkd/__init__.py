"""Distillation losses of six papers as fused, exact, drop-in PyTorch functions."""

from fastkd._core import versions  # noqa: F401, I001 - first, for its word on an old torch
from fastkd import functional
from fastkd._torch.divergences import Divergence
from fastkd.attention import AttentionLoss
from fastkd.cca import CCALoss
from fastkd.contrastive import CosNCELoss
from fastkd.functional import *  # noqa: F403 - its __all__ is the list of functions
from fastkd.head import Head
from fastkd.knn import IntraClassKNNLoss
from fastkd.projection import DualProjectionLoss, OrthogonalProjection
from fastkd.queue import FeatureQueue
from fastkd.relation import FCDLoss
from fastkd.soft_targets import SoftTargetLoss
from fastkd.targets import CrossEntropy, TopK

__version__ = "0.1.0"

__all__ = [
    "AttentionLoss",
    "CCALoss",
    "CosNCELoss",
    "CrossEntropy",
    "Divergence",
    "DualProjectionLoss",
    "FCDLoss",
    "FeatureQueue",
    "Head",
    "IntraClassKNNLoss",
    "OrthogonalProjection",
    "SoftTargetLoss",
    "TopK",
    "functional",
]
__all__ += functional.__all__
