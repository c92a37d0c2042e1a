"""Normalization over dimensions that several ranks may share: the statistics are those of all of them.

Forward gathers two numbers per statistic, backward all-reduces two.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import at_least_float32, copy_to_region, differentiated_again, reduce_from_region
from distributed.shard.operands import local_operand, sum_partial
from distributed.shard.rules.moments import centred, merge_moments, moments
from distributed.shard.rules.reductions import autocast_dtype, drop_dims
from distributed.shard.spec import Shares
from distributed.shard.tensor import ShardTensor, local, wrap


class Normal(torch.autograd.Function):
    """Normalize x over dims that several ranks may share, then scale and shift it; also mean and variance.

    With normal = (x - mean) * scale, where scale = 1 / sqrt(variance + eps), the result is normal * weight + bias. A
    pass over a tensor costs what the layer costs, so forward and backward make few: all but x itself, its gradient and
    one buffer each has the size of the statistics or of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dims: tuple[int, ...],
        shared_by: Shares,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(result in the shape of x, mean, variance); dims have size 1 in the last two, which have no gradient.

        x: this rank's part. weight, bias: parts that broadcast against it. shared_by: the ranks among which dims are
        split, and the elements of each (Spec.shares). The backward pass needs x, which is often kept anyway, and
        nothing else of its size.
        """
        deviation, own_mean, square_sum = centred(x, dims)  # of this rank
        mean, square_sum, count = merge_moments(own_mean, square_sum, dims, x.shape, shared_by)  # of all ranks
        var = square_sum / count
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.statistics = partial(_statistics, eps=eps, dims=dims, shared_by=shared_by)
        ctx.dims = dims
        ctx.shared_by = shared_by
        ctx.mark_non_differentiable(mean, var)
        # x - mean = (x - own_mean) + (own_mean - mean): `deviation`, from the mean of this rank, is reused in place.
        factor = scale if weight is None else scale * weight
        shift = (own_mean - mean) * factor
        if bias is not None:
            shift = shift + bias
        y = deviation.mul_(factor).add_(shift)
        return y.to(autocast_dtype(x)), mean, var

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias; one all-reduce of two numbers for each mean.

        With g = grad * weight, and averages over dims on all ranks:
        gradient of x = (g - average(g) - normal * average(g * normal)) * scale.
        """
        x, weight, bias, mean, scale = ctx.saved_tensors
        again = differentiated_again()
        if again:  # what was kept has no graph
            mean, scale = ctx.statistics(x)
        deviation = x - mean  # computed again, because to keep it would take memory
        grad = at_least_float32(grad)

        # Sums of grad * normal and of grad, first over the dimensions along which the weight is the same: the sums over
        # others are small.
        uniform = uniform_dims(ctx.dims, x.dim(), weight, bias)
        grad_normal_sum = sum_over(grad * deviation, uniform) * scale
        grad_sum = sum_over(grad, uniform)
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        weight_grad = None
        if for_weight:
            weight_grad = grad_normal_sum.sum_to_size(weight.shape).to(weight.dtype)
        bias_grad = None
        if for_bias:
            bias_grad = grad_sum.sum_to_size(bias.shape).to(bias.dtype)

        # average(g * normal) and average(g) over all dims, on all ranks that share them.
        if weight is not None:
            grad_normal_sum = grad_normal_sum * weight
            grad_sum = grad_sum * weight
        own_sums = [
            grad_normal_sum.sum(ctx.dims, keepdim=True),
            grad_sum.sum(ctx.dims, keepdim=True),
        ]
        sums = torch.stack(own_sums)  # (2, ...), where dims have size 1
        count = math.prod([x.shape[d] for d in ctx.dims])
        if ctx.shared_by is not None:
            counts, group = ctx.shared_by
            sums = reduce_from_region(sums, group)
            sums = copy_to_region(sums, group)  # each rank uses them for other elements
            count = sum(counts)
        average_normal, average = (sums / count).unbind()

        # The gradient of x, computed in the memory of x - mean.
        factor = scale if weight is None else scale * weight
        buffer = deviation.clone() if again else deviation
        x_grad = buffer.mul_(-scale.square() * average_normal)
        x_grad = x_grad.sub_(average * scale)
        x_grad = x_grad.addcmul_(grad, factor)
        return x_grad.to(x.dtype), weight_grad, bias_grad, None, None, None


def _statistics(
    x: Tensor,
    eps: float,
    dims: tuple[int, ...],
    shared_by: Shares,
) -> tuple[Tensor, Tensor]:
    """(mean, 1 / sqrt(variance + eps)) over dims on all ranks, with a graph. Every rank uses them for its elements."""
    mean, square_sum, count = moments(at_least_float32(x), dims, shared_by)
    scale = (square_sum / count + eps).rsqrt()
    if shared_by is None:
        return mean, scale
    _, group = shared_by
    return copy_to_region(mean, group), copy_to_region(scale, group)


def uniform_dims(
    dims: Sequence[int],
    count: int,
    *weights: Tensor | None,
) -> list[int]:
    """Those dims, of a tensor of `count` dimensions, along which no weight varies: it broadcasts, or is None."""
    # Dimensions are counted from the end, since the weight may have fewer.
    uniform = []
    for dim in dims:
        from_end = dim - count
        varying = []
        for weight in weights:
            if weight is None or weight.dim() < -from_end:
                continue
            if weight.shape[from_end] != 1:
                varying.append(weight)
        if not varying:
            uniform.append(dim)
    return uniform


def sum_over(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over dims, which stay with size 1; x itself without dims."""
    return x.sum(dims, keepdim=True) if dims else x


def normalized(
    x: ShardTensor,
    dims: Sequence[int],
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """Normalize x over dims, whole or split, then scale and shift it: (result, mean, variance), see Normal.

    weight, bias: plain tensors or ShardTensors that broadcast against the whole x. dims have size 1 in mean and
    variance, which have no gradient.
    """
    x = sum_partial(x)
    dims = tuple(dims)
    # The weight is cut as the tensor is, where it has the same dimension.
    own_weight = None if weight is None else local_operand(weight, x.spec)
    own_bias = None if bias is None else local_operand(bias, x.spec)
    shared_by = x.spec.shares(*dims)
    y, mean, var = Normal.apply(local(x), own_weight, own_bias, eps, dims, shared_by)
    # The statistics have size 1 along dims, on every rank.
    of_statistics = drop_dims(x.spec, dims, True)
    return wrap(y, x.spec), wrap(mean, of_statistics), wrap(var, of_statistics)
