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
# Other modes that are sums of rows, by the number of spatial dimensions.
SMOOTH = {
    1: ("linear",),
    2: ("bilinear", "bicubic"),
    3: ("trilinear",),
}


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
    own_padding = left(along, splits)
    y = func(x, kernel_size, stride, own_padding, dilation, ceil_mode)
    return y, new


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
    own_padding = left(along, splits)
    divisor = () if DIMENSIONS[func] == 1 else (divisor_override,)  # avg_pool1d has no such argument
    y = func(x, kernel_size, stride, own_padding, ceil_mode, count_include_pad, *divisor)
    if divisor_override is not None:
        return y, new

    # The plain operation has divided by all rows of a window, even by those outside of the whole dimension.
    for dim, outputs in own.items():
        window = along[dim]
        sizes, _ = splits[dim]
        rows = sum(sizes)
        padding_rows = window.before if count_include_pad else 0
        low = -padding_rows
        high = rows + padding_rows
        factors = []
        for j in range(*outputs):
            first, last = window.interval(j, j + 1)
            counted = min(last, high) - max(first, low)
            factors.append(window.kernel / counted)
        if any(factor != 1 for factor in factors):
            ones_behind = [1] * (y.ndim - 1 - dim)
            factor_of_row = tensor_on(y.device, factors, y.dtype)
            y = y * factor_of_row.view(-1, *ones_behind)
    return y, new


def pool_windows(
    func: Callable,
    x: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis,
    padding: PerAxis,
    dilation: PerAxis = 1,
) -> dict[int, Window]:
    """{spatial dimension: its Window}. Raises ValueError for more padding than half of a window."""
    first_spatial = x.ndim - DIMENSIONS[func]
    dims = range(first_spatial, x.ndim)
    along = windows_of(dims, kernel_size, stride, padding, dilation)
    for window in along.values():
        before = window.before
        kernel = window.kernel
        if 2 * before > window.reach + 1:
            raise ValueError(f"{func.__name__}: padding {before} is more than half of the window of {kernel}")
    return along


