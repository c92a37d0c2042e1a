"""Assignment to parts of a tensor: x[index] = value, for slices, rows, masks and tensors of indices.

Each rank writes what lies in its part. Nothing is communicated for it, but for values that are split in another way.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from distributed.shard.core.axes import mesh_dims_of, unsplit_axes
from distributed.shard.core.hacks import adopt
from distributed.shard.core.operands import check_writable, gradient_spec, local_operand, sum_partial
from distributed.shard.core.spec import Spec, cut_over
from distributed.shard.core.tensor import ShardTensor, dispatch, local, no_rule, on_shard_tensors, rule, wrap
from distributed.shard.ops.elementwise import is_for_all, take_part
from distributed.shard.ops.indexing import dims_taken, getitem, index_items, locate
from distributed.shard.ops.lookup import mask_of
from utils.torch_private import storage_id


@rule(Tensor.__setitem__)
def setitem(
    func: Callable,
    x: Tensor,
    index: Any,
    value: Any,
) -> None:
    """Assign to slices, rows, masks and tensors of indices; every rank writes its part of the value."""
    if not isinstance(x, ShardTensor) and isinstance(value, ShardTensor):
        value = sum_partial(value)
        if is_for_all(value.spec, (x, value)):
            x[index] = local(value)
            return
        # The plain target becomes a ShardTensor itself, split in such a way that the value needs no exchange.
        target_spec = _spec_of_target(func, x, index, value.spec)
        adopt(func, x, target_spec)
    if not isinstance(x, ShardTensor) or x.spec.partial:
        raise no_rule(func, (x, value), {}, "into a plain or a partial tensor")

    mask = mask_of(x, index)
    selects_elements = mask is not None and mask.dim() == x.dim()
    if selects_elements and not isinstance(value, Tensor):
        dispatch(Tensor.masked_fill_, x, mask, value)
        return
    items = index_items(func, x, index)
    has_places = any(_is_of_places(item) for item in items)
    if has_places:
        _write_places(func, x, items, value)
        return
    _write_slices(func, x, items, value)


def _write_slices(
    func: Callable,
    x: ShardTensor,
    items: list[Any],
    value: Any,
) -> None:
    """Assign to what slices and numbers select."""
    spec, local_index = locate(func, x, items)  # spec: of x[index]
    if isinstance(value, Tensor):
        value = sum_partial(value)
        value = on_shard_tensors(_without_leading_ones, value, len(spec.dims))
        # A row of a split dimension is a partial tensor: only its owner uses its copy of the value.
        value = local_operand(value, gradient_spec(spec), spec)
    # A rank that holds none of the rows still takes part in the backward pass of the value.
    if local_index is None:
        take_part(x, [value])
    elif not _is_in_place(x, local_index, value):
        x[local_index] = value
    check_writable(x)


def _is_in_place(x: Tensor, index: tuple, value: Any) -> bool:
    """Tell whether the value is the very memory that it would be written to: x[i] *= 2 assigns what it has changed."""
    has_tensors = any(isinstance(item, Tensor) for item in index)
    if not isinstance(value, Tensor) or has_tensors:
        return False
    target = x[index]
    if is_dynamo_compiling():  # it knows no memory; to write the same values again changes none
        return False
    same_storage = storage_id(target) == storage_id(value)
    same_start = target.storage_offset() == value.storage_offset()
    if not same_storage or not same_start:
        return False
    return _steps(target) == _steps(value)


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dimension of several elements."""
    dims = zip(x.shape, x.stride(), strict=True)
    return [(size, stride) for size, stride in dims if size > 1]


def _without_leading_ones(value: Tensor, most: int) -> Tensor:
    """The value without dimensions of size 1 in front, which assignment ignores. most: dimensions that are left."""
    while value.dim() > most and value.shape[0] == 1:
        value = value[0]
    return value


# ---- masks and tensors of indices


def _is_of_places(item: Any) -> bool:
    """Tell whether an item selects by a mask or by a tensor of several indices."""
    return isinstance(item, Tensor) and item.dim() > 0


def _write_places(
    func: Callable,
    x: ShardTensor,
    items: list[Any],
    value: Any,
) -> None:
    """Assign to places that masks and tensors of indices select, in dimensions that lie side by side.

    The places become one mask over these dimensions, the same on every rank, of which each rank takes its part.
    """
    chosen = _selecting_items(func, x, items)
    first = chosen[0]

    # The slices alone give a view of the tensor: (before, places, after).
    basic: list[Any] = []
    for number, item in enumerate(items):
        if number in chosen:
            every_row = slice(None)
            basic += [every_row] * dims_taken(item)
        else:
            basic.append(item)
    view = getitem(func, x, tuple(basic))
    selectors = [items[number] for number in chosen]
    count = sum(map(dims_taken, selectors))
    after = view.dim() - first - count
    place_shape = view.spec.shape[first : first + count]
    is_one_mask = len(selectors) == 1 and selectors[0].dtype == torch.bool
    is_one_number = not isinstance(value, Tensor) or value.dim() == 0

    if any(isinstance(item, ShardTensor) for item in selectors):
        # The value broadcasts over the dimensions behind those of the mask.
        mask = selectors[0]
        is_one_value = is_one_number or value.dim() <= after
        if not is_one_mask or not is_one_value:
            raise no_rule(func, (view, mask), {}, "many values by a mask that is a ShardTensor")
    elif is_one_number and is_one_mask and selectors[0].shape == place_shape:
        # The host need not know which places these are, for which it would wait for the device.
        mask = selectors[0].to(x.device)
    else:
        # In general the indices become a mask over the places, and a value for each of them.
        mask, order, shape = _mask_of_places(selectors, place_shape, x.device)
        if not is_one_number:
            most = first + len(shape) + after
            value = on_shard_tensors(_spread, value, most, order, shape, after)  # (before, *places, after)
    on_shard_tensors(_fill, view, mask, value, after)
    check_writable(x)


