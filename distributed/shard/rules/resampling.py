"""Interpolation and padding of a tensor with split spatial dimensions: see windows.py."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.halo import Fetch, Interval, bounds
from distributed.shard.operands import reduced
from distributed.shard.rules import windows
from distributed.shard.rules.pooling import adaptive_avg_pooling
from distributed.shard.rules.windows import Splits, spatial, whole_length
from distributed.shard.tensor import ShardTensor, local, named, no_rule, rule
from networks.vit import PerAxis

NEAREST = "nearest", "nearest-exact"
SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}  # modes by the number of dimensions


@rule(F.interpolate)
def interpolate(
    func: Callable, input: ShardTensor, size: PerAxis | None = None,
    scale_factor: float | Sequence[float] | None = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> ShardTensor:  # fmt: skip
    """Every mode: weighted sums of rows along split dimensions, then the plain operation along the others."""
    given, count = reduced(input), len(input.spec.dims) - 2
    splits, x = windows.splits_of(given, range(2, count + 2)), local(given)
    if not splits:
        y = func(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return windows.resulting(given, y, {})
    lengths, scales = wanted_lengths(x, splits, size, scale_factor, recompute_scale_factor)
    if mode == "area":
        return adaptive_avg_pooling(getattr(F, f"adaptive_avg_pool{count}d"), given, lengths)
    if mode not in (*NEAREST, *SMOOTH[count]) or (antialias and count != 2):
        raise no_rule(func, (given,), {}, f"mode '{mode}'" + antialias * " with antialias")
    dtype, new = x.dtype, {}
    for i, dim in enumerate(range(2, count + 2)):
        if dim in splits:
            sizes, length = splits[dim][0], lengths[i]
            new[dim] = windows.in_proportion(sizes, length)
            read, weights = rows_read(mode, sum(sizes), length, scales[i], align_corners, antialias)
            x, mine, outputs = windows.read(x, dim, splits[dim], new[dim], read)
            if mode in NEAREST:
                x = windows.spread(x, dim, mine)
            else:
                x = windows.weighted_sums(x, dim, mine, weights[slice(*outputs)])
            lengths[i], scales[i] = x.shape[dim], scales[i] and 1.0
    shape = (*x.shape[:2], *lengths)
    if 0 in shape:
        x = windows.no_outputs(x, shape)
    elif len(splits) < count:
        how = {"size": lengths} if scales[0] is None else {"scale_factor": scales}
        x = F.interpolate(x, mode=mode, align_corners=align_corners, antialias=antialias, **how)
    return windows.resulting(given, x.to(dtype), new)


@lru_cache(maxsize=64)
@torch.compiler.assume_constant_result
def rows_read(
    mode: str, rows: int, length: int, scale: float | None, align_corners: bool | None, antialias: bool
) -> tuple[tuple[Interval, ...], tuple[tuple[float, ...], ...]]:
    """The rows [first, last) that each output reads, and their weights, which the plain operation shows."""

    def plain(x: Tensor) -> Tensor:  # (rows, n) -> (length, n)
        # Two columns: of one column torch 2.13 computes every output as the first.
        x = x.to(torch.float64).mT[None, :, :, None].repeat(1, 1, 1, 2)
        how = {"size": (length, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
        plane = {"linear": "bilinear", "trilinear": "bilinear"}.get(mode, mode)
        return F.interpolate(x, mode=plane, align_corners=align_corners, antialias=antialias, **how)[0, :, :, 0].mT

    if mode == "bicubic" or antialias:
        every = plain(torch.eye(rows))
        places = every.ne(0)
        starts = places.int().argmax(1)
        ends = rows - places.flip(1).int().argmax(1)
        read = tuple(zip(starts.tolist(), ends.tolist(), strict=True))
        return read, tuple(tuple(row[a:b]) for row, (a, b) in zip(every.tolist(), read, strict=True))
    at = [round(place, 9) for place in plain(torch.arange(rows)[:, None]).flatten().tolist()]
    read = tuple((math.floor(place), math.floor(place) + 1 + (place % 1 > 0)) for place in at)
    return read, tuple((1 - place % 1, place % 1) if place % 1 else (1.0,) for place in at)


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
        (split,) = windows.splits_of(given, [dim]).values()
        left[i] = left[i + 1] = 0
        rows = sum(split[0])
        most = {"circular": rows, "reflect": rows - 1}.get(mode, math.inf)
        if before + after + rows < 0 or (mode != "constant" and not (0 <= before <= most and 0 <= after <= most)):
            raise ValueError(f"pad: {mode} of {rows} rows by {before} before and {after} after")
        new[dim] = windows.cut(split[0], rows + before + after, lambda end, before=before: end + before)
        if mode in ("reflect", "replicate"):
            inside = [mirrored(row, rows - 1, mode) for row in range(-before, rows + after)]
            x, mine, _ = windows.read(x, dim, split, new[dim], [(row, row + 1) for row in inside])
            x = windows.spread(x, dim, mine)
        else:
            intervals = [(first - before, last - before) for first, last in bounds(new[dim])]
            coming = Fetch(x, dim, split[0], intervals, split[1], mode == "circular", value or 0)
            x = coming.rows() if coming.joined else coming.rows().clone()
    mode = mode if x.numel() else "constant"  # other modes reject empty tensors
    x = F.pad(x, left, mode, value if mode == "constant" else None) if any(left) else x
    return windows.resulting(given, x, new)


def mirrored(row: int, last: int, mode: str) -> int:
    """The row that lies in the place of one outside of [0, last], by reflection or replication."""
    if mode == "reflect":
        row = abs(row) if row <= last else 2 * last - row
    return min(max(row, 0), last)
