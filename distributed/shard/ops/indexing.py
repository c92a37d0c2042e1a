"""Indexing, and slices by their names (narrow, split, chunk, unbind, select, index_select), each of which is an index.

Each rank takes its own part of a slice of a split dimension, and nothing is communicated.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from distributed.shard.core.axes import Axes, Axis, mesh_dims_of, prefix_axes, unsplit_axes
from distributed.shard.core.halo import bounds
from distributed.shard.core.operands import redistribute, sum_partial
from distributed.shard.core.plans import Plan, planned, planned_else
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from distributed.shard.ops.along import unshard_dims
from distributed.shard.ops.edges import find_rows
from distributed.shard.ops.lookup import mask_of, masked, rows_of_plain
from distributed.shard.ops.views import without_memory
from distributed.shard.ops.windows import no_outputs

ARRAYS = list, np.ndarray
OF_ELEMENTS = Tensor, range, bool, *ARRAYS  # items of an index that are no numbers or slices
BASIC = {slice, int, NoneType, EllipsisType}  # asked first: isinstance of a class of tensors takes longer
MASKS = torch.bool, torch.uint8
UNKNOWN_NUMBER = "the number of elements that a mask selects is not known"


def plan_of_slices(func: Callable, x: Tensor, index: Any) -> Plan | None:
    """A selection by numbers and slices that is no row of a split dimension: each rank takes its part."""
    items = index if isinstance(index, tuple) else (index,)
    has_tensors = any(isinstance(item, OF_ELEMENTS) for item in items)
    if has_tensors or not isinstance(x, ShardTensor):
        return None
    spec, own_index = locate(func, x, index_items(func, x, index))
    if spec.partial != x.spec.partial or own_index is None:
        return None
    return Plan(lambda part, index: part[own_index], spec)


@rule(Tensor.__getitem__)
@planned_else(plan_of_slices)
def getitem(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Index with numbers, slices, None and Ellipsis, with tensors and lists, or with a mask.

    One row of a split dimension is a partial tensor: its owner holds the row, the other ranks hold zeros. For a tensor
    of indices a split dimension is made whole, and what it finds is split evenly.
    """
    if not isinstance(x, ShardTensor):
        return rows_of_plain(func, x, index)
    mask = mask_of(x, index)
    if mask is not None:
        return masked(func, x, mask)
    # From here on every item stands for one dimension at most.
    x, items = _without_masks(func, x, index_items(func, x, index))
    of_dims = [item for item in items if item is not None]
    indexed_by_tensors = [dim for dim, item in enumerate(of_dims) if isinstance(item, Tensor)]
    given = index if isinstance(index, tuple) else (index,)
    may_be_constant = not any(isinstance(item, ShardTensor) for item in given)
    if may_be_constant and len(indexed_by_tensors) == 1 and x.spec.is_split(indexed_by_tensors[0]):
        (dim,) = indexed_by_tensors
        takes_all = all(item == slice(None) for d, item in enumerate(items) if d != dim)
        x = sum_partial(x)
        found = find_rows(x, dim, items[dim]) if takes_all else None
        if found is not None:
            return found
    before = x.spec
    x = unshard_dims(x, indexed_by_tensors)
    spec, local_index = locate(func, x, items)
    is_row = spec.partial != x.spec.partial
    if is_row and x.dtype == torch.bool:  # a partial tensor is a sum, which bool does not have
        numbers = dispatch(Tensor.to, x, torch.uint8)
        return dispatch(Tensor.bool, getitem(func, numbers, tuple(items)))
    is_elsewhere = local_index is None
    part = no_outputs(local(x), spec.local_shape) if is_elsewhere else x[local_index]
    selected = wrap(part, spec)
    if any(map(before.is_split, indexed_by_tensors)):
        selected = split_rows(selected, before, x.spec, _first_indexed_dim(items))

    # A change in place of the row changes the tensor with it: see elementwise.change_row.
    is_view = not indexed_by_tensors
    if is_row and is_view and not torch.compiler.is_compiling():
        selected.row_of = x
        selected.is_own_row = not is_elsewhere
    return selected


def split_rows(selected: ShardTensor, before: Spec, whole: Spec, dim: int) -> ShardTensor:
    """Split what was found at dimension dim evenly over a mesh dimension that split the rows it was looked up in.

    before, whole: specs of the tensor of these rows, and of the tensor once they were whole.
    """
    placements: Any = list(selected.spec.placements)
    moved = [m for m, placement in enumerate(before.placements) if placement != whole.placements[m]]
    for m in moved:
        placements[m] = Replicate()
    placements[moved[0]] = Shard(dim)
    return redistribute(selected, placements)


