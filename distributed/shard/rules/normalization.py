"""Normalization layers. Over whole dimensions the plain function runs; over split ones the ranks share statistics.

Forward gathers two numbers per statistic, backward all-reduces two. Weights are plain tensors; if their dimension is
split, each rank takes its part of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Group, gather_from_region, reduce_from_region
from distributed.shard.operands import reduced, replicated, shared
from distributed.shard.rules.reductions import Sharers, at_least_float32, moments, sharers
from distributed.shard.spec import Spec, part_of
from distributed.shard.tensor import MaybeTensor, ShardTensor, dispatch, local, named, no_rule, rule, wrap, wrap_result

Statistics = tuple[Tensor, Tensor]  # mean, 1 / deviation


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: Sequence[int], shared_by: Sharers,
    statistics: Statistics, centered: bool = True,
) -> Tensor:  # fmt: skip
    """(x - mean) / deviation * weight + bias.

    x: local tensor. weight, bias: local tensors that broadcast against x, or None. dims: the dimensions over which the
    statistics (mean, 1 / deviation) are computed. shared_by: (Group, counts) of the ranks that share them.
    """
    group, count = (shared_by[0], sum(shared_by[1])) if shared_by else (None, math.prod([x.shape[d] for d in dims]))
    if torch.is_autocast_enabled(x.device.type) and x.device.type != "cpu":
        x = x.float()  # as autocast does
    mean, scale = statistics
    return _Normalize.apply(x, weight, bias, mean, scale, dims, group, count, centered)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor,
        dims: Sequence[int], group: Group | None, count: int, centered: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.dims, ctx.group, ctx.count, ctx.centered = dims, group, count, centered
        ctx.bias = bias is not None and (bias.shape, bias.dtype)
        out = (at_least_float32(x) - mean) * scale
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normal, grad = (at_least_float32(x) - mean) * scale, at_least_float32(grad)
        grad_weight = grad_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (grad * normal).sum_to_size(weight.shape).to(weight.dtype)
        if ctx.bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum_to_size(ctx.bias[0]).to(ctx.bias[1])
        if weight is not None:
            grad = grad * weight
        sums = torch.stack([(grad * normal).sum(ctx.dims, keepdim=True), grad.sum(ctx.dims, keepdim=True)])
        if ctx.group is not None:
            sums = reduce_from_region(sums, ctx.group)
        along, average = (sums / ctx.count).unbind()
        back = grad - normal * along - average if ctx.centered else grad - normal * along
        return (back * scale).to(x.dtype), grad_weight, grad_bias, None, None, None, None, None, None


def statistics(x: Tensor, dims: tuple[int, ...], shared_by: Sharers, eps: float) -> tuple[Statistics, Tensor, int]:
    """((mean, 1 / deviation), sum of squared deviations, number of elements), without gradients: see _Normalize."""
    with torch.no_grad():
        mean, deviations, count = moments(at_least_float32(x), dims, shared_by)
        return (mean, (deviations / count + eps).rsqrt()), deviations, count


def own(weight: MaybeTensor, spec: Spec, dims: Sequence[int], shape: Sequence[int] | None = None) -> MaybeTensor:
    """This rank's part of a plain weight for dims of a tensor, viewed in a shape if one is given; None stays None."""
    if weight is None:
        return None
    weight = part_of(shared(weight, spec), spec.with_dims([spec.dims[d] for d in dims]))
    return weight if shape is None else weight.view(shape)


@rule(*named("layer_norm"))
def layer_norm(
    func: Callable, input: Any, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True,
) -> ShardTensor:  # fmt: skip
    """Normalize over the last dimensions, whole or split; weights have their global shape."""
    spec = input.spec
    common = type(input) is ShardTensor is not type(weight) and type(bias) is not ShardTensor and not spec.partial
    if not common or spec.whole_from + len(normalized_shape) > len(spec.dims):
        return _of_last(func, input, normalized_shape, weight, bias, eps)
    if spec.copies > 1:
        weight, bias = shared(weight, spec), shared(bias, spec)
    return wrap_result(torch.layer_norm(input, normalized_shape, weight, bias, eps), spec)


