"""Models spread over the processes by FSDP2 (--fsdp): none holds a whole one.

`fully_shard` is called here, and not accelerate's plugin, which shards the one module that Trainer
trains. Of a Distiller that is too much and too little: the teacher would be gathered for a whole
step, torch refuses tied embeddings in the two groups that the plugin makes of them, and the student
alone, as scores and ``generate`` call it, would be without its embeddings and head. Its
checkpoints are not those of a model either; these are what a run without --fsdp writes, and either
goes on with the other's.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from fastkd.distill.distiller import Distiller
from fastkd.distributed import world_size
from fastkd.train import lora, processes

# Where a sharded model keeps the same one without memory.
EMPTY = "_fastkd_empty"
# Tells ``generate`` of transformers that no process may stop before the others.
MANAGED = "_is_fsdp_managed_module"


def shard(model: nn.Module, device: torch.device, learns: bool = True) -> None:
    """Spread a ``model`` of transformers over the processes, in place; all have the same one.

    Its blocks go to ``device`` one by one. What doesn't learn is whole only while it runs.
    """
    mesh, inner = _mesh(device.type), lora.plain(model)
    empty = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    vars(model)[EMPTY] = copy.deepcopy(model, empty)  # tied weights stay tied
    for block in _blocks(inner):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if learns else True)
    vars(inner)[MANAGED] = True
    if hasattr(model, "generate"):  # it calls what is within: PEFT's model, an encoder
        register_fsdp_forward_method(model, "generate")


def shard_distiller(distiller: Distiller, device: torch.device) -> None:
    """`shard` student, teacher and the method's parameters."""
    shard(distiller.student, device)
    if distiller.teachers.live:
        shard(distiller.teacher, device, learns=False)
    else:  # what it said before
        distiller.teacher.to(device)
    distiller.method.to(device)
    if any(True for _ in distiller.method.parameters()):
        fully_shard(distiller.method, mesh=_mesh(device.type))


@functools.cache
def _mesh(kind: str) -> DeviceMesh:
    return init_device_mesh(kind, (world_size(),))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What the model runs one after the other: entries of its outermost lists with attention."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{x}.") for x in found):
            continue
        if any("Attention" in type(part).__name__ for part in module.modules()):
            found[path] = module
    return [block for blocks in found.values() for block in blocks]


def sharded(model: nn.Module) -> bool:
    """Whether `shard` was called for it, or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def without_shards(model: nn.Module) -> Any:
    """A model of the same classes that isn't sharded: without memory, or ``model`` itself."""
    return vars(model).get(EMPTY, model)


def whole(model: Any) -> Any:
    """A whole copy of a sharded model in the first process, None in the others; all call it.

    One that isn't sharded is itself.
    """
    empty = vars(model).get(EMPTY)
    if empty is None:
        return model
    _let_go(model)
    parameters = {}
    for place, p in zip(empty.parameters(), model.parameters(), strict=True):
        value = _gathered(p)
        if value is not None:
            parameters[id(place)] = nn.Parameter(value, p.requires_grad)
    if not processes.first():
        return None
    full = copy.deepcopy(empty, parameters)
    for mine, its in zip(full.buffers(), model.buffers(), strict=True):
        mine.copy_(its)
    return full


def unread(model: nn.Module) -> Any:
    """A whole copy of a sharded model, whose parameters are yet to be read."""
    empty = vars(model)[EMPTY]
    parameters = {
        id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
        for p in empty.parameters()
    }
    return copy.deepcopy(empty, parameters)


def take(model: nn.Module, full: nn.Module) -> None:
    """Give a sharded model the weights of a whole one that learn."""
    _let_go(model)
    with torch.no_grad():
        for p, x in zip(model.parameters(), full.parameters(), strict=True):
            if p.requires_grad:
                p.copy_(_part(x, p))


def whole_state(state: Any) -> Any:
    """A state dict in one piece, in the first process; all call it."""
    return tree_map_only(DTensor, _gathered, state)


class StateDictProxy(nn.Module):
    """In the place of a module or optimizer whose state is whole in checkpoints."""

    target: Any

    def __init__(self, target: Any, state: Any = None):
        super().__init__()
        vars(self)["target"], self.state = target, state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.state

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        like = self.target.state_dict()
        parts = {n: _part(x, like[n]) if n in like else x for n, x in state.items()}
        self.target.load_state_dict(parts)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Give the optimizer of sharded parameters a whole state."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in state["param_groups"] for i in group["params"]]
    for number, p in zip(numbers, own, strict=True):
        entries = state["state"].get(number, {})
        like = {n: x for n, x in entries.items() if isinstance(x, Tensor) and x.shape == p.shape}
        entries.update({n: _part(x, p) for n, x in like.items()})
    optimizer.load_state_dict(state)


def _part(x: Any, like: Any) -> Any:
    """This process's part of a whole tensor, if it is in parts that it is to be ``like``."""
    if not isinstance(like, DTensor):
        return x
    part = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()  # the whole is let go


def _gathered(x: Tensor) -> Tensor | None:
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().cpu() if processes.first() else None


def _let_go(model: nn.Module) -> None:
    """What a last pass has gathered stands in the parameters' place until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value`` as an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
