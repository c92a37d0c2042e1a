"""Pooling of a tensor with split spatial dimensions: see windows.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import tensor_on
from distributed.halo import Fetch, Interval, bounds
from distributed.shard.rules.windows import (
    DIMENSIONS,
    Output,
    Splits,
    Window,
    cropped,
    in_proportion,
    is_empty,
    no_outputs,
    spatial,
    whole_length,
)
from networks.vit import PerAxis


def max_pool(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis | None = None,
    padding: PerAxis = 0, dilation: PerAxis = 1, ceil_mode: bool = False,
) -> Output:  # fmt: skip
    """max_pool1d, 2d, 3d without indices: x (B, C, ...) or (C, ...), func as of torch.nn.functional."""
    count, stride = DIMENSIONS[func], stride or kernel_size
    windows, lengths = pool_windows(func, x, splits, kernel_size, stride, padding, dilation, ceil_mode)
    ahead, left, new, shape = x.ndim - count, list(spatial(padding, count)), {}, list(x.shape)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    for dim in sorted(splits):
        (sizes, group), w = splits[dim], windows[dim - ahead]
        new[dim] = w.output_sizes(sizes, lengths[dim])
        intervals = [w.interval(*b) for b in bounds(new[dim])]
        x = Fetch(x, dim, sizes, intervals, group, fill=lowest).rows()
        left[dim - ahead] = 0
        lengths[dim] = new[dim][group.rank]
    shape[ahead:] = lengths[ahead:]
    if is_empty(shape, new):
        return no_outputs(x, shape), new
    return func(x, kernel_size, stride, left, dilation, ceil_mode), new


def avg_pool(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis | None = None,
    padding: PerAxis = 0, ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Output:  # fmt: skip
    """avg_pool1d, 2d, 3d: x (B, C, ...) or (C, ...)."""
    count, stride = DIMENSIONS[func], stride or kernel_size
    windows, lengths = pool_windows(func, x, splits, kernel_size, stride, padding, 1, ceil_mode)
    ahead, new, ranges, shape = x.ndim - count, {}, {}, list(x.shape)
    for dim in sorted(splits):
        (sizes, group), w = splits[dim], windows[dim - ahead]
        new[dim] = w.output_sizes(sizes, lengths[dim])
        # The plain operation must see the ends of the whole dimension to know which part of a window counts. It
        # therefore pads every part; the rows begin a whole number of strides after the first row, and outputs that
        # read padding inside the whole dimension are cropped.
        outputs = bounds(new[dim])
        intervals = [w.interval(*b) for b in outputs]
        intervals = [whole_strides(w, max(first, 0), last, sum(sizes)) for first, last in intervals]
        x = Fetch(x, dim, sizes, intervals, group, fill=None).rows()
        lengths[dim] = new[dim][group.rank]
        ranges[dim] = outputs[group.rank][0] - intervals[group.rank][0] // w.stride, lengths[dim]
    shape[ahead:] = lengths[ahead:]
    if is_empty(shape, new):
        return no_outputs(x, shape), new
    divisor = () if count == 1 else (divisor_override,)
    return cropped(func(x, kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor), ranges), new


def adaptive_pool(func: Callable, x: Tensor, splits: Splits, output_size: Any, average: bool) -> Output:
    """adaptive_avg_pool (average) and adaptive_max_pool 1d, 2d, 3d, without indices.

    Output j covers the rows [floor(j * rows / outputs), ceil((j + 1) * rows / outputs)). output_size: one for all
    dimensions or one for each; None keeps the number of rows.
    """
    count = DIMENSIONS[func]
    ahead, dtype, new = x.ndim - count, x.dtype, {}
    wanted = list(spatial(output_size, count))
    for dim in range(ahead, x.ndim):
        rows = whole_length(x, dim, splits)
        length = wanted[dim - ahead] = rows if wanted[dim - ahead] is None else wanted[dim - ahead]
        if dim not in splits:
            continue
        sizes, group = splits[dim]
        new[dim] = in_proportion(sizes, length)
        outputs = bounds(new[dim])
        windows = [(j * rows // length, -(-(j + 1) * rows // length)) for j in range(length)]
        intervals = [(windows[a][0], windows[b - 1][1]) if a < b else (0, 0) for a, b in outputs]
        x = Fetch(x, dim, sizes, intervals, group).rows()
        wanted[dim - ahead] = new[dim][group.rank]
        if rows % length and wanted[dim - ahead]:
            start = intervals[group.rank][0]
            mine = [(a - start, b - start) for a, b in windows[slice(*outputs[group.rank])]]
            x = (averages if average else spread)(x, dim, mine)
    shape = [*x.shape[:ahead], *wanted]
    if is_empty(shape, new):
        return no_outputs(x.to(dtype), shape), new
    return func(x, wanted).to(dtype), new


def whole_strides(window: Window, first: int, last: int, rows: int) -> Interval:
    """Extend an interval to begin at a multiple of the stride and to be as long as the kernel, for avg_pool3d."""
    first = first // window.stride * window.stride
    if last > first:
        last = min(rows, max(last, first + window.kernel))
        first = max(0, min(first, (last - window.kernel) // window.stride * window.stride))
    return first, last


def spread(x: Tensor, dim: int, windows: Sequence[Interval]) -> Tensor:
    """Concatenate the rows of windows [a, b), all with one length: shorter windows repeat their last row."""
    longest = max(b - a for a, b in windows)
    rows = [min(a + t, b - 1) for a, b in windows for t in range(longest)]
    return x.index_select(dim, tensor_on(x.device, rows))


def averages(x: Tensor, dim: int, windows: Sequence[Interval]) -> Tensor:
    """The mean of each window, at least in float32."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    longest = max(b - a for a, b in windows)
    counts = tensor_on(x.device, [b - a for a, b in windows])
    inside = torch.arange(longest, device=x.device) < counts[:, None]  # (windows, longest)
    behind = [1] * (x.ndim - 1 - dim)
    rows = spread(x, dim, windows).unflatten(dim, (len(windows), longest))
    return (rows * inside.view(*inside.shape, *behind)).sum(dim + 1) / counts.view(-1, *behind)


def pool_windows(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis, padding: PerAxis,
    dilation: PerAxis, ceil_mode: bool,
) -> tuple[list[Window], list[int]]:  # fmt: skip
    """The Window of every spatial dimension, and the lengths of the whole output."""
    count = DIMENSIONS[func]
    values = [spatial(v, count) for v in (kernel_size, stride, padding, padding, dilation)]
    windows = [Window(*v) for v in zip(*values, strict=True)]
    ahead, lengths = x.ndim - count, list(x.shape)
    for dim, w in enumerate(windows, ahead):
        rows = whole_length(x, dim, splits)
        if 2 * w.before > w.reach + 1:
            raise ValueError(f"{func.__name__}: padding {w.before} is more than half of the window of {w.kernel}")
        lengths[dim] = w.length(rows)
        if ceil_mode:  # an incomplete last window counts unless it begins in the padding
            more = -(-(rows + 2 * w.before - w.reach - 1) // w.stride) + 1
            lengths[dim] = more - ((more - 1) * w.stride >= rows + w.before)
        if lengths[dim] < 1:
            raise ValueError(f"{func.__name__}: a window of {w.reach + 1} rows on {rows}, padded by {2 * w.before}")
    return windows, lengths
