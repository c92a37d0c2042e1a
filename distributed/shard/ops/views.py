"""Views: reshape and reorder dimensions by regrouping their axes.

A dimension is a product of axes (axes.py). A reshape joins axes to one dimension, or breaks an axis up: 24 rows, split
12 and 12, become windows of 4 rows as an outer axis of 6 windows, split 3 and 3, and an inner axis of 4 whole rows.
Nothing is communicated, except where a new shape would break up the ranks' pieces: windows of 4 rows in pieces of 6 and
10. Then the tensor is first cut at the nearest multiples, 8 and 8, and stays so: one all-to-all.
"""

# mypy: disable-error-code="attr-defined"
# (mypy takes Tensor.mT for a value of the class; it is a descriptor)

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import Sizes
from distributed.shard.core.axes import Axes, Axis, check_order, merged, mesh_dims_of, unsplit_axes
from distributed.shard.core.operands import global_shape, gradient_spec, local_operand
from distributed.shard.core.plans import Plan, planned, planned_else, planned_of_tensors
from distributed.shard.core.redistribute import recut
from distributed.shard.core.tensor import (
    ShardTensor,
    dispatch,
    local,
    named,
    no_rule,
    rule,
    wrap,
)
from distributed.shard.ops.reductions import dims_of

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


def without_memory(sizes: Iterable[int]) -> Tensor:
    """A tensor of these sizes by which torch's own functions tell the shape that they give."""
    return torch.empty(tuple(sizes), device="meta")


