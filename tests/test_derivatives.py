"""Derivatives: first, retained, batched, recomputed, hooked; second ones raise.

`tests.fuzz` takes the gradients of its random calls in these ways too.
"""

import copy
import functools
import weakref

import pytest
import torch
from torch.autograd.functional import hessian, jacobian, jvp

import fastkd
from fastkd._core.fallback import by_reference
from fastkd._core.registry import LOSSES, inputs_of
from tests.support.compare import Operations, raises
from tests.support.every import every_loss, features, padding, parameters


@every_loss
def test_accumulation(loss):
    """gradient accumulation"""
    student, teacher = features()
    value = loss(student, teacher, padding())
    found = []
    for part in (0.3 * value, value):
        part.backward(retain_graph=True)
        found.append(student.grad.clone())
        student.grad.zero_()  # in place: what is saved for the next pass must not change
    value.backward(retain_graph=True)
    (0.3 * value).backward()
    assert torch.equal(student.grad, found[1] + found[0])


@every_loss
def test_hooks(loss, wanted):
    """Of tensors and of Modules, on a student that is no leaf."""
    student, teacher = features()
    seen = []
    inner = student * 1
    inner.register_hook(lambda g: seen.append(g) or 2 * g)
    hooked = copy.deepcopy(loss) if list(loss.parameters()) else loss
    handle = hooked.register_full_backward_hook(lambda *_: seen.append(None))
    hooked(inner, teacher, padding()).backward()
    handle.remove()
    assert len(seen) == 2 and torch.equal(student.grad, 2 * wanted[1])


@every_loss
def test_overflow_is_visible_to_a_grad_scaler(loss):
    """A GradScaler looks for inf and NaN to find that its scale is too large."""
    student, teacher = features(torch.float16)
    value = loss(student, teacher, padding())
    for upstream in (torch.inf, 2.0**40):
        factor = torch.full_like(value, upstream)
        (gradient,) = torch.autograd.grad(value, student, factor, retain_graph=True)
        assert not gradient.isfinite().all()


@pytest.mark.parametrize("loss", parameters("torch", "cpp"), indirect=True)
def test_no_gradient_is_computed_without_requires_grad(loss):
    student, teacher = features()
    made = []
    for needed in (False, False, True):  # a warning that is given once comes from the first call
        loss.requires_grad_(needed)
        with torch.set_grad_enabled(not needed), Operations() as found:
            loss(student.requires_grad_(needed), teacher, padding() if loss.masked else None)
        made.append([name for name, _ in found.calls if str(name) != "aten.detach.default"])
    assert made[1] == made[2]


@every_loss
def test_second_derivatives(loss):
    """Only first derivatives"""
    student, teacher = features()
    again = functools.partial(torch.autograd.grad, inputs=student, create_graph=True)
    value = loss(student, teacher, padding())
    raises("first derivatives only", again, value, error=RuntimeError)


FUNCTIONS = {
    name: (getattr(fastkd, name), inputs_of(name))
    for loss in LOSSES
    for name in loss.with_reference
}
plain = functools.partial(fastkd.relation_loss, distance="kl")
FUNCTIONS["relation_loss, plain autograd"] = plain, FUNCTIONS["relation_loss"][1]
of_classes = [torch.randn(4, 3).double()], [torch.tensor([0, 1, 0, 1])], {}
FUNCTIONS["intra_class_similarity"] = fastkd.intra_class_similarity, of_classes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_raise(name):
    """Also with torch.autograd.grad for inputs only, where PyTorch would skip the error."""
    function, inputs = FUNCTIONS[name]
    (x, *learning), given, options = inputs

    def loss(x):
        return function(x, *learning, *given, **options).sum()

    for derivative, *more in ((hessian,), (jvp, x)):
        raises("first derivatives only", derivative, loss, x, *more, error=RuntimeError)
    gradient = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    assert torch.equal(jacobian(loss, x), gradient)


@every_loss
def test_transforms_of_torch_func_are_refused(loss):
    pair = [x.detach() for x in features()]
    for transform, given in ((torch.func.grad, pair), (torch.func.vmap, [x[None] for x in pair])):
        raises(r"tensor of torch\.func", transform(loss), *given, error=RuntimeError)


# References in float64, a chunk at a time


def test_an_output_without_gradient_is_freed():
    """It would keep the memory of every chunk."""
    found = []

    def losses(x):
        unused = x.exp()  # its node saves its own output
        found.append(weakref.ref(unused))
        return x.square().sum(-1)

    x = torch.randn(3, 2, requires_grad=True)
    by_reference(losses, 2, x).sum().backward()
    assert [one() for one in found] == [None]
    torch.testing.assert_close(x.grad, 2 * x)


def test_the_last_backward_pass_scales_the_saved_gradient_in_place():
    """Another tensor of the features' size would double the peak memory."""
    x = torch.randn(3, 2, requires_grad=True)
    loss = 2 * by_reference(lambda x: x.square().sum(-1), 2, x).sum()
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    saved = node.saved_tensors[0].data_ptr()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (last,) = torch.autograd.grad(loss, x)
    assert last.data_ptr() == saved != first.data_ptr()
    torch.testing.assert_close(first, 4 * x.detach())
    torch.testing.assert_close(last, first)
