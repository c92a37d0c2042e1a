"""Normalization layers: the ranks among which dimensions are split share their statistics.

Forward gathers two numbers per statistic, backward all-reduces two.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import at_least_float32, reduce_from_region
from distributed.shard.operands import fitted, reduced, replicated, shared
from distributed.shard.rules.reductions import autocast_dtype, centred, dims_of, kept, merged
from distributed.shard.spec import Shares
from distributed.shard.tensor import (
    NEVER_SPLIT,
    MaybeTensor,
    ShardTensor,
    dispatch,
    local,
    named,
    rule,
    wrap,
    wrap_result,
)


class Normal(torch.autograd.Function):
    """((x - mean) / deviation * weight + bias, mean, variance): of dims of x on all ranks that share them.

    A pass over a tensor costs what the layer costs, so forward and backward make few: all but x itself, its gradient
    and one buffer each has the size of the statistics or of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dims: tuple[int, ...],
        shared_by: Shares,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Local parts that broadcast against x -> the shape of x. shared_by: the ranks and their parts of dims.

        The backward pass needs x, which is often kept anyway, and nothing else of its size. Mean and variance have no
        gradient.
        """
        apart, own_mean, deviations = centred(x, dims)
        mean, deviations, count = merged(own_mean, deviations, dims, x.shape, shared_by)
        var = deviations / count
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.dims, ctx.shared_by = dims, shared_by
        ctx.mark_non_differentiable(mean, var)
        factor = scale if weight is None else scale * weight
        shift = (own_mean - mean) * factor  # from the mean of this rank to that of all
        shift = shift if bias is None else shift + bias
        y = apart.mul_(factor).add_(shift)
        return y.to(autocast_dtype(x)), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias; one all-reduce of two numbers for each mean."""
        x, weight, bias, mean, scale = ctx.saved_tensors
        apart, grad = x - mean, at_least_float32(grad)
        # First over the dimensions along which the weight is the same: the sums over others are small.
        uniform = uniform_dims(ctx.dims, x.dim(), weight, bias)
        of_product = sum_over(grad * apart, uniform) * scale
        of_grad = sum_over(grad, uniform)
        _, for_weight, for_bias, *_ = ctx.needs_input_grad
        of_weight = of_product.sum_to_size(weight.shape).to(weight.dtype) if for_weight else None
        of_bias = of_grad.sum_to_size(bias.shape).to(bias.dtype) if for_bias else None
        if weight is not None:
            of_product, of_grad = of_product * weight, of_grad * weight
        sums = torch.stack([of_product.sum(ctx.dims, keepdim=True), of_grad.sum(ctx.dims, keepdim=True)])
        count = math.prod([x.shape[d] for d in ctx.dims])
        if ctx.shared_by is not None:
            counts, group = ctx.shared_by
            sums, count = reduce_from_region(sums, group), sum(counts)
        along, average = (sums / count).unbind()
        # (grad * weight - (x - mean) * scale * along - average) * scale
        factor = scale if weight is None else scale * weight
        back = apart.mul_(-scale.square() * along).sub_(average * scale).addcmul_(grad, factor)
        return back.to(x.dtype), of_weight, of_bias, None, None, None


def uniform_dims(dims: Sequence[int], count: int, *weights: Tensor | None) -> list[int]:
    """Those dims, of a tensor of `count` dimensions, along which each of some weights that broadcast has one number."""
    uniform = []
    for dim in dims:
        varying = [w for w in weights if w is not None and dim >= count - w.dim() and w.shape[dim - count] != 1]
        if not varying:
            uniform.append(dim)
    return uniform


