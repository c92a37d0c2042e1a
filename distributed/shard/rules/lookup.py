"""Rows, elements and places that other tensors choose: tables, gather and scatter, masks, samples of images."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.collectives import all_gather
from distributed.halo import Fetch, Interval, bounds
from distributed.shard.operands import (
    copied,
    fitted,
    global_shape,
    redistributed,
    reduced,
    shared,
    to_spec,
    used_apart,
    written,
)
from distributed.shard.rules.along import made_whole, moved
from distributed.shard.rules.windows import Splits, no_outputs, splits_of
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
    named_source = {name: kwargs.pop(name) for name in ("src", "value", "source") if name in kwargs}
    source = next(iter(named_source.values()), source)
    like = next(x for x in (input, source, index) if isinstance(x, ShardTensor) and x.dim() == input.dim())
    dim = dim % len(like.spec.dims)
    x = made_whole(like, (dim,))
    spec = x.spec.with_axes(dim, whole(global_shape(input)[dim]))
    in_place = func.__name__.endswith("_")
    if in_place and (like is not input or like.spec.partial or x.spec.placements != like.spec.placements):
        raise no_rule(func, (input, index), {}, "in place on a plain tensor or along a split dimension")

    def part(y: Any) -> Any:
        if not isinstance(y, Tensor) or y.dim() < 2 <= len(spec.dims):  # a number, or indices of rows
            return y.full_tensor() if isinstance(y, ShardTensor) else shared(y, spec)
        return beside(func, spec, dim, y)

    target = local(x) if like is input else part(input)
    out = func(input if in_place else target, dim, part(index), part(source), *args, **kwargs)
    return written(like) if in_place else wrap(out, spec)


@rule(*named("bucketize"))
def bucketize(func: Callable, input: ShardTensor, boundaries: Tensor, **kwargs: Any) -> ShardTensor:
    """The place of each element among plain boundaries."""
    if isinstance(boundaries, ShardTensor):
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
    spec, axes = x.spec, merged(chain(*x.spec.dims[:count]))
    selected = local(x)[fitted(reduced(mask), spec.with_dims(spec.dims[:count]))]
    new = whole(len(selected))
    if over(axes):
        group = spec.mesh.groups[axes[0].mesh_dim]
        number = torch.tensor([len(selected)], device=selected.device)
        sizes = tuple(all_gather(number, 0, (1,) * group.size, group).tolist())
        new = (Axis(sum(sizes), axes[0].mesh_dim, sizes),)
    return wrap(selected, spec.with_dims((new, *spec.dims[count:])))


def in_order(x: ShardTensor, count: int) -> ShardTensor:
    """The tensor whose parts follow each other when the first `count` dimensions are flattened.

    One mesh dimension splits the first of these that is longer than 1, into bands; others split none of them.
    """
    if len(merged(chain(*x.spec.dims[:count]))) < 2:
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


@rule(F.grid_sample)
def grid_sample(
    func: Callable, input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> ShardTensor:  # fmt: skip
    """Samples of images (B, C, ...) at places (B, ..., 2 or 3), which are split as the places are.

    A split dimension of the image is exchanged as a halo where the places of all ranks reach so little beyond the rows
    of their ranks that this sends at most half of what a gather would; otherwise it is gathered. The values of `grid`
    decide the size of that message. The ranks therefore tell each other the first and last row that they need, two
    numbers a dimension in one all-gather, and the host has to read them. It reads nothing, and the image is gathered,
    while compiling or planning, for bicubic samples and 16-bit places, and where the dimension and the places are not
    split over the same ranks.
    """
    like = next(y for y in (input, grid) if isinstance(y, ShardTensor)).spec
    x, places = reduced(copied(input, like)), copied(grid, like)
    places = made_whole(places, (len(places.spec.dims) - 1,))
    if not over(x.spec.dims[0]) & over(*places.spec.dims):
        places = to_spec(places, places.spec.with_axes(0, x.spec.dims[0]))
    samples, *rows, _ = places.spec.dims
    used = over(samples, *rows)
    channels = whole(x.spec.shape[1]) if over(x.spec.dims[1]) & used else x.spec.dims[1]
    out = x.spec.with_dims([samples, channels, *rows])
    grid_part, shape, needed = used_apart(places, out), x.spec.shape[2:], {}
    near = [d for d in x.spec.split_dims if d > 1 and len(x.spec.dims[d]) == 1]
    near = [d for d in near if over(x.spec.dims[d]) <= used - over(samples)]
    if near and mode != "bicubic" and min(shape) > 1 and grid_part.element_size() > 2 and not (
        torch.compiler.is_compiling() or isinstance(grid_part, FakeTensor)
    ):  # fmt: skip
        at = [rows_at(grid_part[..., -1 - i], n, padding_mode, align_corners) for i, n in enumerate(shape)]
        at = [a.round() for a in at] if mode == "nearest" else at
        needed = agreed(x.spec, splits_of(x, near), {d: at[d - 2].detach() for d in near})
    images = [x.spec.dims[d] if d in needed else whole(n) for d, n in enumerate(shape, 2)]
    part = used_apart(to_spec(x, x.spec.with_dims([samples, channels, *images])), out)
    for d, (sizes, group) in splits_of(x, needed).items():
        part = Fetch(part, d, sizes, needed[d], group).rows()
        at[d - 2] = at[d - 2] - needed[d][group.rank][0]
    if not out.local_shape.numel():
        return wrap(no_outputs(part, out.local_shape, grid_part), out)
    if needed:
        grid_part = torch.stack([as_grid(a, n) for a, n in zip(at, part.shape[2:], strict=True)][::-1], -1)
        padding_mode, align_corners = "zeros", True
    return wrap(func(part, grid_part, mode, padding_mode, align_corners), out)


def rows_at(grid: Tensor, rows: int, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Places -1 to 1 as places among so many rows, where they read after padding; as the plain operation does it."""
    at = (grid + 1) * (rows - 1) / 2 if align_corners else ((grid + 1) * rows - 1) / 2
    if padding_mode == "zeros":
        return at.clamp(-2, rows + 1)  # outside of it there is nothing but zeros
    if padding_mode == "reflection":
        low, span = (0, rows - 1) if align_corners else (-0.5, rows)
        apart = (at - low).abs()
        rest = apart.fmod(span)
        at = torch.where((apart / span).floor() % 2 == 0, rest, span - rest) + low
    inside = (at > 0) & (at < rows - 1)
    return torch.where(inside, at, at.detach().clamp(0, rows - 1))


