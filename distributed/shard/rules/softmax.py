"""Softmax and log-softmax along a whole or split dimension."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import Group, reduce_from_region
from distributed.shard.operands import reduced
from distributed.shard.rules.reductions import at_least_float32, dims_of, gathered, numpy_rule, sharers
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, wrap


@numpy_rule(*named("softmax", "log_softmax"))
def softmax(
    func: Callable, input: ShardTensor, dim: int | None = None, _stacklevel: Any = 3, dtype: torch.dtype | None = None
) -> ShardTensor:
    """Forward gathers the maximum and the sum of each rank; backward is one all-reduce."""
    if dim is None:
        raise no_rule(func, (input,), {}, "give a dimension")
    if _stacklevel is None or isinstance(_stacklevel, torch.dtype):  # torch.softmax(x, dim, dtype)
        dtype = _stacklevel
    logarithm = func.__name__ == "log_softmax"
    x = reduced(input if dtype is None else dispatch(Tensor.to, input, dtype))
    spec, part = x.spec, local(x)
    dims = dims_of(spec, dim)
    shared_by = sharers(spec, dims)
    if shared_by is None:
        plain = torch.log_softmax if logarithm else torch.softmax
        return wrap(plain(part, dims[0]), spec)
    if torch.is_autocast_enabled(part.device.type) and part.device.type != "cpu":
        part = part.float()  # as autocast does
    with torch.no_grad():
        tops, totals = gathered(at_least_float32(part), lambda x: summary(x, dims), *shared_by, dims).unbind(1)
        top = tops.amax(0)
        total = (totals * (tops - top).exp()).sum(0)
    return wrap(_Softmax.apply(part, top, total, dims, shared_by[0], logarithm), spec)


def summary(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum, and the sum of the exponentials relative to it, which is 0 if all elements are -inf."""
    top = x.amax(dims, True)
    total = (x - top).exp().sum(dims, keepdim=True)
    return torch.stack([top, torch.where(top == -torch.inf, 0.0, total)])


class _Softmax(torch.autograd.Function):
    """Softmax, given the maximum of all ranks (top) and the sum of the exponentials relative to it (total)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, top: Tensor, total: Tensor, dims: tuple[int, ...], group: Group, logarithm: bool
    ) -> Tensor:
        shifted = at_least_float32(x) - top
        out = (shifted - total.log() if logarithm else shifted.exp() / total).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.dims, ctx.group, ctx.logarithm = dims, group, logarithm
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        wide, g = at_least_float32(out), at_least_float32(grad)
        total = reduce_from_region((g if ctx.logarithm else g * wide).sum(ctx.dims, keepdim=True), ctx.group)
        back = g - wide.exp() * total if ctx.logarithm else wide * (g - total)
        return back.to(out.dtype), None, None, None, None, None
