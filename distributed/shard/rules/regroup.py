"""Axes in a new shape: how a reshape regroups the axes of a tensor, and where it must cut pieces of other sizes.

A dimension is a product of axes (axes.py). A reshape joins axes to one dimension, or breaks an axis up: 24 rows, split
12 and 12, become windows of 4 rows as an outer axis of 6 windows, split 3 and 3, and an inner axis of 4 whole rows.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise

from distributed.collectives import Sizes
from distributed.shard.axes import Axes, Axis, check_order, merged, mesh_dims_of

Cut = dict[int, Sizes]  # {mesh dimension: sizes that its ranks must have before the reshape}


def regrouped(
    axes: Iterable[Axis],
    shape: Sequence[int],
    cut: Cut,
) -> tuple[Axes, ...] | None:
    """The axes of each dimension of a new `shape` with the same elements in the same order.

    axes: of all old dimensions, without prefixes. If the new shape breaks up pieces of a split axis, `cut` receives the
    sizes that its pieces must have. Returns None if no sizes would do.
    """
    # Axes are taken from the outermost on, until their product is the size of the new dimension.
    remaining = list(axes)[::-1]  # the outermost axis is the last of the list
    dims = []
    for size in shape:
        taken = []
        missing = size  # factor of the size that the taken axes still lack
        while missing != 1:
            if not remaining:
                return None
            axis = remaining.pop()
            if axis.order is not None and axis.size == missing:  # all rows, and the mesh dimensions that hold them
                taken.append(axis)
                while remaining and remaining[-1].order is axis.order:
                    taken.append(remaining.pop())
                break
            check_order((axis,))
            if missing == 0:  # take all axes up to one without elements
                taken.append(axis)
                missing = 1 if axis.size == 0 else 0
            elif axis.size and missing % axis.size == 0:
                # The whole axis is a factor of the dimension.
                taken.append(axis)
                missing //= axis.size
            elif axis.size and axis.size % missing == 0:
                # Break up the axis: its inner part belongs to the next dimension.
                inner = axis.size // missing
                outer_sizes = None
                if axis.sizes is not None:
                    # A piece must end where a row of the outer axis does.
                    sizes = _multiples(axis.sizes, inner)
                    if sizes != axis.sizes:
                        cut[axis.mesh_dim] = sizes
                    outer_sizes = tuple([n // inner for n in sizes])
                taken.append(Axis(missing, axis.mesh_dim, outer_sizes))
                remaining.append(Axis(inner))
                missing = 1
            else:
                return None
        dims.append(taken)
    check_order(remaining)
    if mesh_dims_of(remaining):  # a split axis of size 1 at the end
        if not dims:
            return None
        dims[-1] += remaining[::-1]
    return tuple([merged(taken) for taken in dims])


def _multiples(sizes, n):
    """The sizes nearest to `sizes` that are multiples of n and have the same sum: (6, 10) of n = 4 -> (8, 8)."""
    ends = [0]
    for end in accumulate(sizes):
        multiple = (end + n // 2) // n
        ends.append(multiple * n)
    return tuple([b - a for a, b in pairwise(ends)])


def regrouped_with_prefix(
    dims: Sequence[Axes],
    shape: Sequence[int],
    at: int,
    cut: Cut,
) -> tuple[Axes, ...] | None:
    """As `regrouped`, where dimension `at` is a product of axes with a prefix: class tokens ahead of tiles.

    dims: the axes of each old dimension. The dimensions in front of `at` and those from it on are regrouped apart, and
    the prefix stays in front of one new dimension. Returns None where that cannot be.
    """
    in_front = _flat_axes(dims[:at])
    axes = _flat_axes(dims[at:])
    behind = _flat_axes(dims[at + 1 :])

    # The new dimension that begins where dimension `at` does: it receives the elements ahead.
    front_size = _size_of(in_front)
    candidates = []
    for i, n in enumerate(shape):
        begins_there = math.prod(shape[:i]) == front_size
        if begins_there and n != 1:
            candidates.append(i)
    if not candidates or mesh_dims_of(behind):
        return None
    place = candidates[0]

    # The dimensions are regrouped without the elements ahead, then these are put in front of the new dimension.
    inner_shape = shape[place + 1 :]
    inner = math.prod(inner_shape)
    prefix = axes[0].prefix * _size_of(behind)
    outer = _size_of(axes) // max(inner, 1)
    without_prefix = [axes[0]._replace(prefix=0), *axes[1:]]
    new = regrouped(without_prefix, (outer, *inner_shape), cut)
    before = regrouped(in_front, shape[:place], cut)
    if before is None or new is None or not new[0] or cut:
        return None
    prefix_rows = prefix // inner
    has_whole_rows = prefix % inner == 0
    if not has_whole_rows or outer + prefix_rows != shape[place]:
        return None
    first, *others = new[0]
    first = first._replace(prefix=prefix_rows)
    return (*before, (first, *others), *new[1:])


def _flat_axes(dims):
    """The axes of several dimensions, in order."""
    return list(chain.from_iterable(dims))


def _size_of(axes):
    """The number of elements of a product of axes, without those ahead."""
    sizes = [axis.size for axis in axes]
    return math.prod(sizes)
