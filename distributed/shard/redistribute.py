"""Redistribution: change how a tensor is split, one mesh dimension after the other. Every step is differentiable.

The gradient of a split tensor is split in the same way. The gradient of a replicated or partial tensor is the whole
gradient, on every rank.
"""

import math
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distributed.collectives import (
    Sizes,
    all_to_all,
    divided,
    gather_from_region,
    reduce_from_region,
    reduce_scatter,
    scatter_to_region,
)
from distributed.halo import Fetch, bounds
from distributed.shard.spec import CannotSplit, Pieces, Spec, cut_over, merged, over, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def redistribute(
    local: Tensor, spec: Spec, placements: Sequence["Placement"], sizes: Pieces | None = None
) -> tuple[Tensor, Spec]:
    """The local part and the Spec of the same tensor with new `placements`; differentiable.

    sizes: {mesh dimension: sizes of its ranks}. By default a dimension that the same mesh dimension splits already
    keeps its sizes; other sizes are as even as possible.
    """
    from torch.distributed.tensor import Shard  # slow to import

    sizes = sizes or {}
    if len(placements) != len(spec.mesh.groups):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(spec.mesh.groups)} dimensions")
    placements = [Shard(p.dim % len(spec.dims)) if isinstance(p, Shard) else p for p in placements]
    targets = {m: p.dim for m, p in enumerate(placements) if isinstance(p, Shard)}
    # Gathering comes first.
    pending = sorted(
        range(len(placements)), key=lambda m: not spec.placements[m].is_shard() or placements[m].is_shard()
    )
    while pending:
        free = [m for m in pending if over(spec.dims[targets[m]] if m in targets else ()) <= {m}]  # of others there
        m = (free or pending)[0]
        if not free and spec.placements[m].is_shard():  # two mesh dimensions swap their tensor dimensions
            local, spec = _gather(local, spec, m)
            continue
        pending.remove(m)
        local, spec = _change(local, spec, m, placements[m], sizes.get(m))
    return local, spec


def _change(local, spec, m, target, sizes):
    source, group = spec.placements[m], spec.mesh.groups[m]
    if source == target and (sizes is None or not target.is_shard() or tuple(sizes) == sizes_of(spec)[m]):
        return local, spec
    without = spec.with_dims(spec.dims, tuple(p for p in spec.partial if p != m))
    if source.is_shard() and target.is_shard():
        return _exchange(local, spec, m, target.dim, sizes)
    if source.is_shard():
        local, spec = _gather(local, spec, m)
        return (local, spec) if target.is_replicate() else _change(local, spec, m, target, sizes)
    if target.is_partial():
        return divided(local, group.size), spec.with_dims(spec.dims, (*spec.partial, m))
    if target.is_replicate():
        return reduce_from_region(local, group), without
    new, sizes = _cut(without, target.dim, m, sizes)
    split = reduce_scatter if source.is_partial() else scatter_to_region
    return split(local, target.dim, sizes, group), new


def sizes_of(spec: Spec) -> dict[int, Sizes]:
    """{mesh dimension: the sizes of its pieces} of those that split a tensor."""
    return {axis.mesh_dim: axis.sizes for axis in chain(*spec.dims) if axis.sizes is not None}


def _cut(spec, dim, m, sizes):
    """(spec, sizes) after mesh dimension m splits a dimension."""
    if over(spec.dims[dim]):
        raise CannotSplit(f"dimension {dim} of {spec} is split already: it cannot be split over two mesh dimensions")
    (axis,) = cut_over(spec.mesh, m, spec.shape[dim], sizes)
    return spec.with_axes(dim, (axis,)), axis.sizes


def _gather(local, spec, m):
    """Gather the axis that mesh dimension m splits."""
    dim = spec.placements[m].dim
    axes, group = spec.dims[dim], spec.mesh.groups[m]
    place = next(i for i, a in enumerate(axes) if a.mesh_dim == m)
    left = (*axes[:place], axes[place]._replace(mesh_dim=None, sizes=None), *axes[place + 1 :])
    head = local.narrow(dim, 0, axes[0].ahead if spec.is_first(axes) else 0)
    if len(axes) > 1:
        local = local.narrow(dim, head.shape[dim], local.shape[dim] - head.shape[dim])
        local = local.unflatten(dim, spec.local_axes(axes))
    local = gather_from_region(local, dim + place, axes[place].sizes, group)
    if len(axes) > 1:
        local = local.flatten(dim, dim + len(axes) - 1)
    if axes[0].ahead and spec.is_first(left):
        head = gather_from_region(head, dim, (axes[0].ahead, *[0] * (group.size - 1)), group)
        local = torch.cat([head, local], dim)
    return local, spec.with_axes(dim, merged(left))


def recut(local: Tensor, spec: Spec, cut: Pieces) -> tuple[Tensor, Spec]:
    """The same tensor with other sizes of the pieces of its axes, {mesh dimension: sizes}: one all-to-all for each.

    Unlike redistribute it keeps dimensions that are products of axes.
    """
    flat = spec.with_dims([(axis,) for axis in chain(*spec.dims)])
    local, flat = redistribute(local.reshape(flat.local_shape), flat, flat.placements, cut)
    axes = chain(*flat.dims)
    spec = spec.with_dims([tuple(islice(axes, len(dim))) for dim in spec.dims])
    return local.reshape(spec.local_shape), spec


def _exchange(local, spec, m, dim, sizes):
    """Let mesh dimension m split another dimension, or with other sizes: every pair of ranks exchanges a block."""
    from torch.distributed.tensor import Shard  # slow to import

    group, old = spec.mesh.groups[m], spec.placements[m].dim
    if len(spec.dims[old]) > 1:
        return _change(*_gather(local, spec, m), m, Shard(dim), sizes)
    (before,) = spec.dims[old]
    new, sizes = _cut(spec.with_axes(old, whole(before.size)), dim, m, sizes)
    if old == dim:
        return Fetch(local, dim, before.sizes, bounds(sizes), group).rows(), new
    blocks, shape = local.split(sizes, dim), new.local_shape
    shapes = [(*shape[:old], n, *shape[old + 1 :]) for n in before.sizes]
    sent, received = tuple([b.numel() for b in blocks]), tuple(map(math.prod, shapes))
    flat = all_to_all(torch.cat([b.flatten() for b in blocks]), sent, received, group)
    parts = [part.view(shape) for part, shape in zip(flat.split(received), shapes, strict=True)]
    return torch.cat(parts, old), new


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence["Placement"], shape: Sequence[int]) -> "DTensor":
    """The contiguous DTensor of a global shape, of which this rank holds `local`. Nothing is communicated."""
    from torch.distributed.tensor import DTensor  # slow to import

    stride = tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def chunks(shape: Sequence[int], placements: Sequence["Placement"], mesh: DeviceMesh) -> Pieces:
    """{mesh dimension: sizes of the pieces} of a DTensor."""
    from torch.distributed.tensor import Shard  # slow to import

    return {
        m: chunk_sizes_of(shape[p.dim], n)
        for m, (p, n) in enumerate(zip(placements, mesh.shape, strict=True))
        if isinstance(p, Shard)
    }


def chunk_sizes_of(size: int, parts: int) -> Sizes:
    """The sizes of the pieces that torch.chunk and DTensor make: (10, 4) -> (3, 3, 3, 1)."""
    piece = -(-size // parts)
    return tuple(max(0, min(piece, size - i * piece)) for i in range(parts))