def as_grid(at: Tensor, rows: int) -> Tensor:
    """Places among so many rows as places -1 to 1, of which F.grid_sample with align_corners makes the same again.

    The same to rounding, and between the same two rows: the gradient of a place is the difference of these.
    """
    half = (rows - 1) / 2
    grid = at / half - 1
    with torch.no_grad():
        exact = grid.clone()
        for _ in range(3):
            exact += (at.floor() - ((exact + 1) * half).floor()) * torch.finfo(at.dtype).eps
    return grid + (exact - grid.detach())


def agreed(spec: Spec, splits: Splits, places: dict[int, Tensor]) -> dict[int, list[Interval]]:
    """The rows of an image with this spec that each rank of a dimension needs, for the dimensions where a halo is less.

    places: {dimension: this rank's places among its rows}. All ranks call this together; the result is the same on all.
    """
    ends = []
    for d, at in places.items():
        n = spec.shape[d]
        low, high = torch.aminmax(at.floor().nan_to_num()) if at.numel() else (at.new_full((), n), at.new_zeros(()) - 2)
        ends += [low.clamp(0, n), (high + 2).clamp(0, n)]
    group, halos = spec.mesh.joint, {}
    every = all_gather(torch.stack(ends)[None].long(), 0, (1,) * group.size, group).tolist()
    for i, (d, (sizes, _)) in enumerate(splits.items()):
        n, intervals = spec.shape[d], []
        for c in range(len(sizes)):  # ranks of one row of tiles exchange what any of them needs
            (m,) = over(spec.dims[d])
            mine = [row[2 * i : 2 * i + 2] for r, row in enumerate(every) if spec.coordinate(m, r) == c]
            first = min(*[low for low, _ in mine], n - 2)
            intervals.append((first, max(*[high for _, high in mine], first + 2)))
        overlaps = [max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(intervals, bounds(sizes), strict=True)]
        more = sum([last - first for first, last in intervals]) - sum(overlaps)
        if 2 * more <= (len(sizes) - 1) * n:
            halos[d] = intervals
    return halos
