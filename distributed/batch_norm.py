"""BatchNorm with the statistics of the global batch, whatever the layout: that of one device with all samples.

Without it each data-parallel rank normalizes with the statistics of its own samples, as in PyTorch. Ranks that share
an image have common statistics in both cases. Forward all-reduces two numbers of each channel, one after the other, and
backward two more. Method: Ioffe and Szegedy 2015 (arXiv:1502.03167).
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from distributed.collectives import (
    AnyGroup,
    Group,
    as_group,
    at_least_float32,
    copy_to_region,
    reduce_from_region,
)
from distributed.shard.core.spec import Shares
from distributed.shard.ops.normalization import Normal, normal_gradients, of_channels, update
from distributed.shard.ops.reductions import autocast_dtype
from distributed.shard_tensor import ShardTensor, local, sum_partial, whole_weight, wrap

EQUAL = Fraction(1)


def synchronize_batch_norm(model: nn.Module, group: AnyGroup, share: Fraction = EQUAL) -> None:
    """Let the BatchNorm layers of a model, in place, share their statistics over the ranks of a group in training.

    Each rank has the same number of samples, or a part of each of them as a ShardTensor. share: the mean number of
    samples of a rank, relative to this rank's, where members of an ensemble are shared unevenly. A library's subclass
    keeps what else its forward function does.
    """
    group = as_group(group)
    if group.size == 1:
        return
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in layers:
        module.forward = partial(_synchronized, module.forward, group, share)


def _synchronized(forward: Callable, group: Group, share: Fraction, x: Tensor) -> Tensor:
    """The forward function of a layer, in which F.batch_norm is that of a group: (B, C, ...) -> the same shape."""
    with _OverGroup(group, share):
        return forward(x)


class _OverGroup(TorchFunctionMode):
    """Inside, F.batch_norm is the one of this file, over the ranks of a group."""

    def __init__(self, group: Group, share: Fraction):
        super().__init__()
        self.group = group
        self.share = share

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return batch_norm(self.group, self.share, *args, **kwargs)
        return func(*args, **kwargs)


def batch_norm(
    group: Group,
    share: Fraction,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm, in training over all ranks of a group. input: (B, C, ...), plain or a ShardTensor.

    share: see synchronize_batch_norm. Raises ValueError for one value per channel, and for split channels.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    # Ranks that share an image count once: a replica is a set of ranks that together hold whole images.
    spec = None
    part = input
    replicas = group.size
    copies = 1  # ranks that have the same values, each of which adds them to the sums of all
    if isinstance(input, ShardTensor):
        input = sum_partial(input)
        spec = input.spec
        part = local(input)  # (B, C, ...) of this rank
        replicas = group.size // spec.mesh.joint.size
        copies = spec.copies
        weight = whole_weight(weight, spec)
        bias = whole_weight(bias, spec)
        if spec.is_split(1):
            raise ValueError("sync_batchnorm: channels that are split over ranks are not supported")

    # The mean comes first: the sum of squared deviations from it keeps its digits, which E[x²] - E[x]² does not.
    dims = (0, *range(2, part.dim()))
    values_of_channel = input.shape.numel() // input.shape[1]
    count = int(replicas * values_of_channel * share)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    summed = count * copies
    with torch.no_grad():
        values = at_least_float32(part)
        own_sum = values.sum(dims, keepdim=True)  # (1, C, 1, ...)
        mean = reduce_from_region(own_sum, group) / summed
        own_squares = (values - mean).square().sum(dims, keepdim=True)
        variance = reduce_from_region(own_squares, group) / summed
        unbiased_variance = variance * (count / (count - 1))
        update(running_mean, running_var, [mean, unbiased_variance], momentum)
    weight = of_channels(weight, part)  # (C,) -> (1, C, 1, ...)
    bias = of_channels(bias, part)
    scale = (variance + eps).rsqrt()
    shared_by = ((summed,), group)
    y = _NormalAround.apply(part, weight, bias, mean, scale, eps, dims, shared_by)
    return y if spec is None else wrap(y, spec)


def _sum_statistics(
    x: Tensor,
    eps: float,
    dims: tuple[int, ...],
    shared_by: Shares,
) -> tuple[Tensor, Tensor]:
    """(mean, scale) as above, with a graph, for second derivatives. Every rank uses them for its elements."""
    assert shared_by is not None
    (count,), group = shared_by
    values = at_least_float32(x)
    own_sum = values.sum(dims, keepdim=True)
    mean = reduce_from_region(own_sum, group) / count
    mean = copy_to_region(mean, group)
    own_squares = (values - mean).square().sum(dims, keepdim=True)
    squares = reduce_from_region(own_squares, group)
    scale = (squares / count + eps).rsqrt()
    return mean, copy_to_region(scale, group)


class _NormalAround(Normal):
    """(x - mean) * scale * weight + bias, where the statistics of all ranks that share dims of x are known already."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        eps: float,
        dims: tuple[int, ...],
        shared_by: Shares,
    ) -> Tensor:
        """Local parts that broadcast against x -> the shape of x. The backward pass needs x alone."""
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.statistics = partial(_sum_statistics, eps=eps, dims=dims, shared_by=shared_by)
        ctx.dims = dims
        ctx.shared_by = shared_by
        factor = scale if weight is None else scale * weight
        y = (x - mean).mul_(factor)  # in place, since the difference is a tensor of its own
        if bias is not None:
            y = y.add_(bias)
        return y.to(autocast_dtype(x))

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Gradients as those of Normal: it has two arguments less."""
        # The compiler traces a function, and no backward pass of another class.
        return (*normal_gradients(ctx, grad), None, None)