def left(
    along: dict[int, Window],
    splits: Splits,
) -> list[int]:
    """The padding that the plain operation has still to add, after `extended`."""
    padding = []
    for dim, window in along.items():
        missing = 0 if dim in splits else window.before
        padding.append(missing)
    return padding


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
        covered = []  # rows of each output
        for j in range(length):
            first = j * rows // length
            last = -(-(j + 1) * rows // length)
            covered.append((first, last))
        # A mean is a weighted sum, which makes one row of each window; of maxima the plain operation needs all rows.
        weights = None
        if func in AVERAGES:
            weights = []
            for first, last in covered:
                n = last - first
                weights.append([1 / n] * n)
        x = read(x, dim, splits[dim], new[dim], covered, weights)
        shape[dim] = new[dim][group.rank]
    if 0 in shape:
        return no_outputs(x.to(dtype), shape), new
    y = func(x, shape[first_spatial:])
    return y.to(dtype), new


@rule(*AVERAGES)
def adaptive_avg_pooling(func: Callable, input: ShardTensor, output_size: PerAxis) -> ShardTensor:
    """Each rank gets outputs in proportion to its rows; the mean over all rows is a partial tensor."""
    count = DIMENSIONS[func]
    is_mean_of_all = set(spatial(output_size, count)) == {1}
    if is_mean_of_all:
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

    def compute(part: Tensor) -> Any:
        return func(part, *args, **kwargs)

    return on_whole(input, images(input, func), compute, resizes=True)


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
    new_sizes = dict(zip(dims, output_size, strict=True))
    out = x.spec.resized(new_sizes)
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
        pooling = getattr(F, f"adaptive_avg_pool{count}d")
        return adaptive_avg_pooling(pooling, given, lengths)
    is_known = mode in NEAREST or mode in SMOOTH[count]
    has_antialias = not antialias or count == 2  # torch has it for images alone
    if not is_known or not has_antialias:
        raise no_rule(func, (given,), {}, f"mode '{mode}'" + antialias * " with antialias")

    # Weighted sums of rows along the split dimensions.
    dtype = x.dtype
    new = {}
    for i, dim in enumerate(dims):
        if dim not in splits:
            continue
        sizes, _ = splits[dim]
        new[dim] = in_proportion(sizes, lengths[i])
        rows = sum(sizes)
        places, weights = rows_read(mode, rows, lengths[i], scales[i], align_corners, antialias)
        used_weights = None if mode in NEAREST else weights
        x = read(x, dim, splits[dim], new[dim], places, used_weights)
        # This dimension is done: the plain operation below keeps its rows.
        lengths[i] = x.shape[dim]
        scales[i] = scales[i] and 1.0

    # The plain operation follows along the others.
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

    def plain(x: Tensor) -> Tensor:
        """The plain operation along the rows: (rows, n) -> (length, n)."""
        # It gets two columns, because torch 2.13 computes every output of one column as the first.
        columns = x.to(torch.float64).mT[None, :, :, None]  # (1, n, rows, 1)
        planes = columns.repeat(1, 1, 1, 2)  # (1, n, rows, 2)
        how: Any = {"size": (length, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
        plane_mode = "bilinear" if mode in ("linear", "trilinear") else mode
        y = F.interpolate(planes, mode=plane_mode, align_corners=align_corners, antialias=antialias, **how)
        return y[0, :, :, 0].mT  # (length, n)

    intervals = []
    weights = []
    if mode == "bicubic" or antialias:
        # Every row alone shows its weight for each output.
        every = plain(torch.eye(rows))  # (length, rows)
        is_read = every.ne(0).int()
        starts = is_read.argmax(1).tolist()  # the first row that each output reads
        unread_behind = is_read.flip(1).argmax(1).tolist()
        for of_output, first, n in zip(every.tolist(), starts, unread_behind, strict=True):
            last = rows - n
            intervals.append((first, last))
            weights.append(tuple(of_output[first:last]))
    else:
        # Linear and nearest: an output of the row numbers is the place between the two rows that it reads.
        numbers = torch.arange(rows)[:, None]  # (rows, 1)
        places = plain(numbers).flatten().tolist()
        for place in places:
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
        is_padded = before != 0 or after != 0
        if not is_padded or not given.spec.is_split(dim):
            continue
        (split,) = splits_of(given, [dim]).values()
        left[i] = 0
        left[i + 1] = 0

        # The limits are those of the plain operation. Constant padding may also be negative, to cut rows off.
        sizes, _ = split
        rows = sum(sizes)
        length = before + rows + after
        limits = {"circular": rows, "reflect": rows - 1}
        most = limits.get(mode, math.inf)
        fits = 0 <= before <= most and 0 <= after <= most
        is_allowed = mode == "constant" or fits
        if length < 0 or not is_allowed:
            raise ValueError(f"pad: {mode} of {rows} rows by {before} before and {after} after")
        window = Window(1, 1, before, after)
        new[dim] = window.output_sizes(sizes, length)
        if mode in ("reflect", "replicate"):
            windows = []
            for row in range(-before, rows + after):
                inside = mirrored(row, rows - 1, mode)
                windows.append((inside, inside + 1))
            x = read(x, dim, split, new[dim], windows)
        else:
            periodic = mode == "circular"
            pending, *_ = request(x, dim, split, new[dim], window.interval, periodic=periodic, fill=value or 0)
            x = pending.rows()
            if not pending.joined:  # a view: padding gives memory of its own
                x = x.clone()
    if any(left):
        own_mode = mode if x.numel() else "constant"  # other modes reject empty tensors
        own_value = value if own_mode == "constant" else None
        x = F.pad(x, left, own_mode, own_value)
    return resulting(given, x, new)


def mirrored(row: int, last: int, mode: str) -> int:
    """The row that lies in the place of one outside of [0, last], by reflection or replication."""
    if mode == "reflect":
        row = abs(row) if row <= last else 2 * last - row
    not_before = max(row, 0)
    return min(not_before, last)
