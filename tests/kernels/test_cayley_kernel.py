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

pytestmark = pytest.mark.usefixtures("tensors_on_device")
EPS = torch.finfo(torch.float32).eps


def skew_matrices(n, *norms):
    """One of every spectral norm: (B, n, n)."""
    raw = torch.randn(len(norms), n, n)
    size = torch.linalg.matrix_norm(raw - raw.mT, 2).clamp(min=1e-30)
    return (raw - raw.mT) * (torch.tensor(norms) / size)[:, None, None]


def identities(skew):
    return torch.eye(skew.shape[-1]).expand_as(skew)


def exact_inverse(skew):
    return torch.linalg.inv(identities(skew).double() - skew.double())


def relative_error(inverse, skew):
    exact = exact_inverse(skew)
    return torch.linalg.matrix_norm(inverse.double() - exact) / torch.linalg.matrix_norm(exact)


def assert_inverse(inverse, skew, *norms):
    error = relative_error(inverse, skew)
    assert (error <= EPS * (2 + torch.tensor(norms) / 4)).all(), error


COLD = [0.1, 30.0, 1000.0]
# Size, spectral norms, guess (or distance to the matrix that it inverts), most products.
GUESSES = {
    **{f"{n} from the identity": (n, COLD, "identity", 40) for n in (1, 2, 17)},
    "several tiles from zeros": (33, [5.0], "zeros", 20),
    "near": (16, [0.1, 100.0, 1000.0], 0.003, 4),
    "near, several tiles": (33, [2.0], 0.003, 4),
    # A residual of a norm above one half starts again, unless its spectral norm is small.
    "too far": (16, [0.225], "identity", 9),
    "far in many directions": (40, [5.0], 0.3, 8),
}


@pytest.mark.parametrize("name", GUESSES)
def test_cold_and_near_guesses(name):
    n, norms, guess, most = GUESSES[name]
    skew = skew_matrices(n, *norms)
    last = identities(skew) * (guess == "identity")
    if isinstance(guess, float):
        last = exact_inverse(skew).float()
        skew = skew + skew_matrices(n, *[guess] * len(norms))
    inverse, products = kernels.refine(skew, [last], kernels.WARM_LAUNCHES)
    assert max(products.tolist()) <= most
    assert_inverse(inverse, skew, *norms)


@pytest.mark.parametrize("wide", [1, 2])
def test_unchanged_matrices_give_the_guess_back(wide, monkeypatch):
    """Also with fast products in two tiles at once, as for large matrices on Hopper."""
    norms = [0.5, 40.0] if wide == 1 else [5.0]
    skew = skew_matrices(17 * wide, *norms)
    tiles = kernels.blocks(len(skew[0]), skew.device) | {"WIDE": wide}
    monkeypatch.setattr(kernels, "blocks", lambda n, device: tiles)
    inverse = kernels.cayley_inverse(skew, [])
    again, products = kernels.refine(skew, [inverse], kernels.WARM_LAUNCHES)
    assert_inverse(inverse, skew, *norms)
    assert torch.equal(again, inverse) and products.tolist() == [1] * len(norms)


def test_a_single_program_goes_on_in_the_same_way(monkeypatch):
    """The size before padding decides whether there is one."""
    skew = skew_matrices(33, 5.0, 5.0)
    guess = torch.stack([identities(skew)[0], exact_inverse(skew[1] * 1.02).float()])
    many, one = (kernels.refine(skew, [guess], n) for n in (kernels.COLD_LAUNCHES, 3))
    assert many[0].isfinite().all() and all(map(torch.equal, many, one))
    monkeypatch.setattr(kernels, "MANY_ROWS", 32)
    skew = skew_matrices(31, 1000.0)
    assert_inverse(kernels.cayley_inverse(skew, [identities(skew)]), skew, 1000.0)


def test_any_guess_will_do():
    skew = skew_matrices(16, 3.0).expand(4, -1, -1)
    guess = 1e3 * torch.randn(4, 16, 16)
    guess[1] = float("nan")
    guess[2, 3, 4] = float("inf")
    guess[3] = -identities(skew)[0]
    inverse = kernels.cayley_inverse(skew, [guess])
    assert relative_error(inverse, skew)[0] <= 3 * EPS
    assert all(torch.equal(other, inverse[0]) for other in inverse)


