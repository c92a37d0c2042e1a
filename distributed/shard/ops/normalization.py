"""Normalization over dimensions that several ranks may share: the statistics are those of all of them.

Forward gathers two numbers per statistic, backward all-reduces two.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import at_least_float32, copy_to_region, differentiated_again, reduce_from_region
from distributed.shard.core.operands import local_operand, replicate, sum_partial, whole_weight
from distributed.shard.core.spec import Shares
from distributed.shard.core.tensor import (
    NEVER_SPLIT,
    MaybeTensor,
    NoRule,
    ShardTensor,
    dispatch,
    local,
    named,
    on_shard_tensors,
    rule,
    wrap,
    wrap_result,
)
from distributed.shard.ops.moments import centred, merge_moments, moments
from distributed.shard.ops.reductions import autocast_dtype, dims_of, drop_dims


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
        """Gradients of x, weight and bias."""
        return normal_gradients(ctx, grad)


def normal_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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


def of_channels(weight: MaybeTensor, x: Tensor) -> MaybeTensor:
    """A weight of each channel (C,) in a shape that broadcasts against x (B, C, ...); None stays None."""
    if weight is None:
        return None
    shape: list[int] = [-1] + [1] * (x.dim() - 2)
    return on_shard_tensors(_view, weight, shape)


def _view(x, shape):
    """A weight in another shape; in a rule, a ShardTensor is its local part alone."""
    return x.view(shape)


@rule(*named("layer_norm"))
def layer_norm(
    func: Callable,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ShardTensor:
    """Normalize over the last dimensions, whole or split; weights have their global shape, normalized_shape.

    Raises RuntimeError if the last dimensions have another shape.
    """
    x = sum_partial(input) if input.spec.partial else input
    spec = x.spec
    first = len(spec.dims) - len(normalized_shape)
    is_whole = not spec.split_dims or spec.split_dims[-1] < first
    is_plain = type(weight) in NEVER_SPLIT and type(bias) in NEVER_SPLIT
    has_split_weights = not is_plain and (isinstance(weight, ShardTensor) or isinstance(bias, ShardTensor))
    if not is_whole or has_split_weights:
        dims = last_dims(func, x, normalized_shape)
        result, _, _ = normalized(x, dims, eps, weight, bias)
        return result

    # The common case: each rank normalizes its rows by the plain operation.
    if spec.copies > 1:
        weight = whole_weight(weight, spec)
        bias = whole_weight(bias, spec)
    if type(x) is not ShardTensor:  # a fake one bears no backward pass
        y = F.layer_norm(local(x), normalized_shape, weight, bias, eps)
        return wrap(y, spec)
    y = torch.layer_norm(x, normalized_shape, weight, bias, eps)
    return wrap_result(y, spec)


@rule(*named("rms_norm"))
def rms_norm(
    func: Callable,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:
    """Divide by the root mean square of the last dimensions, whole or split. Forward is one all-reduce if split."""
    x = sum_partial(input)
    spec = x.spec
    dims = last_dims(func, input, normalized_shape)
    is_whole = not any(spec.is_split(dim) for dim in dims)
    if is_whole and not isinstance(weight, ShardTensor):
        weight = whole_weight(weight, spec)
        y = F.rms_norm(local(x), normalized_shape, weight, eps)
        return wrap(y, spec)

    y = on_shard_tensors(_divided_by_root_mean_square, x, dims, weight, eps)
    return dispatch(Tensor.to, y, autocast_dtype(input))


def _divided_by_root_mean_square(x, dims, weight, eps):
    """RMS normalization over dims, whole or split: the mean over split ones communicates."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is None:
        eps = torch.finfo(wide.dtype).eps
    mean_square = wide.square().mean(dims, True)
    y = wide * (mean_square + eps).rsqrt()
    return y if weight is None else y * weight


def last_dims(
    func: Callable,
    x: ShardTensor,
    normalized_shape: Sequence[int],
) -> tuple[int, ...]:
    """The last dimensions of x, as many as the shape has. Raises RuntimeError if they have another shape."""
    dims = dims_of(x.spec, range(-len(normalized_shape), 0))
    shape = [x.spec.shape[d] for d in dims]
    if shape != list(normalized_shape):
        raise RuntimeError(f"{func.__name__}: normalized_shape {list(normalized_shape)} of {list(x.spec.shape)}")
    return dims