def _fill(x: Tensor, mask: Tensor, value: Any, after: int) -> None:
    """Assign to the places of a mask in x (before, *places, after): a number, or what broadcasts against x."""
    ones = [1] * after
    over_after = mask.reshape(*mask.shape, *ones)  # (*places, 1, ...)
    has_dims = isinstance(value, Tensor) and value.dim()
    if has_dims:
        x.copy_(torch.where(over_after, value, x))
    else:
        x.masked_fill_(over_after, value)


def _selecting_items(func: Callable, x: ShardTensor, items: list[Any]) -> list[int]:
    """The numbers of the items that select places: masks and tensors of indices, which must lie side by side."""
    chosen = []
    for number, item in enumerate(items):
        # Numbers are indices too where there are tensors of them.
        if _is_of_places(item) or isinstance(item, int):
            chosen.append(number)
    distance = chosen[-1] - chosen[0]
    are_adjacent = distance + 1 == len(chosen)
    if not are_adjacent:
        raise no_rule(func, (x,), {}, "masks and tensors of indices that do not lie side by side")
    return chosen


def _mask_of_places(
    selectors: Sequence[Any],
    shape: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor, torch.Size]:
    """(mask, order, shape of the places) of masks and tensors of indices over dimensions of this shape.

    mask: which places are written. order: which of the values, in the order of the indices, goes to each place; both
    have the shape of the dimensions.
    """
    # A tensor of indices for each dimension; a mask stands for as many as it has dimensions.
    indices: list[Tensor] = []
    for selector in selectors:
        if not isinstance(selector, Tensor):
            indices.append(torch.tensor(selector, device=device))
        elif selector.dtype in (torch.bool, torch.uint8):
            first = len(indices)
            wanted = tuple(shape[first : first + selector.dim()])
            if tuple(selector.shape) != wanted:
                raise IndexError(f"a mask of {tuple(selector.shape)} does not fit dimensions of {wanted}")
            mask = selector.to(device).bool()
            indices.extend(mask.nonzero(as_tuple=True))
        else:
            indices.append(selector.to(device))
    for size, index in zip(shape, indices, strict=True):
        is_outside = (index < -size) | (index >= size)
        if is_outside.any():
            raise IndexError(f"an index is out of bounds for a dimension of size {size}")

    # Each place has a number, in row-major order of the dimensions.
    strides = [math.prod(shape[number + 1 :]) for number in range(len(shape))]
    numbers = torch.zeros((), dtype=torch.long, device=device)
    for index, size, stride in zip(indices, shape, strides, strict=True):
        row = index.long() % size  # negative indices count from the end
        numbers = numbers + row * stride  # the indices broadcast against each other

    # The mask and the order are written flat, (places,), and then take the shape of the dimensions.
    count = math.prod(shape)
    written = numbers.reshape(-1)
    mask = torch.zeros(count, dtype=torch.bool, device=device)
    mask[written] = True
    order = torch.zeros(count, dtype=torch.long, device=device)
    order[written] = torch.arange(numbers.numel(), device=device)
    return mask.view(*shape), order.view(*shape), numbers.shape


def _spread(
    value: Tensor,
    most: int,
    order: Tensor,
    shape: Sequence[int],
    after: int,
) -> Tensor:
    """The value of each place, (before, *places, after), of values (before, *shape, after) or what broadcasts to it.

    most: dimensions of these.
    """
    value = _without_leading_ones(value, most)
    count = len(shape)
    while value.dim() < count + after:
        value = value.unsqueeze(0)
    first = value.dim() - count - after
    before = value.shape[:first]
    of_values = value.shape[first : first + count]
    behind = value.shape[first + count :]
    is_one_value = all(size == 1 for size in of_values)
    if is_one_value:  # it broadcasts over all places
        ones = [1] * order.dim()
        return value.reshape(*before, *ones, *behind)

    # The values in a row, of which each place takes the one with its number in `order`.
    unchanged_before = [-1] * first
    unchanged_after = [-1] * after
    every = value.expand(*unchanged_before, *shape, *unchanged_after)
    in_order = every.reshape(*before, math.prod(shape), *behind)
    spread = in_order.index_select(first, order.reshape(-1))  # (before, places, after)
    return spread.reshape(*before, *order.shape, *behind)


def _spec_of_target(
    func: Callable,
    x: Tensor,
    index: Any,
    value: Spec,
) -> Spec:
    """The spec of a plain tensor of which x[index] is to hold a tensor with the spec `value`: split in the same way."""
    target = value.with_dims(map(unsplit_axes, x.shape), ())
    whole = wrap(x.detach(), target)
    items = [item for item in index_items(func, whole, index) if item is not None]
    if any(isinstance(item, Tensor) for item in items):
        raise no_rule(func, (whole,), {}, "into a plain tensor, by a mask or a tensor of indices")

    # The dimensions that slices leave take the splits of the value's, counted from the last one as in broadcasting.
    dims = list(target.dims)
    left = [dim for dim, item in enumerate(items) if isinstance(item, slice)]
    for dim, axes in zip(left[::-1], value.dims[::-1], strict=False):
        if not mesh_dims_of(axes):
            continue
        sizes = [axis.size for axis in axes]
        size = math.prod(sizes)
        # Where the value fills the dimension, each rank writes what it holds; otherwise the pieces are even.
        if size == x.shape[dim]:
            dims[dim] = axes
        elif len(axes) == 1:
            dims[dim] = cut_over(value.mesh, axes[0].mesh_dim, x.shape[dim])
    return target.with_dims(dims)
