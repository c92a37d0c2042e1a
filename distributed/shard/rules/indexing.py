"""Indexing: each rank takes its own part of a slice of a split dimension, and nothing is communicated."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from distributed.halo import bounds
from distributed.shard.operands import reduced
from distributed.shard.rules.along import made_whole
from distributed.shard.rules.lookup import mask_of, masked, rows_of_plain
from distributed.shard.rules.windows import no_outputs
from distributed.shard.spec import Axes, Axis, Spec, ahead_of, over, shard_sizes, whole
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(Tensor.__getitem__)
def getitem(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Index with numbers, slices, None and Ellipsis, with tensors and lists, or with a mask.

    One row of a split dimension is a partial tensor: its owner holds the row, the other ranks hold zeros. For a tensor
    of indices a split dimension is made whole.
    """
    if not isinstance(x, ShardTensor):
        return rows_of_plain(func, x, index)
    if (mask := mask_of(x, index)) is not None:
        return masked(func, x, mask)
    x, index = _flatten_masks(x, index)
    items = index_items(func, x, index)
    of_dims = enumerate(item for item in items if item is not None)
    x = made_whole(x, [dim for dim, item in of_dims if isinstance(item, Tensor)])
    spec, local_index = locate(func, x, items)
    is_row = spec.partial != x.spec.partial
    if is_row and x.dtype == torch.bool:  # a partial tensor is a sum, which bool does not have
        return dispatch(Tensor.bool, getitem(func, dispatch(Tensor.to, x, torch.uint8), index))
    is_elsewhere = local_index is None
    selected = wrap(no_outputs(local(x), spec.local_shape) if is_elsewhere else x[local_index], spec)
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
    spec, partial = x.spec, list(x.spec.partial)
    dims: list[Axes] = []
    local_index: list[Any] = []
    owned, dim = True, 0
    shapes: list[torch.Size] = []
    places, at = [], 0  # of index tensors: their dimensions replace the first indexed one
    for item in items:
        if item is None:
            dims.append(())
        elif isinstance(item, slice):
            axes, item = _sliced(func, x, dim, item)
            dims.append(axes)
        elif isinstance(item, Tensor):
            if spec.is_split(dim):
                raise no_rule(func, (x,), {}, f"a tensor of indices, and dimension {dim} is split")
            at = at if shapes else len(dims)
            shapes.append(item.shape)
            places.append(sum(not isinstance(i, int) for i in local_index))
        else:
            size = spec.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            partial += over(spec.dims[dim])
            place = _place(spec, dim, item % size)
            owned, item = owned and place is not None, place or 0
        local_index.append(item)
        dim += item is not None
    if shapes:
        at = at if places[-1] - places[0] < len(places) else 0  # in front, if index tensors are not adjacent
        dims[at:at] = [whole(n) for n in torch.broadcast_shapes(*shapes)]
    return spec.with_dims(dims, tuple(sorted(partial))), tuple(local_index) if owned else None


def index_items(func: Callable, x: ShardTensor, index: Any) -> list[Any]:
    """A slice, a number or an index tensor for each dimension of x, and None for each new dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if isinstance(item, list | range):
            items[i] = item = torch.as_tensor(list(item))
        if isinstance(item, ShardTensor):
            if item.spec.split_dims:
                raise no_rule(func, (x, item), {}, "indices that are split; take their full_tensor()")
            items[i] = item = local(reduced(item))
        if isinstance(item, Tensor) and item.dtype == torch.bool and item.dim() == 1:
            items[i] = item = item.nonzero().squeeze(1)
        if isinstance(item, bool) or (isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)):
            raise no_rule(func, (x,), {}, "the number of elements that a mask selects is not known")
        if isinstance(item, Tensor) and item.dim() > 0:
            items[i] = item.to(x.device)
        elif item is not None and item is not Ellipsis and not isinstance(item, int | slice):
            items[i] = item.__index__()
    missing = len(x.spec.dims) - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {len(x.spec.dims)}")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]


def _sliced(func, x, dim, item):
    """(axes of the result, slice of the local tensor) for a slice of a dimension."""
    spec = x.spec
    if item == slice(None):
        return spec.dims[dim], item
    start, stop, step = item.indices(spec.shape[dim])
    if step < 1:
        raise ValueError("step must be greater than zero")
    size = len(range(start, stop, step))
    if size == spec.shape[dim]:
        return spec.dims[dim], slice(None)
    if not spec.is_split(dim):
        return whole(size), slice(start, stop, step)
    ahead, first = spec.dims[dim][0].ahead, spec.is_first(spec.dims[dim])
    if ahead and stop <= ahead:
        return ahead_of(spec.dims[dim], size), slice(start, stop, step) if first else slice(0, 0)
    if start <= ahead and stop == spec.shape[dim] and step == 1 and ahead:
        left = spec.dims[dim][0]._replace(ahead=ahead - start)
        return (left, *spec.dims[dim][1:]), slice(start if first else 0, None)
    old, group = spec.split(dim)
    sizes, pieces = [], []
    for begin, end in bounds(old):
        first = start if start >= begin else begin + (start - begin) % step  # the first selected row of the piece
        last = min(stop, end)
        sizes.append(len(range(first, last, step)))
        pieces.append(slice(first - begin, max(last, first) - begin, step))
    return (Axis(size, spec.dims[dim][0].mesh_dim, tuple(sizes)),), pieces[group.rank]


def _place(spec, dim, index):
    """The position of a global index in this rank's piece of a dimension; None if another rank holds it."""
    ahead, first = (spec.dims[dim][0].ahead, spec.is_first(spec.dims[dim])) if spec.dims[dim] else (0, True)
    if index < ahead:
        return index if first else None
    index, place, inner = index - ahead, 0, spec.shape[dim] - ahead
    for axis in spec.dims[dim]:
        inner //= axis.size
        at = index // inner % axis.size - spec.offset(axis)
        (size,) = spec.local_axes((axis,))
        if not 0 <= at < size:
            return None
        place = place * size + at
    return place + ahead if first else place


