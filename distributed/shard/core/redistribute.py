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
    concatenated,
    divided,
    gather_from_region,
    reduce_from_region,
    reduce_scatter,
    scatter_to_region,
)
from distributed.shard.core.axes import OutOfOrder, merged, mesh_dims_of, unsplit_axes
from distributed.shard.core.halo import HaloExchange, bounds
from distributed.shard.core.spec import CannotSplit, Pieces, Spec, cut_over

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def redistribute(
    local: Tensor,
    spec: Spec,
    placements: Sequence["Placement"],
    sizes: Pieces | None = None,
) -> tuple[Tensor, Spec]:
    """The local part and the Spec of the same tensor with new `placements`; differentiable.

    local, spec: this rank's part now, and how the whole is split. sizes: {mesh dimension: sizes of its ranks}. By
    default a dimension that the same mesh dimension splits already keeps its sizes; other sizes are as even as
    possible. Raises ValueError for a wrong number of placements or for sizes that do not add up, and CannotSplit where
    two mesh dimensions would split one dimension.
    """
    from torch.distributed.tensor import Shard  # slow to import

    if spec.has_order:
        raise OutOfOrder
    sizes = sizes or {}
    mesh_dims = len(spec.mesh.groups)
    if len(placements) != mesh_dims:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh_dims} dimensions")
    count = len(spec.dims)
    placements = [Shard(p.dim % count) if isinstance(p, Shard) else p for p in placements]

    # Mesh dimensions that only gather come first: they make room for others.
    gathering = []
    others = []
    for m, (source, target) in enumerate(zip(spec.placements, placements, strict=True)):
        if source.is_shard() and not target.is_shard():
            gathering.append(m)
        else:
            others.append(m)
    pending = gathering + others

    # One mesh dimension after the other takes its new placement, each when no other one is in its way.
    while pending:
        free = [m for m in pending if _is_free(spec, m, placements[m])]
        m = free[0] if free else pending[0]
        # Where none is free, two mesh dimensions swap their tensor dimensions. One is gathered to make room, and takes
        # its new placement in a later round.
        is_swap = not free and spec.placements[m].is_shard()
        if is_swap:
            local, spec = _gather(local, spec, m)
        else:
            pending.remove(m)
            local, spec = _change(local, spec, m, placements[m], sizes.get(m))
    return local, spec


def _is_free(spec, m, target):
    """Tell whether no mesh dimension but m splits the dimension that m is to split."""
    if not target.is_shard():
        return True
    split_by = mesh_dims_of(spec.dims[target.dim])
    return split_by <= {m}


def _change(local, spec, m, target, sizes):
    """(local, spec) after mesh dimension m has its new placement, `target`.

    | from | to Shard | to Replicate | to Partial |
    |---|---|---|---|
    | Shard | all-to-all, for other sizes too | all-gather | all-gather, then as from Replicate |
    | Replicate | each rank cuts out its part | nothing | each rank has an equal term of the sum |
    | Partial | reduce-scatter | all-reduce | nothing |
    """
    source = spec.placements[m]
    group = spec.mesh.groups[m]
    if source == target:
        keeps_sizes = sizes is None or not target.is_shard() or tuple(sizes) == sizes_of(spec)[m]
        if keeps_sizes:
            return local, spec

    # From Shard.
    if source.is_shard() and target.is_shard():
        return _exchange(local, spec, m, target.dim, sizes)
    if source.is_shard():
        local, spec = _gather(local, spec, m)
        if target.is_replicate():
            return local, spec
        return _change(local, spec, m, target, sizes)

    # From Replicate to Partial.
    if target.is_partial():
        term = divided(local, group.size)
        return term, spec.with_dims(spec.dims, (*spec.partial, m))

    # From Partial or Replicate. `summed` is the spec once the terms of the sum are added up.
    other_partial = tuple([p for p in spec.partial if p != m])
    summed = spec.with_dims(spec.dims, other_partial)
    if target.is_replicate():
        return reduce_from_region(local, group), summed
    new, sizes = _cut(summed, target.dim, m, sizes)
    cut = reduce_scatter if source.is_partial() else scatter_to_region
    part = cut(local, target.dim, sizes, group)
    return part, new


def sizes_of(spec: Spec) -> dict[int, Sizes]:
    """{mesh dimension: the sizes of its pieces} of those that split a tensor."""
    every_axis = chain.from_iterable(spec.dims)
    return {axis.mesh_dim: axis.sizes for axis in every_axis if axis.sizes is not None}


def _cut(spec, dim, m, sizes):
    """(spec, sizes) after mesh dimension m splits a dimension. Raises CannotSplit if another one splits it already."""
    if mesh_dims_of(spec.dims[dim]):
        raise CannotSplit(f"dimension {dim} of {spec} is split already: it cannot be split over two mesh dimensions")
    (axis,) = cut_over(spec.mesh, m, spec.shape[dim], sizes)
    return spec.with_axes(dim, (axis,)), axis.sizes


