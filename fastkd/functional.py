"""All stateless functions and their references, like torch.nn.functional."""

from fastkd.linalg.roots import inv_sqrtm, inv_sqrtm_ref, sqrtm, sqrtm_ref
from fastkd.lm.log_probs import log_probs, log_probs_ref
from fastkd.lm.soft_targets import (
    linear_soft_target_loss,
    linear_soft_target_loss_ref,
    soft_target_loss,
    soft_target_loss_ref,
)
from fastkd.losses.attention import attention_loss, attention_loss_ref
from fastkd.losses.cca import canonical_correlations, cca_loss, cca_loss_ref
from fastkd.losses.cos_nce import cos_nce_loss, cos_nce_loss_ref
from fastkd.losses.hidden_states import hidden_state_loss, hidden_state_loss_ref
from fastkd.losses.knn import intra_class_similarity, knn_feature_loss, knn_feature_loss_ref
from fastkd.losses.projection import cayley, cayley_ref, layer_norm_mse, layer_norm_mse_ref
from fastkd.losses.relation import relation_loss, relation_loss_ref

__all__ = [
    "attention_loss", "attention_loss_ref", "canonical_correlations", "cayley", "cayley_ref",
    "cca_loss", "cca_loss_ref", "cos_nce_loss", "cos_nce_loss_ref", "hidden_state_loss",
    "hidden_state_loss_ref", "intra_class_similarity", "inv_sqrtm", "inv_sqrtm_ref",
    "knn_feature_loss", "knn_feature_loss_ref", "layer_norm_mse", "layer_norm_mse_ref",
    "linear_soft_target_loss", "linear_soft_target_loss_ref", "log_probs", "log_probs_ref",
    "relation_loss", "relation_loss_ref", "soft_target_loss", "soft_target_loss_ref", "sqrtm",
    "sqrtm_ref",
]  # fmt: skip
