"""A tensor of one rank, scattered over the mesh."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from distributed.collectives import all_to_all
from distributed.shard.operands import shared
from distributed.shard.spec import Mesh, Pieces, as_mesh, part_of, spec_of
from distributed.shard.tensor import ShardTensor, wrap


def scatter_tensor(
    x: Any, src: int, mesh: DeviceMesh | Mesh, placements: Sequence[Placement], sizes: Pieces | None = None
) -> ShardTensor:
    """A ShardTensor from the data of one rank: every other rank receives only its own part.

    x: the whole tensor on rank `src` of the mesh (counted in row-major order), ignored elsewhere. placements, sizes:
    Shard or Replicate, as for ShardTensor.from_local; sizes are as even as possible by default. Differentiable: src
    receives the gradient. All ranks call this together. Raises ValueError on every rank if sizes do not fit.
    """
    mesh = as_mesh(mesh)
    group = mesh.joint
    process_group = dist.distributed_c10d._resolve_process_group(dist.GroupName(group.name))
    here = group.rank == src
    facts: list[Any] = [(x.shape, x.dtype, x.device.type, x.requires_grad) if here else None]
    dist.broadcast_object_list(facts, src=dist.get_global_rank(process_group, src), group=process_group)
    shape, dtype, device, differentiable = facts[0]
    spec = spec_of(mesh, shape, placements, sizes)
    if spec.partial:
        raise ValueError("scatter_tensor: a tensor cannot be scattered as Partial()")
    if here:
        parts = [part_of(x, spec, rank).contiguous() for rank in range(group.size)]
        flat, sent = torch.cat([part.flatten() for part in parts]), tuple(part.numel() for part in parts)
    else:
        flat, sent = torch.empty(0, dtype=dtype, device=device, requires_grad=differentiable), (0,) * group.size
    received = tuple(spec.local_shape.numel() if rank == src else 0 for rank in range(group.size))
    part = all_to_all(flat, sent, received, group).view(spec.local_shape)
    return wrap(shared(part, spec), spec)
