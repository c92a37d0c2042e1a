"""Reductions: sums, means, norms and others. Variances are in moments.py, extrema in extrema.py.

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
    gather_from_region,
)
from distributed.shard.core.axes import Axes, mesh_dims_of
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.plans import Plan, planned
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap

Dims = int | Sequence[int] | None  # None: all


def dims_of(spec: Spec, dim: Dims) -> tuple[int, ...]:
    """The dimensions as non-negative numbers; all of them for None or (). Raises IndexError for one out of range."""
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


def drop_dims(
    spec: Spec,
    dims: Sequence[int],
    keepdim: bool = False,
) -> Spec:
    """The spec without dims, which are not negative; with keepdim they stay, with size 1."""
    remaining: list[Axes] = []
    for d, axes in enumerate(spec.dims):
        if d not in dims:
            remaining.append(axes)
        elif keepdim:
            remaining.append(())  # no axes: a dimension of size 1
    return spec.with_dims(remaining)


def reduced_spec(spec: Spec, dims: Sequence[int], keepdim: bool) -> Spec:
    """The spec of a sum over dims: partial over the mesh dimensions that split them."""
    summed_axes = [spec.dims[d] for d in dims]
    summed = mesh_dims_of(*summed_axes)
    partial = tuple(sorted(summed.union(spec.partial)))
    remaining = drop_dims(spec, dims, keepdim)
    return spec.with_dims(remaining.dims, partial)


def gathered(
    x: Tensor,
    summary: Callable[[Tensor], Tensor],
    counts: Sizes,
    group: Group,
    dims: tuple[int, ...],
) -> Tensor:
    """summary(local tensor) of each rank that has elements in dims, in rank order: (ranks, ...).

    summary: keeps dims, with size 1. counts, group: elements of each rank in dims, and the ranks that share them.
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
    """reduce(part, dims, keepdim) of the local part, and again of the results of all ranks if dims are split.

    It suits functions of which the whole is the same function of the parts: any, logsumexp, amax, a norm of norms.
    """
    x = sum_partial(x)
    part = local(x)
    # None means that every rank has whole rows: then nothing is gathered.
    shared_by = x.spec.shares(*dims)

    def summary(part: Tensor) -> Tensor:
        return reduce(part, dims, True)

    if shared_by is None:
        out = reduce(part, dims, True)  # dims have size 1
    else:
        counts, group = shared_by
        of_ranks = gathered(part, summary, counts, group, dims)  # (ranks, ...), where dims have size 1
        out = reduce(of_ranks, (0,), False)  # over the ranks
    return wrap_reduced(out, x.spec, dims, keepdim)


def wrap_reduced(
    out: Tensor,
    spec: Spec,
    dims: tuple[int, ...],
    keepdim: bool,
) -> ShardTensor:
    """The result of a reduction of dims, in which they have size 1, as a ShardTensor. spec: of what is reduced."""
    if not keepdim:
        out = out.squeeze(dims)
    return wrap(out, drop_dims(spec, dims, keepdim))


@rule(*named("sum"))
@planned
def total(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Sum. Over a split dimension it is a partial tensor; nothing is communicated."""
    dims = dims_of(input.spec, dim)
    return Plan(torch.sum, reduced_spec(input.spec, dims, keepdim))


@rule(*named("mean"))
@planned
def mean(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Mean of all elements, whether or not the ranks hold equally many."""
    spec = input.spec
    dims = dims_of(spec, dim)
    new = reduced_spec(spec, dims, keepdim)
    if new.partial == spec.partial:  # dims are whole
        return Plan(torch.mean, new)
    count = math.prod([spec.shape[d] for d in dims])

    def term(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's term of the mean. The count is global, so unequal parts of the ranks do not matter."""
        has_fractions = input.is_floating_point() or input.is_complex()
        if dtype is None and not has_fractions:  # raised on ranks without elements too
            raise RuntimeError(f"mean() of {input.dtype}: give a floating point dtype")
        narrow = dtype or input.dtype
        wide = torch.promote_types(narrow, torch.float32)  # the sum of all elements might not fit into 16 bits
        own_sum = input.sum(dims, keepdim, dtype=wide)
        return (own_sum / count).to(narrow)

    return Plan(term, new)


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


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of normalization and softmax of a tensor: its own, or under autocast, except on a CPU, float32."""
    device = x.device.type
    needs_float32 = torch.is_autocast_enabled(device) and device != "cpu"
    return torch.float32 if needs_float32 else x.dtype
