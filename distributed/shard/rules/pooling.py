"""Pooling of a tensor with split spatial dimensions: see windows.py. With indices the images become whole."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import Sizes, tensor_on
from distributed.halo import Interval
from distributed.shard.operands import fitted, reduced
from distributed.shard.rules import windows
from distributed.shard.rules.along import as_before, made_whole, on_parts
from distributed.shard.rules.windows import DIMENSIONS, Output, Splits, Window, request, spatial, whole_length
from distributed.shard.tensor import ShardTensor, dispatch, local, named, rule, wrap
from networks.vit import PerAxis


def max_pool(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis | None = None,
    padding: PerAxis = 0, dilation: PerAxis = 1, ceil_mode: bool = False,
) -> Output:  # fmt: skip
    """max_pool1d, 2d, 3d without indices: x (B, C, ...) or (C, ...), func as of torch.nn.functional."""
    stride = stride or kernel_size
    along, shape = pool_windows(func, x, splits, kernel_size, stride, padding, dilation, ceil_mode)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    x, new, _ = padded(x, splits, along, shape, lowest)
    if 0 in shape:
        return windows.no_outputs(x, shape), new
    return func(x, kernel_size, stride, left(padding, along, splits), dilation, ceil_mode), new


def avg_pool(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis | None = None,
    padding: PerAxis = 0, ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Output:  # fmt: skip
    """avg_pool1d, 2d, 3d: x (B, C, ...) or (C, ...)."""
    stride = stride or kernel_size
    along, shape = pool_windows(func, x, splits, kernel_size, stride, padding, 1, ceil_mode)
    x, new, own = padded(x, splits, along, shape, 0)
    if 0 in shape:
        return windows.no_outputs(x, shape), new
    divisor = () if DIMENSIONS[func] == 1 else (divisor_override,)
    y = func(x, kernel_size, stride, left(padding, along, splits), ceil_mode, count_include_pad, *divisor)
    for dim, outputs in own.items() if divisor_override is None else ():
        # The plain operation has divided by all rows of a window, even by those outside of the whole dimension.
        w, rows = along[dim], sum(splits[dim][0])
        low, high = (-w.before, rows + w.before) if count_include_pad else (0, rows)
        ends = [w.interval(j, j + 1) for j in range(*outputs)]
        factors = [w.kernel / (min(last, high) - max(first, low)) for first, last in ends]
        if any(factor != 1 for factor in factors):
            y = y * tensor_on(y.device, factors, y.dtype).view(-1, *[1] * (y.ndim - 1 - dim))
    return y, new


def padded(
    x: Tensor, splits: Splits, along: Mapping[int, Window], shape: list[int], fill: float
) -> tuple[Tensor, dict[int, Sizes], dict[int, Interval]]:
    """The rows that this rank's windows read along split dimensions, whose sizes in `shape` become its own.

    Returns also {dimension: sizes of the outputs on all ranks}, and {dimension: this rank's outputs}.
    """
    new, own = {}, {}
    for dim in sorted(splits):
        new[dim] = along[dim].output_sizes(splits[dim][0], shape[dim])
        coming, own[dim], _ = request(x, dim, splits[dim], new[dim], along[dim].interval, fill=fill)
        x, shape[dim] = coming.rows(), own[dim][1] - own[dim][0]
    return x, new, own


def left(padding: PerAxis, along: Mapping[int, Window], splits: Splits) -> list[int]:
    """The padding that the plain operation has still to add, after `padded`."""
    return [0 if dim in splits else n for dim, n in zip(along, spatial(padding, len(along)), strict=True)]


def adaptive_pool(func: Callable, x: Tensor, splits: Splits, output_size: Any, average: bool) -> Output:
    """adaptive_avg_pool (average) and adaptive_max_pool 1d, 2d, 3d, without indices.

    Output j covers the rows [floor(j * rows / outputs), ceil((j + 1) * rows / outputs)). output_size: one for all
    dimensions or one for each; None keeps the number of rows.
    """
    count, dtype, new = DIMENSIONS[func], x.dtype, {}
    shape = [*x.shape[: x.ndim - count], *spatial(output_size, count)]
    for dim in range(x.ndim - count, x.ndim):
        rows = whole_length(x, dim, splits)
        length = shape[dim] = rows if shape[dim] is None else shape[dim]
        if dim not in splits:
            continue
        new[dim] = windows.in_proportion(splits[dim][0], length)
        covered = [(j * rows // length, -(-(j + 1) * rows // length)) for j in range(length)]
        x, mine, (first, last) = windows.read(x, dim, splits[dim], new[dim], covered)
        shape[dim] = last - first
        if average:
            x = windows.weighted_sums(x, dim, mine, [[1 / (b - a)] * (b - a) for a, b in mine])
        else:
            x = windows.spread(x, dim, mine)
    if 0 in shape:
        return windows.no_outputs(x.to(dtype), shape), new
    return func(x, shape[x.ndim - count :]).to(dtype), new


def pool_windows(
    func: Callable, x: Tensor, splits: Splits, kernel_size: PerAxis, stride: PerAxis, padding: PerAxis,
    dilation: PerAxis, ceil_mode: bool,
) -> tuple[dict[int, Window], list[int]]:  # fmt: skip
    """{spatial dimension: its Window}, and the shape of the whole output."""
    count, shape = DIMENSIONS[func], list(x.shape)
    values = [spatial(v, count) for v in (kernel_size, stride, padding, padding, dilation)]
    along = {dim: Window(*v) for dim, v in enumerate(zip(*values, strict=True), x.ndim - count)}
    for dim, w in along.items():
        rows = whole_length(x, dim, splits)
        if 2 * w.before > w.reach + 1:
            raise ValueError(f"{func.__name__}: padding {w.before} is more than half of the window of {w.kernel}")
        shape[dim] = w.length(rows)
        if ceil_mode:  # an incomplete last window counts unless it begins in the padding
            more = -(-(rows + 2 * w.before - w.reach - 1) // w.stride) + 1
            shape[dim] = more - ((more - 1) * w.stride >= rows + w.before)
        if shape[dim] < 1:
            raise ValueError(f"{func.__name__}: a window of {w.reach + 1} rows on {rows}, padded by {2 * w.before}")
    return along, shape


def pooled(implementation: Callable[..., Output], func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Pool with one of the functions above, of values without indices."""
    kwargs.pop("return_indices", None)
    return windows.spatially(implementation, func, input, *args, **kwargs)


rule(*windows.of_kind("max_pool"))(partial(pooled, max_pool))
rule(*windows.of_kind("avg_pool"))(partial(pooled, avg_pool))
rule(*windows.of_kind("adaptive_max_pool"))(partial(pooled, partial(adaptive_pool, average=False)))


@rule(*windows.of_kind("adaptive_avg_pool"))
def adaptive_avg_pooling(func: Callable, input: ShardTensor, output_size: PerAxis) -> ShardTensor:
    """Each rank gets outputs in proportion to its rows; the mean over all rows is a partial tensor."""
    count = DIMENSIONS[func]
    if output_size in (1, (1,) * count, [1] * count):
        # The mean is a sum over the ranks; otherwise one rank would fetch all rows.
        return dispatch(torch.mean, input, tuple(windows.images(input, func)), keepdim=True)
    return pooled(partial(adaptive_pool, average=True), func, input, output_size)


@rule(*(f for kind in ("max", "adaptive_max") for n in (1, 2, 3) for f in named(f"{kind}_pool{n}d_with_indices")))
@rule(torch.adaptive_max_pool1d)  # always returns indices
def with_indices(func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> tuple[ShardTensor, ...]:
    """(maxima, their places in the whole image): each rank has whole images of some channels or samples meanwhile."""
    dims = windows.images(input, func)
    found = on_parts(made_whole(input, dims), dims, lambda part: func(part, *args, **kwargs))
    return tuple([as_before(y, input.spec) for y in found])


@rule(torch._C._nn.max_unpool2d, torch._C._nn.max_unpool3d)
def unpool(func: Callable, input: ShardTensor, indices: Tensor, output_size: Sequence[int], *args: Any) -> ShardTensor:
    """Put values at places in the whole image, on whole images of some channels or samples."""
    dims = windows.images(input, func)
    x = made_whole(input, dims)
    part, places = local(x), fitted(reduced(indices), x.spec)
    out = x.spec.resized(dict(zip(dims, output_size, strict=True)))
    y = func(part, places, output_size, *args) if part.numel() else windows.no_outputs(part, out.local_shape)
    return as_before(wrap(y, out), input.spec)
