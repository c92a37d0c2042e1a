"""Interpolation and padding of a tensor with split spatial dimensions: see windows.py."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Group, Sizes, tensor_on
from distributed.halo import Fetch, Interval, bounds
from distributed.shard.operands import reduced
from distributed.shard.rules import windows
from distributed.shard.rules.pooling import adaptive_avg_pooling
from distributed.shard.rules.windows import Output, Splits, request, spatial, whole_length
from distributed.shard.tensor import ShardTensor, local, named, no_rule, rule
from networks.vit import PerAxis

aten = torch.ops.aten
NEAREST = {
    "nearest": (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
    "nearest-exact": (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
}
LINEAR = {
    "linear": aten.upsample_linear1d,
    "bilinear": aten.upsample_bilinear2d,
    "trilinear": aten.upsample_trilinear3d,
}

Number = TypeVar("Number", float, Tensor)


def by_rows(
    x: Tensor, splits: Splits, lengths: list[int], scales: list[float | None], mode: str, align_corners: bool | None
) -> Output:
    """F.interpolate with mode nearest, nearest-exact, linear, bilinear or trilinear: x (B, C, ...)."""
    count, dtype, new, resampled = x.ndim - 2, x.dtype, {}, False
    for dim in sorted(splits):
        rows, length, scale = sum(splits[dim][0]), lengths[dim - 2], scales[dim - 2]
        new[dim] = windows.in_proportion(splits[dim][0], length)
        source = nearest_rows(mode, rows, length, scale) if mode in NEAREST else None
        place = partial(linear_place, rows=rows, length=length, scale=scale, align_corners=align_corners)

        def rows_read(first, last, place=place, source=source):
            if source is not None:
                return source[first], source[last - 1] + 1
            return math.floor(place(first)), math.ceil(place(last - 1)) + 1

        coming, (first, last), interval = request(x, dim, splits[dim], new[dim], rows_read)
        x, lengths[dim - 2], scales[dim - 2] = coming.rows(), last - first, None
        if first == last:
            continue
        if source is None:
            x, resampled = linear(x, dim, first, last, place, interval), True
        else:
            mine = tuple([row - interval[0] for row in source[first:last]])
            if mine != nearest_rows(mode, x.shape[dim], last - first, None):
                x, resampled = x.index_select(dim, tensor_on(x.device, mine)), True
    shape = (*x.shape[:2], *lengths)
    if 0 in shape:
        return windows.no_outputs(x.to(dtype), shape), new
    if not resampled or x.shape != shape or scales != [None] * count:
        if mode in NEAREST:
            x = NEAREST[mode][count - 1](x, lengths, *scales)
        else:
            x = LINEAR[mode](x, lengths, bool(align_corners), *scales)
    return x.to(dtype), new


def by_matrix(
    x: Tensor, splits: Splits, lengths: list[int], scales: list[float | None], mode: str, align_corners: bool | None,
    antialias: bool,
) -> Output:  # fmt: skip
    """F.interpolate of images in any mode that weights rows and columns one after the other: bicubic, antialiased."""
    new = {}
    for dim in range(2, x.ndim):
        rows, length = whole_length(x, dim, splits), lengths[dim - 2]
        weights = row_weights(mode, rows, length, scales[dim - 2], align_corners, antialias)
        if dim in splits:
            new[dim] = windows.in_proportion(splits[dim][0], length)

            def rows_read(first, last, weights=weights):
                read = weights[first:last].any(0).nonzero().flatten().tolist()
                return read[0], read[-1] + 1

            coming, outputs, interval = request(x, dim, splits[dim], new[dim], rows_read)
            x, weights = coming.rows(), weights[slice(*outputs), slice(*interval)]
        x = (x.movedim(dim, -1) @ weights.to(x).mT).movedim(-1, dim)
    return x, new


@lru_cache(maxsize=64)
def row_weights(
    mode: str, rows: int, length: int, scale: float | None, align_corners: bool | None, antialias: bool
) -> Tensor:
    """The weight of each row in each output, (length, rows), which the plain operation gives to unit vectors."""
    # Two columns: of one column torch 2.13 computes every output as the first.
    units = torch.eye(rows, dtype=torch.float64).view(1, rows, rows, 1).repeat(1, 1, 1, 2)
    how = {"size": (length, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
    return F.interpolate(units, mode=mode, align_corners=align_corners, antialias=antialias, **how)[0, :, :, 0].mT


def wanted_lengths(
    x: Tensor, splits: Splits, size: PerAxis | None, scale_factor: float | Sequence[float] | None,
    recompute_scale_factor: bool | None,
) -> tuple[list[int], list[float | None]]:  # fmt: skip
    """The lengths of the whole output, and the scales; None for a scale that follows from the lengths."""
    count = x.ndim - 2
    if size is not None and scale_factor is None:
        return list(spatial(size, count)), [None] * count
    if size is not None or scale_factor is None:
        raise ValueError("interpolate: either size or scale_factor")
    scales = [scale_factor] * count if isinstance(scale_factor, int | float) else list(scale_factor)
    lengths = [int(whole_length(x, dim, splits) * scale) for dim, scale in enumerate(scales, 2)]
    return lengths, [None] * count if recompute_scale_factor else [float(scale) for scale in scales]


@lru_cache(maxsize=256)
@torch.compiler.assume_constant_result
def nearest_rows(mode: str, rows: int, length: int, scale: float | None) -> tuple[int, ...]:
    """The row that each output copies, with the rounding of the plain operation."""
    places = torch.arange(rows, dtype=torch.float64).view(1, 1, -1)
    return tuple(int(row) for row in NEAREST[mode][0](places, [length], scale).flatten())


def linear_place(output: Number, rows: int, length: int, scale: float | None, align_corners: bool | None) -> Number:
    """The position of an output, or of a tensor of outputs, among the rows."""
    if align_corners:
        place = output * ((rows - 1) / (length - 1) if length > 1 else 0.0)
    else:
        place = (output + 0.5) * (1 / scale if scale else rows / length) - 0.5
    return place.clamp(0, rows - 1) if isinstance(place, torch.Tensor) else min(max(place, 0.0), rows - 1.0)


def linear(x: Tensor, dim: int, first: int, last: int, place: Callable[[Tensor], Tensor], interval: Interval) -> Tensor:
    """Interpolate the outputs [first, last) from x, the rows `interval` of the whole; at least in float32."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    outputs = torch.arange(first, last, device=x.device, dtype=x.dtype)
    at = place(outputs).clamp(interval[0], interval[1] - 1) - interval[0]
    low = at.floor().long()
    weight = (at - low).view(-1, *[1] * (x.ndim - 1 - dim))
    high = (low + 1).clamp(max=x.shape[dim] - 1)
    return torch.lerp(x.index_select(dim, low), x.index_select(dim, high), weight)


