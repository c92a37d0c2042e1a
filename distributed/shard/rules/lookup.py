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
from distributed.halo import HaloExchange, Interval, bounds
from distributed.shard.operands import (
    as_replicated,
    check_writable,
    global_shape,
    local_operand,
    redistribute,
    scale_grad_by_replicas,
    sum_grad_over_replicas,
    sum_partial,
    to_spec,
)
from distributed.shard.rules.along import moved, unshard_dims
from distributed.shard.rules.windows import Splits, no_outputs, splits_of
from distributed.shard.spec import Axes, Axis, Spec, merged, mesh_dims_of, shard_sizes, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap


@rule(*named("gather", "take_along_dim"))
def gather(
    func: Callable,
    input: Tensor,
    dim: Any,
    index: Any = None,
    *,
    sparse_grad: bool = False,
    **kwargs: Any,
) -> ShardTensor:
    """Gather along a dimension. The indices have the tensor's size in all others, and are brought to its split."""
    if func.__name__ == "take_along_dim" and isinstance(dim, Tensor):
        # take_along_dim(input, indices, dim) has its arguments in another order
        dim, index = kwargs.get("dim", index), dim
    if dim is None or not isinstance(input, ShardTensor):
        raise no_rule(func, (input, index), {}, "of a plain tensor, or without a dimension")
    dim = dim % len(input.spec.dims)
    x = unshard_dims(input, (dim,))
    places = split_as(func, x.spec, dim, index)
    found = local(x).gather(dim, places)
    count = global_shape(index)[dim]
    return wrap(found, x.spec.with_axes(dim, unsplit_axes(count)))


def split_as(func: Callable, spec: Spec, dim: int, y: Tensor) -> Tensor:
    """The local part of an operand with a size of its own along dim, split as a tensor with this spec."""
    shape = global_shape(y)
    out = spec.with_axes(dim, unsplit_axes(shape[dim]))
    if out.shape != shape:
        raise no_rule(func, (y,), {}, "it must have the tensor's size in all other dimensions")
    return local_operand(sum_partial(y), out).expand(out.local_shape)


SCATTERS = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")


