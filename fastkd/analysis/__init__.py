"""How alike a model's layers are (SVCCA, CKA), and pictures of layers and relations."""

from fastkd.analysis.layers import adjacent_layer_cca, cka_matrix, rccc, svcca_matrix
from fastkd.analysis.pictures import plot_layer_similarity, plot_relations

__all__ = [
    "adjacent_layer_cca",
    "cka_matrix",
    "plot_layer_similarity",
    "plot_relations",
    "rccc",
    "svcca_matrix",
]
