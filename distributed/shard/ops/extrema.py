"""Extrema: amax and amin, max and min, argmax and argmin.

Each rank finds its own extremum, and one gather of these numbers finds that of all. Where a gradient or an index is
wanted, a second message tells how many elements have the value, or the first of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import Group, copy_to_region, reduce_from_region
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.spec import part_of
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, rule, wrap
from distributed.shard.ops.reductions import Dims, dims_of, reduce_by, wrap_reduced


@rule(*named("amax", "amin"))
def extremum(
    func: Callable,
    input: ShardTensor,
    dim: Dims = (),
    keepdim: bool = False,
) -> ShardTensor:
    """Maximum or minimum. Each extremal element receives an equal share of the gradient, on every rank."""
    x = sum_partial(input)
    spec = x.spec
    part = local(x)
    dims = dims_of(spec, dim)
    shared_by = spec.shares(*dims)
    needs_grad = part.requires_grad and torch.is_grad_enabled()
    if shared_by is None or not needs_grad:
        return reduce_by(func, x, dims, keepdim)
    # Elements on several ranks may have the value: they share the gradient, so their number must be known.
    _, group = shared_by
    with torch.no_grad():
        value = local(reduce_by(func, x, dims, True))  # of all ranks; dims have size 1
        mask = part == value
        own_count = mask.sum(dims, keepdim=True)
        count = reduce_from_region(own_count, group)  # on all ranks
    out = _SharedGradient.apply(part, value, mask, count, group)
    return wrap_reduced(out, spec, dims, keepdim)


class _SharedGradient(torch.autograd.Function):
    """The extremum of a local tensor, whose value is known; its gradient goes in equal shares to some elements.

    x: the local tensor. value: the extremum, with size 1 in the reduced dimensions. mask: which elements of x take a
    share. count: number of such elements on all ranks, in the shape of value. group: these ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        mask: Tensor,
        count: Tensor,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(mask, count)
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, count = ctx.saved_tensors  # this rank's extremal elements, and the number on all ranks
        grad = copy_to_region(grad, ctx.group)  # each rank gives it to other elements
        return mask * (grad / count), None, None, None, None


@rule(*named("max", "min"))
def max_or_min(
    func: Callable,
    input: Any,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
    *,
    other: Tensor | None = None,
) -> Any:
    """Maximum or minimum of all elements, of two tensors, or along a dimension with the index of the first extremum."""
    largest = func.__name__ == "max"
    if isinstance(dim, Tensor):  # max(input, other)
        other = dim
        dim = None
    if other is not None:
        of_two = torch.maximum if largest else torch.minimum
        return dispatch(of_two, input, other)
    if dim is None:
        of_all = torch.amax if largest else torch.amin
        return dispatch(of_all, input)
    return extremum_along(input, dim, keepdim, largest)


@rule(*named("argmax", "argmin"))
def argmax_or_argmin(
    func: Callable,
    input: ShardTensor,
    dim: int | None = None,
    keepdim: bool = False,
) -> ShardTensor:
    """The global index of the first extremum along dim; without dim, its index in the flattened tensor."""
    # An index has no gradient.
    largest = func.__name__ == "argmax"
    x = dispatch(torch.detach, input)
    if dim is not None:
        return extremum_along(x, dim, keepdim, largest).indices
    flat = dispatch(torch.flatten, x)
    index = extremum_along(flat, 0, False, largest).indices
    if keepdim:
        ones = [1] * len(input.spec.dims)
        index = dispatch(torch.reshape, index, ones)
    return index


def extremum_along(
    x: ShardTensor,
    dim: int,
    keepdim: bool,
    largest: bool,
) -> Any:
    """torch.return_types.max (or min): the extremum along one dimension, and its global index.

    If the dimension is split, one gather finds the extremum of all ranks, and another the first element that has it.
    """
    x = sum_partial(x)
    spec = x.spec
    part = local(x)
    dims = dims_of(spec, dim)
    (dim,) = dims
    if spec.is_split(dim):
        values, indices = _of_split_dim(x, part, dim, largest)
    else:
        plain = torch.max if largest else torch.min
        values, indices = plain(part, dim, True)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([wrap_reduced(y, spec, dims, keepdim) for y in (values, indices)])


def _of_split_dim(x, part, dim, largest):
    """(extremum, its global index) along a split dimension, which has size 1 in both. part: of x on this rank."""
    spec = x.spec
    dims = (dim,)
    of_ranks = torch.amax if largest else torch.amin
    with torch.no_grad():
        value = local(reduce_by(of_ranks, x, dims, True))

        # The global index of each element of this rank: (1, ..., rows, ..., 1).
        size = spec.shape[dim]
        shape = [1] * part.dim()
        shape[dim] = -1
        rows = torch.arange(size, device=part.device).view(shape)
        places = part_of(rows, spec)

        # The smallest index of an extremal element counts; all others get a larger number than any index.
        is_extremal = (part == value) | part.isnan()
        candidates = torch.where(is_extremal, places, size)
        indices = local(reduce_by(torch.amin, wrap(candidates, spec), dims, True))
    # One element alone has the gradient, as in torch.
    one = torch.ones_like(indices)
    _, group = spec.shares(dim)
    values = _SharedGradient.apply(part, value, places == indices, one, group)
    return values, indices
