"""Interpolation and padding of a tensor with split spatial dimensions: see windows.py."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Group, Sizes, tensor_on
from distributed.halo import Fetch, Interval, bounds
from distributed.shard.rules.windows import (
    Output,
    Splits,
    cut,
    in_proportion,
    is_empty,
    no_outputs,
    spatial,
    whole_length,
)
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


def interpolate(
    x: Tensor, splits: Splits, size: PerAxis | None = None, scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
) -> Output:  # fmt: skip
    """F.interpolate with mode nearest, nearest-exact, linear, bilinear or trilinear: x (B, C, ...)."""
    count, dtype, new = x.ndim - 2, x.dtype, {}
    lengths, scales = wanted_lengths(x, splits, size, scale_factor, recompute_scale_factor)
    resampled = False
    for dim in sorted(splits):
        (sizes, group), i = splits[dim], dim - 2
        rows, length, scale = sum(sizes), lengths[i], scales[i]
        new[dim] = in_proportion(sizes, length)
        source = nearest_rows(mode, rows, length, scale) if mode in NEAREST else None
        step = linear_step(rows, length, scale, align_corners)

        def rows_read(first, last, rows=rows, step=step, source=source):
            if first >= last:
                return 0, 0
            if source is not None:
                return source[first], source[last - 1] + 1
            low, high = (linear_place(j, step, rows, align_corners) for j in (first, last - 1))
            return math.floor(low), math.ceil(high) + 1

        outputs = bounds(new[dim])
        intervals = [rows_read(*b) for b in outputs]
        x = Fetch(x, dim, sizes, intervals, group).rows()
        (first, last), lengths[i], scales[i] = outputs[group.rank], new[dim][group.rank], None
        if first == last:
            continue
        if source is None:
            x, resampled = linear(x, dim, first, last, step, intervals[group.rank], align_corners), True
        else:
            mine = tuple(row - intervals[group.rank][0] for row in source[first:last])
            if mine != nearest_rows(mode, x.shape[dim], last - first, None):
                x, resampled = x.index_select(dim, tensor_on(x.device, mine)), True
    shape = (*x.shape[:2], *lengths)
    if is_empty(shape, new):
        return no_outputs(x.to(dtype), shape), new
    if not resampled or x.shape != shape or scales != [None] * count:
        if mode in NEAREST:
            x = NEAREST[mode][count - 1](x, lengths, *scales)
        else:
            x = LINEAR[mode](x, lengths, bool(align_corners), *scales)
    return x.to(dtype), new


def by_matrix(
    x: Tensor, splits: Splits, size: PerAxis | None, scale_factor: float | Sequence[float] | None, mode: str,
    align_corners: bool | None, recompute_scale_factor: bool | None, antialias: bool,
) -> Output:  # fmt: skip
    """F.interpolate of images in any mode that weights rows and columns one after the other: bicubic, antialiased."""
    lengths, scales = wanted_lengths(x, splits, size, scale_factor, recompute_scale_factor)
    new = {}
    for dim in range(2, x.ndim):
        rows, length = whole_length(x, dim, splits), lengths[dim - 2]
        weights = row_weights(mode, rows, length, scales[dim - 2], align_corners, antialias)
        if dim in splits:
            sizes, group = splits[dim]
            new[dim] = in_proportion(sizes, length)
            outputs, intervals = bounds(new[dim]), []
            for first, last in outputs:
                read = weights[first:last].any(0).nonzero().flatten().tolist() or [0, -1]
                intervals.append((read[0], read[-1] + 1))
            x = Fetch(x, dim, sizes, intervals, group).rows()
            weights = weights[slice(*outputs[group.rank]), slice(*intervals[group.rank])]
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


def supported(mode: str, count: int) -> bool:
    """Whether interpolate has this mode for this number of spatial dimensions."""
    return mode in NEAREST or list(LINEAR)[count - 1] == mode


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


@torch.compiler.assume_constant_result
def nearest_rows(mode: str, rows: int, length: int, scale: float | None) -> tuple[int, ...]:
    """The row that each output copies, with the rounding of the plain operation."""
    return _nearest_rows(mode, rows, length, scale)


@lru_cache(maxsize=256)
def _nearest_rows(mode, rows, length, scale):
    places = torch.arange(rows, dtype=torch.float64).view(1, 1, -1)
    return tuple(int(row) for row in NEAREST[mode][0](places, [length], scale).flatten())


def linear_step(rows: int, length: int, scale: float | None, align_corners: bool | None) -> float:
    """Rows from one output to the next."""
    if align_corners:
        return (rows - 1) / (length - 1) if length > 1 else 0.0
    return 1 / scale if scale else rows / length


def linear_place(output: Number, step: float, rows: int, align_corners: bool | None) -> Number:
    """The position of an output, or of a tensor of outputs, among the rows."""
    place = output * step if align_corners else (output + 0.5) * step - 0.5
    return place.clamp(0, rows - 1) if isinstance(place, torch.Tensor) else min(max(place, 0.0), rows - 1.0)


def linear(
    x: Tensor, dim: int, first: int, last: int, step: float, interval: Interval, align_corners: bool | None
) -> Tensor:
    """Interpolate the outputs [first, last) from x, the rows `interval` of the whole; at least in float32."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    outputs = torch.arange(first, last, device=x.device, dtype=x.dtype)
    place = linear_place(outputs, step, interval[1], align_corners).clamp(min=interval[0]) - interval[0]
    low = place.floor().long()
    weight = (place - low).view(-1, *[1] * (x.ndim - 1 - dim))
    high = (low + 1).clamp(max=x.shape[dim] - 1)
    return torch.lerp(x.index_select(dim, low), x.index_select(dim, high), weight)


def pad(
    x: Tensor, splits: Splits, padding: Sequence[int], mode: str = "constant", value: float | None = None
) -> Output:
    """F.pad: the first and the last rank with rows hold the padding.

    padding: (before, after) of the last dimension, then of the one before it, ...
    Raises ValueError if padding for reflect, replicate or circular is longer than the plain operation allows.
    """
    left, new = list(padding), {}
    for i in range(0, len(padding), 2):
        dim, (before, after) = x.ndim - 1 - i // 2, padding[i : i + 2]
        if dim not in splits or before == after == 0:
            continue
        left[i] = left[i + 1] = 0
        (sizes, group), rows = splits[dim], sum(splits[dim][0])
        most = {"circular": rows, "reflect": rows - 1}.get(mode, math.inf)
        if before + after + rows < 0 or (mode != "constant" and not (0 <= before <= most and 0 <= after <= most)):
            raise ValueError(f"pad: {mode} of {rows} rows by {before} before and {after} after")
        new[dim] = cut(sizes, rows + before + after, lambda end, before=before: end + before)
        intervals = [(first - before, last - before) for first, last in bounds(new[dim])]
        if mode in ("reflect", "replicate"):
            x = mirrored(x, dim, sizes, group, intervals, mode)
        else:
            coming = Fetch(x, dim, sizes, intervals, group, mode == "circular", value or 0)
            x = coming.rows() if coming.joined else coming.rows().clone()
    mode = mode if x.numel() else "constant"  # other modes reject empty tensors
    return (F.pad(x, left, mode, value if mode == "constant" else None) if any(left) else x), new


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