def index_items(func: Callable, x: ShardTensor, index: Any) -> list[Any]:
    """The normal form of an index: a slice, a number, a tensor of indices or a mask for dimensions of x, and None.

    The items stand for all dimensions, a mask for as many as it has, and None for a new one. Raises IndexError for too
    many items, and no_rule for a mask of no dimension.
    """
    given = index if isinstance(index, tuple) else (index,)
    items = [_index_item(func, x, item) for item in given]
    count = len(x.spec.dims)
    missing = count - sum([dims_taken(item) for item in items if item is not Ellipsis])
    if missing < 0:
        raise IndexError(f"too many indices for tensor of dimension {count}")
    # Slices of all rows stand in the place of an Ellipsis, or at the end.
    places = [place for place, item in enumerate(items) if item is Ellipsis]
    place = places[0] if places else len(items)
    all_rows = [slice(None)] * missing
    return [*items[:place], *all_rows, *items[place + 1 :]]


def _index_item(func, x, item):
    """An item of an index as a slice, a number, a tensor of indices, a mask, None or Ellipsis."""
    if type(item) in BASIC:
        return item
    # torch takes lists, ranges and arrays for tensors of indices.
    if isinstance(item, range):
        item = list(item)
    if isinstance(item, ARRAYS):
        item = torch.as_tensor(item)
    is_tensor = isinstance(item, Tensor)
    if is_tensor and item.dim() > 0:
        return item
    if isinstance(item, bool) or (is_tensor and item.dtype in MASKS):
        raise no_rule(func, (x,), {}, UNKNOWN_NUMBER)
    return item.__index__()


def dims_taken(item: Any) -> int:
    """Number of dimensions of a tensor that an item of an index stands for."""
    if type(item) in BASIC:
        return int(item is not None)
    return item.dim() if item.dtype in MASKS else 1


def _without_masks(func: Callable, x: ShardTensor, items: Sequence[Any]) -> tuple[ShardTensor, list[Any]]:
    """(x, items) where plain indices of rows take the place of masks, and one dimension of x that of several's."""
    result = []
    dim = 0  # of x, at which the item stands
    for item in items:
        if type(item) in BASIC:
            result.append(item)
            dim += item is not None
            continue
        if isinstance(item, ShardTensor):
            if item.spec.split_dims:
                raise no_rule(func, (x, item), {}, "indices that are split; take their full_tensor()")
            item = local(sum_partial(item))
        if item.dtype == torch.bool:
            end = dim + item.dim()
            if item.shape != x.spec.shape[dim:end]:
                raise IndexError(f"a mask of {tuple(item.shape)} does not fit a tensor of {tuple(x.spec.shape)}")
            if item.dim() > 1:
                x = dispatch(torch.flatten, x, dim, end - 1)
                item = item.reshape(-1)
            item = item.nonzero().squeeze(1)
        if item.dtype in MASKS:
            raise no_rule(func, (x,), {}, UNKNOWN_NUMBER)
        result.append(item.to(x.device))
        dim += 1
    return x, result


def locate(
    func: Callable,
    x: ShardTensor,
    items: Sequence[Any],
) -> tuple[Spec, tuple | None]:
    """(spec of x[items], index into this rank's part; None if another rank holds the selected row).

    items: as index_items gives them, without masks. Raises IndexError for a number out of bounds, and no_rule for a
    tensor of indices in a split dimension.
    """
    spec = x.spec
    dims: list[Axes] = []  # of the selection
    local_index: list[Any] = []
    partial = list(spec.partial)
    is_here = True  # whether this rank holds the selected rows
    dim = 0  # of x, at which the item stands
    for item in items:
        if item is None:
            dims.append(())
            local_index.append(None)
            continue
        if isinstance(item, slice):
            axes, own = _sliced(func, x, dim, item)
            dims.append(axes)
        elif isinstance(item, Tensor):
            if spec.is_split(dim):
                raise no_rule(func, (x,), {}, f"a tensor of indices, and dimension {dim} is split")
            own = item
        else:
            size = spec.shape[dim]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {size}")
            # A row of a split dimension is a sum over the ranks: one has the row, the others zeros.
            partial += mesh_dims_of(spec.dims[dim])
            place = _place(spec, dim, item % size)
            is_here = is_here and place is not None
            own = place or 0
        local_index.append(own)
        dim += 1

    # Tensors of indices broadcast against each other, and the dimensions of their result stand in their place.
    index_shapes = [item.shape for item in items if isinstance(item, Tensor)]
    if index_shapes:
        first = _first_indexed_dim(items)
        new_shape = torch.broadcast_shapes(*index_shapes)
        dims[first:first] = map(unsplit_axes, new_shape)
    selection = spec.with_dims(dims, tuple(sorted(partial)))
    return selection, tuple(local_index) if is_here else None


