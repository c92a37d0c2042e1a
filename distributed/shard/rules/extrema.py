"""Maximum and minimum, with and without their indices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import reduce_from_region
from distributed.shard.operands import reduced
from distributed.shard.rules.reductions import Dims, dims_of, numpy_rule, reduce_by, reduced_to
from distributed.shard.spec import part_of
from distributed.shard.tensor import ShardTensor, dispatch, local, named, wrap


@numpy_rule(*named("amax", "amin"))
def extremum(func: Callable, input: ShardTensor, dim: Dims = (), keepdim: bool = False) -> ShardTensor:
    """Maximum or minimum. Each extremal element receives an equal share of the gradient, on every rank."""
    reduce = torch.amax if func.__name__ == "amax" else torch.amin
    x = reduced(input)
    spec, part = x.spec, local(x)
    dims = dims_of(spec, dim)
    shared_by = spec.shares(*dims)
    if shared_by is None or not (part.requires_grad and torch.is_grad_enabled()):
        return reduce_by(reduce, x, dims, keepdim)
    with torch.no_grad():
        value = local(reduce_by(reduce, x, dims, True))
        mask = part == value
        count = reduce_from_region(mask.sum(dims, keepdim=True), shared_by[1])
    return reduced_to(_Shared.apply(part, value, mask, count), spec, dims, keepdim)


class _Shared(torch.autograd.Function):
    """The extremum, given as `value`, of x; `count` elements on all ranks, those of a mask, share the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(mask, count)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, count = ctx.saved_tensors
        return mask * (grad / count), None, None, None


@numpy_rule(*named("max", "min"))
def max_or_min(
    func: Callable, input: Any, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None
) -> Any:
    """Maximum or minimum of all elements, of two tensors, or along a dimension with the index of the first extremum."""
    largest = func.__name__ == "max"
    if isinstance(dim, Tensor) or other is not None:
        return dispatch(torch.maximum if largest else torch.minimum, input, dim if isinstance(dim, Tensor) else other)
    if dim is None:
        return dispatch(torch.amax if largest else torch.amin, input)
    return along(input, dim, keepdim, largest)


@numpy_rule(*named("argmax", "argmin"))
def arg(func: Callable, input: ShardTensor, dim: int | None = None, keepdim: bool = False) -> ShardTensor:
    """The global index of the first extremum along dim; without dim, its index in the flattened tensor."""
    largest = func.__name__ == "argmax"
    if dim is not None:
        return along(dispatch(torch.detach, input), dim, keepdim, largest).indices
    index = along(dispatch(torch.flatten, dispatch(torch.detach, input)), 0, False, largest).indices
    return dispatch(torch.reshape, index, [1] * len(input.spec.dims)) if keepdim else index


def along(x: ShardTensor, dim: int, keepdim: bool, largest: bool) -> Any:
    """The extremum along one dimension and its index; one gather of both if the dimension is split."""
    x = reduced(x)
    spec, part = x.spec, local(x)
    (dim,) = dims = dims_of(spec, dim)
    if not spec.is_split(dim):
        values, indices = torch.max(part, dim, True) if largest else torch.min(part, dim, True)
    else:
        with torch.no_grad():
            value = local(reduce_by(torch.amax if largest else torch.amin, x, dims, True))
            shape = [-1 if d == dim else 1 for d in range(part.dim())]
            places = part_of(torch.arange(spec.shape[dim], device=part.device).view(shape), spec)
            found = torch.where((part == value) | part.isnan(), places, spec.shape[dim])
            indices = local(reduce_by(torch.amin, wrap(found, spec), dims, True))
        values = _Shared.apply(part, value, places == indices, torch.ones_like(indices))
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([reduced_to(y, spec, dims, keepdim) for y in (values, indices)])
