"""Softmax along a whole or split dimension, and loss functions.

Of a loss the plain function computes one value per element or sample; ordinary reductions follow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from distributed.shard.operands import fitted, global_shape, reduced, shared
from distributed.shard.rules.elementwise import broadcast
from distributed.shard.rules.reductions import autocast_dtype, kept, reduced_spec
from distributed.shard.spec import whole
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(*named("softmax", "log_softmax"))
def softmax(
    func: Callable, input: ShardTensor, dim: int | None = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> ShardTensor:
    """The plain function along a whole dimension; x - logsumexp(x), or its exponential, along a split one."""
    if dim is None:
        raise no_rule(func, (input,), {}, "give a dimension")
    if _stacklevel is None or isinstance(_stacklevel, torch.dtype):  # torch.softmax(x, dim, dtype)
        dtype = _stacklevel
    x = reduced(input if dtype is None else dispatch(Tensor.to, input, dtype))
    log = func.__name__ in ("log_softmax", "special_log_softmax")
    if not x.spec.is_split(dim):
        return wrap((torch.log_softmax if log else torch.softmax)(local(x), dim), x.spec)
    wide = dispatch(Tensor.to, x, torch.promote_types(x.dtype, torch.float32))
    y = dispatch(torch.sub, wide, dispatch(torch.logsumexp, wide, dim, True))
    y = y if log else dispatch(torch.exp, y)
    return dispatch(Tensor.to, y, autocast_dtype(x))


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


@rule(
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip
def elementwise_loss(
    func: Callable, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean", **parameters: Any,
) -> ShardTensor:  # fmt: skip
    """One value for each element. kl_div broadcasts, and may divide the sum by the global number of samples, batchmean.

    torch drops the weight of F.l1_loss before this rule is called.
    """
    shapes = [tuple(global_shape(x)) for x in (input, target)]
    if func is not F.kl_div and shapes[0] != shapes[1]:
        raise ValueError(f"{func.__name__}: shapes {shapes[0]} and {shapes[1]} differ")
    reduction = named_reduction(reduction, size_average, reduce)
    weights = {} if weight is None else {"weight": weight}
    loss = broadcast(func, (input, target), {"reduction": "none", **weights, **parameters})
    if reduction == "batchmean" and func is F.kl_div:
        return dispatch(torch.div, averaged(loss, "sum"), shapes[0][0])
    if reduction == "mean" and func is F.mse_loss and weight is not None:
        total = dispatch(torch.sum, weight) if isinstance(weight, ShardTensor) else weight.sum()
        return dispatch(torch.div, averaged(loss, "sum"), total)
    return averaged(loss, reduction)


@rule(F.cross_entropy, F.nll_loss)
def class_loss(
    func: Callable, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> ShardTensor:  # fmt: skip
    """Loss over classes. input: (C,) or (B, C, ...), classes not split. target: indices (B, ...), or probabilities."""
    if not isinstance(input, ShardTensor) or isinstance(weight, ShardTensor):
        raise no_rule(func, (input, target, weight), {}, "the input must be a ShardTensor, the weight a plain tensor")
    x, target = reduced(input), reduced(target)
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
    if reduction != "mean":
        return averaged(wrap(loss, each), reduction)
    counts = torch.ones_like(loss) if not indices else (part != ignore_index).to(loss.dtype)
    if indices and weight is not None:
        counts = weight[torch.where(part == ignore_index, 0, part)] * counts
    one = reduced_spec(each, range(len(each.dims)), False)
    sums = reduced(wrap(torch.stack([loss.sum(), counts.sum()]), one.with_dims([whole(2)])))  # one all-reduce for both
    value, count = local(sums).unbind()
    return wrap(value / count, sums.spec.with_dims([]))