@rule(*named("rms_norm"))
def rms_norm(
    func: Callable, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:  # fmt: skip
    """Divide by the root mean square of the last dimensions, whole or split. Forward is one all-reduce if split."""
    return _of_last(func, input, normalized_shape, weight, None, eps)


def _of_last(func, input, normalized_shape, weight, bias, eps):
    x, first = reduced(_plain_weights(func, input, weight, bias)), len(input.spec.dims) - len(normalized_shape)
    (spec, part), dims = (x.spec, local(x)), tuple(range(first, len(x.spec.dims)))
    if spec.shape[first:] != tuple(normalized_shape):
        raise RuntimeError(f"{func.__name__}: normalized_shape {list(normalized_shape)} of {list(spec.shape)}")
    own_weight, own_bias, shared_by = own(weight, spec, dims), own(bias, spec, dims), sharers(spec, dims)
    if shared_by is None:
        weights = (own_weight, own_bias) if func.__name__ == "layer_norm" else (own_weight,)
        return wrap(func(part, normalized_shape, *weights, eps), spec)
    if func.__name__ == "layer_norm":
        found, _, _ = statistics(part, dims, shared_by, eps)
        return wrap(normalize(part, own_weight, own_bias, dims, shared_by, found), spec)
    with torch.no_grad():
        wide = at_least_float32(part)
        square = reduce_from_region(wide.square().sum(dims, keepdim=True), shared_by[0]) / sum(shared_by[1])
        scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    found = torch.zeros_like(scale), scale
    return wrap(normalize(part, own_weight, None, dims, shared_by, found, centered=False), spec)


def _plain_weights(func, x, *weights):
    if not isinstance(x, ShardTensor) or any(isinstance(w, ShardTensor) for w in weights):
        raise no_rule(func, (x, *weights), {}, "the weights of a layer are plain tensors, its input is a ShardTensor")
    return x


@rule(*named("group_norm"))
def group_norm(
    func: Callable, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> ShardTensor:  # fmt: skip
    """Normalize groups of channels of (B, C, ...). Channels may be split if every rank holds whole groups."""
    x = reduced(_plain_weights(func, input, weight, bias))
    spec, part = x.spec, local(x)
    if spec.shape[1] % num_groups:
        raise ValueError(f"group_norm: {spec.shape[1]} channels cannot be cut into {num_groups} groups")
    size = spec.shape[1] // num_groups
    if spec.is_split(1) and any(n % size for n in spec.shares(1)[0]):
        raise no_rule(func, (input,), {}, "a group of channels is split")
    spatial, groups = tuple(range(2, len(spec.dims))), part.shape[1] // size
    shared_by = sharers(spec, spatial)
    if shared_by is None and part.numel():
        return wrap(F.group_norm(part, groups, own(weight, spec, (1,)), own(bias, spec, (1,)), eps), spec)
    if shared_by is not None:
        shared_by = shared_by[0], tuple([n * size for n in shared_by[1]])
    part, shape = part.unflatten(1, (groups, size)), (groups, size, *[1] * len(spatial))
    weight, bias = own(weight, spec, (1,), shape), own(bias, spec, (1,), shape)
    dims = tuple(range(2, part.dim()))
    found, _, _ = statistics(part, dims, shared_by, eps)
    return wrap(normalize(part, weight, bias, dims, shared_by, found).flatten(1, 2), spec)


@rule(F.batch_norm)
def batch_norm(
    func: Callable, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:  # fmt: skip
    """Normalize (B, C, ...) with statistics of all ranks; every rank updates the running ones in the same way."""
    x = reduced(_plain_weights(func, input, running_mean, running_var, weight, bias))
    spec, part = x.spec, local(x)
    channels, dims = (-1, *[1] * (len(spec.dims) - 2)), (0, *range(2, len(spec.dims)))
    if not training and (part.numel() or running_mean is None or running_var is None):  # for None it raises
        mean, var, weight, bias = (own(w, spec, (1,)) for w in (running_mean, running_var, weight, bias))
        return wrap(F.batch_norm(part, mean, var, weight, bias, False, momentum, eps), spec)
    weight, bias = own(weight, spec, (1,), channels), own(bias, spec, (1,), channels)
    if not training:  # a rank without elements
        none = torch.zeros(channels[1:], dtype=part.dtype, device=part.device)
        return wrap(normalize(part, weight, bias, dims, None, (none, none)), spec)
    shared_by = sharers(spec, dims)
    count = spec.shape.numel() // max(spec.shape[1], 1)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {spec.shape}")
    found, deviations, _ = statistics(part, dims, shared_by, eps)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            every = torch.stack([found[0].flatten(), deviations.flatten() / (count - 1)], 1)  # (channels, 2)
            if (split := spec.split(1)) is not None:
                every = gather_from_region(every, 0, *split)
            for running, new in zip((running_mean, running_var), every.unbind(1), strict=True):
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
    return wrap(normalize(part, weight, bias, dims, shared_by, found), spec)


@rule(F.instance_norm)
def instance_norm(
    func: Callable, input: ShardTensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardTensor:  # fmt: skip
    """Normalize each channel of each sample of (B, C, ...)."""
    if not use_input_stats:
        return dispatch(F.batch_norm, input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None and running_var is not None:
        spatial = range(2, len(input.spec.dims))
        for running, new in zip((running_var, running_mean), dispatch(torch.var_mean, input, spatial), strict=True):
            average = local(replicated(dispatch(torch.mean, dispatch(torch.detach, new), 0)))  # over the samples
            running.mul_(1 - momentum).add_(average.to(running.dtype), alpha=momentum)
    return dispatch(F.group_norm, input, input.spec.shape[1], weight, bias, eps)


@rule(F.normalize)
def to_unit_norm(
    func: Callable, input: ShardTensor, p: float = 2.0, dim: int | Sequence[int] = 1, eps: float = 1e-12,
    out: Tensor | None = None,
) -> ShardTensor:  # fmt: skip
    """Divide by the global p-norm along dim, or by eps if that is larger."""
    if out is not None:
        raise no_rule(func, (input,), {}, "out= is not supported")
    size = dispatch(torch.linalg.vector_norm, input, p, dim, keepdim=True)
    return dispatch(torch.div, input, dispatch(torch.clamp, size, min=eps))
