"""Local parts of tensors, described by the global tensors they belong to: any layout can read such a checkpoint."""

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distributed.shard.spec import part_of
from distributed.shard_tensor import wrap
from distributed.split import Split
from utils import comm

Tensors = dict[str, Any]  # {"model" or "ema": {name: weight}, "optimizer": {name: {moment: tensor}}, ...}


def global_view(tensors: Tensors, split: Split) -> Tensors:
    """The same tensors, described as parts of global ones, or whole.

    A tensor split over the tensor-parallel ranks becomes a DTensor of the same memory. A tensor split over the domain
    ranks, in pieces that no DTensor can describe, is gathered: call take_parts after loading.
    tensors: as of checkpoint.collect_state, weights and moments by the parameter's name.
    """
    if not split.dims and not split.specs:
        return tensors
    weights = {
        part: {name: _global(value, name, split) for name, value in tensors[part].items()}
        for part in ("model", "ema")
        if part in tensors
    }
    moments = {
        name: {key: _global(value, name, split) for key, value in state.items()}
        for name, state in tensors["optimizer"].items()
    }
    return tensors | weights | {"optimizer": moments}


@torch.no_grad()
def take_parts(tensors: Tensors, view: Tensors, split: Split) -> None:
    """Copy what was loaded into a global view back into `tensors`, where the two do not share memory."""
    for name, spec in split.specs.items():
        for part in {"model", "ema"} & tensors.keys():
            tensors[part][name].copy_(part_of(view[part][name], spec))
        for key, value in tensors["optimizer"][name].items():
            value.copy_(part_of(view["optimizer"][name][key], spec) if value.dim() else view["optimizer"][name][key])


def _global(tensor, name, split):
    if tensor.dim() == 0:  # the optimizer's count of steps
        return tensor
    if name in split.specs:
        return wrap(tensor.detach(), split.specs[name]).full_tensor()
    return _as_part(tensor, split.dims[name]) if name in split.dims else tensor


def _as_part(tensor, dim):
    """This rank's piece along `dim` of the whole tensor; it may in turn be sharded by fully_shard."""
    shape, placements, local, mesh = list(tensor.shape), [], tensor, comm.get_mesh("tp")
    if isinstance(tensor, DTensor):
        placements, local = list(tensor.placements), tensor.to_local()
        # tp comes first: a row that is split twice is split by tp, and each piece by the data-parallel ranks.
        ranks = _ranks().reshape(-1, *tensor.device_mesh.shape)
        mesh = DeviceMesh(tensor.device.type, ranks, _init_backend=False)
    shape[dim] *= comm.get_size("tp")
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DTensor.from_local(
        local, mesh, [Shard(dim), *placements], run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def _ranks():
    """Ranks of this pipeline stage, (tp, all others)."""
    mesh = comm.get_mesh("")
    names = list(mesh.mesh_dim_names)
    ranks = mesh.mesh.movedim(names.index("pp"), 0)[comm.get_rank("pp")]
    names.remove("pp")
    return ranks.movedim(names.index("tp"), 0).flatten(1)
