"""Inverses of I − Q by products: right from any guess, in few products from a near one."""

import copy
import pickle

import pytest
import torch

from fastkd.losses.projection import DualProjectionLoss, OrthogonalProjection, cayley, cayley_ref

pytest.importorskip("triton")

from fastkd.kernels import cayley as kernels
from tests.kernels.launches import count_launches
from tests.support.compare import assert_accurate, raises

EPS = torch.finfo(torch.float32).eps


def skew_matrices(n, norms, device):
    """One of every spectral norm: (B, n, n)."""
    raw = torch.randn(len(norms), n, n, device=device)
    skew = raw - raw.mT
    size = torch.linalg.matrix_norm(skew, 2).clamp(min=1e-30)
    return skew * (torch.tensor(norms, device=device) / size)[:, None, None]


def identities(skew):
    return torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)


def exact_inverse(skew):
    return torch.linalg.inv(identities(skew).double() - skew.double())


def relative_error(inverse, skew):
    exact = exact_inverse(skew)
    size = torch.linalg.matrix_norm(exact)
    return (torch.linalg.matrix_norm(inverse.double() - exact) / size).tolist()


def orthogonality_error(inverse):
    """‖WᵀW − I‖ with W = 2S − I, the largest of the batch."""
    weight = 2 * inverse.double() - identities(inverse).double()
    return torch.linalg.matrix_norm(weight.mT @ weight - identities(weight)).max().item()


def assert_inverse(inverse, skew, norms):
    for error, norm in zip(relative_error(inverse, skew), norms, strict=True):
        assert error <= EPS * (2 + norm / 4), (norm, error)


COLD = [0.1, 30.0, 1000.0]
# Size, spectral norms, guess (or distance to the matrix that it inverts), most products.
GUESSES = {
    **{f"{n} from the identity": (n, COLD, "identity", 40) for n in (1, 2, 17)},
    "several tiles from zeros": (33, [5.0], "zeros", 20),
    "near": (16, [0.1, 100.0, 1000.0], 0.003, 4),
    "near, several tiles": (65, [2.0], 0.003, 4),
    # A residual of a norm above one half starts again, unless its spectral norm is small.
    "too far": (16, [0.225], "identity", 9),
    "far in many directions": (40, [5.0], 0.3, 8),
}


@pytest.mark.parametrize("name", GUESSES)
def test_cold_and_near_guesses(device, name):
    n, norms, guess, most = GUESSES[name]
    skew = skew_matrices(n, norms, device)
    last = identities(skew) * (guess == "identity")
    if isinstance(guess, float):
        last = exact_inverse(skew).float()
        skew = skew + skew_matrices(n, [guess] * len(norms), device)
    inverse, products = kernels.refine(skew, [last], kernels.WARM_LAUNCHES)
    assert max(products.tolist()) <= most
    assert_inverse(inverse, skew, norms)
    assert orthogonality_error(inverse[:1]) <= 1e-6 * n**0.5
    residual = identities(skew) - last + skew @ last
    assert "far" not in name or torch.linalg.matrix_norm(residual).item() > 0.5


@pytest.mark.parametrize("wide", [1, 2])
def test_unchanged_matrices_give_the_guess_back(device, wide, monkeypatch):
    """Also with fast products in two tiles at once, as for large matrices on Hopper."""
    norms = [0.5, 40.0] if wide == 1 else [5.0]
    skew = skew_matrices(17 * wide, norms, device)
    tiles = kernels.blocks(len(skew[0]), skew.device) | {"WIDE": wide}
    monkeypatch.setattr(kernels, "blocks", lambda n, device: tiles)
    inverse = kernels.cayley_inverse(skew, [])
    again, products = kernels.refine(skew, [inverse], kernels.WARM_LAUNCHES)
    assert_inverse(inverse, skew, norms)
    assert torch.equal(again, inverse) and products.tolist() == [1] * len(norms)


def test_the_size_before_padding_decides_on_the_single_program(device, monkeypatch):
    skew = skew_matrices(31, [1000.0], device)
    monkeypatch.setattr(kernels, "MANY_ROWS", 32)
    assert_inverse(kernels.cayley_inverse(skew, [identities(skew)]), skew, [1000.0])


def test_a_single_program_goes_on_in_the_same_way(device):
    skew = skew_matrices(33, [5.0, 5.0], device)
    guess = torch.stack([identities(skew)[0], exact_inverse(skew[1] * 1.02).float()])
    many, one = (kernels.refine(skew, [guess], n) for n in (kernels.COLD_LAUNCHES, 3))
    assert many[0].isfinite().all() and all(map(torch.equal, many, one))


def test_any_guess_will_do(device):
    skew = skew_matrices(16, [3.0] * 4, device)[:1].expand(4, -1, -1)
    guess = 1e3 * torch.randn(4, 16, 16, device=device)
    guess[1] = float("nan")
    guess[2, 3, 4] = float("inf")
    guess[3] = -identities(skew)[0]
    inverse = kernels.cayley_inverse(skew, [guess])
    assert relative_error(inverse, skew)[0] <= 3 * EPS
    for other in inverse[1:]:
        assert torch.equal(other, inverse[0])


def test_what_can_not_be_inverted_is_nan_and_alone(device):
    skew = skew_matrices(5, [0.1, 0.1, 0.1, 1e12], device)
    alone = kernels.cayley_inverse(skew[:1], [identities(skew[:1])])
    skew[1, 2, 3] = float("nan")
    skew[2, 0, 1] = float("inf")
    inverse = kernels.cayley_inverse(skew, [identities(skew)])
    assert torch.equal(inverse[:1], alone)
    assert inverse[1:].isnan().all()


