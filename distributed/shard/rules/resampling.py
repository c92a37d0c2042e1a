"""Pooling, interpolation and padding of a tensor with split spatial dimensions: see windows.py.

For the indices of maxima the images become whole, of some channels or samples on each rank.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import tensor_on
from distributed.halo import Interval
from distributed.shard.operands import local_operand, sum_partial
from distributed.shard.rules.along import on_whole, restore_sharding, unshard_dims
from distributed.shard.rules.windows import (
    DIMENSIONS,
    Output,
    Splits,
    Window,
    extended,
    images,
    in_proportion,
    no_outputs,
    output_shape,
    read,
    request,
    resulting,
    spatial,
    spatial_rule,
    spatially,
    splits_of,
    whole_length,
    windows_of,
)
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from networks.vit import PerAxis

AVERAGES = set(named("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"))
NEAREST = "nearest", "nearest-exact"
SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}  # modes by the number of dimensions


@spatial_rule("max_pool")
def max_pool(
    func: Callable,
    x: Tensor,
    splits: Splits,
    kernel_size: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Output:
    """max_pool1d, 2d, 3d without indices: x (B, C, ...) or (C, ...), func as of torch.nn.functional."""
    stride = stride or kernel_size
    along = pool_windows(func, x, kernel_size, stride, padding, dilation)
    shape = output_shape(func, x, splits, along, ceil_mode)
    # Rows of padding must never be the maximum.
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    x, new, _ = extended(x, splits, along, shape, lowest)
    if 0 in shape:
        return no_outputs(x, shape), new
    return func(x, kernel_size, stride, left(along, splits), dilation, ceil_mode), new


@spatial_rule("avg_pool")
def avg_pool(
    func: Callable,
    x: Tensor,
    splits: Splits,
    kernel_size: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Output:
    """avg_pool1d, 2d, 3d: x (B, C, ...) or (C, ...)."""
    stride = stride or kernel_size
    along = pool_windows(func, x, kernel_size, stride, padding)
    shape = output_shape(func, x, splits, along, ceil_mode)
    x, new, own = extended(x, splits, along, shape, 0)
    if 0 in shape:
        return no_outputs(x, shape), new
    divisor = () if DIMENSIONS[func] == 1 else (divisor_override,)
    y = func(x, kernel_size, stride, left(along, splits), ceil_mode, count_include_pad, *divisor)
    if divisor_override is not None:
        return y, new

    # The plain operation has divided by all rows of a window, even by those outside of the whole dimension.
    for dim, outputs in own.items():
        window = along[dim]
        rows = sum(splits[dim][0])
        low, high = (-window.before, rows + window.before) if count_include_pad else (0, rows)
        factors = []
        for j in range(*outputs):
            first, last = window.interval(j, j + 1)
            counted = min(last, high) - max(first, low)
            factors.append(window.kernel / counted)
        if any(factor != 1 for factor in factors):
            dims_behind = y.ndim - 1 - dim
            y = y * tensor_on(y.device, factors, y.dtype).view(-1, *[1] * dims_behind)
    return y, new


def pool_windows(
    func: Callable, x: Tensor, kernel_size: PerAxis, stride: PerAxis, padding: PerAxis, dilation: PerAxis = 1
) -> dict[int, Window]:
    """{spatial dimension: its Window}. Raises ValueError for more padding than half of a window."""
    dims = range(x.ndim - DIMENSIONS[func], x.ndim)
    along = windows_of(dims, kernel_size, stride, padding, dilation)
    for window in along.values():
        before, kernel = window.before, window.kernel
        if 2 * before > window.reach + 1:
            raise ValueError(f"{func.__name__}: padding {before} is more than half of the window of {kernel}")
    return along


def left(along: dict[int, Window], splits: Splits) -> list[int]:
    """The padding that the plain operation has still to add, after `extended`."""
    return [0 if dim in splits else w.before for dim, w in along.items()]


@spatial_rule("adaptive_max_pool")
def adaptive_pool(
    func: Callable,
    x: Tensor,
    splits: Splits,
    output_size: Any,
    return_indices: bool = False,
) -> Output:
    """adaptive_avg_pool and adaptive_max_pool 1d, 2d, 3d, without indices.

    Output j covers the rows [floor(j * rows / outputs), ceil((j + 1) * rows / outputs)). output_size: one for all
    dimensions or one for each; None keeps the number of rows.
    """
    count = DIMENSIONS[func]
    dtype = x.dtype
    first_spatial = x.ndim - count
    new = {}
    shape = [*x.shape[:first_spatial], *spatial(output_size, count)]
    for dim in range(first_spatial, x.ndim):
        rows = whole_length(x, dim, splits)
        length = rows if shape[dim] is None else shape[dim]
        shape[dim] = length
        if dim not in splits:
            continue
        sizes, group = splits[dim]
        new[dim] = in_proportion(sizes, length)
        covered = [(j * rows // length, -(-(j + 1) * rows // length)) for j in range(length)]
        weights = None
        if func in AVERAGES:
            weights = [[1 / (b - a)] * (b - a) for a, b in covered]
        x = read(x, dim, splits[dim], new[dim], covered, weights)
        shape[dim] = new[dim][group.rank]
    if 0 in shape:
        return no_outputs(x.to(dtype), shape), new
    return func(x, shape[first_spatial:]).to(dtype), new


@rule(*AVERAGES)
def adaptive_avg_pooling(func: Callable, input: ShardTensor, output_size: PerAxis) -> ShardTensor:
    """Each rank gets outputs in proportion to its rows; the mean over all rows is a partial tensor."""
    count = DIMENSIONS[func]
    if set(spatial(output_size, count)) == {1}:
        # The mean is a sum over the ranks; otherwise one rank would fetch all rows.
        return dispatch(torch.mean, input, tuple(images(input, func)), keepdim=True)
    return spatially(adaptive_pool, func, input, output_size)


MAXIMA_WITH_INDICES = [f"{kind}_pool{n}d_with_indices" for kind in ("max", "adaptive_max") for n in (1, 2, 3)]


@rule(*named(*MAXIMA_WITH_INDICES))
@rule(torch.adaptive_max_pool1d)  # always returns indices
def with_indices(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[ShardTensor, ...]:
    """(maxima, their places in the whole image): each rank has whole images of some channels or samples meanwhile."""
    return on_whole(input, images(input, func), lambda part: func(part, *args, **kwargs), resizes=True)


@rule(torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d)
def unpool(
    func: Callable,
    input: ShardTensor,
    indices: Tensor,
    output_size: Sequence[int],
    *args: Any,
) -> ShardTensor:
    """Put values at places in the whole image, on whole images of some channels or samples."""
    dims = images(input, func)
    x = unshard_dims(input, dims)
    part = local(x)
    places = local_operand(sum_partial(indices), x.spec)
    out = x.spec.resized(dict(zip(dims, output_size, strict=True)))
    y = func(part, places, output_size, *args) if part.numel() else no_outputs(part, out.local_shape)
    return restore_sharding(wrap(y, out), input.spec)


@rule(F.interpolate)
def interpolate(
    func: Callable,
    input: ShardTensor,
    size: PerAxis | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> ShardTensor:
    """Every mode: weighted sums of rows along split dimensions, then the plain operation along the others."""
    given = sum_partial(input)
    count = len(input.spec.dims) - 2
    dims = range(2, count + 2)
    splits = splits_of(given, dims)
    x = local(given)
    options = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    if not splits:
        return resulting(given, func(x, *options), {})

    # The size of the output and the scale of each dimension, as the plain operation has them.
    meta = torch.empty(given.spec.shape, device="meta")
    lengths = list(func(meta, *options).shape[2:])
    scales: list[Any] = [None] * count if recompute_scale_factor else list(spatial(scale_factor, count))
    if mode == "area":
        return adaptive_avg_pooling(getattr(F, f"adaptive_avg_pool{count}d"), given, lengths)
    is_known = mode in NEAREST or mode in SMOOTH[count]
    if not is_known or (antialias and count != 2):
        raise no_rule(func, (given,), {}, f"mode '{mode}'" + antialias * " with antialias")

    # Weighted sums of rows along the split dimensions.
    dtype = x.dtype
    new = {}
    for i, dim in enumerate(dims):
        if dim not in splits:
            continue
        sizes, _ = splits[dim]
        new[dim] = in_proportion(sizes, lengths[i])
        places, weights = rows_read(mode, sum(sizes), lengths[i], scales[i], align_corners, antialias)
        x = read(x, dim, splits[dim], new[dim], places, None if mode in NEAREST else weights)
        lengths[i] = x.shape[dim]  # done: the plain operation below keeps these rows
        scales[i] = scales[i] and 1.0

    # The plain operation along the others.
    shape = (*x.shape[:2], *lengths)
    if 0 in shape:
        x = no_outputs(x, shape)
    elif len(splits) < count:
        how: Any = {"size": lengths} if scales[0] is None else {"scale_factor": scales}
        x = F.interpolate(x, mode=mode, align_corners=align_corners, antialias=antialias, **how)
    return resulting(given, x.to(dtype), new)


@lru_cache(maxsize=64)
@torch.compiler.assume_constant_result
def rows_read(
    mode: str,
    rows: int,
    length: int,
    scale: float | None,
    align_corners: bool | None,
    antialias: bool,
) -> tuple[tuple[Interval, ...], tuple[tuple[float, ...], ...]]:
    """The rows [first, last) that each output reads, and their weights, which the plain operation shows."""

    def plain(x: Tensor) -> Tensor:  # (rows, n) -> (length, n)
        # Two columns: of one column torch 2.13 computes every output as the first.
        planes = x.to(torch.float64).mT[None, :, :, None].repeat(1, 1, 1, 2)  # (1, n, rows, 2)
        how = {"size": (length, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
        plane_mode = {"linear": "bilinear", "trilinear": "bilinear"}.get(mode, mode)
        y = F.interpolate(planes, mode=plane_mode, align_corners=align_corners, antialias=antialias, **how)
        return y[0, :, :, 0].mT

    intervals = []
    weights = []
    if mode == "bicubic" or antialias:
        # Every row alone shows its weight for each output.
        every = plain(torch.eye(rows))  # (length, rows)
        is_read = every.ne(0)
        starts = is_read.int().argmax(1).tolist()
        behind = is_read.flip(1).int().argmax(1).tolist()
        for row, first, n in zip(every.tolist(), starts, behind, strict=True):
            last = rows - n
            intervals.append((first, last))
            weights.append(tuple(row[first:last]))
    else:
        # Linear and nearest: an output of the row numbers is the place between the two rows that it reads.
        numbers = torch.arange(rows)[:, None]
        for place in plain(numbers).flatten().tolist():
            place = round(place, 9)
            first = math.floor(place)
            fraction = place % 1
            if fraction:
                intervals.append((first, first + 2))
                weights.append((1 - fraction, fraction))
            else:
                intervals.append((first, first + 1))
                weights.append((1.0,))
    return tuple(intervals), tuple(weights)


@rule(*named("pad"))
def pad(
    func: Callable,
    input: ShardTensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> ShardTensor:
    """Pad. In a split dimension the first and the last rank with rows hold the padding.

    Raises ValueError if padding for reflect, replicate or circular is longer than the plain operation allows.
    """
    given = sum_partial(input)
    x = local(given)
    left = list(pad)  # for the plain operation: that of dimensions which are not split
    new = {}
    for i in range(0, len(pad), 2):
        dim = x.ndim - 1 - i // 2  # the last dimension comes first
        before, after = pad[i : i + 2]
        if before == after == 0 or not given.spec.is_split(dim):
            continue
        (split,) = splits_of(given, [dim]).values()
        left[i] = 0
        left[i + 1] = 0
        rows = sum(split[0])
        length = before + rows + after
        most = {"circular": rows, "reflect": rows - 1}.get(mode, math.inf)
        is_allowed = mode == "constant" or (0 <= before <= most and 0 <= after <= most)
        if length < 0 or not is_allowed:
            raise ValueError(f"pad: {mode} of {rows} rows by {before} before and {after} after")
        window = Window(1, 1, before, after)
        new[dim] = window.output_sizes(split[0], length)
        if mode in ("reflect", "replicate"):
            inside = [mirrored(row, rows - 1, mode) for row in range(-before, rows + after)]
            x = read(x, dim, split, new[dim], [(row, row + 1) for row in inside])
        else:
            periodic = mode == "circular"
            pending, *_ = request(x, dim, split, new[dim], window.interval, periodic=periodic, fill=value or 0)
            x = pending.rows()
            if not pending.joined:  # a view: padding gives memory of its own
                x = x.clone()
    if any(left):
        own_mode = mode if x.numel() else "constant"  # other modes reject empty tensors
        x = F.pad(x, left, own_mode, value if own_mode == "constant" else None)
    return resulting(given, x, new)


def mirrored(row: int, last: int, mode: str) -> int:
    """The row that lies in the place of one outside of [0, last], by reflection or replication."""
    if mode == "reflect":
        row = abs(row) if row <= last else 2 * last - row
    return min(max(row, 0), last)
