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

from distributed.collectives import copy_to_region, gather_from_region, reduce_from_region
from distributed.shard.operands import reduced, replicated, shared
from distributed.shard.rules.reductions import Sharers, as_autocast, at_least_float32, moments, sharers
from distributed.shard.rules.windows import no_outputs
from distributed.shard.spec import Spec, part_of
from distributed.shard.tensor import MaybeTensor, ShardTensor, dispatch, local, named, no_rule, rule, wrap, wrap_result

Statistics = tuple[Tensor, Tensor]  # mean, 1 / deviation


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: Sequence[int], shared_by: Sharers,
    statistics: Statistics,
) -> Tensor:  # fmt: skip
    """(x - mean) / deviation * weight + bias.

    x: local tensor. weight, bias: local tensors that broadcast against x, or None. dims: the dimensions over which the
    statistics (mean, 1 / deviation) are computed. shared_by: (Group, counts) of the ranks that share them.
    """
    x = as_autocast(x)
    out = _Normal.apply(at_least_float32(x), *statistics, dims, shared_by)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


class _Normal(torch.autograd.Function):
    """(x - mean) * scale, where mean and scale = 1 / deviation are functions of x on all ranks that share them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, dims: Sequence[int], shared_by: Sharers) -> Tensor:
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, scale)
        ctx.dims, ctx.shared_by = dims, shared_by
        return normal

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale = ctx.saved_tensors
        sums = torch.stack([(grad * normal).sum(ctx.dims, keepdim=True), grad.sum(ctx.dims, keepdim=True)])
        count = math.prod([normal.shape[d] for d in ctx.dims])
        if ctx.shared_by is not None:
            group, counts = ctx.shared_by
            sums, count = reduce_from_region(sums, group), sum(counts)
        along, average = (sums / count).unbind()
        return (grad - normal * along - average) * scale, None, None, None, None


def statistics(x: Tensor, dims: tuple[int, ...], shared_by: Sharers, eps: float) -> tuple[Statistics, Tensor]:
    """((mean, 1 / deviation), sum of squared deviations), without gradients: see _Normal."""
    with torch.no_grad():
        mean, deviations, count = moments(at_least_float32(x), dims, shared_by)
        return (mean, (deviations / count + eps).rsqrt()), deviations


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
    if common and spec.whole_from + len(normalized_shape) <= len(spec.dims):
        if spec.copies > 1:
            weight, bias = shared(weight, spec), shared(bias, spec)
        return wrap_result(torch.layer_norm(input, normalized_shape, weight, bias, eps), spec)
    x, dims, shared_by = _of_last(func, input, normalized_shape, weight, bias)
    part, weight, bias = local(x), own(weight, x.spec, dims), own(bias, x.spec, dims)
    if shared_by is None:
        return wrap(F.layer_norm(part, normalized_shape, weight, bias, eps), x.spec)
    found, _ = statistics(part, dims, shared_by, eps)
    return wrap(normalize(part, weight, bias, dims, shared_by, found), x.spec)


@rule(*named("rms_norm"))
def rms_norm(
    func: Callable, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> ShardTensor:  # fmt: skip
    """Divide by the root mean square of the last dimensions, whole or split. Forward is one all-reduce if split."""
    x, dims, shared_by = _of_last(func, input, normalized_shape, weight)
    part, weight = local(x), own(weight, x.spec, dims)
    if shared_by is None:
        return wrap(F.rms_norm(part, normalized_shape, weight, eps), x.spec)
    group, counts = shared_by
    part = as_autocast(part)
    wide = at_least_float32(part)
    square = reduce_from_region(wide.square().sum(dims, keepdim=True), group) / sum(counts)
    scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * copy_to_region(scale, group)
    return wrap((out if weight is None else out * weight).to(part.dtype), x.spec)


def _of_last(func, input, normalized_shape, *weights):
    """(input, not partial; its last dimensions, which normalized_shape has; the ranks among which they are split)."""
    x, first = reduced(_plain_weights(func, input, *weights)), len(input.spec.dims) - len(normalized_shape)
    if x.spec.shape[first:] != tuple(normalized_shape):
        raise RuntimeError(f"{func.__name__}: normalized_shape {list(normalized_shape)} of {list(x.spec.shape)}")
    dims = tuple(range(first, len(x.spec.dims)))
    return x, dims, sharers(x.spec, dims)


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
    found, _ = statistics(part, dims, shared_by, eps)
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
        return wrap(no_outputs(part, part.shape, weight, bias), spec)
    shared_by = sharers(spec, dims)
    count = spec.shape.numel() // max(spec.shape[1], 1)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {spec.shape}")
    found, deviations = statistics(part, dims, shared_by, eps)
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
