"""Reductions: sums, means, norms, variances, extrema and others.

A sum over a split dimension is a partial tensor. Its parts are added up when a nonlinear operation follows, so several
means in a row cost one all-reduce. All other reductions gather one number from each rank that has elements, and every
rank combines these numbers in the same way.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import (
    Group,
    Sizes,
    all_gather,
    at_least_float32,
    gather_from_region,
    reduce_from_region,
    tensor_on,
)
from distributed.shard.operands import sum_partial
from distributed.shard.spec import Axes, Shares, Spec, mesh_dims_of, part_of
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap

Dims = int | Sequence[int] | None  # None: all


def dims_of(spec: Spec, dim: Dims) -> tuple[int, ...]:
    """The dimensions as non-negative numbers; all of them if none is given."""
    count = len(spec.dims)
    if dim is None:
        return tuple(range(count))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if not dims:  # torch takes an empty tuple for all
        return tuple(range(count))
    limit = max(count, 1)  # a number has dimension 0 too
    is_in_range = all(-limit <= d < limit for d in dims)
    if not is_in_range:
        raise IndexError(f"Dimension out of range: {dims} of a tensor of {count} dimensions")
    return tuple([d % count for d in dims]) if count else ()


def kept(
    spec: Spec,
    dims: Sequence[int],
    keepdim: bool = False,
) -> Spec:
    """The spec without dims, or with dims of size 1."""
    left: list[Axes] = []
    for d, axes in enumerate(spec.dims):
        if d not in dims:
            left.append(axes)
        elif keepdim:
            left.append(())
    return spec.with_dims(left)


def reduced_spec(spec: Spec, dims: Sequence[int], keepdim: bool) -> Spec:
    """The spec of a sum over dims: partial over the mesh dimensions that split them."""
    summed_axes = [spec.dims[d] for d in dims]
    summed = mesh_dims_of(*summed_axes)
    partial = tuple(sorted(summed.union(spec.partial)))
    left = kept(spec, dims, keepdim)
    return spec.with_dims(left.dims, partial)


def gathered(
    x: Tensor,
    summary: Callable[[Tensor], Tensor],
    counts: Sizes,
    group: Group,
    dims: tuple[int, ...],
) -> Tensor:
    """summary(local tensor) of each rank that has elements in dims, in rank order: (ranks, ...).

    All ranks must use the result in the same way, because its gradient is not summed over the ranks.
    """
    # A rank may have no elements, where a maximum for example is not defined.
    empty = [d for d in dims if x.shape[d] == 0]
    if empty:  # a placeholder, whose summary is not sent
        x = x.sum(empty, keepdim=True, dtype=x.dtype)
    return gathered_summaries(summary(x), counts, group)


def gathered_summaries(own: Tensor, counts: Sizes, group: Group) -> Tensor:
    """The summaries, of one shape, of all ranks that have elements, in rank order: (ranks, ...). own: of this rank.

    counts: elements of each rank. The summary of a rank without any is not sent.
    """
    sizes = tuple([int(count > 0) for count in counts])
    own_size = sizes[group.rank]
    own = own[None][:own_size]  # (1 or 0, ...)
    return gather_from_region(own, 0, sizes, group)  # (ranks, ...)


def reduce_by(
    reduce: Callable[[Tensor, tuple[int, ...], bool], Tensor],
    x: ShardTensor,
    dims: tuple[int, ...],
    keepdim: bool,
) -> ShardTensor:
    """reduce(part, dims, keepdim) of the local part, and of the results of all ranks if dims are split."""
    x = sum_partial(x)
    part = local(x)
    # None means that every rank has whole rows: then nothing is gathered.
    shared_by = x.spec.shares(*dims)

    def summary(part: Tensor) -> Tensor:
        return reduce(part, dims, True)

    if shared_by is None:
        out = reduce(part, dims, True)
    else:
        counts, group = shared_by
        of_ranks = gathered(part, summary, counts, group, dims)  # (ranks, ...)
        out = reduce(of_ranks, (0,), False)
    return reduced_to(out, x.spec, dims, keepdim)


def reduced_to(
    out: Tensor,
    spec: Spec,
    dims: tuple[int, ...],
    keepdim: bool,
) -> ShardTensor:
    """The result of a reduction of dims, in which they have size 1, as a ShardTensor. spec: of what is reduced."""
    if not keepdim:
        out = out.squeeze(dims)
    return wrap(out, kept(spec, dims, keepdim))


@rule(*named("sum"))
def total(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Sum. Over a split dimension it is a partial tensor; nothing is communicated."""
    dims = dims_of(input.spec, dim)
    part = input.sum(dims, keepdim, dtype=dtype)
    return wrap(part, reduced_spec(input.spec, dims, keepdim))