def plan_of_shape(func: Callable, x: ShardTensor, shape: Sequence[int]) -> Plan:
    """Reshape a part to its part of a new global shape, after it is cut in other sizes where it must be.

    Raises no_rule if no sizes keep ranks' pieces together.
    """
    old = x.spec
    cut: Cut = {}  # mostly none
    with_prefix = [d for d, axes in enumerate(old.dims) if axes and axes[0].prefix]  # class tokens ahead
    if with_prefix:
        dims = regrouped_with_prefix(old.dims, shape, with_prefix[0], cut)
    else:
        axes = chain(*old.dims)
        dims = regrouped(axes, shape, cut)
    if dims is None:
        raise no_rule(func, (x,), {}, f"the new shape {list(shape)} does not keep the ranks' pieces together")
    new = old.with_dims(dims)
    # Only view() refuses a tensor that would have to be copied.
    into = Tensor.view if func == Tensor.view else Tensor.reshape

    def compute(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part = recut(local(x), old, cut)[0] if cut else x
        return into(part, new.local_shape)

    return Plan(compute, new)


@rule(*named("reshape", "view"))
@planned
def reshape(func: Callable, input: ShardTensor, *shape: Any, **keywords: Any) -> Plan:
    """Reshape to a global shape, given as numbers or as one tuple. Raises no_rule for another dtype."""
    if any(isinstance(x, torch.dtype) for x in (*shape, *keywords.values())):
        raise no_rule(func, (input,), {}, "a view as another dtype")
    whole = without_memory(input.spec.shape)
    return plan_of_shape(func, input, func(whole, *shape, **keywords).shape)


@rule(*named("flatten", "ravel"))
@planned
def flatten(func: Callable, input: ShardTensor, *dims: Any, **keywords: Any) -> Plan:
    """Flatten several dimensions to one, which keeps their axes."""
    whole, part = map(without_memory, (input.spec.shape, input.spec.local_shape))
    plan = plan_of_shape(func, input, func(whole, *dims, **keywords).shape)
    # Of a split dimension of size 1, which may join the dimension beside it, all ranks but one hold nothing.
    is_alike = func(part, *dims, **keywords).shape == plan.spec.local_shape
    return Plan(func, plan.spec) if is_alike else plan


@rule(*named("view_as", "reshape_as"))
@planned_of_tensors
def reshape_as(func: Callable, input: ShardTensor, other: Tensor) -> Plan:
    """Reshape to the global shape of another tensor."""
    whole = without_memory(input.spec.shape)
    return plan_of_shape(func, input, whole.view(global_shape(other)).shape)


@rule(*named("unflatten"))
@planned
def unflatten(func: Callable, input: ShardTensor, dim: int, sizes: Sequence[int]) -> Plan:
    """Distribute the axes of one dimension over several. One size may be -1."""
    whole = without_memory(input.spec.shape)
    return plan_of_shape(func, input, whole.unflatten(dim, sizes).shape)


def numbers(
    given: Sequence[Any],
    keywords: dict[str, Any],
) -> tuple[int, ...]:
    """Arguments as a tuple of numbers: 2, 3; (2, 3); a tensor of this shape; or one of them by its name."""
    # The name of the argument depends on the function: size, other, dims.
    given = given or tuple(keywords.values())
    if len(given) == 1 and isinstance(given[0], Tensor):
        return tuple(global_shape(given[0]))
    is_one_tuple = given and isinstance(given[0], Sequence)
    return tuple(given[0] if is_one_tuple else given)


@rule(*named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "t", "T"))
@planned
def reorder(func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> Plan:
    """Reorder dimensions together with their axes, so that no element changes its rank."""
    # No two dimensions of this tensor have one size, so that each size tells which dimension has come there.
    dims = input.spec.dims
    sizes = range(2, 2 + len(dims))
    reordered = func(without_memory(sizes), *args, **kwargs)
    order = [size - 2 for size in reordered.shape]
    # The tracer cannot read an attribute, such as mT, of the input of a graph.
    compute = func if args or kwargs else lambda x: x.permute(order)
    return Plan(compute, input.spec.with_dims([dims[d] for d in order]))


@rule(*named("H", "mH", "adjoint"))
def adjoint(func: Callable, input: ShardTensor) -> ShardTensor:
    """Swap the last two dimensions of the complex conjugate."""
    transposed = reorder(torch.transpose, input, -2, -1)  # (..., M, N)
    return dispatch(torch.conj, transposed)


@rule(*named("view_as_real", "view_as_complex"))
def complex_view(func: Callable, input: ShardTensor) -> ShardTensor:
    """Complex numbers as a last dimension of 2, which must be whole, and back."""
    spec = input.spec
    if func is torch.view_as_real:
        pairs = func(input.resolve_conj())  # (..., 2)
        real_dims = (*spec.dims, unsplit_axes(2))
        return wrap(pairs, spec.with_dims(real_dims))
    # A number needs both of its parts.
    if spec.is_split(-1):
        raise no_rule(func, (input,), {}, "the last dimension is split")
    return wrap(func(input), spec.with_dims(spec.dims[:-1]))


@rule(*named("unsqueeze"))
@planned
def unsqueeze(func: Callable, x: ShardTensor, dim: int) -> Plan:
    """Insert a dimension of size 1, without axes."""
    dims = x.spec.dims
    dim = dim % (len(dims) + 1)
    return Plan(func, x.spec.with_dims((*dims[:dim], (), *dims[dim:])))


@rule(*named("squeeze"))
def squeeze(
    func: Callable,
    x: ShardTensor,
    dim: int | Sequence[int] | None = None,
) -> ShardTensor:
    """Remove dimensions of global size 1. One may be split: then one rank holds its only row."""
    spec = x.spec
    candidates = () if dim == () else dims_of(spec, dim)
    gone = [d for d in candidates if spec.shape[d] == 1]
    # The rule of indexing knows which rank holds the only row.
    index = [0 if d in gone else slice(None) for d in range(len(spec.dims))]  # 0 removes a dimension
    return dispatch(Tensor.__getitem__, x, tuple(index))


def plan_of_growth(func: Callable, x: Tensor, *shape: Any, **keywords: Any) -> Plan | None:
    """Each rank expands its part of a ShardTensor."""
    if not isinstance(x, ShardTensor):
        return None
    spec = x.spec
    new_shape = without_memory(spec.shape).expand(numbers(shape, keywords)).shape
    # New dimensions come in front.
    ahead = len(new_shape) - len(spec.dims)
    old_shape = (*[1] * ahead, *spec.shape)
    dims: list[Axes] = [*[()] * ahead, *spec.dims]
    for dim, size in enumerate(new_shape):
        if size == old_shape[dim]:
            continue
        if mesh_dims_of(dims[dim]):
            raise no_rule(func, (x,), {}, "a split dimension of size 1 cannot grow")
        dims[dim] = unsplit_axes(size)
    new = spec.with_dims(dims)
    return Plan(lambda x, *args, **kwargs: x.expand(new.local_shape), new)


@rule(*named("expand", "expand_as", "broadcast_to"))
@planned_else(plan_of_growth)
def expand(func: Callable, x: Tensor, *shape: Any, **keywords: Any) -> Tensor:
    """Expand to a global shape; -1 keeps a size. A split dimension of size 1 cannot be expanded.

    A plain tensor that is expanded as a ShardTensor is split as that is.
    """
    other, *_ = (*shape, *keywords.values())
    if other.spec.has_order and not x.is_floating_point():  # indices of edges stay constants
        return x.expand(other.spec.shape)
    like = gradient_spec(other.spec)
    part = local_operand(x, like)
    return wrap(part.expand(like.local_shape), like)


@rule(*named("pixel_shuffle"))
def pixel_shuffle(func: Callable, input: ShardTensor, factor: int) -> ShardTensor:
    """(..., C r^2, H, W) -> (..., C, H r, W r)."""
    x = unflatten(func, input, -3, (-1, factor, factor))  # (..., C, r, r, H, W)
    # Each factor goes behind the dimension that it extends.
    x = reorder(torch.movedim, x, (-4, -3), (-3, -1))  # (..., C, H, r, W, r)
    x = flatten(torch.flatten, x, -2)
    return flatten(torch.flatten, x, -3, -2)


@rule(*named("pixel_unshuffle"))
def pixel_unshuffle(func: Callable, input: ShardTensor, factor: int) -> ShardTensor:
    """(..., C, H r, W r) -> (..., C r^2, H, W)."""
    x = unflatten(func, input, -1, (-1, factor))
    x = unflatten(func, x, -3, (-1, factor))  # (..., C, H, r, W, r)
    x = reorder(torch.movedim, x, (-3, -1), (-4, -3))  # (..., C, r, r, H, W)
    return flatten(torch.flatten, x, -5, -3)


@rule(torch.broadcast_tensors)
def broadcast_tensors(func: Callable, *tensors: Tensor) -> list[Tensor]:
    """All tensors in the shape that they broadcast to."""
    shape = torch.broadcast_shapes(*map(global_shape, tensors))  # global
    return [expand(func, x, shape) if isinstance(x, ShardTensor) else x.expand(shape) for x in tensors]
