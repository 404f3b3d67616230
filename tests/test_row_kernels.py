"""The C++ row kernels: threads, what they can't do, and fastkd without them.

Values and gradients are tested with those of the other backends, in each loss's own file.
"""

import pytest
import torch
from torch import Tensor

from fastkd import _dispatch, _extension
from tests.interpreter import MARKS
from tests.losses import subjects
from tests.subject import D_S, D_T

pytestmark = MARKS["cpp"]
SUBJECTS = {subject.name: subject for subject in subjects("cpp")}


def value_and_gradient(loss, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    value = loss(student, teacher, None)
    return value.detach(), *torch.autograd.grad(value, student)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_same_bits_on_any_number_of_threads(name, threads):
    student, teacher = torch.randn(40, 30, D_S).requires_grad_(), torch.randn(40, 30, D_T)
    threads(1)
    wanted = value_and_gradient(SUBJECTS[name], student, teacher)
    for count in (2, 5):
        threads(count)
        found = value_and_gradient(SUBJECTS[name], student, teacher)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), count


def test_auto_takes_them_on_the_cpu_where_they_are():
    x = torch.ones(2, 3)
    for name in _dispatch.CPP_FUNCTIONS:
        assert _dispatch.why_not_cpp(name, x) is None
    assert _dispatch.backend_of("auto", "layer_norm_mse", x, columns=3) == "cpp"
    assert _dispatch.backend_of("auto", "layer_norm_mse", x.to("meta"), columns=3) == "torch"
    assert _dispatch.backend_of("auto", "cayley", x) == "torch"


def test_says_why_they_can_not_run(monkeypatch):
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"backend='cpp' can't run cayley: .* no C\+\+ kernel"):
        _dispatch.backend_of("cpp", "cayley", x)
    with pytest.raises(ValueError, match=r"student is on meta, and C\+\+ kernels run on the CPU"):
        _dispatch.backend_of("cpp", "layer_norm_mse", x.to("meta"), columns=3)
    monkeypatch.setattr(_extension, "CPU", False)
    with pytest.raises(ValueError, match="the extension is not built"):
        _dispatch.backend_of("cpp", "layer_norm_mse", x, columns=3)
    assert _dispatch.backend_of("auto", "layer_norm_mse", x, columns=3) == "torch"
