"""Pooling of a tensor with split spatial dimensions: see windows.py.

For the indices of maxima the images become whole, of some channels or samples on each rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import tensor_on
from distributed.shard.core.operands import local_operand, sum_partial
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, rule, wrap
from distributed.shard.ops.along import on_whole, restore_sharding, unshard_dims
from distributed.shard.ops.windows import (
    DIMENSIONS,
    Output,
    PerAxis,
    Splits,
    Window,
    fetch_halos,
    in_proportion,
    no_outputs,
    ntuple,
    output_shape,
    pad_whole_dims,
    read_windows,
    spatial_dims_of,
    spatial_rule,
    spatially,
    whole_length,
    windows_of,
)

AVERAGES = set(named("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"))


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
    window_of = pool_windows(func, x, kernel_size, stride, padding, dilation)
    shape = output_shape(func, x, splits, window_of, ceil_mode)  # of the whole output
    # Rows of padding must never be the maximum.
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    x, out_sizes, _ = fetch_halos(x, splits, window_of, shape, lowest)  # which makes `shape` this rank's
    if 0 in shape:
        return no_outputs(x, shape), out_sizes
    x, own_padding = pad_whole_dims(x, splits, window_of)
    y = func(x, kernel_size, stride, own_padding, dilation, ceil_mode)
    return y, out_sizes


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
    window_of = pool_windows(func, x, kernel_size, stride, padding)
    shape = output_shape(func, x, splits, window_of, ceil_mode)  # of the whole output
    x, out_sizes, own_outputs = fetch_halos(x, splits, window_of, shape, 0)  # which makes it this rank's
    if 0 in shape:
        return no_outputs(x, shape), out_sizes
    x, own_padding = pad_whole_dims(x, splits, window_of)
    divisor = () if DIMENSIONS[func] == 1 else (divisor_override,)  # avg_pool1d has no such argument
    y = func(x, kernel_size, stride, own_padding, ceil_mode, count_include_pad, *divisor)
    if divisor_override is not None:
        return y, out_sizes

    # The plain operation has divided by all rows of a window, even by those outside of the whole dimension.
    for dim, outputs in own_outputs.items():
        sizes, _ = splits[dim]
        factors = _corrections(window_of[dim], sum(sizes), outputs, count_include_pad)
        if any(factor != 1 for factor in factors):
            ones_behind = [1] * (y.ndim - 1 - dim)
            factor_of_row = tensor_on(y.device, factors, y.dtype)
            y = y * factor_of_row.view(-1, *ones_behind)
    return y, out_sizes


def _corrections(window, rows, outputs, count_include_pad):
    """For each output [first, last), the size of its window over the number of rows that count in it."""
    padding_rows = window.before if count_include_pad else 0
    low = -padding_rows
    high = rows + padding_rows
    factors = []
    for j in range(*outputs):
        first, last = window.interval(j, j + 1)
        counted = min(last, high) - max(first, low)
        factors.append(window.kernel / counted)
    return factors


def pool_windows(
    func: Callable,
    x: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis,
    padding: PerAxis,
    dilation: PerAxis = 1,
) -> dict[int, Window]:
    """{spatial dimension: its Window} of a pooling. Raises ValueError for more padding than half of a window."""
    first_spatial = x.ndim - DIMENSIONS[func]
    dims = range(first_spatial, x.ndim)
    window_of = windows_of(dims, kernel_size, stride, padding, dilation)
    for window in window_of.values():
        before = window.before
        kernel = window.kernel
        if 2 * before > window.reach + 1:
            raise ValueError(f"{func.__name__}: padding {before} is more than half of the window of {kernel}")
    return window_of


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
    out_sizes = {}
    # The shape of the whole output, whose split dimensions get this rank's sizes below.
    shape = [*x.shape[:first_spatial], *ntuple(output_size, count)]
    for dim in range(first_spatial, x.ndim):
        rows = whole_length(x, dim, splits)
        length = rows if shape[dim] is None else shape[dim]
        shape[dim] = length
        if dim not in splits:
            continue
        sizes, group = splits[dim]
        out_sizes[dim] = in_proportion(sizes, length)
        covered = []  # rows [first, last) of each output
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
        x = read_windows(x, dim, splits[dim], out_sizes[dim], covered, weights)
        shape[dim] = out_sizes[dim][group.rank]
    if 0 in shape:
        return no_outputs(x.to(dtype), shape), out_sizes
    y = func(x, shape[first_spatial:])
    return y.to(dtype), out_sizes


@rule(*AVERAGES)
def adaptive_avg_pooling(func: Callable, input: ShardTensor, output_size: PerAxis) -> ShardTensor:
    """Each rank gets outputs in proportion to its rows; the mean over all rows is a partial tensor."""
    count = DIMENSIONS[func]
    is_mean_of_all = set(ntuple(output_size, count)) == {1}
    if is_mean_of_all:
        # The mean is a sum over the ranks; otherwise one rank would fetch all rows.
        return dispatch(torch.mean, input, tuple(spatial_dims_of(input, func)), keepdim=True)
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

    return on_whole(input, spatial_dims_of(input, func), compute, resizes=True)


@rule(torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d)
def unpool(
    func: Callable,
    input: ShardTensor,
    indices: Tensor,
    output_size: Sequence[int],
    *args: Any,
) -> ShardTensor:
    """Put values at places in the whole image, on whole images of some channels or samples."""
    dims = spatial_dims_of(input, func)
    x = unshard_dims(input, dims)
    part = local(x)
    places = local_operand(sum_partial(indices), x.spec)
    new_sizes = dict(zip(dims, output_size, strict=True))
    out = x.spec.resized(new_sizes)
    y = func(part, places, output_size, *args) if part.numel() else no_outputs(part, out.local_shape)
    return restore_sharding(wrap(y, out), input.spec)
