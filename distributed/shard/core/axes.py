"""Axes: what the dimensions of a split tensor are made of.

Every dimension is a product of *axes*, outermost first. An axis is either whole on every rank, or split over one
dimension of the mesh into contiguous pieces of any sizes, including 0. Each dimension of an image has one axis. If
(H, W) is flattened, the result is one dimension with two axes. The tokens of a tile therefore remember their rows and
columns, and can be unflattened exactly. A class token stands *ahead* of such a product: the first of the ranks among
which the axes are split holds it, and the outermost axis counts it as its prefix.

The rows of a dimension may also lie on the ranks in any way, such as the edges of a graph, each where its node is. Its
outermost axis then has an Order (order.py), and all others, of size 1, name the further mesh dimensions. No piece is
contiguous, so what needs contiguous pieces raises OutOfOrder, and is computed once the rows are in order.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from distributed.collectives import Sizes


class OutOfOrder(Exception):
    """Rows that lie on the ranks in an Order of their own, for a function that needs contiguous pieces."""


class Axis(NamedTuple):
    """A number of elements; if mesh_dim is not None, rank i of that mesh dimension holds sizes[i] of them."""

    size: int
    mesh_dim: Any = None  # an int if sizes are given
    sizes: Sizes | None = None
    prefix: int = 0  # of the outermost of several axes: elements in front of their product
    order: Any = None  # an Order, of rows that are not in contiguous pieces


Axes = tuple[Axis, ...]  # of one dimension, outermost first; none for a whole dimension of size 1


def mesh_dims_of(*dims: Iterable[Axis]) -> set[int]:
    """The mesh dimensions that split any of the axes of some dimensions."""
    return {axis.mesh_dim for axis in chain(*dims) if axis.sizes is not None}


def has_order(axes: Iterable[Axis]) -> bool:
    """Tell whether the rows of a dimension with these axes lie on the ranks in an Order of their own."""
    return any(axis.order is not None for axis in axes)


def check_order(axes: Iterable[Axis]) -> None:
    """Raise OutOfOrder where the pieces of these axes are not contiguous."""
    if has_order(axes):
        raise OutOfOrder


def unsplit_axes(size: int) -> Axes:
    """The axes of a dimension that is not split: one, or none for a size of 1, which broadcasts."""
    return (Axis(size),) if size != 1 else ()


def merged(axes: Iterable[Axis]) -> Axes:
    """The same dimension in as few axes as possible: an axis that is whole joins the axis outside of it.

    (12 rows split 8 and 4) x (5 whole columns) -> (60 elements split 40 and 20). If one axis is left, its prefix joins
    it, in the piece of the first rank.
    """
    result: list[Axis] = []
    for axis in axes:
        is_split = axis.sizes is not None
        if axis.size == 1 and not is_split and not axis.prefix:
            continue
        if result and not is_split:  # pieces of the outer axis stay contiguous
            check_order(result)
            outer = result[-1]
            sizes = outer.sizes and tuple([n * axis.size for n in outer.sizes])
            result[-1] = outer._replace(size=outer.size * axis.size, sizes=sizes)
        else:
            result.append(axis)
    has_one_axis = len(result) == 1
    if has_one_axis and result[0].prefix:
        size, mesh_dim, sizes, prefix, _ = result[0]
        if sizes:  # the first rank holds the prefix
            first, *others = sizes
            sizes = (first + prefix, *others)
        return (Axis(size + prefix, mesh_dim, sizes),)
    return tuple(result)


def prefix_axes(axes: Axes, count: int) -> Axes:
    """The axes of `count` elements, all of which the first of the ranks holds among which `axes` are split."""
    check_order(axes)
    result: list[Axis] = []
    for axis in axes:
        if axis.sizes is None:
            continue
        # The outermost axis has all elements, each other one a single element.
        size = 1 if result else count
        of_others = [0] * (len(axis.sizes) - 1)
        sizes = (size, *of_others)
        result.append(Axis(size, axis.mesh_dim, sizes))
    return tuple(result)