def sum_over(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over dims, which stay with size 1; x itself without dims."""
    return x.sum(dims, keepdim=True) if dims else x


def normalized(
    x: ShardTensor, dims: Sequence[int], eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """((x - mean) / deviation * weight + bias, mean, variance) over dims; the last two have no gradient."""
    x, dims = reduced(x), tuple(dims)
    scaling = [None if w is None else fitted(w, x.spec) for w in (weight, bias)]
    y, mean, var = Normal.apply(local(x), *scaling, eps, dims, x.spec.shares(*dims))
    left = kept(x.spec, dims, True)
    return wrap(y, x.spec), wrap(mean, left), wrap(var, left)


def scaled(y: ShardTensor, weight: Tensor | None, bias: Tensor | None, like: Tensor) -> ShardTensor:
    """Weight and bias of a layer applied to y, in the dtype that it gives for an input `like`."""
    y = y if weight is None else dispatch(torch.mul, y, weight)
    y = y if bias is None else dispatch(torch.add, y, bias)
    return dispatch(Tensor.to, y, autocast_dtype(like))


def of_channels(weight: MaybeTensor, x: Tensor) -> MaybeTensor:
    """A weight of each channel (C,) in a shape that broadcasts against x (B, C, ...); None stays None."""
    return None if weight is None else weight.view(-1, *[1] * (x.dim() - 2))


@rule(*named("layer_norm"))
def layer_norm(
    func: Callable, input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> ShardTensor:  # fmt: skip
    """Normalize over the last dimensions, whole or split; weights have their global shape."""
    x = reduced(input) if input.spec.partial else input
    spec = x.spec
    first = len(spec.dims) - len(normalized_shape)
    is_whole = not spec.split_dims or spec.split_dims[-1] < first
    is_plain = type(weight) in NEVER_SPLIT and type(bias) in NEVER_SPLIT
    has_split_weights = not is_plain and (isinstance(weight, ShardTensor) or isinstance(bias, ShardTensor))
    if not is_whole or has_split_weights:
        return normalized(x, last_dims(func, x, normalized_shape), eps, weight, bias)[0]
    if spec.copies > 1:
        weight, bias = shared(weight, spec), shared(bias, spec)
    if type(x) is not ShardTensor:  # a fake one bears no backward pass
        return wrap(F.layer_norm(local(x), normalized_shape, weight, bias, eps), spec)
    return wrap_result(torch.layer_norm(x, normalized_shape, weight, bias, eps), spec)


@rule(*named("rms_norm"))
def rms_norm(
    func: Callable, input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:  # fmt: skip
    """Divide by the root mean square of the last dimensions, whole or split. Forward is one all-reduce if split."""
    x, dims = reduced(input), last_dims(func, input, normalized_shape)
    if not any(map(x.spec.is_split, dims)) and not isinstance(weight, ShardTensor):
        return wrap(F.rms_norm(local(x), normalized_shape, shared(weight, x.spec), eps), x.spec)
    wide = dispatch(Tensor.to, x, torch.promote_types(x.dtype, torch.float32))
    square = dispatch(torch.mean, dispatch(torch.square, wide), dims, True)
    square = dispatch(torch.add, square, torch.finfo(wide.dtype).eps if eps is None else eps)
    return scaled(dispatch(torch.mul, wide, dispatch(torch.rsqrt, square)), weight, None, input)


def last_dims(func: Callable, x: ShardTensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The last dimensions, which have this shape."""
    dims = dims_of(x.spec, range(-len(normalized_shape), 0))
    if [x.spec.shape[d] for d in dims] != list(normalized_shape):
        raise RuntimeError(f"{func.__name__}: normalized_shape {list(normalized_shape)} of {list(x.spec.shape)}")
    return dims


@rule(*named("group_norm"))
def group_norm(
    func: Callable, input: ShardTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> ShardTensor:  # fmt: skip
    """Normalize groups of channels of (B, C, ...)."""
    x = dispatch(Tensor.unflatten, input, 1, (num_groups, -1))
    shape = num_groups, -1, *[1] * (len(x.spec.dims) - 3)
    weight, bias = (None if w is None else w.view(shape) for w in (weight, bias))
    return dispatch(torch.flatten, normalized(x, range(2, len(x.spec.dims)), eps, weight, bias)[0], 1, 2)


@rule(F.batch_norm)
def batch_norm(
    func: Callable, input: ShardTensor, running_mean: Any, running_var: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> ShardTensor:  # fmt: skip
    """Normalize (B, C, ...) with statistics of all ranks; every rank updates the running ones in the same way."""
    shape = input.spec.shape
    if not training:
        scale = (running_var + eps).rsqrt() * (1 if weight is None else weight)
        shift = (0 if bias is None else bias) - running_mean * scale
        return scaled(input, of_channels(scale, input), of_channels(shift, input), input)
    count = shape.numel() // max(shape[1], 1)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {shape}")
    scaling = of_channels(weight, input), of_channels(bias, input)
    y, mean, var = normalized(input, (0, *range(2, len(shape))), eps, *scaling)
    if running_mean is not None:
        update(running_mean, running_var, [mean, dispatch(torch.mul, var, count / (count - 1))], momentum)
    return y


@torch.no_grad()
def update(running_mean: Tensor | None, running_var: Tensor | None, new: Any, momentum: float) -> None:
    """Move running statistics (C,), if there are any, towards the `new` mean and variance, of C elements each."""
    if isinstance(new[0], ShardTensor):
        new = local(replicated(dispatch(torch.stack, new)))  # (2, ...)
    for running, value in zip((running_mean, running_var), new, strict=True):
        if running is not None:
            running.mul_(1 - momentum).add_(value.flatten().to(running.dtype), alpha=momentum)


@rule(F.instance_norm)
def instance_norm(
    func: Callable, input: ShardTensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:  # fmt: skip
    """Normalize each channel of each sample of (B, C, ...)."""
    if not use_input_stats:
        return dispatch(F.batch_norm, input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:
        var, mean = dispatch(torch.var_mean, input, range(2, len(input.spec.dims)))
        update(running_mean, running_var, [dispatch(torch.mean, x, 0) for x in (mean, var)], momentum)
    return dispatch(F.group_norm, input, input.spec.shape[1], weight, bias, eps)


@rule(F.normalize)
def to_unit_norm(
    func: Callable, input: ShardTensor, p: float = 2.0, dim: int | Sequence[int] = 1, eps: float = 1e-12,
    out: Tensor | None = None,
) -> ShardTensor:  # fmt: skip
    """Divide by the global p-norm along dim, or by eps if that is larger."""
    size = dispatch(torch.linalg.vector_norm, input, p, dim, keepdim=True)
    return dispatch(torch.div, input, dispatch(torch.clamp, size, min=eps))
