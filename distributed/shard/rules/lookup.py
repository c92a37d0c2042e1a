"""Rows and elements that other tensors choose: tables, gather and scatter, masks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.shard.operands import fitted, global_shape, redistributed, reduced, shared
from distributed.shard.rules.along import made_whole, moved
from distributed.shard.spec import Axis, Spec, merged, over, shard_sizes, whole
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(*named("gather", "take_along_dim"))
def gather(
    func: Callable, input: Tensor, dim: Any, index: Any = None, *, sparse_grad: bool = False, **kwargs: Any
) -> ShardTensor:
    """Gather along a dimension. The indices have the tensor's size in all others, and are brought to its split."""
    if func.__name__ == "take_along_dim" and isinstance(dim, Tensor):
        dim, index = kwargs.get("dim", index), dim
    if dim is None or not isinstance(input, ShardTensor):
        raise no_rule(func, (input, index), {}, "of a plain tensor, or without a dimension")
    dim = dim % len(input.spec.dims)
    x = made_whole(input, (dim,))
    places = beside(func, x.spec, dim, index)
    return wrap(local(x).gather(dim, places), x.spec.with_axes(dim, whole(global_shape(index)[dim])))


def beside(func: Callable, spec: Spec, dim: int, y: Tensor) -> Tensor:
    """The local part of an operand with a size of its own along dim, split as a tensor with this spec."""
    out = spec.with_axes(dim, whole(global_shape(y)[dim]))
    if out.shape != global_shape(y):
        raise no_rule(func, (y,), {}, "it must have the tensor's size in all other dimensions")
    return fitted(reduced(y), out).expand(out.local_shape)


SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")


@rule(*named(*SCATTERS, *(f"{name}_" for name in SCATTERS)))
def scatter(
    func: Callable, input: Tensor, dim: int, index: Tensor, source: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Write or add along a dimension, at indices: of elements (scatter), or plain ones of rows (index_add)."""
    found = {name: kwargs.pop(name) for name in ("src", "value", "source") if name in kwargs}
    source = next(iter(found.values()), source)
    like = next(x for x in (input, source, index) if isinstance(x, ShardTensor) and x.dim() == input.dim())
    dim = dim % len(like.spec.dims)
    x = made_whole(like, (dim,))
    spec = x.spec.with_axes(dim, whole(global_shape(input)[dim]))
    moved = like is input and x.spec.placements != like.spec.placements
    if func.__name__.endswith("_") and (moved or like is not input or input.spec.partial):
        raise no_rule(func, (input, index), {}, "in place on a plain tensor or along a split dimension")

    def part(y: Any) -> Any:
        if not isinstance(y, Tensor) or y.dim() < 2 <= len(spec.dims):  # a number, or indices of rows
            return y.full_tensor() if isinstance(y, ShardTensor) else shared(y, spec)
        return beside(func, spec, dim, y)

    own = local(x) if like is input else part(input)
    out = func(input if func.__name__.endswith("_") else own, dim, part(index), part(source), *args, **kwargs)
    return input if func.__name__.endswith("_") else wrap(out, spec)


@rule(*named("bucketize"))
def bucketize(func: Callable, input: ShardTensor, boundaries: Tensor, **kwargs: Any) -> ShardTensor:
    """The place of each element among plain boundaries."""
    if isinstance(boundaries, ShardTensor) or "out" in kwargs:
        raise no_rule(func, (input, boundaries), kwargs, "boundaries must be plain")
    input = reduced(input)
    return wrap(func(local(input), boundaries, **kwargs), input.spec)


def mask_of(x: Any, index: Any) -> Tensor | None:
    """The mask, if an index is one of at least two dimensions or a ShardTensor."""
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(x, ShardTensor) and isinstance(index, Tensor) and index.dtype == torch.bool:
        return index if index.dim() > 1 or isinstance(index, ShardTensor) else None
    return None


@rule(*named("masked_select"))
def masked(func: Callable, input: ShardTensor, mask: Tensor) -> ShardTensor:
    """The elements that a mask of the first dimensions selects: (selected, ...), one gather of their numbers."""
    if not isinstance(input, ShardTensor) or tuple(global_shape(mask)) != tuple(input.spec.shape[: mask.dim()]):
        raise no_rule(func, (input, mask), {}, "of a plain tensor, or by a mask that broadcasts")
    x, count = in_order(reduced(input), mask.dim()), mask.dim()
    spec, axes = x.spec, merged([axis for d in x.spec.dims[:count] for axis in d])
    found = local(x)[fitted(reduced(mask), spec.with_dims(spec.dims[:count]))]
    new = whole(len(found))
    if over(axes):
        group = spec.mesh.groups[axes[0].mesh_dim]
        number = torch.tensor([len(found)], device=found.device)
        sizes = tuple(all_gather(number, 0, (1,) * group.size, group).tolist())
        new = (Axis(sum(sizes), axes[0].mesh_dim, sizes),)
    return wrap(found, spec.with_dims((new, *spec.dims[count:])))


def in_order(x: ShardTensor, count: int) -> ShardTensor:
    """The tensor whose parts follow each other when the first `count` dimensions are flattened.

    One mesh dimension splits the first of these that is longer than 1, into bands; others split none of them.
    """
    if len(merged([axis for d in x.spec.dims[:count] for axis in d])) < 2:
        return x
    lead = next(d for d in range(count) if x.spec.shape[d] > 1)
    splits = [m for m, p in enumerate(x.spec.placements) if isinstance(p, Shard) and p.dim < count]
    kept = min(splits, key=lambda m: x.spec.placements[m] != Shard(lead))
    for m in splits:
        x = x if m == kept else moved(x, m, range(count))
    even = shard_sizes(x.spec.shape[lead], x.spec.mesh.groups[kept].size) if len(x.spec.dims[lead]) > 1 else None
    return redistributed(x, [Shard(lead) if m == kept else p for m, p in enumerate(x.spec.placements)], {kept: even})


def rows_of_plain(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Look up rows of a plain table by a ShardTensor of indices."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != 1 or index[0].dtype == torch.bool:
        raise no_rule(func, (x, *index), {}, "of a plain tensor, by more than one ShardTensor of indices")
    index = reduced(index[0])
    spec = index.spec.with_dims((*index.spec.dims, *map(whole, x.shape[1:])))
    return wrap(shared(x, spec)[local(index)], spec)


@rule(F.embedding)
def embedding(
    func: Callable, input: ShardTensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> ShardTensor:  # fmt: skip
    """Look up split indices in a plain table: (...) -> (..., D)."""
    if isinstance(weight, ShardTensor) or max_norm is not None or scale_grad_by_freq:
        raise no_rule(func, (input, weight), {}, "indices must be a ShardTensor, the table plain, without max_norm")
    input = reduced(input)
    spec = input.spec.with_dims((*input.spec.dims, whole(weight.shape[1])))
    return wrap(F.embedding(local(input), shared(weight, spec), padding_idx, sparse=sparse), spec)


@rule(F.one_hot)
def one_hot(func: Callable, tensor: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a dimension of num_classes; -1 takes the largest index of all ranks plus one."""
    if num_classes == -1:
        num_classes = int(local(dispatch(torch.amax, tensor))) + 1
    tensor = reduced(tensor)
    spec = tensor.spec.with_dims((*tensor.spec.dims, whole(num_classes)))
    return wrap(F.one_hot(local(tensor), num_classes), spec)
