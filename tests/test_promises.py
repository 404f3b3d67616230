"""README's list of what every loss does, item by item, over every loss and Module."""

import functools
import itertools
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastkd
from fastkd._core import check
from tests.distill.processes import run_ranks
from tests.losses import subjects
from tests.support.compare import counted, relative_error
from tests.support.interpreter import MARKS
from tests.support.subject import D_S, D_T, B, N, Subject

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# The table: every loss on every backend, and whether it takes a mask.
TABLE = {(backend, s.name): s.masked for backend in MARKS for s in subjects(backend)}


def _parameters(*backends: str, masked: bool = False) -> list:
    return [
        pytest.param((backend, name), marks=MARKS[backend], id=f"{backend}: {name}")
        for (backend, name), takes_mask in TABLE.items()
        if backend in backends and (takes_mask or not masked)
    ]


every_loss = pytest.mark.parametrize("loss", _parameters(*MARKS), indirect=True)
every_loss_with_mask = pytest.mark.parametrize(
    "loss", _parameters(*MARKS, masked=True), indirect=True
)


def made(backend: str, name: str) -> Subject:
    torch.manual_seed(0)
    return next(s for s in subjects(backend) if s.name == name).to(DEVICE)


@pytest.fixture
def loss(request) -> Subject:
    return made(*request.param)


@pytest.fixture
def runs_on(request) -> str:
    """Loss of the subject."""
    return request.node.callspec.params["loss"][0]


