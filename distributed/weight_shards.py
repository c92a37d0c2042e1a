"""Parts of weights: any layout starts from the same ones, and can read any layout's checkpoint.

No rank ever holds the whole model. A rank fills its parts of the initial weights, and describes what it holds by the
global tensors that it belongs to.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distributed.collectives import shard
from distributed.shard.redistribute import as_dtensor
from distributed.shard.spec import part_of
from distributed.shard.tensor import wrap
from distributed.split import Split
from utils import comm
from utils.sharded import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensors = dict[str, Any]  # {"model" or "ema": {name: weight}, "optimizer": {name: {moment: tensor}}, ...}


@torch.no_grad()
def fill_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]], split: Split) -> None:
    """Fill this rank's parameters and buffers, whole or in part, with their initial values.

    weights: yields (name, full tensor) of the whole model, one at a time, the same on every rank. split: the result of
    model parallelism. Nothing is communicated.
    """
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in weights:
        if name not in held:  # of another stage
            continue
        parameter = held[name]
        if name in split.dims:
            value = shard(value, split.dims[name], comm.get_rank("tp"), comm.get_size("tp"))
        if name in split.specs:
            value = part_of(value, split.specs[name])
        if is_dtensor(parameter):
            value, parameter = local_part(value, parameter), parameter.to_local()
        parameter.copy_(value)


def local_part(full: Tensor, parameter: "DTensor") -> Tensor:
    """This rank's part of the full value of a DTensor: split over tp first, then over the data-parallel ranks."""
    mesh = parameter.device_mesh
    dims = zip(mesh.mesh_dim_names or (), parameter.placements, mesh.shape, mesh.get_coordinate() or (), strict=True)
    for _, placement, size, rank in sorted(dims, key=lambda item: item[0] != "tp"):
        if hasattr(placement, "dim"):  # sharded, also by a _StridedShard, which is no Shard
            chunks = full.chunk(size, placement.dim)
            full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def global_view(tensors: Tensors, split: Split) -> Tensors:
    """The same tensors, described as parts of global ones, or whole.

    A tensor split over the tensor-parallel ranks becomes a DTensor of the same memory. A tensor split over the domain
    ranks, in pieces that no DTensor can describe, is gathered: call take_parts after loading.
    tensors: as of checkpoint.collect_state, weights and moments by the parameter's name.
    """
    if not split.dims and not split.specs:
        return tensors
    return {part: {name: _global(value, name, split) for name, value in held.items()} for part, held in tensors.items()}


@torch.no_grad()
def take_parts(tensors: Tensors, view: Tensors, split: Split) -> None:
    """Copy what was loaded into a global view back into `tensors`, where the two do not share memory."""
    for name, spec in split.specs.items():
        for part in {"model", "ema"} & tensors.keys():
            tensors[part][name].copy_(part_of(view[part][name], spec))
        for key, value in tensors["optimizer"].get(name, {}).items():  # a frozen parameter has no moments
            value.copy_(part_of(view["optimizer"][name][key], spec) if value.dim() else view["optimizer"][name][key])


def _global(tensor, name, split):
    if isinstance(tensor, dict):  # the moments of a parameter
        return {key: _global(moment, name, split) for key, moment in tensor.items()}
    if tensor.dim() == 0:  # the optimizer's count of steps
        return tensor
    if name in split.specs:
        return wrap(tensor.detach(), split.specs[name]).full_tensor()
    return _as_part(tensor, split.dims[name]) if name in split.dims else tensor


def _as_part(tensor, dim):
    """This rank's piece along `dim` of the whole tensor; it may in turn be sharded by fully_shard."""
    from torch.distributed.tensor import Shard  # slow to import

    shape, placements, local, mesh = list(tensor.shape), [], tensor, comm.get_mesh("tp")
    if is_dtensor(tensor):
        placements, local = list(tensor.placements), tensor.to_local()
        # tp comes first: a row that is split twice is split by tp, and each piece by the data-parallel ranks.
        ranks = _ranks(tensor.device_mesh.ndim).reshape(-1, *tensor.device_mesh.shape)
        mesh = DeviceMesh(tensor.device.type, ranks, _init_backend=False)
    shape[dim] *= comm.get_size("tp")
    return as_dtensor(local, mesh, [Shard(dim), *placements], shape)


def _ranks(mesh_dims):
    """Ranks of this pipeline stage: (tp, all others), or in the order of hsdp's mesh, which has two dimensions."""
    mesh = comm.get_mesh("")
    names = list(mesh.mesh_dim_names)
    first = ["pp", "tp", "dp_replicate"] if mesh_dims == 2 else ["pp", "tp"]
    ordered = first + [name for name in names if name not in first]
    ranks = mesh.mesh.permute(*(names.index(name) for name in ordered))
    return ranks[comm.get_rank("pp")].flatten(1)
