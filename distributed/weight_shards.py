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
from distributed.shard.core.redistribute import as_dtensor
from distributed.shard.core.spec import part_of
from distributed.shard.core.tensor import wrap
from distributed.split import Split
from utils import comm
from utils.torch_private import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensors = dict[str, Any]  # {"model" or "ema": {name: weight}, "optimizer": {name: {moment: tensor}}, ...}


@torch.no_grad()
def fill_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    split: Split,
) -> None:
    """Fill this rank's parameters and buffers, whole or in part, with their initial values.

    weights: yields (name, full tensor) of the whole model, one at a time, the same on every rank. split: the result of
    model parallelism. Nothing is communicated.
    """
    held: dict[str, Tensor] = dict(model.named_parameters())
    held.update(model.named_buffers())
    for name, value in weights:
        is_of_another_stage = name not in held
        if is_of_another_stage:
            continue
        parameter = held[name]
        # Each layout that splits this weight takes its part of what the one before it has left.
        if name in split.dims:
            value = shard(value, split.dims[name], comm.get_rank("tp"), comm.get_size("tp"))
        if name in split.specs:
            value = part_of(value, split.specs[name])
        if is_dtensor(parameter):
            value = local_part(value, parameter)
            parameter = parameter.to_local()
        parameter.copy_(value)


def local_part(full: Tensor, parameter: "DTensor") -> Tensor:
    """This rank's part of the full value of a DTensor: split over tp first, then over the data-parallel ranks."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate() or ()
    mesh_dims = list(zip(names, parameter.placements, mesh.shape, coordinate, strict=True))
    mesh_dims.sort(key=lambda item: item[0] != "tp")
    for _, placement, size, rank in mesh_dims:
        dim = getattr(placement, "dim", None)  # a _StridedShard has it too, though it is no Shard
        if dim is None:
            continue
        chunks = full.chunk(size, dim)
        # torch gives the last ranks nothing where there are fewer chunks than ranks.
        full = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return full


def global_view(tensors: Tensors, split: Split) -> Tensors:
    """The same tensors, described as parts of global ones, or whole.

    A tensor split over the tensor-parallel ranks becomes a DTensor of the same memory. A tensor split over the domain
    ranks, in pieces that no DTensor can describe, is gathered: call take_parts after loading.
    tensors: as of checkpoint_state.collect_state, weights and moments by the parameter's name.
    """
    is_split = bool(split.dims or split.specs)
    if not is_split:
        return tensors
    view: Tensors = {}
    for part, held in tensors.items():
        view[part] = {name: _global(value, name, split) for name, value in held.items()}
    return view


@torch.no_grad()
def take_parts(tensors: Tensors, view: Tensors, split: Split) -> None:
    """Copy what was loaded into a global view back into `tensors`, where the two do not share memory."""
    for name, spec in split.specs.items():
        for part in {"model", "ema"} & tensors.keys():
            full = view[part][name]
            tensors[part][name].copy_(part_of(full, spec))
        moments = tensors["optimizer"].get(name, {})  # a frozen parameter has no moments
        for key, moment in moments.items():
            full = view["optimizer"][name][key]
            is_of_weight = moment.dim() > 0  # the optimizer's count of steps is one number on every rank
            moment.copy_(part_of(full, spec) if is_of_weight else full)


def _global(tensor, name, split):
    """A tensor of the parameter `name`, or a dict of its moments, as global_view describes it."""
    if isinstance(tensor, dict):  # the moments of a parameter
        return {key: _global(moment, name, split) for key, moment in tensor.items()}
    if tensor.dim() == 0:  # the optimizer's count of steps
        return tensor
    if name in split.specs:
        part = wrap(tensor.detach(), split.specs[name])
        return part.full_tensor()
    if name in split.dims:
        return _as_part(tensor, split.dims[name])
    return tensor


def _as_part(tensor, dim):
    """This rank's piece along `dim` of the whole tensor; it may in turn be sharded by fully_shard."""
    from torch.distributed.tensor import Shard  # slow to import

    shape = list(tensor.shape)
    shape[dim] *= comm.get_size("tp")
    if not is_dtensor(tensor):
        tp_mesh = comm.get_mesh("tp")
        assert tp_mesh is not None  # a weight is split over ranks alone
        return as_dtensor(tensor, tp_mesh, [Shard(dim)], shape)
    # tp comes first: a row that is split twice is split by tp, and each piece by the data-parallel ranks.
    data_mesh = tensor.device_mesh
    ranks = _ranks(data_mesh.ndim).reshape(-1, *data_mesh.shape)  # (tp, *data-parallel)
    mesh = DeviceMesh(tensor.device.type, ranks, _init_backend=False)
    placements = [Shard(dim), *tensor.placements]
    return as_dtensor(tensor.to_local(), mesh, placements, shape)


def _ranks(mesh_dims):
    """Ranks of this pipeline stage: (tp, all others), or in the order of hsdp's mesh, which has two dimensions."""
    mesh = comm.get_mesh("")
    assert mesh is not None and mesh.mesh_dim_names is not None  # utils.comm has built it
    names = list(mesh.mesh_dim_names)
    first = ["pp", "tp", "dp_replicate"] if mesh_dims == 2 else ["pp", "tp"]
    rest = [name for name in names if name not in first]
    order = [names.index(name) for name in (*first, *rest)]
    ranks = mesh.mesh.permute(order)  # (pp, tp, ...)
    of_stage = ranks[comm.get_rank("pp")]  # (tp, ...)
    return of_stage.flatten(1)
