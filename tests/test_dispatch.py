"""The choice of a backend by the GPU's vendor and compute capability."""

import types

import pytest
import torch

from fastkd._core import dispatch, extension

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Patch vendor and capability of a fake GPU; returns a tensor on it."""

    def found(capability=(9, 0), hip=None):
        extension._known_capability.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        properties = types.SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(dispatch, "TRITON_INSTALLED", True)
        monkeypatch.setattr(extension, "CUDA", True)
        return types.SimpleNamespace(
            device=GPU, dtype=torch.float32, is_cuda=True, is_cpu=False, shape=torch.Size((3, 3))
        )

    yield found
    extension._known_capability.cache_clear()


def backend(x):
    return dispatch.backend_of("auto", "layer_norm_mse", x, columns=3)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 1)])
def test_gpus_from_capability_8_run_kernels(gpu, capability):
    x = gpu(capability)
    assert backend(x) == "triton"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"capability": (7, 5)}, "need compute capability 8.0 or later, and cuda:0 has 7.5"),
        ({"hip": "6.4"}, "for NVIDIA GPUs, and this torch is built for AMD's"),
    ],
)
def test_other_gpus_run_pytorch(gpu, facts, reason):
    x = gpu(**facts)
    assert backend(x) == "torch"
    with pytest.raises(dispatch.BackendUnavailable, match=reason):
        dispatch.backend_of("triton", "layer_norm_mse", x, columns=3)


@pytest.mark.filterwarnings("error")
def test_a_graph_holds_the_choice(gpu):
    # Dynamo lists PyTorch's functions when it first compiles: not those of the fake GPU.
    torch.compile(torch.neg, backend="eager")(torch.zeros(()))
    gpu((7, 5))

    @torch.compile(fullgraph=True, backend="eager")
    def choose(x):
        return x + (extension.why_not_gpu(GPU) is None)

    assert choose(torch.zeros(())) == 0
