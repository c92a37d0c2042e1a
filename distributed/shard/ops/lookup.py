"""Rows and elements that other tensors choose: tables, gather and scatter, masks."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.shard.core.axes import Axes, Axis, check_order, merged, mesh_dims_of, unsplit_axes
from distributed.shard.core.constants import row_numbers
from distributed.shard.core.operands import (
    check_writable,
    global_shape,
    local_operand,
    redistribute,
    sum_partial,
    whole_weight,
)
from distributed.shard.core.spec import Spec, shard_sizes
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from distributed.shard.ops.along import move_split, restore_sharding, unshard_dims
from distributed.shard.ops.edges import find_rows, scatter_rows


@rule(*named("gather", "take_along_dim"))
def gather(
    func: Callable,
    input: Tensor,
    dim: Any,
    index: Any = None,
    *,
    sparse_grad: bool = False,
    **kwargs: Any,
) -> ShardTensor:
    """Elements of input (..., N, ...) by indices (..., M, ...) along dim -> (..., M, ...).

    The dimension becomes whole, and is split again in the result. The indices, of the tensor's size in all others, are
    brought to its split. Raises no_rule for a plain tensor.
    """
    if func.__name__ == "take_along_dim" and isinstance(dim, Tensor):
        # take_along_dim(input, indices, dim) has its arguments in another order.
        indices = dim
        dim = kwargs.get("dim", index)
        index = indices
    if dim is None or not isinstance(input, ShardTensor):
        raise no_rule(func, (input, index), {}, "of a plain tensor, or without a dimension")
    dim = dim % len(input.spec.dims)
    input = sum_partial(input)
    rows = row_numbers(index, dim, input.spec.shape)
    if rows is not None and input.spec.is_split(dim):
        found = find_rows(input, dim, rows)
        if found is not None:
            return found
    x = unshard_dims(input, (dim,))
    own_index = split_as(func, x.spec, dim, index)
    elements = local(x).gather(dim, own_index)  # (..., M, ...)
    count = global_shape(index)[dim]
    whole = wrap(elements, x.spec.with_axes(dim, unsplit_axes(count)))
    return restore_sharding(whole, input.spec)


def split_as(
    func: Callable,
    spec: Spec,
    dim: int,
    y: Tensor,
) -> Tensor:
    """The local part of an operand y, split as a tensor with this spec in all dimensions but dim.

    Along dim y has a size of its own. Raises no_rule if another dimension has not the tensor's size.
    """
    shape = global_shape(y)
    own_axes = unsplit_axes(shape[dim])
    out = spec.with_axes(dim, own_axes)
    if out.shape != shape:
        raise no_rule(func, (y,), {}, "it must have the tensor's size in all other dimensions")
    part = local_operand(sum_partial(y), out)
    return part.expand(out.local_shape)


SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
SCATTERS_IN_PLACE = [f"{name}_" for name in SCATTERS]


@rule(*named(*SCATTERS, *SCATTERS_IN_PLACE))
def scatter(
    func: Callable,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Write or add to input (..., N, ...) along dim, and return it, or a changed copy of it.

    scatter takes an index for each element, (..., M, ...). index_add and the like take one for each row, (M,). The
    dimension becomes whole, and is split again in the result. An operand that is a plain tensor is split as the
    ShardTensor among them. Raises no_rule for a change in place of a plain tensor or along a split dimension.
    """
    for name in ("src", "value", "source"):
        if name in kwargs:
            source = kwargs.pop(name)
    changed = scatter_rows(func, input, dim, index, source, *args, **kwargs)
    if changed is not None:
        return changed
    # The split of the first ShardTensor that has the dimensions of the input decides.
    split_operands = [x for x in (input, source, index) if isinstance(x, ShardTensor)]
    like = next(x for x in split_operands if x.dim() == input.dim())
    dim = dim % len(like.spec.dims)
    x = unshard_dims(like, (dim,))
    length = global_shape(input)[dim]
    spec = x.spec.with_axes(dim, unsplit_axes(length))

    # In place, this rank's part of the input must be the one that is written.
    in_place = str(func.__name__).endswith("_")
    is_unchanged = not like.spec.partial and x.spec.placements == like.spec.placements
    keeps_split = like is input and is_unchanged
    if in_place and not keeps_split:
        raise no_rule(func, (input, index), {}, "in place on a plain tensor or along a split dimension")

    def part(y: Any) -> Any:
        """The operand as this rank needs it: an index, a source, or a number."""
        # In a tensor of several dimensions, an operand of one lists rows, and an operand of none is a number.
        lists_rows = isinstance(y, Tensor) and y.dim() < 2 and len(spec.dims) >= 2
        if isinstance(y, Tensor) and not lists_rows:
            return split_as(func, spec, dim, y)
        # Every rank needs all indices of rows; a number is the same on all of them.
        if isinstance(y, ShardTensor):
            return y.full_tensor()
        return whole_weight(y, spec)

    if in_place:
        target = input
    elif like is input:
        target = local(x)
    else:
        target = part(input)
    own_index = part(index)
    own_source = part(source)
    out = func(target, dim, own_index, own_source, *args, **kwargs)
    return check_writable(like) if in_place else restore_sharding(wrap(out, spec), like.spec)


@rule(*named("bucketize", "isin"))
def bucketize(
    func: Callable,
    input: ShardTensor,
    boundaries: Any,
    **kwargs: Any,
) -> ShardTensor:
    """The place of each element among boundaries, or whether it is one of them; every rank has all of these."""
    input = sum_partial(input)
    places = func(local(input), whole_weight(boundaries, input.spec), **kwargs)
    return wrap(places, input.spec)