@pytest.mark.parametrize(("factor", "n"), [(1e-30, 33), (1e30, 16)])
def test_gradients_of_any_size(device, factor, n):
    skew = skew_matrices(n, [2.0], device).requires_grad_()
    upstream = torch.randn(n, n, device=device).T
    (found,) = torch.autograd.grad(cayley(skew, backend="triton")[0], skew, factor * upstream)
    exact = skew.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(cayley_ref(exact)[0], exact, upstream.double())
    assert_accurate(found.double() / factor, right, torch.float32)


def test_a_gradient_of_nan_stays_in_its_matrix(device):
    skew = skew_matrices(5, [2.0, 2.0], device).requires_grad_()
    upstream = torch.ones(2, 5, 5, device=device)
    weight = cayley(skew, backend="triton")
    (right,) = torch.autograd.grad(weight, skew, upstream, retain_graph=True)
    upstream[0, 1, 2] = float("nan")
    (found,) = torch.autograd.grad(weight, skew, upstream)
    assert found[0].isnan().all()
    assert torch.equal(found[1], right[1])


def test_what_is_not_skew_is_right_or_nan(device):
    matrices = torch.randn(2, 3, 3, device=device)
    matrices *= torch.tensor([0.1, 10.0], device=device)[:, None, None]
    results = cayley(matrices, backend="triton"), cayley_ref(matrices.double())
    for actual, exact in zip(*results, strict=True):
        if not actual.isnan().any():
            torch.testing.assert_close(actual.double(), exact, rtol=1e-3, atol=1e-4)


# OrthogonalProjection on this path


def pair(in_dim, out_dim, device, layers=2):
    """The same projection on both backends."""
    by_products = OrthogonalProjection(in_dim, out_dim, layers, backend="triton").to(device)
    torch.nn.init.normal_(by_products.raw, std=0.3)
    factorised = OrthogonalProjection(in_dim, out_dim, layers, backend="torch").to(device)
    factorised.load_state_dict(by_products.state_dict())
    return by_products, factorised


def value_and_grads(module, x):
    y = module(x)
    return y, *torch.autograd.grad(y.cos().sum(), [x, module.raw])


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6)


def test_projection_backward_twice_and_after_the_next_forward(device):
    module, _ = pair(4, 4, device, layers=1)
    for use in (module, lambda x: x @ module.weight):
        x = torch.randn(3, 4, device=device)
        loss = use(x).cos().sum()
        first = torch.autograd.grad(loss, module.raw, retain_graph=True)
        with torch.no_grad():
            module.raw.mul_(1.1)
        use(x)
        assert torch.equal(first[0], torch.autograd.grad(loss, module.raw)[0])


def changes(module, plain, x):
    """Both modules after each change that a program may make between two calls."""
    for factor in (1.02, torch.randn_like(plain.raw)):  # a step, and another checkpoint
        with torch.no_grad():
            plain.raw.mul_(factor)
        module.load_state_dict(plain.state_dict())
        yield module, plain
    with torch.inference_mode():
        module(x)
    yield module.eval(), plain
    yield copy.deepcopy(module), plain
    yield pickle.loads(pickle.dumps(module)), plain
    raises("float64 is left to PyTorch", module.double(), x.double())
    assert module.half()(x.half()).dtype == torch.float16
    yield module.float(), plain
    with torch.no_grad():
        module.raw[0, 1, 2] = float("nan")
        assert module(x).isnan().all()
        module.raw.copy_(plain.raw)
    yield module, plain


def test_projection_follows_its_parameter(device):
    """The last inverse is a guess only; it is no part of a checkpoint or of a copy."""
    x = torch.randn(3, 5, device=device, requires_grad=True)
    for module, plain in changes(*pair(5, 7, device, layers=1), x):
        assert_same(value_and_grads(module, x), value_and_grads(plain, x))
        assert list(module.state_dict()) == ["raw"] and not list(module.buffers())
        assert module.raw.dtype == module._last_inverse.dtype == torch.float32
        assert_same(module.weight, plain.weight)


def test_projection_compiles_as_one_graph(device):
    module, factorised = pair(4, 4, device, layers=1)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    module(x)
    with torch.no_grad():
        for m in (module, factorised):
            m.raw.mul_(1.02)
    state = module._last_inverse.clone()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    grads = torch.autograd.grad(y.cos().sum(), [x, module.raw])
    assert_same((y, *grads), value_and_grads(factorised, x))
    skew = (module.raw.detach() - module.raw.detach().mT) / 2
    assert relative_error(state, skew)[0] > 1e-3
    assert relative_error(module._last_inverse, skew)[0] <= 3 * EPS


def test_few_launches(device):
    """A step of one projection, and of both of the dual loss, whose inverses are one batch.

    Q and the guess are stored in parts before the rounds, and a single program ends them.
    """
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 6, device=device)
    dual = DualProjectionLoss(4, 6, backend="triton").to(device)
    for step in (lambda: dual.student_projection(x).sum(), lambda: dual(x, y)):
        with count_launches() as launches:
            step().backward()
        inverse = [name for name in launches.of_triton() if name.startswith("cayley")]
        assert len(inverse) == 2 + kernels.WARM_LAUNCHES + 1 == 14
