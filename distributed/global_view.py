"""Parts of tensors as what they are parts of, so that a checkpoint can be read by any other layout."""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from utils import comm


def global_view(tensors, split_dims):
    """The same memory, where every tensor that is split over the tensor-parallel ranks is a DTensor that says so.

    tensors: as of checkpoint.collect_state, weights and moments by the parameter's name. split_dims: {parameter: dim}.
    """
    if not split_dims:
        return tensors
    weights = {name: _as_part(value, split_dims.get(name)) for name, value in tensors["model"].items()}
    moments = {
        name: {key: _as_part(value, split_dims.get(name)) for key, value in state.items()}
        for name, state in tensors["optimizer"].items()
    }
    return tensors | {"model": weights, "optimizer": moments}


def _as_part(tensor, dim):
    """This rank's piece along `dim` of the whole tensor; it may in turn be sharded by fully_shard."""
    if dim is None or tensor.dim() == 0:  # the optimizer's count of steps
        return tensor
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