@rule(*named("group_norm"))
def group_norm(
    func: Callable,
    input: ShardTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ShardTensor:
    """Normalize each group of channels of each sample, (B, C, ...) -> the same; weights are (C,)."""
    # Each group is normalized over its channels and all points.
    x = dispatch(Tensor.unflatten, input, 1, (num_groups, -1))  # (B, groups, C / groups, ...)
    dims = range(2, len(x.spec.dims))
    ones = [1] * (len(dims) - 1)
    shape = (num_groups, -1, *ones)  # of the weights: (groups, C / groups, 1, ...)
    weight = None if weight is None else on_shard_tensors(_view, weight, shape)
    bias = None if bias is None else on_shard_tensors(_view, bias, shape)
    y, _, _ = normalized(x, dims, eps, weight, bias)
    return dispatch(torch.flatten, y, 1, 2)


@rule(F.batch_norm)
def batch_norm(
    func: Callable,
    input: ShardTensor,
    running_mean: Any,
    running_var: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Normalize (B, C, ...) with statistics of all ranks; every rank updates the running ones in the same way.

    Weights and running statistics are plain tensors (C,). Raises ValueError for one value per channel in training.
    """
    shape = input.spec.shape
    if not training:
        y = on_shard_tensors(_evaluated, input, running_mean, running_var, weight, bias, eps)
        return dispatch(Tensor.to, y, autocast_dtype(input))
    channels = max(shape[1], 1)
    count = shape.numel() // channels  # global: samples times points
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")
    dims = (0, *range(2, len(shape)))
    weight = of_channels(weight, input)  # (C,) -> (C, 1, ...)
    bias = of_channels(bias, input)
    y, mean, var = normalized(input, dims, eps, weight, bias)
    if running_mean is not None:
        # torch's running variance is the unbiased one.
        unbiased = dispatch(torch.mul, var, count / (count - 1))
        update(running_mean, running_var, [mean, unbiased], momentum)
    return y


def _evaluated(x, running_mean, running_var, weight, bias, eps):
    """Normalization with known statistics (C,): one product and one sum for each element of (B, C, ...)."""
    inverse_root = (running_var + eps).rsqrt()  # (C,)
    scale = inverse_root * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - running_mean * scale
    return x * of_channels(scale, x) + of_channels(shift, x)


@torch.no_grad()
def update(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    new: Any,
    momentum: float,
) -> None:
    """Move running statistics (C,), if there are any, towards the `new` mean and variance, of C elements each."""
    if isinstance(new[0], ShardTensor):
        both = dispatch(torch.stack, new)  # one gather for both
        new = local(replicate(both))  # (2, ...)
    for running, value in zip((running_mean, running_var), new, strict=True):
        if isinstance(running, ShardTensor) and (running.spec.partial or running.spec.split_dims):
            raise NoRule("ShardTensor: running statistics that a norm changes must be whole: give their full_tensor()")
        if running is not None:
            value = value.flatten().to(running.dtype)  # (C,)
            running.mul_(1 - momentum).add_(value, alpha=momentum)


@rule(F.instance_norm)
def instance_norm(
    func: Callable,
    input: ShardTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:
    """Normalize each channel of each sample of (B, C, ...); weights and running statistics are plain tensors (C,)."""
    if not use_input_stats:
        training = False
        return dispatch(F.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)
    if running_mean is not None:
        # The running statistics are means over the samples.
        spatial_dims = tuple(range(2, len(input.spec.dims)))
        var, mean = dispatch(torch.var_mean, input, spatial_dims)  # each (B, C)
        of_batch = [dispatch(torch.mean, mean, 0), dispatch(torch.mean, var, 0)]
        update(running_mean, running_var, of_batch, momentum)
    channels = input.spec.shape[1]  # each is a group of its own
    return dispatch(F.group_norm, input, channels, weight, bias, eps)


@rule(F.normalize)
def to_unit_norm(
    func: Callable,
    input: ShardTensor,
    p: float = 2.0,
    dim: int | Sequence[int] = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
) -> ShardTensor:
    """Divide by the global p-norm along dim, or by eps if that is larger."""
    size = dispatch(torch.linalg.vector_norm, input, p, dim, keepdim=True)
    divisor = dispatch(torch.clamp, size, min=eps)
    return dispatch(torch.div, input, divisor)