def at(x: ShardTensor, dim: int, item: Any) -> tuple:
    """The index of `item` in a dimension of x."""
    return (*[slice(None)] * (dim % len(x.spec.dims)), item)


@rule(*named("narrow"))
def narrow(func: Callable, input: ShardTensor, dim: int, start: Any, length: int) -> ShardTensor:
    """A slice of rows. start may be a tensor with one number."""
    dim = dim % len(input.spec.dims)
    size, start = input.spec.shape[dim], int(start)
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise RuntimeError(f"narrow: rows {start} to {start + length} of {size}")
    return getitem(func, input, at(input, dim, slice(start, start + length)))


@rule(*named("unbind"))
def unbind(func: Callable, input: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    """All rows, each without its dimension. Rows of a split dimension are partial tensors."""
    spec, dim = input.spec, dim % len(input.spec.dims)
    if spec.is_split(dim):
        return tuple([getitem(func, input, at(input, dim, i)) for i in range(spec.shape[dim])])
    left = spec.derived(("unbind", dim), lambda: spec.with_dims([*spec.dims[:dim], *spec.dims[dim + 1 :]]))
    return tuple([wrap(part, left) for part in input.unbind(dim)])


@rule(*named("split", "split_with_sizes"))
def split(func: Callable, tensor: ShardTensor, *args: Any, dim: int = 0, **named_sizes: Any) -> tuple[ShardTensor, ...]:
    """Split into pieces. Along a split dimension each rank holds its own part of every piece."""
    sizes, dim = (*args, *named_sizes.values(), dim)[:2]
    dim = dim % len(tensor.spec.dims)
    size = tensor.spec.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - i) for i in range(0, size, sizes)] or [0]
    if sum(sizes) != size:
        raise RuntimeError(f"split: sizes {list(sizes)} do not make up dimension {dim} of {size}")
    return tensor_split(func, tensor, list(accumulate(sizes))[:-1], dim)


@rule(*named("tensor_split"))
def tensor_split(
    func: Callable, input: ShardTensor, *args: Any, dim: int = 0, **named_cuts: Any
) -> tuple[ShardTensor, ...]:
    """Split into pieces as even as possible, or at given rows."""
    cuts, dim = (*args, *named_cuts.values(), dim)[:2]
    size, dim = input.spec.shape[dim], dim % len(input.spec.dims)
    ends = [0, *accumulate(shard_sizes(size, cuts))] if isinstance(cuts, int) else [0, *cuts, size]
    return tuple([getitem(func, input, at(input, dim, slice(*pair))) for pair in pairwise(ends)])


rule(*named("select"))(lambda func, input, dim, index: getitem(func, input, at(input, dim, int(index))))
rule(*named("index_select"))(lambda func, input, dim, index: getitem(func, input, at(input, dim, index.reshape(-1))))
rule(*named("chunk"))(
    lambda func, input, chunks, dim=0: split(
        func, input, -(-n // chunks) if (n := input.spec.shape[dim]) else [0] * chunks, dim
    )
)
