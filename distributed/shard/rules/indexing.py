"""Indexing: each rank takes its own part of a slice of a split dimension, and nothing is communicated."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from distributed.halo import bounds
from distributed.shard.operands import sum_partial
from distributed.shard.rules.along import unshard_dims
from distributed.shard.rules.lookup import mask_of, masked, rows_of_plain
from distributed.shard.rules.windows import no_outputs
from distributed.shard.spec import Axes, Axis, Spec, mesh_dims_of, prefix_axes, shard_sizes, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(Tensor.__getitem__)
def getitem(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Index with numbers, slices, None and Ellipsis, with tensors and lists, or with a mask.

    One row of a split dimension is a partial tensor: its owner holds the row, the other ranks hold zeros. For a tensor
    of indices a split dimension is made whole.
    """
    if not isinstance(x, ShardTensor):
        return rows_of_plain(func, x, index)
    mask = mask_of(x, index)
    if mask is not None:
        return masked(func, x, mask)
    x, index = _flatten_masks(x, index)
    items = index_items(func, x, index)
    of_dims = enumerate(item for item in items if item is not None)
    x = unshard_dims(x, [dim for dim, item in of_dims if isinstance(item, Tensor)])
    spec, local_index = locate(func, x, items)
    is_row = spec.partial != x.spec.partial
    if is_row and x.dtype == torch.bool:  # a partial tensor is a sum, which bool does not have
        numbers = dispatch(Tensor.to, x, torch.uint8)
        return dispatch(Tensor.bool, getitem(func, numbers, index))
    is_elsewhere = local_index is None
    part = no_outputs(local(x), spec.local_shape) if is_elsewhere else x[local_index]
    selected = wrap(part, spec)
    is_view = not any(isinstance(item, Tensor) for item in items)
    if is_row and is_view and not torch.compiler.is_compiling():
        selected.row_of = x
        selected.is_own_row = not is_elsewhere
    return selected


def _flatten_masks(x: ShardTensor, index: Any) -> tuple[ShardTensor, Any]:
    """The tensor and the index with each plain mask of several dimensions, and those dimensions, made one."""
    if not isinstance(index, tuple):
        return x, index
    items = list(index)
    ahead = 0  # dimensions in front of an item
    for number, item in enumerate(items):
        is_mask = type(item) is Tensor and item.dtype == torch.bool and item.dim() > 1
        if item is Ellipsis:
            # What follows is counted from the end.
            behind = sum(dims_taken(other) for other in items[number + 1 :])
            ahead = x.dim() - behind
        elif is_mask:
            if item.shape != x.spec.shape[ahead : ahead + item.dim()]:
                raise IndexError(f"a mask of {tuple(item.shape)} does not fit a tensor of {tuple(x.spec.shape)}")
            x = dispatch(torch.flatten, x, ahead, ahead + item.dim() - 1)
            items[number] = item.reshape(-1)
            ahead += 1
        else:
            ahead += dims_taken(item)
    return x, tuple(items)


def dims_taken(item: Any) -> int:
    """Number of dimensions of a tensor that an item of an index stands for."""
    if item is None:
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0
    return item.dim() if is_mask else 1


def locate(
    func: Callable,
    x: ShardTensor,
    items: Sequence[Any],
) -> tuple[Spec, tuple | None]:
    """(spec of the selection, index into this rank's part; None if another rank holds the selected row)."""
    spec = x.spec
    partial = list(spec.partial)
    dims: list[Axes] = []  # of the selection
    local_index: list[Any] = []
    is_here = True
    dim = 0  # of x, at which the item stands
    shapes: list[torch.Size] = []  # of index tensors, whose dimensions replace the first indexed one
    places: list[int] = []  # of index tensors, in the selection
    at = 0  # where their dimensions go
    for item in items:
        if item is None:
            dims.append(())
        elif isinstance(item, slice):
            axes, item = _sliced(func, x, dim, item)
            dims.append(axes)
        elif isinstance(item, Tensor):
            if spec.is_split(dim):
                raise no_rule(func, (x,), {}, f"a tensor of indices, and dimension {dim} is split")
            if not shapes:
                at = len(dims)
            shapes.append(item.shape)
            places.append(sum(not isinstance(i, int) for i in local_index))
        else:
            size = spec.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            partial += mesh_dims_of(spec.dims[dim])
            place = _place(spec, dim, item % size)
            is_here = is_here and place is not None
            item = place or 0
        local_index.append(item)
        dim += item is not None
    if shapes:
        are_adjacent = places[-1] - places[0] < len(places)
        if not are_adjacent:
            at = 0
        dims[at:at] = [unsplit_axes(n) for n in torch.broadcast_shapes(*shapes)]
    selection = spec.with_dims(dims, tuple(sorted(partial)))
    return selection, tuple(local_index) if is_here else None