def _first_indexed_dim(items: Sequence[Any]) -> int:
    """The dimension of the selection at which the result of its tensors of indices begins.

    It is that of the first tensor; as in numpy it is 0 where tensors do not stand side by side.
    """
    of_dims = [item for item in items if not isinstance(item, int)]  # a number leaves no dimension
    places = [place for place, item in enumerate(of_dims) if isinstance(item, Tensor)]
    are_adjacent = places[-1] - places[0] < len(places)
    return places[0] if are_adjacent else 0


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
    is_of_prefix = prefix and stop <= prefix
    if is_of_prefix:
        own_slice = slice(start, stop, step) if is_first else slice(0, 0)
        return prefix_axes(axes, size), own_slice
    keeps_the_rest = prefix and start <= prefix and stop == length and step == 1
    if keeps_the_rest:
        outer, *inner = axes
        outer = outer._replace(prefix=prefix - start)
        own_start = start if is_first else 0
        return (outer, *inner), slice(own_start, None)

    # One axis: each rank takes what lies in its piece.
    old_sizes, group = spec.split(dim)
    sizes = []  # of the selection, on each rank
    slices = []  # of each rank's part
    for begin, end in bounds(old_sizes):
        # The first selected row of the piece: the steps go on from the pieces before it.
        skipped = (start - begin) % step
        first = start if start >= begin else begin + skipped
        last = min(stop, end)
        selected = range(first, last, step)
        sizes.append(len(selected))
        last = max(last, first)
        slices.append(slice(first - begin, last - begin, step))
    axis = Axis(size, axes[0].mesh_dim, tuple(sizes))
    return (axis,), slices[group.rank]


def _place(spec, dim, index):
    """The position of a global index in this rank's piece of a dimension; None if another rank holds it."""
    axes = spec.dims[dim]
    prefix = axes[0].prefix if axes else 0
    is_first = not axes or spec.is_first(axes)
    if index < prefix:
        return index if is_first else None
    # The index in the product of axes has a coordinate along each axis, as a row-major index has along dimensions.
    # Those in this rank's pieces of the axes give the position in the product of its pieces.
    index -= prefix
    place = 0
    inner = spec.shape[dim] - prefix  # elements of the axes inside of this one
    for axis in axes:
        inner //= axis.size
        coordinate = index // inner % axis.size
        own_coordinate = coordinate - spec.offset(axis)
        (own_size,) = spec.local_axes((axis,))
        if not 0 <= own_coordinate < own_size:
            return None
        place = place * own_size + own_coordinate
    return place + prefix if is_first else place


def index_in(x: ShardTensor, dim: int, item: Any) -> tuple:
    """The index that selects `item` in a dimension of x, and all of the others: x.select(1, 3) is x[:, 3]."""
    dim = dim % len(x.spec.dims)
    all_rows = [slice(None)] * dim
    return (*all_rows, item)


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
    end = start + length
    if not 0 <= start <= end <= size:
        raise RuntimeError(f"narrow: rows {start} to {end} of {size}")
    index = index_in(input, dim, slice(start, end))
    return getitem(func, input, index)


@rule(*named("unbind"))
@planned
def unbind(func: Callable, input: ShardTensor, dim: int = 0) -> Plan:
    """All rows of a dimension, each without it: partial tensors where it is split."""
    spec = input.spec
    dim = dim % len(spec.dims)
    count = spec.shape[dim]
    if not spec.is_split(dim):
        before = spec.dims[:dim]
        behind = spec.dims[dim + 1 :]
        return Plan(func, [spec.with_dims([*before, *behind])] * count)

    def rows(x: ShardTensor, *args: Any, **kwargs: Any) -> tuple[ShardTensor, ...]:
        return tuple([getitem(func, x, index_in(x, dim, i)) for i in range(count)])

    return Plan(rows, None)


PIECES = named("split", "split_with_sizes", "tensor_split", "chunk")
PIECES += named("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")


@rule(*PIECES)
@planned
def pieces(func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> Plan:
    """Pieces of a dimension; each rank holds its own part of every piece."""
    # dim may stand behind the sizes, or the number, of the pieces.
    by_position = args[1] if len(args) > 1 else 0
    dim = kwargs.get("dim", by_position) % len(input.spec.dims)
    specs = []
    own_sizes = []
    first = 0
    for piece in func(without_memory(input.spec.shape), *args, **kwargs):
        last = first + piece.shape[dim]
        items = index_items(func, input, index_in(input, dim, slice(first, last)))
        spec, _ = locate(func, input, items)
        specs.append(spec)
        own_sizes.append(spec.local_shape[dim])
        first = last

    def compute(part: Tensor, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        return part.split_with_sizes(own_sizes, dim)

    return Plan(compute, specs)


@rule(*named("select"))
def select(
    func: Callable,
    input: ShardTensor,
    dim: int,
    index: Any,
) -> ShardTensor:
    """One row, without its dimension."""
    return getitem(func, input, index_in(input, dim, int(index)))


@rule(*named("index_select"))
def index_select(
    func: Callable,
    input: ShardTensor,
    dim: int,
    index: Tensor,
) -> ShardTensor:
    """Some rows, by their indices."""
    return getitem(func, input, index_in(input, dim, index.reshape(-1)))
