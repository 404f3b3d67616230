"""Pictures show the computed numbers and are saved under the given path."""

import math

import pytest
import torch

import fastkd
from fastkd.analysis import (
    plot_layer_similarity,
    plot_relations,
    plot_sentence,
    relation_agreement,
    relation_maps,
)
from fastkd.analysis.pictures import plot_layer_panels
from tests.support.compare import raises


def test_layer_similarity_shows_the_matrix(tmp_path):
    matrix = torch.rand(5, 5)
    path = tmp_path / "new" / "svcca.png"
    figure = plot_layer_similarity(matrix, path, title="SVCCA")
    shown = figure.axes[0].images[0].get_array()
    torch.testing.assert_close(torch.tensor(shown), matrix.double())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot_layer_similarity(matrix, ax=figure.add_subplot()) is figure
    assert plot_layer_similarity(torch.ones(2, 3), names=("teacher", "student")).axes
    # On a scale from 0 to 1 all values above 0.96 would have one colour.
    near = plot_layer_similarity(0.96 + 0.04 * torch.eye(3))
    assert near.axes[0].images[0].get_clim() == pytest.approx((0.95, 1.0))
    raises("not empty", plot_layer_similarity, torch.ones(3))


def test_panels_share_their_colours_and_leave_no_corner_empty(tmp_path):
    """Five panels have one colour bar, their own titles and a centred last row."""
    own, across = torch.eye(4), 0.3 + 0.5 * torch.rand(7, 4)
    titles = (["model", "before", "student"], ["before against the model", "student against it"])
    rows = [
        [(title, ("layer", "layer"), matrix) for title in row]
        for row, matrix in zip(titles, (own, across), strict=True)
    ]
    figure = plot_layer_panels(rows, tmp_path / "svcca.png", title="SVCCA")
    *panels, bar = figure.axes
    assert [ax.get_title() for ax in panels] == [*titles[0], *titles[1]]
    assert {ax.images[0].get_clim() for ax in panels} == {(0.0, 1.0)}
    assert bar.get_ylabel() == "SVCCA"
    begin = [ax.get_subplotspec().colspan.start for ax in panels]
    assert begin == [0, 2, 4, 1, 3]  # on a grid of six columns the last two panels are centred


def test_relation_picture_has_no_padding(tmp_path):
    student, teacher = torch.randn(2, 6, 4), torch.randn(2, 6, 9)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    student[mask == 0] = float("nan")
    figure = plot_relations(student, teacher, mask, tmp_path / "relations.png")
    maps = [ax.images[0].get_array() for ax in figure.axes if ax.get_xlabel() == "token"]
    assert [m.shape for m in maps] == [(4, 4), (4, 4), (2, 2), (2, 2)]
    rows = torch.nn.functional.normalize(teacher[0, :4].double(), dim=-1)
    torch.testing.assert_close(torch.tensor(maps[1]), rows @ rows.T)
    assert (tmp_path / "relations.png").stat().st_size > 1000
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == [*"0123"]
    words = [list("abcdef"), list("uvwxyz")]
    named = plot_relations(student, teacher, mask, tokens=words)
    assert [text.get_text() for text in named.axes[3].get_yticklabels()] == ["u", "v"]
    with pytest.raises(ValueError, match="tokens must have 6 tokens for each of 2 samples"):
        plot_relations(student, teacher, mask, tokens=words[:1])
    raises("equal B and N", plot_relations, student, teacher[:, :5])


def test_relations_of_a_sentence_under_the_four_normalisations(tmp_path):
    """The drawn relations equal the loss's relations; the axes have the sentence's tokens."""
    torch.manual_seed(0)
    tokens, widths = ["[CLS]", "a", "word", "[SEP]"], {"teacher": 9, "before": 6, "after": 6}
    features = {name: torch.randn(4, width) for name, width in widths.items()}
    figure = plot_sentence(features, tokens, tmp_path / "relations.png")
    assert (tmp_path / "relations.png").read_bytes().startswith(b"\x89PNG")
    axes = iter(figure.axes[:12])
    assert len(figure.axes) == 24  # one colour bar for each map
    for name, x in features.items():
        x = x.double()
        centred = x - x.mean(1, keepdim=True)
        taken = {
            "l2": x / x.norm(dim=1, keepdim=True),
            "layer_norm": centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt(),
            "softmax": x.exp() / x.exp().sum(1, keepdim=True),
            "none": x,
        }
        found, rho = relation_maps(x), relation_agreement(x, features["teacher"])
        for kind, y in taken.items():
            ax = next(axes)
            torch.testing.assert_close(found[kind], y @ y.T)
            assert torch.equal(torch.tensor(ax.images[0].get_array()), found[kind])
            loss = fastkd.relation_loss(x[None], features["teacher"].double()[None], normalize=kind)
            assert rho[kind] == pytest.approx(1 - float(loss))
            assert ax.get_title() == (kind if name == "teacher" else f"{kind}, ρ = {rho[kind]:.3f}")
            if kind == "l2":
                assert [label.get_text() for label in ax.get_yticklabels()] == tokens
                assert ax.get_ylabel() == name
    raises("'after' must be", plot_sentence, {**features, "after": torch.randn(3, 6)}, tokens)


def test_agreement_does_not_depend_on_the_size_of_features():
    """The eps of the loss would make ρ of small maps, such as softmax's, small."""
    torch.manual_seed(0)
    x, constant = torch.randn(8, 256), torch.ones(8, 4)
    for size in (1.0, 0.01, 1e-4):
        found = relation_agreement(size * x, size * x)
        assert found == pytest.approx(dict.fromkeys(relation_maps(x), 1.0), abs=1e-9)
    assert {*relation_agreement(constant, x).values()} == {0.0}
    assert plot_relations(constant, x).axes[0].get_title() == "student, ρ = 0.000"
    assert all(map(math.isnan, relation_agreement(x * math.nan, x).values()))


def test_any_sentence_can_be_drawn(tmp_path, recwarn):
    """Mathematical signs, a script without glyphs, a page of text, and one token."""
    for tokens, path in (
        (["$$", "a$b$c", "蒸"], tmp_path / "relations.png"), (["word"] * 400, None), (["one"], None)
    ):  # fmt: skip
        x = torch.randn(len(tokens), 3)
        assert max(plot_sentence({"teacher": x}, tokens, path).get_size_inches()) < 30
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]
    assert all(map(math.isnan, relation_agreement(x, -x).values()))  # a single token
    raises(r"teacher must have shape \(1, 3\)", relation_agreement, x, torch.randn(2, 3))
    raises("features must have 2 dimensions", relation_maps, x[None])
    raises("must not be empty", plot_sentence, {"teacher": x[:0]}, [])
