"""The public names of the package, which imports them at the first use of one."""

from fastkd import functional
from fastkd._core.plans import clear_plans
from fastkd.functional import *  # noqa: F403 - its __all__ is the list of functions
from fastkd.lm.divergences import Divergence
from fastkd.lm.heads import Head
from fastkd.lm.soft_targets import SoftTargetLoss
from fastkd.lm.targets import CrossEntropy, Draft, ImportanceRatio, TopK
from fastkd.lm.vocabulary_match import VocabularyMatch
from fastkd.losses.attention import AttentionLoss
from fastkd.losses.cca import CCALoss
from fastkd.losses.cos_nce import CosNCELoss
from fastkd.losses.hidden_states import HiddenStateLoss
from fastkd.losses.knn import IntraClassKNNLoss
from fastkd.losses.projection import DualProjectionLoss, OrthogonalProjection
from fastkd.losses.queue import FeatureQueue
from fastkd.losses.relation import FCDLoss

__all__ = [
    "AttentionLoss", "CCALoss", "CosNCELoss", "CrossEntropy", "Divergence", "Draft",
    "DualProjectionLoss", "FCDLoss", "FeatureQueue", "Head", "HiddenStateLoss", "ImportanceRatio",
    "IntraClassKNNLoss", "OrthogonalProjection", "SoftTargetLoss", "TopK", "VocabularyMatch",
    "clear_plans", "functional",
]  # fmt: skip
__all__ += functional.__all__