def features(
    dtype: torch.dtype = torch.float32, batch: int = B, device: torch.device = DEVICE
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(batch, N, D_S, generator=generator, dtype=torch.float64)
    teacher = torch.randn(batch, N, D_T, generator=generator, dtype=torch.float64)
    return student.to(device, dtype).requires_grad_(), teacher.to(device, dtype)


def padding(batch: int = B, device: torch.device = DEVICE) -> Tensor:
    """A tokenizer's mask: 1 at real tokens, on the left of each row."""
    lengths = torch.arange(batch) % (N - 1) + 2
    return (torch.arange(N) < lengths[:, None]).long().to(device)


def value_and_gradient(
    loss: Subject, student: Tensor, teacher: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    student = student.detach().requires_grad_()
    value = loss(student, teacher, mask)
    value.backward()
    return value.detach(), student.grad


@functools.cache
def usual(backend: str, name: str) -> tuple[Tensor, Tensor]:
    return value_and_gradient(made(backend, name), *features(), padding())


@pytest.fixture
def wanted(request) -> tuple[Tensor, Tensor]:
    """The loss's value and gradient of `features` and `padding`, which many tests compare with."""
    return usual(*request.node.callspec.params["loss"])


@every_loss
def test_dtypes(loss, runs_on):
    """takes bf16, fp16, fp32 or fp64 and sums in fp32 or better"""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        if dtype == torch.float64:
            if runs_on == "triton":
                continue  # refused; each loss's own test file checks the sentence
            loss.double()
        value, gradient = value_and_gradient(loss, *features(dtype), padding())
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert gradient.dtype == dtype
        assert value.isfinite() and gradient.isfinite().all(), dtype


@every_loss_with_mask
def test_padding(loss):
    """ignores padding, whatever it holds, NaN included"""
    mask = padding()
    student, teacher = features()
    wanted = value_and_gradient(loss, student, teacher, mask)
    parameters = [p.grad.clone() for p in loss.parameters()]
    loss.zero_grad()
    student, teacher = (x.detach() for x in features())
    for x in (student, teacher):
        x[mask == 0] = torch.tensor([torch.nan, torch.inf], device=DEVICE).repeat(x.shape[-1] // 2)
    value, gradient = value_and_gradient(loss, student, teacher, mask)
    assert torch.equal(value, wanted[0]) and torch.equal(gradient, wanted[1])
    assert (gradient[mask == 0] == 0).all()
    for p, wanted_gradient in zip(loss.parameters(), parameters, strict=True):
        assert torch.equal(p.grad, wanted_gradient)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="to look at the values would wait for the GPU")
@pytest.mark.parametrize("loss", _parameters("torch"), indirect=True)
def test_mask_without_a_real_token_warns_once(loss):
    if not loss.masked:
        pytest.skip("it takes no mask")
    student, teacher = features()
    for mask in (torch.zeros(B, N, dtype=torch.bool), torch.zeros(B, N)):  # torch's, and additive
        check._warn_of_empty_mask.cache_clear()
        with pytest.warns(UserWarning, match="mask has no real token"):
            loss(student, teacher, mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(student, teacher, mask)
    check._warn_of_empty_mask.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "CCALoss: .* observations")  # has fewer than dimensions
        loss(student, teacher, padding())
        loss(student[:0], teacher[:0], padding()[:0])


def test_a_mask_without_a_real_token_in_a_graph():
    check._warn_of_empty_mask.cache_clear()
    student, teacher = features()
    call, graphs = counted(fastkd.FCDLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert call(student, teacher, torch.zeros(B, N, device=DEVICE)) == 0
    assert len(graphs) == 1


DEGENERATE = {
    "one sample": lambda x: x[:1],
    "one token": lambda x: x[:, :1],
    "zeros": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, 0.7),
    "equal samples": lambda x: x[:1].expand_as(x).contiguous(),
    "equal tokens": lambda x: x[:, :1].expand_as(x).contiguous(),
    "no sample": lambda x: x[:0],
    "no token": lambda x: x[:, :0],
    "padding alone": lambda x: x,
}


@every_loss
def test_degenerate_batches(loss):
    """gives finite gradients for degenerate batches (one token, equal rows, zero vectors)"""
    for kind, make in DEGENERATE.items():
        student, teacher = (make(x.detach()) for x in features())
        mask = padding(len(student))[:, : student.shape[1]] * (kind != "padding alone")
        value, gradient = value_and_gradient(loss, student, teacher, mask)
        gradients = [gradient, *(p.grad for p in loss.parameters() if p.grad is not None)]
        assert value.isfinite() and all(x.isfinite().all() for x in gradients), kind
        nothing = student.numel() == 0 or (kind == "padding alone" and loss.masked)
        if nothing and not loss.name.startswith("IntraClassKNNLoss"):  # which projects zeros
            assert value == 0 and not any(x.any() for x in gradients), kind
        loss.zero_grad()


@every_loss
def test_nan_in_real_data(loss):
    """returns NaN if real data holds NaN"""
    for side, bad in itertools.product((0, 1), (torch.nan, torch.inf)):
        pair = [x.detach().clone() for x in features()]
        pair[side][1, 0, 0] = bad
        assert loss(*pair, padding()).isnan(), (("student", "teacher")[side], bad)


@every_loss
def test_autocast(loss, wanted):
    """autocast"""
    for inside in (False, True):
        student, teacher = features()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            value = loss(student, teacher, padding())
            if inside:
                value.backward()
        if not inside:
            value.backward()
        assert torch.equal(value, wanted[0]) and torch.equal(student.grad, wanted[1])


# Modules whose own tests count the graphs of changing sizes.
COUNTED = ("FCDLoss", "CosNCELoss", "DualProjectionLoss")


def _traced() -> list:
    """Each function, and in PyTorch each Module: the losses' own tests trace their options.

    The kernels are one operator in a graph, whether a function or a Module calls it.
    """
    once = {(backend, name.split()[0]): name for backend, name in reversed(TABLE)}
    return [
        given
        for given in _parameters(*MARKS)
        for backend, name in [given.values[0]]
        if once[backend, name.split()[0]] == name and not name.startswith(COUNTED)
        if backend == "torch" or name[0].islower()
    ]


@pytest.mark.parametrize("loss", _traced(), indirect=True)
def test_compile(loss):
    """torch.compile(fullgraph=True)"""
    compiled, graphs = counted(loss)
    # Sizes that the compiler finds out to change are in `tests.fuzz` and the losses' own tests.
    for batch in (13, 16):  # more samples than features: CCA's cheaper side is one
        student, teacher = features(batch=batch)
        mask = padding(batch)
        wanted = value_and_gradient(loss, student, teacher, mask)
        for x in (student, teacher, mask):
            torch._dynamo.mark_dynamic(x, 0)
        value = compiled(student, teacher, mask)
        (gradient,) = torch.autograd.grad(value, student)
        assert relative_error(value, wanted[0]) <= 1e-5
        assert relative_error(gradient, wanted[1]) <= 1e-5
    assert len(graphs) == 1, f"{len(graphs)} graphs for two sizes"


def test_inductor():
    """Losses in one graph under Inductor, whose compilation takes long."""
    divergence = fastkd.SoftTargetLoss(temperature=2.0)

    def step(student, teacher, mask):
        same = teacher[..., :D_S]
        rows = fastkd.layer_norm_mse(student, same) + divergence(student, same, mask)
        return fastkd.relation_loss(student, teacher, mask) + rows

    pair, mask = features(), padding()
    compiled = torch.compile(step, fullgraph=True)
    wanted, found = (value_and_gradient(call, *pair, mask) for call in (step, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_an_empty_batch_in_a_dynamic_graph():
    names = "layer_norm_mse", "hidden_state_loss mse"
    losses = [s for s in subjects("torch") if s.name in names]

    def step(student, teacher):
        return sum(loss(student, teacher) for loss in losses)

    student, teacher = (x[:0] for x in features())
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    assert compiled(student, teacher).item() == 0


def test_losses_twice_in_a_dynamic_graph():
    names = "relation_loss over tokens", "cos_nce_loss", "soft_target_loss forward_kl"
    losses = [s for s in subjects("torch") if s.name in names]

    def step(student, teacher):
        return sum(loss(x, teacher) for loss in losses for x in (student, student.sin()))

    student, teacher = features()
    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(student, teacher), step(student, teacher))


@pytest.mark.parametrize(
    "loss", [pytest.param(("cpp", "FCDLoss"), marks=MARKS["cpp"])], indirect=True
)
def test_a_module_twice_in_a_dynamic_graph(loss):
    compiled = torch.compile(
        lambda s, t: loss(s, t, None) + loss(s.sin(), t, None),
        fullgraph=True, backend="eager", dynamic=True,
    )  # fmt: skip
    student, teacher = features(device=torch.device("cpu"))
    expected = loss(student, teacher, None) + loss(student.sin(), teacher, None)
    torch.testing.assert_close(compiled(student, teacher), expected)


def test_compile_without_gradients():
    projection = fastkd.OrthogonalProjection(D_S, D_T)

    def step(student, teacher):
        return fastkd.relation_loss(student, teacher) + projection(student[0]).sum()

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*features()), step(*features()))


class _Operations(TorchDispatchMode):
    """Record the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", _parameters("torch", "cpp"), indirect=True)
def test_no_gradient_is_computed_without_requires_grad(loss):
    student, teacher = features()
    made = []
    for needed in (False, False, True):  # a warning that is given once comes from the first call
        loss.requires_grad_(needed)
        with torch.no_grad(), _Operations() as operations:
            loss(student.requires_grad_(needed), teacher, padding() if loss.masked else None)
        made.append([name for name in operations.names if name != "aten.detach.default"])
    assert made[1] == made[2]


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


@pytest.mark.parametrize("loss", _parameters("torch"), indirect=True)
def test_checkpointing(loss, wanted):
    student, teacher = features()
    value = checkpoint(loss, student, teacher, padding(), use_reentrant=False)
    value.backward()
    assert torch.equal(value, wanted[0]) and torch.equal(student.grad, wanted[1])


@every_loss
def test_same_bits(loss, wanted):
    """the same bits on every run"""
    found = value_and_gradient(loss, *features(), padding())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():  # and without gradients
        assert torch.equal(loss(*features(), padding()), wanted[0])


# Of the student and of the teacher.
STRIDES = (
    (lambda x: x.mT.contiguous().mT, lambda x: x.repeat_interleave(2, -1)[..., ::2]),
    (lambda x: x[:, :1].expand_as(x), lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
)


@every_loss
def test_strides(loss):
    """contiguous or not"""
    for of_student, of_teacher in STRIDES:
        student, teacher = (x.detach() for x in features())
        strided = of_student(student), of_teacher(teacher), padding().mT.contiguous().mT
        found = value_and_gradient(loss, *strided)
        wanted = value_and_gradient(loss, *(x.contiguous() for x in strided))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@every_loss
def test_teacher_of_inference_mode(loss, wanted):
    """teachers made under inference_mode"""
    with torch.inference_mode():
        teacher, mask = features()[1].clone(), padding().clone()
        assert torch.equal(loss(*features(), padding()), wanted[0])
    found = value_and_gradient(loss, features()[0], teacher, mask)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@every_loss
def test_meta_device_returns_shapes(loss, runs_on):
    """Without data no kernel starts."""
    loss.to("meta")
    for batch in (B, 40):  # fewer samples than features, and more
        student, teacher = (x.detach().to("meta") for x in features(batch=batch))
        student.requires_grad_()
        if runs_on != "torch":
            with pytest.raises(ValueError, match=r"is on meta, and .* kernels run on"):
                loss(student, teacher, padding(batch).to("meta"))
            continue
        value = loss(student, teacher, padding(batch).to("meta"))
        value.backward()
        assert value.is_meta and value.shape == ()
        assert student.grad.is_meta and student.grad.shape == student.shape


WRONG = {
    "a teacher that requires grad": (lambda s, t, m: (s, t.requires_grad_(), m), "detach"),
    "another number of samples": (lambda s, t, m: (s, t[:-1], m), "teacher|y must"),
    "integers": (lambda s, t, m: (s.detach().long(), t.long(), m), "float"),
    "two dtypes": (lambda s, t, m: (s, t.double(), m), "dtype|float64"),
    "a list of numbers": (lambda s, t, m: (s.tolist(), t, m), "Tensor|tensor"),
    "a mask of another shape": (lambda s, t, m: (s, t, m[:, :-1]), "mask"),
    "a mask of other numbers": (lambda s, t, m: (s, t, m * 2), "mask"),
    "sparse tensors": (lambda s, t, m: (s.detach().to_sparse(), t, m), "must be dense"),
    "the meta device for one": (lambda s, t, m: (s, t.to("meta"), m), "meta"),
}


# Some losses have no frozen teacher; for lists of layers this test has no dtype to compare.
NO_MISTAKE = {
    ("layer_norm_mse", "a teacher that requires grad"),
    ("linear_soft_target_loss", "a list of numbers"),
}


@every_loss
def test_wrong_input(loss):
    """rejects wrong input in one sentence that names the argument"""
    for mistake, (change, words) in WRONG.items():
        if (loss.name, mistake) in NO_MISTAKE or ("mask" in mistake and not loss.masked):
            continue
        if mistake == "a mask of other numbers" and DEVICE.type == "cuda":
            continue  # reading it would wait for the device
        with pytest.raises((ValueError, TypeError), match=words) as raised:
            loss(*change(*features(), padding()))
        assert "\n" not in str(raised.value), mistake


@every_loss
def test_second_derivatives(loss):
    """Only first derivatives"""
    student, teacher = features()
    value = loss(student, teacher, padding())
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(value, student, create_graph=True)


@every_loss
def test_a_batch_of_upstream_gradients(loss):
    """A pass for each; torch.func's transforms are refused in one sentence."""
    for dtype in (torch.float32, torch.float16):
        student, teacher = features(dtype)
        upstream = torch.tensor([1.0, -0.5, 3.0], device=DEVICE)

        def gradient(loss=loss, pair=(student, teacher), **how):
            return torch.autograd.grad(loss(*pair, padding()), pair[0], **how)[0]

        found = gradient(grad_outputs=upstream, is_grads_batched=True)
        wanted = torch.stack([gradient(grad_outputs=one) for one in upstream])
        torch.testing.assert_close(found, wanted)
    pair = [x.detach() for x in features()]
    for transform, given in ((torch.func.grad, pair), (torch.func.vmap, [x[None] for x in pair])):
        with pytest.raises(RuntimeError, match=r"tensor of torch\.func"):
            transform(loss)(*given)


def test_ddp(tmp_path):
    """DDP"""
    run_ranks(_ddp_process, 2, tmp_path)


def _ddp_process(rank: int) -> None:
    for subject in subjects("torch"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.Linear(D_S, D_S), "loss": subject})
        wrapped = DistributedDataParallel(_Step(model))
        cpu = torch.device("cpu")  # a forked process can't use the GPU
        halves = [x.detach().chunk(2) for x in (*features(device=cpu), padding(device=cpu))]
        wrapped(*(half[rank] for half in halves)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for other in range(2):
            (_Step(model)(*(half[other] for half in halves)) / 2).backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            assert relative_error(gradient, parameter.grad) <= 1e-5, subject.name


class _Step(nn.Module):
    """A student of one layer, and its loss."""

    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return self.model["loss"](self.model["body"](x), teacher, mask)


def test_every_sentence_of_the_readme_has_a_test():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    items = readme.split("Every loss:\n\n")[1].split("\n\n")[0]
    promised = re.sub(r"\s+", " ", items).strip().rstrip(".")
    kept = {
        function.__doc__
        for name, function in globals().items()
        if name.startswith("test_") and function.__doc__
    } | ELSEWHERE.keys()
    left = promised.replace("`", "")
    for sentence in sorted(kept, key=len, reverse=True):
        left = left.replace(sentence, "")
    assert re.fullmatch(r"([\s;,-]|and|works under)*", left), left


# Sentences that another file tests.
ELSEWHERE = {
    "never synchronises a GPU with the host": "tests/test_dry_cuda.py",
    "except CCA with top_k or ridge=0": "tests/test_dry_cuda.py",
}