@rule(*named("mean"))
def mean(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Mean of all elements, whether or not the ranks hold equally many."""
    spec = input.spec
    has_fractions = input.is_floating_point() or input.is_complex()
    if dtype is None and not has_fractions:  # raised on ranks without elements too
        raise RuntimeError(f"mean() of {input.dtype}: give a floating point dtype")
    dims = dims_of(spec, dim)
    dtype = dtype or input.dtype
    wide = torch.promote_types(dtype, torch.float32)  # the sum of all elements might not fit into 16 bits
    count = math.prod([spec.shape[d] for d in dims])
    # The count is global, so unequal parts of the ranks do not matter.
    own_sum = input.sum(dims, keepdim, dtype=wide)
    out = own_sum / count  # this rank's term of the mean
    return wrap(out.to(dtype), reduced_spec(spec, dims, keepdim))


@rule(*named("count_nonzero"))
def count_nonzero(func: Callable, input: ShardTensor, dim: Dims = None) -> ShardTensor:
    """The number of elements that are not 0: a sum, so that it is partial where dim is split."""
    is_nonzero = dispatch(torch.ne, input, 0)
    return dispatch(torch.sum, is_nonzero, dim)


@rule(*named("any", "all", "logsumexp"))
def of_values(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
) -> ShardTensor:
    """One gather of the value of each rank, and the same function of these."""
    dims = dims_of(input.spec, dim)
    return reduce_by(func, input, dims, keepdim)


@rule(torch.linalg.vector_norm)
def vector_norm(
    func: Callable,
    x: ShardTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """One gather of the norm of each rank, then the norm of these norms."""
    if ord in (math.inf, -math.inf):
        if dtype is not None:
            x = dispatch(Tensor.to, x, dtype)
        extremum = torch.amax if ord > 0 else torch.amin
        sizes = dispatch(torch.abs, x)
        return dispatch(extremum, sizes, dims_of(x.spec, dim), keepdim)
    x = sum_partial(x)
    dims = dims_of(x.spec, dim)

    def norm(
        x: Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
    ) -> Tensor:
        return torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype)

    if ord == 0:  # the number of elements that are not 0, which is a sum over the ranks
        own_count = norm(local(x), dims, keepdim)
        return wrap(own_count, reduced_spec(x.spec, dims, keepdim))
    return reduce_by(norm, x, dims, keepdim)


@rule(*named("norm"))
def norm(
    func: Callable,
    input: ShardTensor,
    p: float | str | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    *,
    ord: float | str | None = None,
) -> ShardTensor:
    """torch.norm, Tensor.norm and torch.linalg.norm of vectors; norms of matrices have no rule."""
    # torch.linalg calls it ord, torch.norm p.
    order = p if ord is None else ord
    if func is torch.linalg.norm and order is not None:
        is_of_one_dim = isinstance(dim, int) or len(dim or input.spec.dims) == 1
        if not is_of_one_dim:
            raise no_rule(func, (input,), {}, "a norm of matrices")
    elif order in (None, "fro"):
        order = 2
    if isinstance(order, str):
        raise no_rule(func, (input,), {}, f"a norm of matrices, {order}")
    order = 2 if order is None else order
    return vector_norm(func, input, order, dim, keepdim, dtype=dtype)


def centred(
    x: Tensor,
    dims: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean, mean, sum of squared deviations from the mean) over dims of a local tensor, in float32 at least.

    dims stay, with size 1. The deviations are taken from the mean that is already known, so that no digits are lost if
    the mean is large. Two passes of this kind take a tenth of the time of torch.var_mean, which has one.
    """
    count = math.prod([x.shape[d] for d in dims])
    wide = torch.promote_types(x.dtype, torch.float32)  # float16 and bfloat16 have too few digits for sums
    mean = x.sum(dims, keepdim=True, dtype=wide) / max(count, 1)  # a rank may have no elements
    apart = x - mean
    sizes = apart.abs() if apart.is_complex() else apart
    deviations = sizes.square().sum(dims, keepdim=True)
    return apart, mean, deviations


class _Moments(torch.autograd.Function):
    """(mean, sum of squared deviations from it) over dims of a local tensor, which is all that backward needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        _, mean, deviations = centred(x, dims)
        ctx.save_for_backward(x, mean)
        ctx.count = math.prod([x.shape[d] for d in dims])
        return mean, deviations

    @staticmethod
    def backward(
        ctx: Any,
        of_mean: Tensor,
        of_deviations: Tensor,
    ) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        # The deviations do not depend on the mean: their derivative by it, a sum of x - mean, is 0.
        count = max(ctx.count, 1)
        grad = (x - mean) * (2 * of_deviations) + of_mean / count
        return grad.to(x.dtype), None


def merged(
    mean: Tensor,
    deviations: Tensor,
    dims: tuple[int, ...],
    shape: Sequence[int],
    shared_by: Shares,
) -> tuple[Tensor, Tensor, int]:
    """(mean, sum of squared deviations from it, number of elements) over dims of the local tensors of all ranks.

    mean, deviations: of the local tensor, which has this shape; dims have size 1 in them. The method of Chan et al.
    1979 combines those of each rank. It loses no digits if the mean is large, unlike the mean of squares minus the
    square of the mean.
    """
    if shared_by is None:
        return mean, deviations, math.prod([shape[d] for d in dims])
    counts, group = shared_by
    own = torch.stack([mean, deviations])  # (2, ...)
    of_ranks = gathered_summaries(own, counts, group)  # (ranks, 2, ...)
    means, deviations = of_ranks.unbind(1)  # each (ranks, ...)
    count = sum(counts)
    present = [n for n in counts if n]  # ranks with elements have sent something
    weight = tensor_on(mean.device, present, mean.dtype)
    ones = [1] * mean.dim()
    weight = weight.view(-1, *ones)  # (ranks, 1, ...)

    # Differences of the ranks' means from that of the first, and then from the mean of all.
    apart = means - means[:1]
    shift = (apart * weight).sum(0) / count
    between = (apart - shift).square() * weight
    mean_of_all = means[0] + shift
    deviations_of_all = deviations.sum(0) + between.sum(0)
    return mean_of_all, deviations_of_all, count


def moments(
    x: Tensor,
    dims: tuple[int, ...],
    shared_by: Shares,
) -> tuple[Tensor, Tensor, int]:
    """(mean, sum of squared deviations from it, number of elements) over dims of the local tensors of all ranks.

    dims stay, with size 1. One gather of both numbers if dims are split. Differentiable.
    """
    mean, deviations = _Moments.apply(x, dims)
    return merged(mean, deviations, dims, x.shape, shared_by)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of normalization and softmax of a tensor: its own, or under autocast, except on a CPU, float32."""
    device = x.device.type
    needs_float32 = torch.is_autocast_enabled(device) and device != "cpu"
    return torch.float32 if needs_float32 else x.dtype


def root(var: Tensor) -> Tensor:
    """The square root of a variance; its gradient is 0 if the variance is 0, as in torch."""
    # The inner `where` keeps an infinite derivative out of the backward pass.
    is_zero = var == 0
    safe = torch.where(is_zero, 1.0, var)  # the derivative of sqrt at 0 is infinite
    return torch.where(is_zero, 0.0, safe.sqrt())


@rule(*named("var", "std", "var_mean", "std_mean"))
def var(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = 1,
) -> ShardTensor | tuple[ShardTensor, ShardTensor]:
    """Variance or standard deviation, alone or with the mean: one gather of two numbers from each rank."""
    if isinstance(dim, bool):  # var(x, unbiased)
        unbiased = dim
        dim = None
    if unbiased is not None:
        correction = int(unbiased)
    elif correction is None:
        correction = 1
    input = sum_partial(input)
    spec = input.spec
    part = local(input)
    if part.is_complex():
        raise no_rule(func, (input,), {}, "of complex numbers")
    dims = dims_of(spec, dim)
    average, deviations, count = moments(at_least_float32(part), dims, spec.shares(*dims))
    freedom = count - correction  # degrees of freedom
    out = deviations / freedom if freedom > 0 else deviations * math.nan
    if func.__name__ in ("std", "std_mean"):
        out = root(out)
    # Statistics are computed at least in float32, and given in the dtype of the tensor.
    result = reduced_to(out.to(part.dtype), spec, dims, keepdim)
    average_result = reduced_to(average.to(part.dtype), spec, dims, keepdim)
    with_mean = func.__name__ in ("var_mean", "std_mean")
    return (result, average_result) if with_mean else result


@rule(*named("cumsum"))
def cumsum(
    func: Callable,
    input: ShardTensor,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Cumulative sum. Along a split dimension each rank adds the total of the ranks before it."""
    input = sum_partial(input)
    spec = input.spec
    part = local(input)
    (dim,) = dims_of(spec, dim)
    out = part.cumsum(dim, dtype=dtype)  # of this rank's rows alone
    split = spec.split(dim)
    if split is not None:
        _, group = split
        own_total = part.sum(dim, keepdim=True, dtype=dtype)[None]  # (1, ..., 1, ...)
        one_of_each = (1,) * group.size
        totals = all_gather(own_total, 0, one_of_each, group)  # (ranks, ..., 1, ...)
        of_earlier_ranks = totals[: group.rank]
        out = out + of_earlier_ranks.sum(0)
    return wrap(out, spec)


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
        value = local(reduce_by(func, x, dims, True))
        mask = part == value
        own_count = mask.sum(dims, keepdim=True)
        count = reduce_from_region(own_count, group)
    out = _Shared.apply(part, value, mask, count)
    return reduced_to(out, spec, dims, keepdim)


class _Shared(torch.autograd.Function):
    """The extremum, given as `value`, of x; `count` elements on all ranks, those of a mask, share the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        mask: Tensor,
        count: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(mask, count)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, count = ctx.saved_tensors  # this rank's extremal elements, and the number on all ranks
        return mask * (grad / count), None, None, None


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
    return along(input, dim, keepdim, largest)


@rule(*named("argmax", "argmin"))
def arg(
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
        return along(x, dim, keepdim, largest).indices
    flat = dispatch(torch.flatten, x)
    index = along(flat, 0, False, largest).indices
    if keepdim:
        ones = [1] * len(input.spec.dims)
        index = dispatch(torch.reshape, index, ones)
    return index


def along(
    x: ShardTensor,
    dim: int,
    keepdim: bool,
    largest: bool,
) -> Any:
    """The extremum along one dimension and its index; one gather of both if the dimension is split."""
    x = sum_partial(x)
    spec = x.spec
    part = local(x)
    dims = dims_of(spec, dim)
    (dim,) = dims
    if not spec.is_split(dim):
        plain = torch.max if largest else torch.min
        values, indices = plain(part, dim, True)
    else:
        of_ranks = torch.amax if largest else torch.amin
        with torch.no_grad():
            value = local(reduce_by(of_ranks, x, dims, True))
            # The global index of each extremal element, and a larger number for all others; the first one counts.
            size = spec.shape[dim]
            shape = [1] * part.dim()
            shape[dim] = -1
            rows = torch.arange(size, device=part.device).view(shape)  # (1, ..., rows, ..., 1)
            places = part_of(rows, spec)
            is_extremal = (part == value) | part.isnan()
            found = torch.where(is_extremal, places, size)
            indices = local(reduce_by(torch.amin, wrap(found, spec), dims, True))
        # One element alone has the gradient, as in torch.
        one = torch.ones_like(indices)
        values = _Shared.apply(part, value, places == indices, one)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([reduced_to(y, spec, dims, keepdim) for y in (values, indices)])
