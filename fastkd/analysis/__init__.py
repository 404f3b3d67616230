"""Similarity of layers (CCA, SVCCA, PWCCA, CKA), and plots of layers and relations."""

from fastkd.analysis.layer_comparison import (
    adjacent_layer_cca,
    cka_matrix,
    layer_intra_class_similarity,
    layer_similarity,
    rccc,
    svcca_matrix,
)
from fastkd.analysis.pictures import (
    plot_layer_similarity,
    plot_relations,
    plot_sentence,
    relation_agreement,
    relation_maps,
)
from fastkd.analysis.similarity_measures import similarity

__all__ = [
    "adjacent_layer_cca", "cka_matrix", "layer_intra_class_similarity", "layer_similarity",
    "plot_layer_similarity", "plot_relations", "plot_sentence", "rccc", "relation_agreement",
    "relation_maps", "similarity", "svcca_matrix",
]  # fmt: skip
