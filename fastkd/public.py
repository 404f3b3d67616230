"""The public names of the package, which imports them at the first use of one."""

from fastkd import functional
from fastkd._torch.divergences import Divergence
from fastkd.attention import AttentionLoss
from fastkd.cca import CCALoss
from fastkd.contrastive import CosNCELoss
from fastkd.functional import *  # noqa: F403 - its __all__ is the list of functions
from fastkd.head import Head
from fastkd.hidden_states import HiddenStateLoss
from fastkd.knn import IntraClassKNNLoss
from fastkd.projection import DualProjectionLoss, OrthogonalProjection
from fastkd.queue import FeatureQueue
from fastkd.relation import FCDLoss
from fastkd.soft_targets import SoftTargetLoss
from fastkd.targets import CrossEntropy, ImportanceRatio, TopK
from fastkd.vocabulary_match import VocabularyMatch

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
    "HiddenStateLoss",
    "ImportanceRatio",
    "IntraClassKNNLoss",
    "OrthogonalProjection",
    "SoftTargetLoss",
    "TopK",
    "VocabularyMatch",
    "functional",
]
__all__ += functional.__all__
