"""Mean and variance over dimensions that several ranks share: for var and std, and for normalization layers.

Each rank computes the mean of its elements and the sum of their squared deviations from it. One gather of these two
numbers merges them to those of all elements, without a loss of digits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import at_least_float32, differentiated_again, tensor_on
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.plans import Plan, planned_else
from distributed.shard.core.spec import Shares
from distributed.shard.core.tensor import ShardTensor, local, named, no_rule, rule
from distributed.shard.ops.reductions import Dims, dims_of, drop_dims, gathered_summaries, wrap_reduced


def centred(
    x: Tensor,
    dims: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean, mean, sum of squared deviations from the mean) over dims of a local tensor, in float32 at least.

    The first has the shape of x; in the others dims have size 1. The deviations are taken from the mean that is already
    known, so that no digits are lost if the mean is large. Two passes of this kind take a tenth of the time of
    torch.var_mean, which has one.
    """
    count = math.prod([x.shape[d] for d in dims])
    wide = torch.promote_types(x.dtype, torch.float32)  # float16 and bfloat16 have too few digits for sums
    mean = x.sum(dims, keepdim=True, dtype=wide) / max(count, 1)  # a rank may have no elements
    deviation = x - mean
    sizes = deviation.abs() if deviation.is_complex() else deviation
    square_sum = sizes.square().sum(dims, keepdim=True)
    return deviation, mean, square_sum


class _Moments(torch.autograd.Function):
    """(mean, sum of squared deviations from it) over dims of a local tensor; backward keeps x and the mean alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        _, mean, square_sum = centred(x, dims)
        ctx.save_for_backward(x, mean)
        ctx.dims = dims
        ctx.count = math.prod([x.shape[d] for d in dims])
        return mean, square_sum

    @staticmethod
    def backward(
        ctx: Any,
        grad_of_mean: Tensor,
        grad_of_square_sum: Tensor,
    ) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors
        if differentiated_again():  # what was kept has no graph
            _, mean, _ = centred(x, ctx.dims)
        # The square sum does not depend on x by way of the mean: its derivative by the mean, a sum of x - mean, is 0.
        count = max(ctx.count, 1)
        grad = (x - mean) * (2 * grad_of_square_sum) + grad_of_mean / count
        return grad.to(x.dtype), None


def merge_moments(
    mean: Tensor,
    square_sum: Tensor,
    dims: tuple[int, ...],
    shape: Sequence[int],
    shared_by: Shares,
) -> tuple[Tensor, Tensor, int]:
    """(mean, sum of squared deviations from it, number of elements) over dims of the local tensors of all ranks.

    mean, square_sum: of the local tensor, which has this shape; dims have size 1 in them, as in the results. shared_by:
    the ranks among which dims are split, as Spec.shares has them; None if no other rank has elements of them.

    The method of Chan et al. 1979 combines those of each rank. It loses no digits if the mean is large, unlike the mean
    of squares minus the square of the mean.
    """
    if shared_by is None:
        return mean, square_sum, math.prod([shape[d] for d in dims])
    counts, group = shared_by
    own = torch.stack([mean, square_sum])  # (2, ...)
    of_ranks = gathered_summaries(own, counts, group)  # (ranks, 2, ...)
    means, square_sums = of_ranks.unbind(1)  # each (ranks, ...)
    count = sum(counts)
    present = [n for n in counts if n]  # ranks with elements have sent something
    weight = tensor_on(mean.device, present, mean.dtype)
    ones = [1] * mean.dim()
    weight = weight.view(-1, *ones)  # (ranks, 1, ...): elements of each rank

    # The mean of all, counted from that of the first rank, so that a large mean cancels before it is multiplied.
    from_first = means - means[:1]  # (ranks, ...)
    shift = (from_first * weight).sum(0) / count
    mean_of_all = means[0] + shift

    # The deviations inside of each rank, and those of the ranks' means from the mean of all.
    between_ranks = (from_first - shift).square() * weight  # (ranks, ...)
    square_sum_of_all = square_sums.sum(0) + between_ranks.sum(0)
    return mean_of_all, square_sum_of_all, count


def moments(
    x: Tensor,
    dims: tuple[int, ...],
    shared_by: Shares,
) -> tuple[Tensor, Tensor, int]:
    """(mean, sum of squared deviations from it, number of elements) over dims of the local tensors of all ranks.

    x: this rank's part. shared_by: the ranks among which dims are split, as Spec.shares has them. dims stay, with
    size 1. One gather of both numbers if dims are split. Differentiable.
    """
    mean, square_sum = _Moments.apply(x, dims)
    return merge_moments(mean, square_sum, dims, x.shape, shared_by)


def root(var: Tensor) -> Tensor:
    """The square root of a variance; its gradient is 0 if the variance is 0, as in torch."""
    # The inner `where` keeps an infinite derivative out of the backward pass.
    is_zero = var == 0
    safe = torch.where(is_zero, 1.0, var)  # the derivative of sqrt at 0 is infinite
    return torch.where(is_zero, 0.0, safe.sqrt())


def plan_of_whole_dims(
    func: Callable,
    input: ShardTensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    **correction: Any,
) -> Plan | None:
    """The plain function, where every rank has the dimensions whole."""
    if isinstance(dim, bool):  # var(x, unbiased)
        dim = None
    dims = dims_of(input.spec, dim)
    is_whole = not set(dims).intersection(input.spec.split_dims)
    if input.spec.partial or not is_whole:
        return None
    new = drop_dims(input.spec, dims, keepdim)
    with_mean = func.__name__ in ("var_mean", "std_mean")
    return Plan(func, (new, new)) if with_mean else Plan(func, new)


@rule(*named("var", "std", "var_mean", "std_mean"))
@planned_else(plan_of_whole_dims)
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
    average, square_sum, count = moments(at_least_float32(part), dims, spec.shares(*dims))
    freedom = count - correction  # degrees of freedom
    out = square_sum / freedom if freedom > 0 else square_sum * math.nan  # nan as in torch
    if func.__name__ in ("std", "std_mean"):
        out = root(out)
    # Statistics are computed at least in float32, and given in the dtype of the tensor.
    result = wrap_reduced(out.to(part.dtype), spec, dims, keepdim)
    average_result = wrap_reduced(average.to(part.dtype), spec, dims, keepdim)
    with_mean = func.__name__ in ("var_mean", "std_mean")
    return (result, average_result) if with_mean else result
