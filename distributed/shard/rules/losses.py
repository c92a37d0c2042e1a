"""Loss functions: the plain function computes one value per element or sample; ordinary reductions follow."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from distributed.shard.rules.elementwise import broadcast, fitted
from distributed.shard.rules.reductions import kept, reduced_spec
from distributed.shard.spec import whole
from distributed.shard.tensor import ShardTensor, dispatch, global_shape, local, no_rule, reduced, rule, shared, wrap


def averaged(loss: ShardTensor, reduction: str) -> ShardTensor:
    """Mean or sum of the losses, or the losses themselves for 'none'. Raises ValueError for another reduction."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return dispatch(torch.mean if reduction == "mean" else torch.sum, loss)


def named_reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction, which two deprecated arguments may give instead."""
    return reduction if size_average is reduce is None else _reduction.legacy_get_string(size_average, reduce)


@rule(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
def regression_loss(
    func: Callable, input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", weight: Tensor | None = None, **parameters: Any,
) -> ShardTensor:  # fmt: skip
    """Losses of tensors with equal shapes. torch drops the weight of F.l1_loss before this rule is called."""
    reduction = named_reduction(reduction, size_average, reduce)
    _same_shape(func, input, target, weight)
    loss = broadcast(func, (input, target), {"reduction": "none", **parameters})
    if weight is None:
        return averaged(loss, reduction)
    loss = dispatch(torch.mul, loss, weight)
    if reduction == "mean" and func is not F.huber_loss:
        total = dispatch(torch.sum, weight) if isinstance(weight, ShardTensor) else weight.sum()
        return dispatch(torch.div, dispatch(torch.sum, loss), total)
    return averaged(loss, reduction)


@rule(F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
def binary_loss(
    func: Callable, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean", pos_weight: Tensor | None = None,
) -> ShardTensor:  # fmt: skip
    """Binary cross-entropy of tensors with equal shapes; the weights broadcast."""
    _same_shape(func, input, target)
    weights = {"weight": weight} if pos_weight is None else {"weight": weight, "pos_weight": pos_weight}
    loss = broadcast(func, (input, target), {"reduction": "none", **weights})
    return averaged(loss, named_reduction(reduction, size_average, reduce))


@rule(F.kl_div)
def kl_div(
    func: Callable, input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", log_target: bool = False,
) -> ShardTensor:  # fmt: skip
    """Kullback-Leibler divergence. The reduction may also be batchmean: the sum by the global number of samples."""
    loss = broadcast(func, (input, target), {"reduction": "none", "log_target": log_target})
    if reduction == "batchmean":
        return dispatch(torch.div, averaged(loss, "sum"), global_shape(input)[0])
    return averaged(loss, named_reduction(reduction, size_average, reduce))


def _same_shape(func, *tensors):
    shapes = [global_shape(x) for x in tensors if x is not None]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{func.__name__}: shapes {', '.join(str(tuple(shape)) for shape in shapes)} differ")


@rule(F.cross_entropy, F.nll_loss)
def class_loss(
    func: Callable, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> ShardTensor:  # fmt: skip
    """Loss over classes. input: (C,) or (B, C, ...), classes not split. target: indices (B, ...), or probabilities."""
    if not isinstance(input, ShardTensor) or isinstance(weight, ShardTensor):
        raise no_rule(func, (input, target, weight), {}, "the input must be a ShardTensor, the weight a plain tensor")
    x = reduced(input)
    target = reduced(target) if isinstance(target, ShardTensor) else target
    reduction = named_reduction(reduction, size_average, reduce)
    spec, classes = x.spec, 0 if len(x.spec.dims) == 1 else 1
    if spec.is_split(classes):
        raise no_rule(func, (input, target), {}, "the classes are split")
    each = kept(spec, (classes,))
    indices = target.dim() == len(each.dims)
    if tuple(global_shape(target)) != tuple(each.shape if indices else spec.shape):
        raise ValueError(f"{func.__name__}: target {tuple(global_shape(target))} of input {tuple(spec.shape)}")
    part = fitted(target, each if indices else spec)
    smoothing = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    loss = func(local(x), part, shared(weight, spec), ignore_index=ignore_index, reduction="none", **smoothing)
    if reduction != "mean" or not indices:
        total = averaged(wrap(loss, each), "none" if reduction == "none" else "sum")
        return total if reduction != "mean" else dispatch(torch.div, total, max(each.shape.numel(), 1))
    counts = (part != ignore_index).to(loss.dtype)
    if weight is not None:
        counts = weight[torch.where(part == ignore_index, 0, part)] * counts
    one = reduced_spec(each, range(len(each.dims)), False)
    sums = reduced(wrap(torch.stack([loss.sum(), counts.sum()]), one.with_dims([whole(2)])))  # one all-reduce for both
    value, count = local(sums).unbind()
    return wrap(value / count, sums.spec.with_dims([]))