def index_items(func: Callable, x: ShardTensor, index: Any) -> list[Any]:
    """A slice, a number or an index tensor for each dimension of x, and None for each new dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        items[i] = _index_item(func, x, item)
    count = len(x.spec.dims)
    missing = count - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {count}")
    # Slices of all rows stand in the place of an Ellipsis, or at the end.
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


def _index_item(func, x, item):
    """An item of an index as a slice, a number, a plain index tensor, None or Ellipsis."""
    if isinstance(item, list | range):
        item = torch.as_tensor(list(item))
    if isinstance(item, ShardTensor):
        if item.spec.split_dims:
            raise no_rule(func, (x, item), {}, "indices that are split; take their full_tensor()")
        item = local(sum_partial(item))
    is_tensor = isinstance(item, Tensor)
    if is_tensor and item.dtype == torch.bool and item.dim() == 1:
        item = item.nonzero().squeeze(1)
    is_mask = is_tensor and item.dtype in (torch.bool, torch.uint8)
    if is_mask or isinstance(item, bool):
        raise no_rule(func, (x,), {}, "the number of elements that a mask selects is not known")
    if is_tensor and item.dim() > 0:
        return item.to(x.device)
    if item is None or item is Ellipsis or isinstance(item, int | slice):
        return item
    return item.__index__()


def _sliced(func, x, dim, item):
    """(axes of the result, slice of the local tensor) for a slice of a dimension."""
    spec = x.spec
    axes = spec.dims[dim]
    length = spec.shape[dim]
    if item == slice(None):
        return axes, item
    start, stop, step = item.indices(length)
    if step < 1:
        raise ValueError("step must be greater than zero")
    size = len(range(start, stop, step))
    if size == length:
        return axes, slice(None)
    if not spec.is_split(dim):
        return unsplit_axes(size), slice(start, stop, step)

    # Elements ahead of a product of axes: the first rank holds them.
    prefix = axes[0].prefix
    is_first = spec.is_first(axes)
    if prefix and stop <= prefix:
        return prefix_axes(axes, size), slice(start, stop, step) if is_first else slice(0, 0)
    if prefix and start <= prefix and stop == length and step == 1:
        left = axes[0]._replace(prefix=prefix - start)
        return (left, *axes[1:]), slice(start if is_first else 0, None)

    # One axis: each rank takes what lies in its piece.
    old, group = spec.split(dim)
    sizes = []
    pieces = []
    for begin, end in bounds(old):
        # The first selected row of the piece.
        first = start if start >= begin else begin + (start - begin) % step
        last = min(stop, end)
        sizes.append(len(range(first, last, step)))
        pieces.append(slice(first - begin, max(last, first) - begin, step))
    axis = Axis(size, axes[0].mesh_dim, tuple(sizes))
    return (axis,), pieces[group.rank]


def _place(spec, dim, index):
    """The position of a global index in this rank's piece of a dimension; None if another rank holds it."""
    axes = spec.dims[dim]
    prefix = axes[0].prefix if axes else 0
    is_first = not axes or spec.is_first(axes)
    if index < prefix:
        return index if is_first else None
    index -= prefix
    place = 0
    inner = spec.shape[dim] - prefix  # elements of the axes inside of this one
    for axis in axes:
        inner //= axis.size
        at = index // inner % axis.size - spec.offset(axis)
        (size,) = spec.local_axes((axis,))
        if not 0 <= at < size:
            return None
        place = place * size + at
    return place + prefix if is_first else place


