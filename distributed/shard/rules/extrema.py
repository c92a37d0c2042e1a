"""Maximum and minimum, with and without their indices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import Group, Sizes, gather_from_region
from distributed.shard.operands import reduced
from distributed.shard.rules.reductions import Dims, dims_of, gathered, kept, numpy_rule, reduce_by, sharers
from distributed.shard.spec import part_of
from distributed.shard.tensor import ShardTensor, dispatch, local, named, wrap


@numpy_rule(*named("amax", "amin"))
def extremum(func: Callable, input: ShardTensor, dim: Dims = (), keepdim: bool = False) -> ShardTensor:
    """Maximum or minimum. Each extremal element receives an equal share of the gradient, on every rank."""
    reduce = torch.amax if func.__name__ == "amax" else torch.amin
    x = reduced(input)
    spec, part = x.spec, local(x)
    dims = dims_of(spec, dim)
    shared_by = sharers(spec, dims)
    if shared_by is None or not (part.requires_grad and torch.is_grad_enabled()):
        return reduce_by(x, dims, keepdim, lambda x: reduce(x, dims, True), lambda parts: reduce(parts, 0))
    with torch.no_grad():

        def summary(x: Tensor) -> Tensor:
            value = reduce(x, dims, True)
            count = (x == value).sum(dims, keepdim=True)
            return torch.stack([value.float() if value.element_size() < 4 else value, count])

        values, counts = gathered(part, summary, *shared_by, dims).unbind(1)
        value = reduce(values, 0)
        count = torch.where(values == value, counts, 0).sum(0)
    out = _Shared.apply(part, value.to(part.dtype), count)
    return wrap(out if keepdim else out.squeeze(dims), kept(spec, dims, keepdim))


class _Shared(torch.autograd.Function):
    """The extremum, given as `value`; `count` elements on all ranks are equal to it and share the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x, value, count)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, value, count = ctx.saved_tensors
        return (x == value) * (grad / count), None, None


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
    shared_by = sharers(spec, dims)
    if shared_by is None:
        values, indices = torch.max(part, dim, True) if largest else torch.min(part, dim, True)
    else:
        places = torch.arange(spec.shape[dim], device=part.device)
        places = part_of(places, spec.with_dims((spec.dims[dim],)))
        values, indices = best(part, places, dim, largest, *shared_by)
    left = kept(spec, dims, keepdim)
    kind: Any = torch.return_types.max if largest else torch.return_types.min
    return kind([wrap(y if keepdim else y.squeeze(dim), left) for y in (values, indices)])


def best(x: Tensor, places: Tensor, dim: int, largest: bool, group: Group, counts: Sizes) -> tuple[Tensor, Tensor]:
    """(values, indices) of the extrema along a split dimension. places: global indices of the elements of x."""
    choose = torch.max if largest else torch.min
    if x.shape[dim] == 0:  # a placeholder, which is not sent
        x, places = x.sum(dim, keepdim=True, dtype=x.dtype), places.new_zeros(1)
    chosen, index = choose(x, dim, True)
    sizes = tuple([int(count > 0) for count in counts])
    mine = sizes[group.rank]
    values, indices = (
        gather_from_region(y[None][:mine], 0, sizes, group) for y in (chosen, places[index])
    )  # (ranks, ...)
    with torch.no_grad():
        value = choose(values, 0).values
        equal = values == value
        if values.is_floating_point():
            equal = equal | values.isnan()
        rank = torch.where(equal, indices, torch.iinfo(indices.dtype).max).argmin(0, keepdim=True)
    return values.gather(0, rank)[0], indices.gather(0, rank)[0]