def test_what_can_not_be_inverted_is_nan_and_alone():
    skew = skew_matrices(5, 0.1, 0.1, 0.1, 1e12)
    alone = kernels.cayley_inverse(skew[:1], [identities(skew[:1])])
    skew[1, 2, 3] = float("nan")
    skew[2, 0, 1] = float("inf")
    inverse = kernels.cayley_inverse(skew, [identities(skew)])
    assert torch.equal(inverse[:1], alone) and inverse[1:].isnan().all()


@pytest.mark.parametrize(("factor", "n"), [(1e-30, 33), (1e30, 16)])
def test_gradients_of_any_size(factor, n):
    """And of NaN, which stay in their matrix."""
    skew = skew_matrices(n, *[2.0] * (1 + (n == 16))).requires_grad_()
    upstream = torch.randn(n, n).T.repeat(len(skew), 1, 1)
    weight = cayley(skew, backend="triton")
    (found,) = torch.autograd.grad(weight, skew, factor * upstream, retain_graph=True)
    exact = skew.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(cayley_ref(exact), exact, upstream.double())
    assert_accurate(found.double() / factor, right, torch.float32)
    if n == 16:
        upstream[0, 1, 2] = float("nan")
        (other,) = torch.autograd.grad(weight, skew, factor * upstream)
        assert other[0].isnan().all() and torch.equal(other[1], found[1])


# OrthogonalProjection on this path


def projections(in_dim, out_dim):
    """The same projection on both backends, and features."""
    by_products, factorised = (
        OrthogonalProjection(in_dim, out_dim, 1, backend=backend) for backend in ("triton", "torch")
    )
    torch.nn.init.normal_(by_products.raw, std=0.3)
    factorised.load_state_dict(by_products.state_dict())
    return by_products, factorised, torch.randn(3, in_dim, requires_grad=True)


def assert_same(module, plain, x):
    results = (
        (y, *torch.autograd.grad(y.cos().sum(), [x, each.raw]))
        for each in (module, plain)
        for y in [each(x)]
    )
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)


def test_projection_backward_twice_and_after_the_next_forward():
    module, _, x = projections(4, 4)
    for use in (module, lambda x: x @ module.weight):
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


def test_projection_follows_its_parameter():
    """The last inverse is a guess only; it is no part of a checkpoint or of a copy."""
    *pair, x = projections(5, 7)
    for module, plain in changes(*pair, x):
        assert_same(module, plain, x)
        assert list(module.state_dict()) == ["raw"] and not list(module.buffers())
        assert module.raw.dtype == module._last_inverse.dtype == torch.float32
        torch.testing.assert_close(module.weight, plain.weight, rtol=2e-5, atol=2e-6)


def test_projection_compiles_as_one_graph():
    module, factorised, x = projections(4, 4)
    module(x)
    with torch.no_grad():
        for m in (module, factorised):
            m.raw.mul_(1.02)
    state = module._last_inverse.clone()
    assert_same(torch.compile(module, fullgraph=True, backend="aot_eager"), factorised, x)
    skew = (module.raw.detach() - module.raw.detach().mT) / 2
    assert relative_error(state, skew)[0] > 1e-3
    assert relative_error(module._last_inverse, skew)[0] <= 3 * EPS


def test_few_launches():
    """A step of one projection, and of both of the dual loss, whose inverses are one batch.

    Q and the guess are stored in parts before the rounds, and a single program ends them.
    """
    x, y = torch.randn(3, 4), torch.randn(3, 6)
    dual = DualProjectionLoss(4, 6, backend="triton")
    for step in (lambda: dual.student_projection(x).sum(), lambda: dual(x, y)):
        with count_launches() as launches:
            step().backward()
        inverse = [name for name in launches.of_triton() if name.startswith("cayley")]
        assert len(inverse) == 2 + kernels.WARM_LAUNCHES + 1 == 14