def at(x: ShardTensor, dim: int, item: Any) -> tuple:
    """The index of `item` in a dimension of x."""
    return (*[slice(None)] * (dim % len(x.spec.dims)), item)


@rule(*named("narrow"))
def narrow(
    func: Callable,
    input: ShardTensor,
    dim: int,
    start: Any,
    length: int,
) -> ShardTensor:
    """A slice of rows. start may be a tensor with one number."""
    dim = dim % len(input.spec.dims)
    size = input.spec.shape[dim]
    start = int(start)
    if start < 0:
        start += size
    if not 0 <= start <= start + length <= size:
        raise RuntimeError(f"narrow: rows {start} to {start + length} of {size}")
    return getitem(func, input, at(input, dim, slice(start, start + length)))


@rule(*named("unbind"))
def unbind(func: Callable, input: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    """All rows, each without its dimension. Rows of a split dimension are partial tensors."""
    spec = input.spec
    dim = dim % len(spec.dims)
    if spec.is_split(dim):
        rows = range(spec.shape[dim])
        return tuple([getitem(func, input, at(input, dim, i)) for i in rows])

    def without_dim() -> Spec:
        return spec.with_dims([*spec.dims[:dim], *spec.dims[dim + 1 :]])

    left = spec.derived(("unbind", dim), without_dim)
    return tuple([wrap(part, left) for part in input.unbind(dim)])


@rule(*named("split", "split_with_sizes"))
def split(
    func: Callable,
    tensor: ShardTensor,
    *args: Any,
    dim: int = 0,
    **named_sizes: Any,
) -> tuple[ShardTensor, ...]:
    """Split into pieces. Along a split dimension each rank holds its own part of every piece."""
    sizes, dim = (*args, *named_sizes.values(), dim)[:2]
    dim = dim % len(tensor.spec.dims)
    size = tensor.spec.shape[dim]
    if isinstance(sizes, int):
        each = sizes
        sizes = [min(each, size - first) for first in range(0, size, each)] or [0]
    if sum(sizes) != size:
        raise RuntimeError(f"split: sizes {list(sizes)} do not make up dimension {dim} of {size}")
    cuts = list(accumulate(sizes))[:-1]
    return tensor_split(func, tensor, cuts, dim)


@rule(*named("tensor_split"))
def tensor_split(
    func: Callable, input: ShardTensor, *args: Any, dim: int = 0, **named_cuts: Any
) -> tuple[ShardTensor, ...]:
    """Split into pieces as even as possible, or at given rows."""
    cuts, dim = (*args, *named_cuts.values(), dim)[:2]
    size = input.spec.shape[dim]
    dim = dim % len(input.spec.dims)
    if isinstance(cuts, int):  # a number of pieces
        *cuts, _ = accumulate(shard_sizes(size, cuts))
    ends = [0, *cuts, size]
    pieces = []
    for first, last in pairwise(ends):
        pieces.append(getitem(func, input, at(input, dim, slice(first, last))))
    return tuple(pieces)


@rule(*named("select"))
def select(func: Callable, input: ShardTensor, dim: int, index: Any) -> ShardTensor:
    """One row, without its dimension."""
    return getitem(func, input, at(input, dim, int(index)))


@rule(*named("index_select"))
def index_select(func: Callable, input: ShardTensor, dim: int, index: Tensor) -> ShardTensor:
    """Some rows, by their indices."""
    return getitem(func, input, at(input, dim, index.reshape(-1)))


@rule(*named("chunk"))
def chunk(
    func: Callable,
    input: ShardTensor,
    chunks: int,
    dim: int = 0,
) -> tuple[ShardTensor, ...]:
    """Split into pieces of one size, of which the last may be shorter."""
    size = input.spec.shape[dim]
    sizes = -(-size // chunks) if size else [0] * chunks
    return split(func, input, sizes, dim)
