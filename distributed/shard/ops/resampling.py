"""Interpolation and padding of a tensor with split spatial dimensions: see windows.py."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.halo import Interval
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.plans import Plan, planned_else
from distributed.shard.core.tensor import ShardTensor, local, named, no_rule, rule
from distributed.shard.ops.pooling import adaptive_avg_pooling
from distributed.shard.ops.windows import (
    PerAxis,
    Window,
    in_proportion,
    no_outputs,
    ntuple,
    read_windows,
    request,
    splits_of,
    wrap_output,
)

NEAREST = "nearest", "nearest-exact"
# Other modes that are sums of rows, by the number of spatial dimensions.
SMOOTH = {
    1: ("linear",),
    2: ("bilinear", "bicubic"),
    3: ("trilinear",),
}
WeightsOfRows = tuple[tuple[float, ...], ...]  # for each output, the weight of each row that it reads


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
    """Resize (B, C, ...) to (B, C, *sizes) in any mode.

    Along split dimensions each output is a weighted sum of rows; the plain operation then resizes the others. Raises
    no_rule for modes that torch itself does not have.
    """
    given = sum_partial(input)
    count = len(input.spec.dims) - 2  # of spatial dimensions
    dims = range(2, count + 2)
    splits = splits_of(given, dims)
    x = local(given)
    options = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    if not splits:
        return wrap_output(given, func(x, *options), {})

    # The size of the output and the scale of each dimension, as the plain operation has them.
    meta = torch.empty(given.spec.shape, device="meta")
    lengths = list(func(meta, *options).shape[2:])
    scales: list[Any] = [None] * count if recompute_scale_factor else list(ntuple(scale_factor, count))
    if mode == "area":
        pooling = getattr(F, f"adaptive_avg_pool{count}d")
        return adaptive_avg_pooling(pooling, given, lengths)
    is_known = mode in NEAREST or mode in SMOOTH[count]
    has_antialias = not antialias or count == 2  # torch has it for images alone
    if not is_known or not has_antialias:
        raise no_rule(func, (given,), {}, f"mode '{mode}'" + antialias * " with antialias")

    # Weighted sums of rows along the split dimensions.
    dtype = x.dtype
    out_sizes = {}
    for i, dim in enumerate(dims):
        if dim not in splits:
            continue
        sizes, _ = splits[dim]
        out_sizes[dim] = in_proportion(sizes, lengths[i])
        windows, weights = rows_read(mode, sum(sizes), lengths[i], scales[i], align_corners, antialias)
        used_weights = None if mode in NEAREST else weights  # nearest takes a row as it is, in its own dtype
        x = read_windows(x, dim, splits[dim], out_sizes[dim], windows, used_weights)
        # This dimension is done: the plain operation below keeps its rows.
        lengths[i] = x.shape[dim]
        scales[i] = scales[i] and 1.0

    # The plain operation follows along the others.
    shape = (*x.shape[:2], *lengths)  # of this rank's output
    if 0 in shape:
        x = no_outputs(x, shape)
    elif len(splits) < count:
        how: Any = {"size": lengths} if scales[0] is None else {"scale_factor": scales}
        x = F.interpolate(x, mode=mode, align_corners=align_corners, antialias=antialias, **how)
    return wrap_output(given, x.to(dtype), out_sizes)


@lru_cache(maxsize=64)
@torch.compiler.assume_constant_result
def rows_read(
    mode: str,
    rows: int,
    length: int,
    scale: float | None,
    align_corners: bool | None,
    antialias: bool,
) -> tuple[tuple[Interval, ...], WeightsOfRows]:
    """For each of `length` outputs the rows [first, last) that it reads, and the weight of each of these rows.

    The plain operation on rows that are known tells both, so that no formula of torch is repeated here.
    """

    def plain(x: Tensor) -> Tensor:
        """The plain operation along the rows: (rows, n) -> (length, n)."""
        # It gets two columns, because torch 2.13 computes every output of one column as the first.
        columns = x.to(torch.float64).mT[None, :, :, None]  # (1, n, rows, 1)
        planes = columns.repeat(1, 1, 1, 2)  # (1, n, rows, 2)
        how: Any = {"size": (length, 2)} if scale is None else {"scale_factor": (scale, 1.0)}
        plane_mode = "bilinear" if mode in ("linear", "trilinear") else mode
        y = F.interpolate(planes, mode=plane_mode, align_corners=align_corners, antialias=antialias, **how)
        return y[0, :, :, 0].mT  # (length, n)

    if mode == "bicubic" or antialias:
        # Each row of the identity is 1 at one place: its outputs are the weights of that place.
        weights_of_all_rows = plain(torch.eye(rows))  # (length, rows)
        return _rows_with_weights(weights_of_all_rows)
    # The outputs of the row numbers 0, 1, ... are the places between rows at which the outputs lie.
    numbers = torch.arange(rows)[:, None]  # (rows, 1)
    places = plain(numbers).flatten().tolist()
    return _rows_around(places)


def _rows_with_weights(weights):
    """(rows, their weights) of each output, as rows_read has them, of the weights (length, rows) of all rows."""
    rows = weights.shape[1]
    is_read = weights.ne(0).int()
    starts = is_read.argmax(1).tolist()  # the first row that each output reads
    unread_behind = is_read.flip(1).argmax(1).tolist()  # rows behind the last one
    intervals = []
    own_weights = []
    for of_output, first, behind in zip(weights.tolist(), starts, unread_behind, strict=True):
        last = rows - behind
        intervals.append((first, last))
        own_weights.append(tuple(of_output[first:last]))
    return tuple(intervals), tuple(own_weights)


def _rows_around(places):
    """(rows, their weights) of each output, as rows_read has them, for outputs at places between two rows."""
    intervals = []
    weights: list[tuple[float, ...]] = []
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


def plan_of_padding(
    func: Callable,
    input: ShardTensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Plan | None:
    """The plain function, where dimensions that every rank has whole are padded by a constant."""
    spec = input.spec
    dims = list(spec.dims)
    for i in range(0, len(pad), 2):
        dim = len(dims) - 1 - i // 2  # the last dimension comes first
        before, after = pad[i : i + 2]
        if before or after:
            dims[dim] = unsplit_axes(before + spec.shape[dim] + after)
            if spec.is_split(dim):
                return None
    if mode != "constant" or spec.partial:
        return None

    def compute(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
        return torch.constant_pad_nd(input, pad, value or 0)

    return Plan(compute, spec.with_dims(dims))


@rule(*named("pad"))
@planned_else(plan_of_padding)
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
    own_padding = list(pad)  # for the plain operation: that of dimensions which are not split
    out_sizes = {}
    for i in range(0, len(pad), 2):
        dim = x.ndim - 1 - i // 2  # the last dimension comes first
        before, after = pad[i : i + 2]
        is_padded = before != 0 or after != 0
        if not is_padded or not given.spec.is_split(dim):
            continue
        (split,) = splits_of(given, [dim]).values()
        own_padding[i] = 0
        own_padding[i + 1] = 0

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
        out_sizes[dim] = window.output_sizes(sizes, length)
        if mode in ("reflect", "replicate"):
            # Each row of the result is a copy of one row of the input.
            windows = []
            for row in range(-before, rows + after):
                inside = mirrored(row, rows - 1, mode)
                windows.append((inside, inside + 1))
            x = read_windows(x, dim, split, out_sizes[dim], windows)
        else:
            periodic = mode == "circular"
            pending, *_ = request(x, dim, split, out_sizes[dim], window.interval, periodic=periodic, fill=value or 0)
            x = pending.rows()
            if not pending.joined:  # a view: padding gives memory of its own
                x = x.clone()
    if any(own_padding):
        own_mode = mode if x.numel() else "constant"  # other modes reject empty tensors
        own_value = value if own_mode == "constant" else None
        x = F.pad(x, own_padding, own_mode, own_value)
    return wrap_output(given, x, out_sizes)


def mirrored(row: int, last: int, mode: str) -> int:
    """The row that lies in the place of one outside of [0, last], by reflection or replication."""
    if mode == "reflect":
        row = abs(row) if row <= last else 2 * last - row
    not_before = max(row, 0)
    return min(not_before, last)
