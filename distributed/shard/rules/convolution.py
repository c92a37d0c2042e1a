"""Convolution and transposed convolution of a tensor with split spatial dimensions: see windows.py.

The weights are plain tensors, whole on every rank. Each rank fetches the rows that its outputs need, including padding
at the ends of the whole dimension, and calls the plain operation.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Sizes
from distributed.halo import HaloExchange, Interval, bounds
from distributed.layers import to_compute_dtype
from distributed.shard.rules import windows
from distributed.shard.rules.windows import (
    Output,
    Padding,
    Splits,
    Window,
    request,
    spatial,
    whole_length,
)
from networks.vit import PerAxis


@windows.spatial_rule("conv")
def convolve(
    func: Callable,
    x: Tensor,
    splits: Splits,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
) -> Output:
    """conv1d, conv2d, conv3d: x (B, C, ...) or (C, ...), weight (D, C / groups, ...) -> (B, D, ...).

    padding: numbers, 'same' or 'valid'. On an accelerator, the outputs that need only this rank's rows are computed
    while other rows travel, if these are most of the outputs of every rank. Raises ValueError if a window is longer
    than the padded input.
    """
    count = weight.ndim - 2
    x = to_compute_dtype(x)
    first_spatial = x.ndim - count
    spatial_dims = range(first_spatial, x.ndim)
    kernel = weight.shape[2:]
    along = windows.windows_of(spatial_dims, kernel, stride, padding, dilation)
    shape = windows.output_shape(func, x, splits, along)
    shape[first_spatial - 1] = weight.shape[0]  # (B, D, ...) of the whole output

    x, own_padding = _padded(x, splits, along)

    def compute(part: Tensor) -> Tensor:
        return func(part, weight, bias, stride, own_padding, dilation, groups)

    # Fetch the rows of all split dimensions but the last at once, and only begin to fetch those of the last.
    *others, last = sorted(splits)
    other_splits = {dim: splits[dim] for dim in others}
    x, new, _ = windows.extended(x, other_splits, along, shape, 0)
    window = along[last]
    sizes, group = splits[last]
    new[last] = window.output_sizes(sizes, shape[last])
    pending, outputs, _ = request(x, last, splits[last], new[last], window.interval)
    shape[last] = outputs[1] - outputs[0]  # of this rank's output
    if 0 in shape:
        return windows.no_outputs(pending.rows(), shape, weight, bias), new

    # Compute what needs no other rank's rows while they travel, where that pays.
    every_rank_has_outputs = all(all(sizes_of_dim) for sizes_of_dim in new.values())
    worthwhile = every_rank_has_outputs and mostly_inside(window, sizes, new[last])
    if worthwhile and pending.traffic and may_overlap(x):
        own_rows = bounds(sizes)[group.rank]
        y = overlapped(compute, pending, window, last, own_rows, outputs)
        return y, new
    y = compute(pending.rows())  # (B, D, ...) of this rank
    return y, new


def _padded(x, splits, along):
    """(x, padding that the plain operation has still to add) along the dimensions that are not split.

    The plain operation pads both ends by the same number. Where they differ, x is padded here.
    """
    own_padding = []
    for dim, window in along.items():
        is_even = window.before == window.after
        if dim in splits or not is_even:
            own_padding.append(0)
        else:
            own_padding.append(window.before)
        if dim not in splits and not is_even:
            # F.pad takes a pair (before, after) for each dimension, the last dimension first.
            later_dims = [0, 0] * (x.ndim - 1 - dim)
            x = F.pad(x, [*later_dims, window.before, window.after])
    return x, own_padding


def may_overlap(x: Tensor) -> bool:
    """Tell whether an exchange can go on beside a convolution of x."""
    # On a CPU the exchange uses the same cores as the computation. A compiler orders the operations itself.
    return x.device.type != "cpu" and not torch.compiler.is_compiling()


def mostly_inside(window: Window, sizes: Sizes, outputs: Sizes) -> bool:
    """Tell whether on every rank most of the outputs, but not all, need only its own rows.

    sizes, outputs: number of rows and of outputs on every rank. All ranks must decide alike: one that overlaps begins,
    in its backward pass, to exchange rows before it has the gradients of the weights, and any other rank afterwards.
    Where data parallelism reduces these gradients meanwhile, the collectives would come in different orders.
    """
    for rows, (first, last) in zip(bounds(sizes), bounds(outputs), strict=True):
        inner_first, inner_last = inside(window, rows, (first, last))
        count = last - first
        inner_count = inner_last - inner_first
        # Most: more than three quarters.
        if not 3 * count < 4 * inner_count < 4 * count:
            return False
    return True


def overlapped(
    compute: Callable[[Tensor], Tensor],
    pending: HaloExchange,
    window: Window,
    dim: int,
    rows: Interval,
    outputs: Interval,
) -> Tensor:
    """Compute the outputs of a rank that holds `rows`, those that need no others first."""
    first_output, last_output = outputs
    first_inner, last_inner = inside(window, rows, outputs)
    own_first, _ = rows

    # The first call of pending.rows waits for the other ranks, so the middle is computed before.
    first, last = window.interval(first_inner, last_inner)
    own_rows = pending.own.narrow(dim, first - own_first, last - first)
    middle = compute(own_rows)
    parts = [middle]
    if first_output < first_inner:
        first, last = window.interval(first_output, first_inner)
        front = compute(pending.rows(first, last))
        parts.insert(0, front)
    if last_inner < last_output:
        first, last = window.interval(last_inner, last_output)
        back = compute(pending.rows(first, last))
        parts.append(back)
    return torch.cat(parts, dim)


def inside(window: Window, rows: Interval, outputs: Interval) -> Interval:
    """The outputs among [first, last) that need only the given rows."""
    first_row, end_row = rows
    first_output, end_output = outputs

    # Output j reads from row j * stride - before on, as far as `reach` rows behind that.
    first = -((-first_row - window.before) // window.stride)
    last_start = end_row - 1 - window.reach
    last = (last_start + window.before) // window.stride + 1
    first = max(first, first_output)
    first = min(first, end_output)
    last = min(last, end_output)
    return first, max(first, last)


@windows.spatial_rule("conv_transpose")
def convolve_transposed(
    func: Callable,
    x: Tensor,
    splits: Splits,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: PerAxis = 1,
    padding: PerAxis = 0,
    output_padding: PerAxis = 0,
    groups: int = 1,
    dilation: PerAxis = 1,
) -> Output:
    """conv_transpose1d, 2d, 3d: x (B, C, ...) or (C, ...), weight (C, D / groups, ...) -> (B, D, ...)."""
    count = weight.ndim - 2
    x = to_compute_dtype(x)
    first_spatial = x.ndim - count
    strides = spatial(stride, count)
    dilations = spatial(dilation, count)
    crops = list(spatial(padding, count))  # outputs that are left out at both ends
    extras = list(spatial(output_padding, count))  # and outputs that are added at the end
    new = {}
    surplus = {}  # {split dimension: outputs to drop in front of this rank's own}
    shape = [*x.shape[: first_spatial - 1], weight.shape[1] * groups]  # (B, D), then this rank's rows
    for i, (kernel, d) in enumerate(zip(weight.shape[2:], dilations, strict=True)):
        dim = first_spatial + i
        s = strides[i]
        p = crops[i]
        extra = extras[i]
        reach = d * (kernel - 1)
        start_of_last = (whole_length(x, dim, splits) - 1) * s  # of the outputs of the last row
        length = start_of_last - 2 * p + reach + extra + 1
        if extra >= max(s, d) or length < 1:
            raise ValueError(f"{func.__name__}: {length} rows, output_padding {extra}, stride {s}")
        if dim in splits:
            # Row j contributes to the outputs j * s - p + dilation * t; its rank holds those around their middle.
            middle = reach // 2 - (s - 1) // 2 - p
            sizes, _ = splits[dim]
            place = partial(middle_output, stride=s, middle=middle)
            new[dim] = windows.cut(sizes, length, place)
            rows = partial(spread_over, stride=s, reach=reach, crop=p)
            pending, (first, last), (row, end) = request(x, dim, splits[dim], new[dim], rows)
            x = pending.rows()
            # The plain operation on these rows also makes outputs of other ranks: in front, and behind.
            in_front = first + p - row * s
            end_of_outputs = (end - 1) * s + reach + 1
            behind = end_of_outputs - last - p
            crops[i] = max(0, min(in_front, behind))
            extras[i] = max(0, -behind)
            surplus[dim] = in_front - crops[i]
            length = last - first
        shape.append(length)
    if 0 in shape:
        return windows.no_outputs(x, shape, weight, bias), new
    y = func(x, weight, bias, stride, crops, extras, groups, dilation)
    return _own_outputs(y, surplus, shape), new


def _own_outputs(y, surplus, shape):
    """The outputs that belong to this rank. surplus: {split dimension: outputs of other ranks in front of them}."""
    part = y
    for dim, in_front in surplus.items():
        part = part.narrow(dim, in_front, shape[dim])
    if part.shape == y.shape:
        return y
    return part.clone()  # in memory of its own, as the output of any operation


def middle_output(row: int, stride: int, middle: int) -> int:
    """The output in the middle of those to which a row contributes."""
    return row * stride + middle


def spread_over(
    first: int,
    last: int,
    stride: int,
    reach: int,
    crop: int,
) -> Interval:
    """The input rows [a, b) that a transposed convolution needs for the outputs [first, last)."""
    # Outputs are counted before the crop from here on.
    first += crop
    last += crop
    first_that_reaches = -((reach - first) // stride)
    first_row = max(0, min(first_that_reaches, first // stride))
    return first_row, (last - 1) // stride + 1
