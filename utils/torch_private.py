"""What several modules need of torch beside its public names, and tests of its classes that do not import them.

Where a public name exists, it is tried first. Checked with torch 2.11, 2.13 and 2.15. A private name that a single
module needs stands in that module; .github/CONTRIBUTING.md has the command that lists all of them.

DTensor takes longer to import than a short program runs. An object of a class can be there only if the module of that
class has been imported: before that, nothing is one. `--help` and a refusal therefore never import it. (torch imports
it itself with its modules fsdp, checkpoint, optim and pipelining, imported where they are used, and with
torch._dynamo, which a model's first call imports.)
"""

import datetime
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def storage_id(tensor: Tensor) -> int:
    """A number that tensors over the same memory have in common, fake ones and those on the meta device too."""
    if tensor.layout != torch.strided:  # a sparse tensor has none of its own
        return id(tensor)
    return tensor.untyped_storage()._cdata


def is_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of many inside of torch.vmap."""
    return torch._C._functorch.is_batchedtensor(tensor)


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """The mesh of one dimension with all ranks of a mesh of several."""
    return mesh._flatten(name)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective knows by this name."""
    return distributed_c10d._resolve_process_group(dist.GroupName(name))


def set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup) -> None:
    """Let the ranks of a group wait so long for one another."""
    public = getattr(dist, "set_timeout", None)  # since torch 2.14
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Tell whether a value is a DTensor."""
    return _is_of("torch.distributed.tensor", "DTensor", value)


def is_fsdp_module(value: Any) -> TypeGuard["FSDPModule"]:
    """Tell whether a value is a module to which fully_shard was applied."""
    return _is_of("torch.distributed.fsdp", "FSDPModule", value)


def _is_of(module: str, name: str, value: Any) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