@rule(F.interpolate)
def interpolate(
    func: Callable, input: ShardTensor, size: PerAxis | None = None,
    scale_factor: float | Sequence[float] | None = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> ShardTensor:  # fmt: skip
    """Every mode; of split images with two rows of weights a row, bilinear and bicubic, antialiased too."""
    x, count = reduced(input), len(input.spec.dims) - 2
    splits, part = windows.splits_of(x, range(2, count + 2)), local(x)
    if not splits:
        y = func(part, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return windows.resulting(x, y, {})
    lengths, scales = wanted_lengths(part, splits, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return adaptive_avg_pooling(getattr(F, f"adaptive_avg_pool{count}d"), x, lengths)
    if count == 2 and (mode == "bicubic" or antialias):
        return windows.resulting(x, *by_matrix(part, splits, lengths, scales, mode, align_corners, antialias))
    if antialias or mode not in (*NEAREST, list(LINEAR)[count - 1]):
        raise no_rule(func, (x,), {}, f"mode '{mode}'" + antialias * " with antialias")
    return windows.resulting(x, *by_rows(part, splits, lengths, scales, mode, align_corners))


@rule(*named("pad"))
def pad(
    func: Callable, input: ShardTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardTensor:
    """Pad. In a split dimension the first and the last rank with rows hold the padding.

    Raises ValueError if padding for reflect, replicate or circular is longer than the plain operation allows.
    """
    given = reduced(input)
    x, left, new = local(given), list(pad), {}
    for i in range(0, len(pad), 2):
        dim, (before, after) = x.ndim - 1 - i // 2, pad[i : i + 2]
        if before == after == 0 or not given.spec.is_split(dim):
            continue
        ((sizes, group),) = windows.splits_of(given, [dim]).values()
        left[i] = left[i + 1] = 0
        rows = sum(sizes)
        most = {"circular": rows, "reflect": rows - 1}.get(mode, math.inf)
        if before + after + rows < 0 or (mode != "constant" and not (0 <= before <= most and 0 <= after <= most)):
            raise ValueError(f"pad: {mode} of {rows} rows by {before} before and {after} after")
        new[dim] = windows.cut(sizes, rows + before + after, lambda end, before=before: end + before)
        intervals = [(first - before, last - before) for first, last in bounds(new[dim])]
        if mode in ("reflect", "replicate"):
            x = mirrored(x, dim, sizes, group, intervals, mode)
        else:
            coming = Fetch(x, dim, sizes, intervals, group, mode == "circular", value or 0)
            x = coming.rows() if coming.joined else coming.rows().clone()
    mode = mode if x.numel() else "constant"  # other modes reject empty tensors
    x = F.pad(x, left, mode, value if mode == "constant" else None) if any(left) else x
    return windows.resulting(given, x, new)


def mirrored(x: Tensor, dim: int, sizes: Sizes, group: Group, intervals: Sequence[Interval], mode: str) -> Tensor:
    """Rows of intervals that extend beyond the whole dimension, filled by reflection or replication."""
    last = sum(sizes) - 1

    def inner(row: int) -> int:
        row = row if mode == "replicate" else abs(row) if row <= last else 2 * last - row
        return min(max(row, 0), last)

    rows = [[inner(row) for row in range(*interval)] for interval in intervals]
    read = [(min(r), max(r) + 1) if r else (0, 0) for r in rows]
    coming, start = Fetch(x, dim, sizes, read, group), read[group.rank][0]
    if coming.joined and read[group.rank] == intervals[group.rank]:
        return coming.rows()
    order = tensor_on(x.device, [row - start for row in rows[group.rank]], torch.long)
    return coming.rows().index_select(dim, order)
