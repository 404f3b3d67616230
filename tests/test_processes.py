"""Every loss in a model of two processes. Samples of all processes are in test_distributed.py."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distill.processes import run_ranks
from tests.losses import subjects
from tests.support.compare import relative_error
from tests.support.every import features, padding
from tests.support.subject import D_S


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
