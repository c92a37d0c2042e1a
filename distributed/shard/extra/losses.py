"""Softmax along a whole or split dimension, and loss functions.

Of a loss the plain function computes one value per element or sample; ordinary reductions follow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.operands import global_shape, local_operand, sum_partial, whole_weight
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, on_shard_tensors, rule, wrap
from distributed.shard.ops.elementwise import broadcast
from distributed.shard.ops.reductions import autocast_dtype, drop_dims, reduced_spec


@rule(*named("softmax", "log_softmax"))
def softmax(
    func: Callable,
    input: ShardTensor,
    dim: int | None = None,
    _stacklevel: Any = 3,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """The plain function along a whole dimension; x - logsumexp(x), or its exponential, along a split one."""
    if dim is None:
        raise no_rule(func, (input,), {}, "give a dimension")
    if _stacklevel is None or isinstance(_stacklevel, torch.dtype):  # torch.softmax(x, dim, dtype)
        dtype = _stacklevel
    if dtype is not None:
        input = dispatch(Tensor.to, input, dtype)
    x = sum_partial(input)
    # The exponential of a partial tensor is not that of its sum.
    is_log = func.__name__ in ("log_softmax", "special_log_softmax")
    if not x.spec.is_split(dim):
        plain = torch.log_softmax if is_log else torch.softmax
        y = plain(local(x), dim)
        return wrap(y, x.spec)

    y = on_shard_tensors(_log_softmax, x, dim)
    if not is_log:
        y = dispatch(torch.exp, y)
    return dispatch(Tensor.to, y, autocast_dtype(x))


def _log_softmax(x, dim):
    """Along a split dimension the rule of logsumexp gathers one number of each rank."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide - wide.logsumexp(dim, True)


def averaged(loss: ShardTensor, reduction: str) -> ShardTensor:
    """Mean or sum of the losses, or the losses themselves for 'none'. Raises ValueError for another reduction."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    reduce = torch.mean if reduction == "mean" else torch.sum
    return dispatch(reduce, loss)


def named_reduction(
    reduction: str,
    size_average: bool | None,
    reduce: bool | None,
) -> str:
    """The reduction, which two deprecated arguments may give instead."""
    if size_average is None and reduce is None:
        return reduction
    return _reduction.legacy_get_string(size_average, reduce)


@rule(
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
def elementwise_loss(
    func: Callable,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    **parameters: Any,
) -> ShardTensor:
    """One value for each element. kl_div broadcasts, and may divide the sum by the global number of samples, batchmean.

    torch drops the weight of F.l1_loss before this rule is called.
    """
    shape = tuple(global_shape(input))
    target_shape = tuple(global_shape(target))
    if func is not F.kl_div and shape != target_shape:
        raise ValueError(f"{func.__name__}: shapes {shape} and {target_shape} differ")
    reduction = named_reduction(reduction, size_average, reduce)
    # The plain function gives one loss for each element, whatever the reduction.
    settings: dict[str, Any] = {"reduction": "none"}
    if weight is not None:
        settings["weight"] = weight
    loss = broadcast(func, input, target, **settings, **parameters)
    is_batchmean = reduction == "batchmean" and func is F.kl_div
    if is_batchmean:
        loss_sum = averaged(loss, "sum")
        samples = shape[0]
        return dispatch(torch.div, loss_sum, samples)
    # Of these losses mse_loss alone divides by the sum of the weights; the others divide by the number of elements.
    is_weighted_mean = reduction == "mean" and func is F.mse_loss
    if is_weighted_mean and weight is not None:
        return on_shard_tensors(lambda loss, weight: loss.sum() / weight.sum(), loss, weight)
    return averaged(loss, reduction)


@rule(F.cross_entropy, F.nll_loss)
def class_loss(
    func: Callable,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> ShardTensor:
    """Loss over classes. input: (C,) or (B, C, ...), classes not split. target: indices (B, ...), or probabilities."""
    if not isinstance(input, ShardTensor):
        raise no_rule(func, (input, target), {}, "the input must be a ShardTensor")
    x = sum_partial(input)
    target = sum_partial(target)
    reduction = named_reduction(reduction, size_average, reduce)
    spec = x.spec
    classes = 0 if len(spec.dims) == 1 else 1
    if spec.is_split(classes):
        raise no_rule(func, (input, target), {}, "the classes are split")

    # There is one loss for each sample or pixel: (B, ...).
    each = drop_dims(spec, (classes,))
    has_indices = target.dim() == len(each.dims)  # otherwise one probability for each class
    target_spec = each if has_indices else spec
    target_shape = tuple(global_shape(target))
    if target_shape != tuple(target_spec.shape):
        raise ValueError(f"{func.__name__}: target {target_shape} of input {tuple(spec.shape)}")
    part = local_operand(target, target_spec)
    smoothing = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    own_weight = whole_weight(weight, spec)  # (C,)
    loss = func(local(x), part, own_weight, ignore_index=ignore_index, reduction="none", **smoothing)
    # A sum over split dimensions is a partial tensor.
    if reduction != "mean":
        return averaged(wrap(loss, each), reduction)

    # The mean divides by the weights of the targets; a target that is ignored has none.
    is_ignored = part == ignore_index
    counts = (~is_ignored).to(loss.dtype) if has_indices else torch.ones_like(loss)
    if has_indices and own_weight is not None:
        valid = torch.where(is_ignored, 0, part)  # any class will do where the count is 0
        counts = own_weight[valid] * counts

    # The sums of losses and counts are added up over the ranks in one all-reduce.
    every_dim = range(len(each.dims))
    one = reduced_spec(each, every_dim, False)
    two = one.with_dims([unsplit_axes(2)])
    own_sums = torch.stack([loss.sum(), counts.sum()])  # (2,)
    sums = sum_partial(wrap(own_sums, two))
    value, count = local(sums).unbind()
    return wrap(value / count, sums.spec.with_dims([]))
