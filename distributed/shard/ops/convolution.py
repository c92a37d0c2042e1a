"""Convolution and transposed convolution of a tensor with split spatial dimensions: see windows.py.

The weights are plain tensors, whole on every rank. Each rank fetches the rows that its outputs need, including padding
at the ends of the whole dimension, and calls the plain operation.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from distributed.collectives import Sizes, to_compute_dtype
from distributed.shard.core.halo import HaloExchange, Interval, bounds
from distributed.shard.ops.windows import (
    Output,
    Padding,
    PerAxis,
    Splits,
    Window,
    cut,
    fetch_halos,
    no_outputs,
    ntuple,
    output_shape,
    pad_whole_dims,
    request,
    spatial_rule,
    whole_length,
    windows_of,
)


@spatial_rule("conv")
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
    count = weight.ndim - 2  # of spatial dimensions
    x = to_compute_dtype(x)
    first_spatial = x.ndim - count
    spatial_dims = range(first_spatial, x.ndim)
    kernel = weight.shape[2:]
    window_of = windows_of(spatial_dims, kernel, stride, padding, dilation)
    shape = output_shape(func, x, splits, window_of)
    shape[first_spatial - 1] = weight.shape[0]  # (B, D, ...) of the whole output

    x, own_padding = pad_whole_dims(x, splits, window_of)

    def compute(part: Tensor) -> Tensor:
        return func(part, weight, bias, stride, own_padding, dilation, groups)

    # Fetch the rows of all split dimensions but the last at once, and only begin to fetch those of the last.
    *others, last = sorted(splits)
    other_splits = {dim: splits[dim] for dim in others}
    x, out_sizes, _ = fetch_halos(x, other_splits, window_of, shape, 0)
    window = window_of[last]
    sizes, group = splits[last]
    out_sizes[last] = window.output_sizes(sizes, shape[last])
    pending, outputs, _ = request(x, last, splits[last], out_sizes[last], window.interval)
    shape[last] = outputs[1] - outputs[0]  # from here on `shape` is that of this rank's output
    if 0 in shape:
        return no_outputs(pending.rows(), shape, weight, bias), out_sizes

    # Compute what needs no other rank's rows while they travel, where that pays.
    every_rank_has_outputs = all(all(sizes_of_dim) for sizes_of_dim in out_sizes.values())
    worthwhile = every_rank_has_outputs and mostly_inside(window, sizes, out_sizes[last])
    if worthwhile and pending.traffic and may_overlap(x):
        own_rows = bounds(sizes)[group.rank]
        y = overlapped(compute, pending, window, last, own_rows, outputs)
        return y, out_sizes
    y = compute(pending.rows())  # (B, D, ...) of this rank
    return y, out_sizes


def may_overlap(x: Tensor) -> bool:
    """Tell whether an exchange can go on beside a convolution of x."""
    # On a CPU the exchange uses the same cores as the computation. A compiler orders the operations itself.
    return x.device.type != "cpu" and not torch.compiler.is_compiling()


def mostly_inside(window: Window, sizes: Sizes, out_sizes: Sizes) -> bool:
    """Tell whether on every rank most of the outputs, but not all, need only its own rows.

    sizes, out_sizes: number of rows and of outputs on every rank. All ranks must decide alike: one that overlaps
    begins, in its backward pass, to exchange rows before it has the gradients of the weights, and any other rank
    afterwards. Where data parallelism reduces these gradients meanwhile, collectives would come in different orders.
    """
    for rows, (first, last) in zip(bounds(sizes), bounds(out_sizes), strict=True):
        inner_first, inner_last = inside(window, rows, (first, last))
        count = last - first
        inner_count = inner_last - inner_first
        are_most = 4 * inner_count > 3 * count  # more than three quarters
        are_all = inner_count == count
        if are_all or not are_most:
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
    """The outputs [a, b) among `outputs` that need only the given rows; a = b if there are none."""
    first_row, end_row = rows
    first_output, end_output = outputs

    # Output j reads the rows from j * stride - before on, to `reach` rows behind that.
    # The first output that reads nothing in front of first_row: first_row + before over stride, rounded up.
    first = -((-first_row - window.before) // window.stride)
    # The last output that reads nothing behind the last row.
    last_start = end_row - 1 - window.reach
    last = (last_start + window.before) // window.stride
    first = max(first, first_output)
    first = min(first, end_output)
    end = min(last + 1, end_output)
    return first, max(first, end)


def middle_output(window: Window, row: int) -> int:
    """The output of a transposed convolution in the middle of those to which a row adds.

    window: of the convolution that it is the transpose of: a row adds to the outputs that its window would read there.
    The owner of the output is the rank that holds the row.
    """
    middle_of_first_row = window.reach // 2 - (window.stride - 1) // 2 - window.before
    return row * window.stride + middle_of_first_row


def rows_adding(window: Window, first: int, last: int) -> Interval:
    """The rows [a, b) that add to the outputs [first, last) of a transposed convolution. window: see middle_output."""
    # Outputs are counted from -before on, as the convolution counts rows of its padding.
    first += window.before
    last += window.before
    first_that_reaches = -((window.reach - first) // window.stride)  # rounded up
    first_row = max(0, min(first_that_reaches, first // window.stride))
    return first_row, (last - 1) // window.stride + 1


@spatial_rule("conv_transpose")
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
    """conv_transpose1d, 2d, 3d: x (B, C, ...) or (C, ...), weight (C, D / groups, ...) -> (B, D, ...).

    Raises ValueError for an output without rows, and for an output_padding that torch refuses.
    """
    count = weight.ndim - 2  # of spatial dimensions
    x = to_compute_dtype(x)
    first_spatial = x.ndim - count
    spatial_dims = range(first_spatial, x.ndim)
    window_of = windows_of(spatial_dims, weight.shape[2:], stride, padding, dilation)
    crops = [window.before for window in window_of.values()]  # of the plain operation on this rank's rows
    extras = list(ntuple(output_padding, count))
    out_sizes = {}
    in_front = {}  # {split dimension: outputs of other ranks, in front of this rank's, that the plain operation makes}
    shape = [*x.shape[: first_spatial - 1], weight.shape[1] * groups]  # (B, D), then the rows of this rank's output
    for i, (dim, window) in enumerate(window_of.items()):
        _, end = window.interval(0, whole_length(x, dim, splits))
        length = end - window.before + extras[i]
        if extras[i] >= max(window.stride, window.dilation) or length < 1:
            raise ValueError(f"{func.__name__}: {length} rows, output_padding {extras[i]}, stride {window.stride}")
        if dim in splits:
            # Fetch the rows that add to this rank's outputs.
            sizes, _ = splits[dim]
            out_sizes[dim] = cut(sizes, length, partial(middle_output, window))
            rows_of = partial(rows_adding, window)
            pending, outputs, rows = request(x, dim, splits[dim], out_sizes[dim], rows_of)
            x = pending.rows()
            crops[i], extras[i], in_front[dim] = _around_own_outputs(window, outputs, rows)
            first, last = outputs
            length = last - first
        shape.append(length)
    if 0 in shape:
        return no_outputs(x, shape, weight, bias), out_sizes
    y = func(x, weight, bias, stride, crops, extras, groups, dilation)
    return _own_outputs(y, in_front, shape), out_sizes


def _around_own_outputs(window, outputs, rows):
    """(crop, extra, outputs in front) with which the plain operation on `rows` makes this rank's outputs.

    The plain operation also makes outputs of other ranks, in front of this rank's and behind them. Its crop is the same
    at both ends, so what it cannot crop in front is left for _own_outputs. If it makes too few, it adds some.
    """
    first_output, end_output = outputs
    first_made, end_of_made = window.interval(*rows)
    surplus_in_front = first_output - first_made
    surplus_behind = end_of_made - end_output
    crop = max(0, min(surplus_in_front, surplus_behind))
    extra = max(0, -surplus_behind)
    return crop, extra, surplus_in_front - crop


def _own_outputs(y: Tensor, in_front: Mapping[int, int], shape: list[int]) -> Tensor:
    """The outputs that belong to this rank, which have this shape.

    in_front: {split dimension: outputs of other ranks in front of them}.
    """
    part = y
    for dim, count in in_front.items():
        part = part.narrow(dim, count, shape[dim])
    if part.shape == y.shape:
        return y
    return part.clone()  # in memory of its own, as the output of any operation
