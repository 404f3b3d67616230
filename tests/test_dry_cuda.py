"""Calls on a GPU neither synchronise nor mix devices; tested without a GPU by `tools.dry_cuda`."""

import inspect
import json
import typing

import pytest
import torch

pytest.importorskip("triton")

import fastkd
from fastkd._core.registry import ARGUMENTS, LOSSES
from tools import calls
from tools.compile_report import walked
from tools.dry_cuda import PLANTED

# References are PyTorch's own operations, and parts of a call no calls.
PUBLIC = [
    name
    for name in fastkd.__all__
    if callable(getattr(fastkd, name))
    and not name.endswith("_ref")
    and name not in (*ARGUMENTS, "clear_plans")
]


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_gpu.py looks at the real thing")
@pytest.mark.parametrize("loss", calls.LOSSES)
def test_calls_neither_synchronise_nor_mix_devices(loss):
    report = walked(loss)
    assert set(report["planted"]) == set(PLANTED), "a planted mistake was not found"
    assert not report["problems"], json.dumps(report["problems"], indent=1)


@pytest.fixture(scope="module")
def listed():
    """Options of every listed call, for each function or Module."""
    options: dict[str, list[dict]] = {}
    for loss in calls.LOSSES:
        for call in calls.of(loss):
            options.setdefault(call.of.__name__, []).append(call.options)
    return options


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_and_option_has_a_call(listed, name):
    """Every value of its Literal options is listed too."""
    assert name in listed, f"tools/calls has no call of {name}"
    public = getattr(fastkd, name)
    function = public.__init__ if inspect.isclass(public) else public
    words = typing.get_type_hints(function)
    has_kernels = any(
        loss.triton for loss in LOSSES if name in {*loss.with_reference, *loss.modules}
    )
    for option, parameter in inspect.signature(function).parameters.items():
        kind = words.get(option)
        kinds = (kind,) if typing.get_origin(kind) is typing.Literal else typing.get_args(kind)
        for literal in (one for one in kinds if typing.get_origin(one) is typing.Literal):
            used = {options.get(option, parameter.default) for options in listed[name]}
            missing = set(typing.get_args(literal)) - used
            if option == "backend":
                missing -= {"cpp"} if has_kernels else {"cpp", "triton"}
            assert not missing, f"tools/calls has no call of {name} with {option}={missing}"


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_every_tensor_argument_has_a_call(loss):
    given = walked(loss.name)["given"]
    for name in (*loss.with_reference, *loss.modules, *loss.without_reference):
        public = getattr(fastkd, name)
        kinds = typing.get_type_hints(public.forward if inspect.isclass(public) else public)
        tensors = {argument for argument, kind in kinds.items() if "Tensor" in str(kind)}
        # A call with rows waits for the device, as documented; segments are on the CPU.
        missing = tensors - {"return", "rows", "segments", *given[name]}
        assert not missing, f"tools/calls has no call of {name} with {missing}"