def _gather(local, spec, m):
    """(local, spec) after the axis that mesh dimension m splits is whole again, on every rank of its group.

    The dimension may be a product of axes with a prefix: elements ahead of the product, which the first rank holds.
    """
    dim = spec.placements[m].dim
    axes = spec.dims[dim]
    group = spec.mesh.groups[m]
    place = next(i for i, axis in enumerate(axes) if axis.mesh_dim == m)
    sizes = axes[place].sizes
    gathered_axis = axes[place]._replace(mesh_dim=None, sizes=None)
    new_axes = (*axes[:place], gathered_axis, *axes[place + 1 :])

    # Take the prefix off, and gather the axis as a dimension of its own.
    prefix = axes[0].prefix
    own_prefix = prefix if spec.is_first(axes) else 0
    head = local.narrow(dim, 0, own_prefix)
    is_product = len(axes) > 1
    if is_product:
        local = local.narrow(dim, own_prefix, local.shape[dim] - own_prefix)
        local = torch.unflatten(local, dim, spec.local_axes(axes))  # (..., each axis, ...)
    local = gather_from_region(local, dim + place, sizes, group)
    if is_product:
        last = dim + len(axes) - 1
        local = local.flatten(dim, last)

    # Put the prefix in front again, on each rank that is now a first one: one rank of the group sends it to the others.
    if prefix and spec.is_first(new_axes):
        of_others = [0] * (group.size - 1)
        head = gather_from_region(head, dim, (prefix, *of_others), group)
        local = torch.cat([head, local], dim)
    return local, spec.with_axes(dim, merged(new_axes))


def recut(
    local: Tensor,
    spec: Spec,
    cut: Pieces,
) -> tuple[Tensor, Spec]:
    """The same tensor with other sizes of the pieces of its axes, {mesh dimension: sizes}: one all-to-all for each.

    Unlike redistribute it keeps dimensions that are products of axes.
    """
    # Each axis is a dimension of its own meanwhile.
    every_axis = chain.from_iterable(spec.dims)
    unflattened = spec.with_dims([(axis,) for axis in every_axis])
    local = local.reshape(unflattened.local_shape)  # (each axis of each dimension)
    local, unflattened = redistribute(local, unflattened, unflattened.placements, cut)

    # Each dimension is a product of as many axes as before, with their new sizes.
    new_axes = chain.from_iterable(unflattened.dims)
    dims = []
    for old in spec.dims:
        dims.append(tuple(islice(new_axes, len(old))))
    spec = spec.with_dims(dims)
    return local.reshape(spec.local_shape), spec


def _exchange(local, spec, m, dim, sizes):
    """(local, spec) after mesh dimension m splits `dim`, in other sizes or in place of the dimension that it split.

    Every pair of ranks exchanges a block: from the sender its rows of the old dimension, of these the receiver's rows
    of the new one.
    """
    from torch.distributed.tensor import Shard  # slow to import

    group = spec.mesh.groups[m]
    old = spec.placements[m].dim
    if len(spec.dims[old]) > 1:  # a product of axes is not in one piece
        local, spec = _gather(local, spec, m)
        return _change(local, spec, m, Shard(dim), sizes)
    (before,) = spec.dims[old]
    gathered = spec.with_axes(old, unsplit_axes(before.size))
    new, sizes = _cut(gathered, dim, m, sizes)
    if old == dim:
        # The dimension only changes its sizes, so rows move mostly between neighbours.
        exchange = HaloExchange(local, dim, before.sizes, bounds(sizes), group)
        return exchange.rows(), new

    # Cut this rank's part into a block for each rank. Blocks travel flat, because they differ in shape.
    blocks = local.split(sizes, dim)
    sent = tuple([block.numel() for block in blocks])
    outgoing = concatenated([block.flatten() for block in blocks])
    shape = new.local_shape
    shapes = [(*shape[:old], n, *shape[old + 1 :]) for n in before.sizes]  # of the blocks that arrive
    received = tuple([math.prod(of_block) for of_block in shapes])
    flat = all_to_all(outgoing, sent, received, group)  # (elements,)

    # The blocks arrive in the order of the ranks. Joined, they are whole along the old dimension.
    arrived = []
    for block, of_block in zip(flat.split(received), shapes, strict=True):
        arrived.append(block.view(of_block))
    return torch.cat(arrived, old), new


def as_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence["Placement"],
    shape: Sequence[int],
) -> "DTensor":
    """The contiguous DTensor of a global shape, of which this rank holds `local`. Nothing is communicated."""
    from torch.distributed.tensor import DTensor  # slow to import

    count = len(shape)
    stride = tuple([math.prod(shape[i + 1 :]) for i in range(count)])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def chunks(
    shape: Sequence[int],
    placements: Sequence["Placement"],
    mesh: DeviceMesh,
) -> Pieces:
    """{mesh dimension: sizes of the pieces} of a DTensor."""
    from torch.distributed.tensor import Shard  # slow to import

    # torch cuts as torch.chunk does, which may leave the last ranks without elements.
    pieces = {}
    for m, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces[m] = chunk_sizes_of(shape[placement.dim], mesh.shape[m])
    return pieces


def chunk_sizes_of(size: int, parts: int) -> Sizes:
    """The sizes of the pieces that torch.chunk and DTensor make: (10, 4) -> (3, 3, 3, 1)."""
    piece = -(-size // parts)  # rounded up
    sizes = []
    for i in range(parts):
        left = max(0, size - i * piece)
        sizes.append(min(piece, left))
    return tuple(sizes)
