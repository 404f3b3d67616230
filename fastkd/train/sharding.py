"""Models sharded over the processes by FSDP2 (--fsdp), so that no process holds a whole model.

accelerate's plugin shards the one module that Trainer trains. For a Distiller this has four faults:
the teacher is gathered for a whole step; torch refuses tied embeddings in the plugin's two groups;
the student alone, as evaluation and ``generate`` call it, lacks embeddings and head; and the
checkpoints are not those of a model. `fully_shard` is therefore called here. Checkpoints are those
of a run without --fsdp, and each kind of run resumes the other's.
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
from fastkd.models.inputs import without_adapters
from fastkd.train import processes

# Attribute of a sharded model: the same model on the meta device.
EMPTY = "_fastkd_empty"
# Attribute that makes transformers' ``generate`` end at the same token in all processes.
MANAGED = "_is_fsdp_managed_module"


def shard(model: nn.Module, device: torch.device, trained: bool = True) -> None:
    """Shard a transformers ``model``, equal in all processes, in place.

    Blocks are moved to ``device`` one by one. A model that is not trained (``trained=False``) frees
    its gathered weights after every forward pass.
    """
    mesh, inner = _mesh(device.type), without_adapters(model)
    empty = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    vars(model)[EMPTY] = copy.deepcopy(model, empty)  # tied weights stay tied
    for block in _blocks(inner):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if trained else True)
    vars(inner)[MANAGED] = True
    if hasattr(model, "generate"):  # which calls inner modules: PEFT's model, an encoder
        register_fsdp_forward_method(model, "generate")


def shard_distiller(distiller: Distiller, device: torch.device) -> None:
    """`shard` student, teacher and the method's parameters."""
    shard(distiller.student, device)
    if distiller.teachers.live:
        shard(distiller.teacher, device, trained=False)
    else:  # cached outputs
        distiller.teacher.to(device)
    distiller.method.to(device)
    if any(True for _ in distiller.method.parameters()):
        fully_shard(distiller.method, mesh=_mesh(device.type))


@functools.cache
def _mesh(kind: str) -> DeviceMesh:
    return init_device_mesh(kind, (world_size(),))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks of the model: entries of its outermost module lists that contain attention."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{x}.") for x in found):
            continue
        if any("Attention" in type(part).__name__ for part in module.modules()):
            found[path] = module
    return [block for blocks in found.values() for block in blocks]


def sharded(model: nn.Module) -> bool:
    """Whether the model or a part of it is sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def whole(model: Any) -> Any:
    """Full copy of a sharded model in the first process, None in the others.

    All processes call it. A model that is not sharded is returned itself.
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
    if processes.rank() > 0:
        return None
    full = copy.deepcopy(empty, parameters)
    for mine, its in zip(full.buffers(), model.buffers(), strict=True):
        mine.copy_(its)
    return full


def unread(model: nn.Module) -> Any:
    """Full copy of a sharded model with uninitialised parameters."""
    empty = vars(model)[EMPTY]
    parameters = {
        id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
        for p in empty.parameters()
    }
    return copy.deepcopy(empty, parameters)


def take(model: nn.Module, full: nn.Module) -> None:
    """Copy the trained weights of a full model into a sharded model."""
    _let_go(model)
    with torch.no_grad():
        for p, x in zip(model.parameters(), full.parameters(), strict=True):
            if p.requires_grad:
                p.copy_(_part(x, p))


class StateDictProxy(nn.Module):
    """Stand-in for a module or optimizer, with the full state dict that checkpoints hold."""

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


def full_state(target: Any) -> Any:
    """A full copy of a sharded model, or a stand-in with the full state of anything else."""
    if EMPTY in vars(target):
        return whole(target)
    return StateDictProxy(target, tree_map_only(DTensor, _gathered, target.state_dict()))


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a full state into the optimizer of sharded parameters."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in state["param_groups"] for i in group["params"]]
    for number, p in zip(numbers, own, strict=True):
        entries = state["state"].get(number, {})
        like = {n: x for n, x in entries.items() if isinstance(x, Tensor) and x.shape == p.shape}
        entries.update({n: _part(x, p) for n, x in like.items()})
    optimizer.load_state_dict(state)


def _part(x: Any, like: Any) -> Any:
    """This process's shard of ``x`` if ``like`` is sharded, else ``x``."""
    if not isinstance(like, DTensor):
        return x
    part = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()  # so that the full tensor can be freed


def _gathered(x: Tensor) -> Tensor | None:
    full = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().cpu() if processes.rank() == 0 else None


def _let_go(model: nn.Module) -> None:
    """Reshard all modules; gathered weights of the last forward pass replace their parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which ``value`` replaces an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