def mask_of(x: Any, index: Any) -> Tensor | None:
    """The mask, if x[index] of a ShardTensor x selects elements by one: of two dimensions or more, or a ShardTensor.

    None for any other index, and for a plain x.
    """
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_mask or not isinstance(x, ShardTensor):
        return None
    # A plain mask of one dimension is as good as the indices of its rows, which indexing finds.
    is_plain_row_mask = index.dim() <= 1 and not isinstance(index, ShardTensor)
    return None if is_plain_row_mask else index


@rule(*named("masked_select"))
def masked(func: Callable, input: ShardTensor, mask: Tensor) -> ShardTensor:
    """The elements that a mask of the first dimensions selects, (selected, ...), in the order of the whole tensor.

    One gather tells all ranks how many each has selected. Raises no_rule for a mask that broadcasts.
    """
    count = mask.dim()
    mask_shape = tuple(global_shape(mask))
    fits = isinstance(input, ShardTensor) and mask_shape == tuple(input.spec.shape[:count])
    if not fits:
        raise no_rule(func, (input, mask), {}, "of a plain tensor, or by a mask that broadcasts")
    x = in_order(sum_partial(input), count)
    spec = x.spec
    mask_dims = spec.dims[:count]
    rest = spec.dims[count:]
    # The mask is cut as the tensor is, so that each rank selects among its own elements.
    own_mask = local_operand(sum_partial(mask), spec.with_dims(mask_dims))
    selected = local(x)[own_mask]  # (selected on this rank, ...)

    # Where the mask is split, every rank must know how many elements each of the others has selected.
    axes = merged(chain.from_iterable(mask_dims))
    rows: Axes = unsplit_axes(len(selected))
    if mesh_dims_of(axes):
        mesh_dim = axes[0].mesh_dim
        group = spec.mesh.groups[mesh_dim]
        number = torch.tensor([len(selected)], device=selected.device)
        one_of_each = (1,) * group.size
        numbers = all_gather(number, 0, one_of_each, group)  # (ranks,)
        sizes = tuple(numbers.tolist())
        rows = (Axis(sum(sizes), mesh_dim, sizes),)
    return wrap(selected, spec.with_dims((rows, *rest)))


def in_order(x: ShardTensor, count: int) -> ShardTensor:
    """Redistribute x, so that the ranks' parts follow each other when its first `count` dimensions are flattened.

    For that, one mesh dimension splits the first of these that is longer than 1, into bands; others split none of them.
    """
    spec = x.spec
    axes = merged(chain.from_iterable(spec.dims[:count]))
    check_order(axes)
    # Pieces of a single axis follow each other already.
    if len(axes) < 2:
        return x
    longer = [d for d in range(count) if spec.shape[d] > 1]
    lead = longer[0]
    splitting = []  # mesh dimensions that split the first `count` dimensions
    for m, placement in enumerate(spec.placements):
        if isinstance(placement, Shard) and placement.dim < count:
            splitting.append(m)

    # Keep the mesh dimension that splits the leading dimension already, if one does, and move the others away.
    leading = [m for m in splitting if spec.placements[m] == Shard(lead)]
    kept = leading[0] if leading else splitting[0]
    for m in splitting:
        if m != kept:
            x = move_split(x, m, range(count))
    sizes = None
    if len(x.spec.dims[lead]) > 1:  # a product of axes becomes one axis, in even pieces
        group = x.spec.mesh.groups[kept]
        sizes = shard_sizes(x.spec.shape[lead], group.size)
    placements = list(x.spec.placements)
    placements[kept] = Shard(lead)
    return redistribute(x, placements, {kept: sizes})


def rows_of_plain(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Look up rows of a plain table x (N, ...) by a ShardTensor of indices (I, ...) -> (I, ..., ...).

    Raises no_rule for a mask, and for more than one index.
    """
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != 1 or index[0].dtype == torch.bool:
        raise no_rule(func, (x, *index), {}, "of a plain tensor, by more than one ShardTensor of indices")
    index = sum_partial(index[0])
    row_dims = map(unsplit_axes, x.shape[1:])
    spec = index.spec.with_dims((*index.spec.dims, *row_dims))
    table = whole_weight(x, spec)
    return wrap(table[local(index)], spec)


@rule(F.embedding)
def embedding(
    func: Callable,
    input: ShardTensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardTensor:
    """Look up split indices in a table, which every rank has whole: (...) -> (..., D)."""
    if max_norm is not None or scale_grad_by_freq:
        raise no_rule(func, (input, weight), {}, "with max_norm, or with gradients scaled by frequency")
    input = sum_partial(input)
    features = unsplit_axes(global_shape(weight)[1])
    spec = input.spec.with_dims((*input.spec.dims, features))
    table = whole_weight(weight, spec)
    rows = F.embedding(local(input), table, padding_idx, sparse=sparse)  # (..., D)
    return wrap(rows, spec)


@rule(F.one_hot)
def one_hot(func: Callable, tensor: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a dimension of num_classes; -1 takes the largest index of all ranks plus one."""
    if num_classes == -1:
        largest = dispatch(torch.amax, tensor)  # of all ranks
        num_classes = int(local(largest)) + 1
    tensor = sum_partial(tensor)
    classes = unsplit_axes(num_classes)
    spec = tensor.spec.with_dims((*tensor.spec.dims, classes))
    return wrap(F.one_hot(local(tensor), num_classes), spec)
