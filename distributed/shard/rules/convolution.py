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
from distributed.halo import Fetch, Interval, bounds
from distributed.layers import to_compute_dtype
from distributed.shard.rules import windows
from distributed.shard.rules.windows import Output, Padding, Splits, Window, request, spatial, whole_length
from networks.vit import PerAxis


@windows.spatial_rule("conv")
def convolve(
    func: Callable, x: Tensor, splits: Splits, weight: Tensor, bias: Tensor | None = None,
    stride: PerAxis = 1, padding: Padding = 0, dilation: PerAxis = 1, groups: int = 1,
) -> Output:  # fmt: skip
    """conv1d, conv2d, conv3d: x (B, C, ...) or (C, ...), weight (D, C / groups, ...) -> (B, D, ...).

    padding: numbers, 'same' or 'valid'. On an accelerator, the outputs that need only this rank's rows are computed
    while other rows travel, if these are most of the outputs of every rank. Raises ValueError if a window is longer
    than the padded input.
    """
    count = weight.ndim - 2
    x, ahead = to_compute_dtype(x), x.ndim - count
    along = windows.windows_of(range(ahead, x.ndim), weight.shape[2:], stride, padding, dilation)
    shape = windows.output_shape(func, x, splits, along)
    shape[ahead - 1], left = weight.shape[0], [0] * count
    for dim, w in along.items():
        if dim not in splits and w.before == w.after:
            left[dim - ahead] = w.before
        elif dim not in splits:
            x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [w.before, w.after])

    def compute(part: Tensor) -> Tensor:
        return func(part, weight, bias, stride, left, dilation, groups)

    *others, last = sorted(splits)
    x, new, _ = windows.extended(x, {dim: splits[dim] for dim in others}, along, shape, 0)
    w, (sizes, group) = along[last], splits[last]
    new[last] = w.output_sizes(sizes, shape[last])
    coming, outputs, _ = request(x, last, splits[last], new[last], w.interval)
    shape[last] = outputs[1] - outputs[0]
    if 0 in shape:
        return windows.no_outputs(coming.rows(), shape, weight, bias), new
    everywhere = all(map(all, new.values())) and mostly_inside(w, sizes, new[last])  # every rank has outputs
    if not (everywhere and coming.traffic and may_overlap(x)):
        return compute(coming.rows()), new
    return overlapped(compute, coming, w, last, bounds(sizes)[group.rank], outputs), new


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
        inner = inside(window, rows, (first, last))
        if not 3 * (last - first) < 4 * (inner[1] - inner[0]) < 4 * (last - first):
            return False
    return True


def overlapped(
    compute: Callable[[Tensor], Tensor], coming: Fetch, window: Window, dim: int, rows: Interval, outputs: Interval
) -> Tensor:
    """Compute the outputs of a rank that holds `rows`, those that need no others first."""
    inner = inside(window, rows, outputs)
    first, last = window.interval(*inner)
    middle = compute(coming.own.narrow(dim, first - rows[0], last - first))
    parts = [middle]
    if outputs[0] < inner[0]:
        parts.insert(0, compute(coming.rows(*window.interval(outputs[0], inner[0]))))
    if inner[1] < outputs[1]:
        parts.append(compute(coming.rows(*window.interval(inner[1], outputs[1]))))
    return torch.cat(parts, dim)


def inside(window: Window, rows: Interval, outputs: Interval) -> Interval:
    """The outputs among [first, last) that need only the given rows."""
    first = -((-rows[0] - window.before) // window.stride)
    last = (rows[1] - 1 - window.reach + window.before) // window.stride + 1
    first = min(max(first, outputs[0]), outputs[1])
    return first, max(first, min(last, outputs[1]))


@windows.spatial_rule("conv_transpose")
def convolve_transposed(
    func: Callable, x: Tensor, splits: Splits, weight: Tensor, bias: Tensor | None = None,
    stride: PerAxis = 1, padding: PerAxis = 0, output_padding: PerAxis = 0, groups: int = 1, dilation: PerAxis = 1,
) -> Output:  # fmt: skip
    """conv_transpose1d, 2d, 3d: x (B, C, ...) or (C, ...), weight (C, D / groups, ...) -> (B, D, ...)."""
    count = weight.ndim - 2
    x, ahead = to_compute_dtype(x), x.ndim - count
    strides, crops, extras = spatial(stride, count), list(spatial(padding, count)), list(spatial(output_padding, count))
    new, surplus, shape = {}, {}, [*x.shape[: ahead - 1], weight.shape[1] * groups]
    for i, (kernel, d) in enumerate(zip(weight.shape[2:], spatial(dilation, count), strict=True)):
        dim, s, p, reach = ahead + i, strides[i], crops[i], d * (kernel - 1)
        length = (whole_length(x, dim, splits) - 1) * s - 2 * p + reach + extras[i] + 1
        if extras[i] >= max(s, d) or length < 1:
            raise ValueError(f"{func.__name__}: {length} rows, output_padding {extras[i]}, stride {s}")
        if dim in splits:
            # Row j contributes to the outputs j * s - p + d * t; its rank holds those around their middle.
            middle = reach // 2 - (s - 1) // 2 - p
            new[dim] = windows.cut(splits[dim][0], length, lambda end, s=s, middle=middle: end * s + middle)
            rows = partial(spread_over, stride=s, reach=reach, crop=p)
            coming, (first, last), (row, end) = request(x, dim, splits[dim], new[dim], rows)
            x = coming.rows()
            ahead_of, behind = first + p - row * s, (end - 1) * s + reach + 1 - last - p  # surplus outputs
            crops[i], extras[i] = max(0, min(ahead_of, behind)), max(0, -behind)
            surplus[dim], length = ahead_of - crops[i], last - first
        shape.append(length)
    if 0 in shape:
        return windows.no_outputs(x, shape, weight, bias), new
    y = func(x, weight, bias, stride, crops, extras, groups, dilation)
    part = y
    for dim in new:
        part = part.narrow(dim, surplus[dim], shape[dim])
    return y if part.shape == y.shape else part.clone(), new  # in memory of its own, as the output of any operation


def spread_over(first: int, last: int, stride: int, reach: int, crop: int) -> Interval:
    """The input rows [a, b) that a transposed convolution needs for the outputs [first, last)."""
    first, last = first + crop, last + crop
    return max(0, min(-((reach - first) // stride), first // stride)), (last - 1) // stride + 1
