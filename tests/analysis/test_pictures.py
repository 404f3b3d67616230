"""Pictures hold the numbers they were given and land where they were asked to."""

import pytest
import torch

from fastkd.analysis import plot_layer_similarity, plot_relations


def test_layer_similarity_shows_the_matrix(tmp_path):
    matrix = torch.rand(5, 5)
    path = tmp_path / "new" / "svcca.png"
    figure = plot_layer_similarity(matrix, path, title="SVCCA")
    shown = figure.axes[0].images[0].get_array()
    torch.testing.assert_close(torch.tensor(shown), matrix.double())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot_layer_similarity(matrix, ax=figure.add_subplot()) is figure
    with pytest.raises(ValueError, match="square"):
        plot_layer_similarity(torch.ones(2, 3))


def test_relations_leave_padding_out(tmp_path):
    student, teacher = torch.randn(2, 6, 4), torch.randn(2, 6, 9)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    student[mask == 0] = float("nan")
    figure = plot_relations(student, teacher, mask, tmp_path / "relations.png")
    maps = [ax.images[0].get_array() for ax in figure.axes if ax.get_xlabel() == "token"]
    assert [m.shape for m in maps] == [(4, 4), (4, 4), (2, 2), (2, 2)]
    rows = torch.nn.functional.normalize(teacher[0, :4].double(), dim=-1)
    torch.testing.assert_close(torch.tensor(maps[1]), rows @ rows.T)
    assert (tmp_path / "relations.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="equal B and N"):
        plot_relations(student, teacher[:, :5])