@rule(*named(*SCATTERS, *(f"{name}_" for name in SCATTERS)))
def scatter(
    func: Callable,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Write or add along a dimension, at indices: of elements (scatter), or plain ones of rows (index_add)."""
    for name in ("src", "value", "source"):
        if name in kwargs:
            source = kwargs.pop(name)
    # The split of the first ShardTensor that has the dimensions of the input decides.
    operands = (input, source, index)
    like = next(x for x in operands if isinstance(x, ShardTensor) and x.dim() == input.dim())
    dim = dim % len(like.spec.dims)
    x = unshard_dims(like, (dim,))
    spec = x.spec.with_axes(dim, unsplit_axes(global_shape(input)[dim]))
    in_place = func.__name__.endswith("_")
    keeps_split = like is input and not like.spec.partial and x.spec.placements == like.spec.placements
    if in_place and not keeps_split:
        raise no_rule(func, (input, index), {}, "in place on a plain tensor or along a split dimension")

    def part(y: Any) -> Any:
        is_of_elements = isinstance(y, Tensor) and not y.dim() < 2 <= len(spec.dims)
        if is_of_elements:
            return split_as(func, spec, dim, y)
        # A number, or indices of rows: every rank needs all of them.
        return y.full_tensor() if isinstance(y, ShardTensor) else scale_grad_by_replicas(y, spec)

    if in_place:
        target = input
    elif like is input:
        target = local(x)
    else:
        target = part(input)
    out = func(target, dim, part(index), part(source), *args, **kwargs)
    return check_writable(like) if in_place else wrap(out, spec)


@rule(*named("bucketize"))
def bucketize(func: Callable, input: ShardTensor, boundaries: Tensor, **kwargs: Any) -> ShardTensor:
    """The place of each element among plain boundaries."""
    if isinstance(boundaries, ShardTensor):
        raise no_rule(func, (input, boundaries), kwargs, "boundaries must be plain")
    input = sum_partial(input)
    return wrap(func(local(input), boundaries, **kwargs), input.spec)


def mask_of(x: Any, index: Any) -> Tensor | None:
    """The mask, if an index is one of at least two dimensions or a ShardTensor."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_mask or not isinstance(x, ShardTensor):
        return None
    return index if index.dim() > 1 or isinstance(index, ShardTensor) else None


@rule(*named("masked_select"))
def masked(func: Callable, input: ShardTensor, mask: Tensor) -> ShardTensor:
    """The elements that a mask of the first dimensions selects: (selected, ...), one gather of their numbers."""
    count = mask.dim()
    if not isinstance(input, ShardTensor) or tuple(global_shape(mask)) != tuple(input.spec.shape[:count]):
        raise no_rule(func, (input, mask), {}, "of a plain tensor, or by a mask that broadcasts")
    x = in_order(sum_partial(input), count)
    spec = x.spec
    own_mask = local_operand(sum_partial(mask), spec.with_dims(spec.dims[:count]))
    selected = local(x)[own_mask]  # (selected on this rank, ...)
    axes = merged(chain(*spec.dims[:count]))
    rows: Axes = unsplit_axes(len(selected))
    if mesh_dims_of(axes):
        mesh_dim = axes[0].mesh_dim
        group = spec.mesh.groups[mesh_dim]
        number = torch.tensor([len(selected)], device=selected.device)
        sizes = tuple(all_gather(number, 0, (1,) * group.size, group).tolist())
        rows = (Axis(sum(sizes), mesh_dim, sizes),)
    return wrap(selected, spec.with_dims((rows, *spec.dims[count:])))


def in_order(x: ShardTensor, count: int) -> ShardTensor:
    """The tensor whose parts follow each other when the first `count` dimensions are flattened.

    One mesh dimension splits the first of these that is longer than 1, into bands; others split none of them.
    """
    spec = x.spec
    if len(merged(chain(*spec.dims[:count]))) < 2:
        return x
    lead = next(d for d in range(count) if spec.shape[d] > 1)
    splits = [m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim < count]
    # Keep the mesh dimension that splits the leading dimension already, if one does.
    leading = [m for m in splits if spec.placements[m] == Shard(lead)]
    kept = leading[0] if leading else splits[0]
    for m in splits:
        if m != kept:
            x = moved(x, m, range(count))
    sizes = None
    if len(x.spec.dims[lead]) > 1:  # a product of axes becomes one axis, in even pieces
        sizes = shard_sizes(x.spec.shape[lead], x.spec.mesh.groups[kept].size)
    placements = list(x.spec.placements)
    placements[kept] = Shard(lead)
    return redistribute(x, placements, {kept: sizes})


def rows_of_plain(func: Callable, x: Tensor, index: Any) -> ShardTensor:
    """Look up rows of a plain table by a ShardTensor of indices."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != 1 or index[0].dtype == torch.bool:
        raise no_rule(func, (x, *index), {}, "of a plain tensor, by more than one ShardTensor of indices")
    index = sum_partial(index[0])
    spec = index.spec.with_dims((*index.spec.dims, *map(unsplit_axes, x.shape[1:])))
    return wrap(scale_grad_by_replicas(x, spec)[local(index)], spec)


@rule(F.embedding)
def embedding(
    func: Callable,
    input: ShardTensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardTensor:
    """Look up split indices in a plain table: (...) -> (..., D)."""
    if isinstance(weight, ShardTensor) or max_norm is not None or scale_grad_by_freq:
        raise no_rule(func, (input, weight), {}, "indices must be a ShardTensor, the table plain, without max_norm")
    input = sum_partial(input)
    features = unsplit_axes(weight.shape[1])
    spec = input.spec.with_dims((*input.spec.dims, features))
    rows = F.embedding(local(input), scale_grad_by_replicas(weight, spec), padding_idx, sparse=sparse)
    return wrap(rows, spec)


@rule(F.one_hot)
def one_hot(func: Callable, tensor: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """Add a dimension of num_classes; -1 takes the largest index of all ranks plus one."""
    if num_classes == -1:
        num_classes = int(local(dispatch(torch.amax, tensor))) + 1
    tensor = sum_partial(tensor)
    spec = tensor.spec.with_dims((*tensor.spec.dims, unsplit_axes(num_classes)))
    return wrap(F.one_hot(local(tensor), num_classes), spec)


@rule(F.grid_sample)
def grid_sample(
    func: Callable,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> ShardTensor:
    """Samples of images (B, C, ...) at places (B, ..., 2 or 3), which are split as the places are.

    A split dimension of the image is exchanged as a halo where the places of all ranks reach so little beyond the rows
    of their ranks that this sends at most half of what a gather would; otherwise it is gathered. The values of `grid`
    decide the size of that message. The ranks therefore tell each other the first and last row that they need, two
    numbers a dimension in one all-gather, and the host has to read them. It reads nothing, and the image is gathered,
    while compiling or planning, for bicubic samples and 16-bit places, and where the dimension and the places are not
    split over the same ranks.
    """
    like = next(y for y in (input, grid) if isinstance(y, ShardTensor)).spec
    x = sum_partial(as_replicated(input, like))
    places = as_replicated(grid, like)
    coordinates = len(places.spec.dims) - 1
    places = unshard_dims(places, (coordinates,))

    # The result is split as the places are, and in channels as the image where no place uses the same ranks.
    image_samples, image_channels, *_ = x.spec.dims
    if not mesh_dims_of(image_samples) & mesh_dims_of(*places.spec.dims):
        places = to_spec(places, places.spec.with_axes(0, image_samples))
    samples, *rows, _ = places.spec.dims
    used = mesh_dims_of(samples, *rows)
    channels = unsplit_axes(x.spec.shape[1]) if mesh_dims_of(image_channels) & used else image_channels
    out = x.spec.with_dims([samples, channels, *rows])
    grid_part = sum_grad_over_replicas(places, out)  # (b, ..., 2 or 3)

    # Which rows of the image each rank needs, for the dimensions where a halo is less than a gather.
    shape = x.spec.shape[2:]
    needed: dict[int, list[Interval]] = {}
    at: list[Tensor] = []  # this rank's places along each dimension of the image, in rows
    near = halo_dims(x.spec, used - mesh_dims_of(samples))
    values_are_known = not torch.compiler.is_compiling() and not isinstance(grid_part, FakeTensor)
    is_precise = mode != "bicubic" and min(shape) > 1 and grid_part.element_size() > 2
    if near and is_precise and values_are_known:
        for i, n in enumerate(shape):
            of_dim = rows_at(grid_part[..., -1 - i], n, padding_mode, align_corners)
            at.append(of_dim.round() if mode == "nearest" else of_dim)
        splits = splits_of(x, near)
        needed = rows_needed(x.spec, splits, {d: at[d - 2].detach() for d in near})

    # Gather the other dimensions, and fetch the halos.
    images = [x.spec.dims[d] if d in needed else unsplit_axes(n) for d, n in enumerate(shape, 2)]
    part = sum_grad_over_replicas(to_spec(x, x.spec.with_dims([samples, channels, *images])), out)
    for d, (sizes, group) in splits_of(x, needed).items():
        part = HaloExchange(part, d, sizes, needed[d], group).rows()
        first_row, _ = needed[d][group.rank]
        at[d - 2] = at[d - 2] - first_row
    if not out.local_shape.numel():
        return wrap(no_outputs(part, out.local_shape, grid_part), out)
    if needed:  # places in the part of the image that this rank has, which rows_at has padded
        last_first = [as_grid(a, n) for a, n in zip(at, part.shape[2:], strict=True)][::-1]
        grid_part = torch.stack(last_first, -1)
        padding_mode = "zeros"
        align_corners = True
    return wrap(func(part, grid_part, mode, padding_mode, align_corners), out)


def halo_dims(spec: Spec, mesh_dims: set[int]) -> list[int]:
    """The dimensions of images (B, C, ...) in one piece on each rank that only these mesh dimensions split."""
    dims = []
    for d in spec.split_dims:
        is_in_one_piece = len(spec.dims[d]) == 1
        if d > 1 and is_in_one_piece and mesh_dims_of(spec.dims[d]) <= mesh_dims:
            dims.append(d)
    return dims


def rows_at(grid: Tensor, rows: int, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Places -1 to 1 as places among so many rows, where they read after padding; as the plain operation does it."""
    at = (grid + 1) * (rows - 1) / 2 if align_corners else ((grid + 1) * rows - 1) / 2
    if padding_mode == "zeros":
        return at.clamp(-2, rows + 1)  # outside of it there is nothing but zeros
    if padding_mode == "reflection":
        low, span = (0, rows - 1) if align_corners else (-0.5, rows)
        apart = (at - low).abs()
        rest = apart.fmod(span)
        is_forward = (apart / span).floor() % 2 == 0  # after an even number of reflections
        at = torch.where(is_forward, rest, span - rest) + low
    inside = (at > 0) & (at < rows - 1)
    return torch.where(inside, at, at.detach().clamp(0, rows - 1))  # a place at the border has no gradient


def as_grid(at: Tensor, rows: int) -> Tensor:
    """Places among so many rows as places -1 to 1, of which F.grid_sample with align_corners makes the same again.

    The same to rounding, and between the same two rows: the gradient of a place is the difference of these.
    """
    half = (rows - 1) / 2
    grid = at / half - 1
    with torch.no_grad():
        exact = grid.clone()
        for _ in range(3):
            row_again = ((exact + 1) * half).floor()
            exact += (at.floor() - row_again) * torch.finfo(at.dtype).eps
    return grid + (exact - grid.detach())


def rows_needed(
    spec: Spec,
    splits: Splits,
    places: dict[int, Tensor],
) -> dict[int, list[Interval]]:
    """The rows of an image with this spec that each rank of a dimension needs, for the dimensions where a halo is less.

    places: {dimension: this rank's places among its rows}. All ranks call this together; the result is the same on all.
    """
    # The first and last row that this rank needs along each dimension.
    ends = []
    for d, at in places.items():
        n = spec.shape[d]
        if at.numel():
            low, high = torch.aminmax(at.floor().nan_to_num())
        else:  # no rows at all
            low, high = at.new_full((), n), at.new_zeros(()) - 2
        ends += [low.clamp(0, n), (high + 2).clamp(0, n)]
    group = spec.mesh.joint
    own_ends = torch.stack(ends)[None].long()  # (1, 2 * dimensions)
    ends_of_ranks = all_gather(own_ends, 0, (1,) * group.size, group).tolist()  # (ranks, 2 * dimensions)

    halos = {}
    for i, (d, (sizes, _)) in enumerate(splits.items()):
        n = spec.shape[d]
        (mesh_dim,) = mesh_dims_of(spec.dims[d])
        intervals = []
        for coordinate in range(len(sizes)):
            # Ranks of one row of tiles exchange what any of them needs, at least two rows.
            first = n - 2
            last = 0
            for rank, of_rank in enumerate(ends_of_ranks):
                if spec.coordinate(mesh_dim, rank) == coordinate:
                    first = min(first, of_rank[2 * i])
                    last = max(last, of_rank[2 * i + 1])
            intervals.append((first, max(last, first + 2)))
        fetched = 0
        for (first, last), (own_first, own_last) in zip(intervals, bounds(sizes), strict=True):
            overlap = max(0, min(last, own_last) - max(first, own_first))
            fetched += last - first - overlap
        gathered = (len(sizes) - 1) * n
        if 2 * fetched <= gathered:
            halos[d] = intervals
    return halos
