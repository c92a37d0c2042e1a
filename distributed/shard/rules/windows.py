"""Common parts of convolution, pooling and resampling: outputs that read rows split over the ranks of a group.

Convolutions and poolings are functions of plain local tensors, and spatial_rule makes rules of them. Samples may be
split too, and channels for all of them except convolution, which mixes channels. These functions take

    x: this rank's shard; splits: {dimension: (sizes of all ranks, Group)} of the split spatial dimensions

and return (this rank's shard of the output, {dimension: its sizes on all ranks}). If two dimensions are split, the rows
of one are fetched after those of the other; the second exchange includes the corners. Each rank computes a part of the
gradient of a weight; the sum of the parts is the whole gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, Sizes, at_least_float32, tensor_on
from distributed.halo import HaloExchange, Interval, bounds
from distributed.shard.operands import scale_grad_by_replicas, sum_partial
from distributed.shard.tensor import (
    Rule,
    ShardTensor,
    flat,
    local,
    named,
    no_rule,
    rule,
    wrap,
)
from networks.vit import PerAxis

KINDS = (
    "conv",
    "conv_transpose",
    "max_pool",
    "avg_pool",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "max_unpool",
)
DIMENSIONS: dict[Callable, int] = {}  # {function: number of its spatial dimensions}
for _count in (1, 2, 3):
    for _kind in KINDS:
        _name = f"{_kind}{_count}d"
        DIMENSIONS |= dict.fromkeys(named(_name, f"{_name}_with_indices"), _count)
CONVOLUTIONS = {f for f in DIMENSIONS if f.__name__.startswith("conv")}  # they mix channels
Padding = PerAxis | Literal["same", "valid"]
Splits = Mapping[int, tuple[Sizes, Group]]  # {dimension: (sizes of all ranks, Group)}
Output = tuple[Tensor, dict[int, Sizes]]  # the local output, {dimension: its sizes on all ranks}


class Window(NamedTuple):
    """Along one dimension: output j reads the rows j * stride - before + dilation * t, for t < kernel."""

    kernel: int
    stride: int = 1
    before: int = 0  # rows of padding
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Distance from the first row that an output reads to the last."""
        return self.dilation * (self.kernel - 1)

    def length(self, rows: int) -> int:
        """Number of outputs for a number of rows."""
        padded = rows + self.before + self.after
        starts = padded - self.reach  # rows at which a whole window can begin
        return (starts - 1) // self.stride + 1

    def interval(self, first: int, last: int) -> Interval:
        """The rows that the outputs [first, last) read; there is at least one."""
        last_output = last - 1
        first_row = first * self.stride - self.before
        start_of_last = last_output * self.stride - self.before
        return first_row, start_of_last + self.reach + 1

    def output_sizes(self, sizes: Sizes, length: int) -> Sizes:
        """Number of outputs of each rank: an output belongs to the rank that holds the middle of its window.

        With stride 1 the sizes stay the same, even if padding is a separate operation before the convolution.
        """
        middle = self.reach // 2 - self.before  # of the first window

        def first_output(row: int) -> int:
            # The middle of output j is at row middle + j * stride: the smallest j that reaches the row.
            return -((middle - row) // self.stride)

        return cut(sizes, length, first_output)


def cut(
    sizes: Sizes,
    length: int,
    place: Callable[..., int],
) -> Sizes:
    """Sizes of `length` outputs on each rank. place(row): the first output that belongs to this row or a later one."""
    rows = sum(sizes)
    # Each end of a rank's rows becomes an end of its outputs.
    ends = []
    for end in accumulate(sizes):
        if end == rows:
            ends.append(length)  # every output has an owner
        elif end == 0:
            ends.append(0)  # ranks without rows have no outputs
        else:
            first_behind = max(place(end), 0)
            ends.append(min(first_behind, length))
    starts_and_ends = pairwise([0, *ends])
    return tuple([end - start for start, end in starts_and_ends])


def in_proportion(sizes: Sizes, length: int) -> Sizes:
    """Sizes of `length` outputs in proportion to the rows of each rank."""
    rows = sum(sizes)
    return cut(sizes, length, lambda end: -(-end * length // rows))


def spatial(given: Any, count: int) -> tuple[Any, ...]:
    """One value for each of `count` dimensions: 3 -> (3, 3)."""
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    return values * count if len(values) == 1 else values


def windows_of(
    dims: range,
    kernel: PerAxis,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
) -> dict[int, Window]:
    """{dimension: its Window} for spatial dimensions. Raises ValueError for padding='same' with a stride."""
    count = len(dims)
    kernels = spatial(kernel, count)
    strides = spatial(stride, count)
    dilations = spatial(dilation, count)
    has_stride = any(s != 1 for s in strides)
    if padding == "same" and has_stride:
        raise ValueError("padding='same' is not supported for strided convolutions")
    is_word = padding in ("same", "valid")
    pads = spatial(0 if is_word else padding, count)
    # Padding may differ at the two ends, for 'same' with an even kernel.
    windows = {}
    for dim, k, s, d, pad in zip(dims, kernels, strides, dilations, pads, strict=True):
        window = Window(k, s, before=pad, after=pad, dilation=d)
        if padding == "same":
            # torch pads an odd reach by one row more behind.
            half = window.reach // 2
            window = window._replace(before=half, after=window.reach - half)
        windows[dim] = window
    return windows


def whole_length(x: Tensor, dim: int, splits: Splits) -> int:
    """Global number of rows along a dimension of the local tensor x, whether it is split or not."""
    if dim not in splits:
        return x.shape[dim]
    sizes, _ = splits[dim]
    return sum(sizes)


def output_shape(
    func: Callable,
    x: Tensor,
    splits: Splits,
    along: Mapping[int, Window],
    ceil_mode: bool = False,
) -> list[int]:
    """The shape of the whole output, with the channels of x. Raises ValueError where a window is longer than the rows.

    ceil_mode: an incomplete last window counts unless it begins in the padding.
    """
    shape = list(x.shape)
    for dim, window in along.items():
        rows = whole_length(x, dim, splits)
        shape[dim] = window.length(rows)
        if ceil_mode:
            # Padding of less than a stride behind lets one more window begin.
            longer = window._replace(after=window.after + window.stride - 1)
            count = longer.length(rows)
            start_of_last = (count - 1) * window.stride  # counted from the padding in front
            last_begins_in_padding = start_of_last >= rows + window.before
            shape[dim] = count - 1 if last_begins_in_padding else count
        if shape[dim] < 1:
            padded = window.before + window.after
            raise ValueError(f"{func.__name__}: a window of {window.reach + 1} rows on {rows}, padded by {padded}")
    return shape


def no_outputs(
    x: Tensor,
    shape: Sequence[int],
    *weights: Tensor | None,
) -> Tensor:
    """The output of a rank that computes nothing, empty or zeros; its backward pass runs too, with gradients of 0."""
    out = x.new_zeros(shape)
    for tensor in (x, *weights):
        if tensor is not None and tensor.requires_grad:
            out = out + tensor.narrow(0, 0, 0).sum()
    return out


def request(
    x: Tensor,
    dim: int,
    split: tuple[Sizes, Group],
    new: Sizes,
    interval: Callable[[int, int], Interval],
    **options: Any,
) -> tuple[HaloExchange, Interval, Interval]:
    """Begin to fetch the rows that every rank's outputs read along a split dimension.

    split: (sizes, Group) of the rows. new: sizes of the outputs. interval: from outputs [first, last), at least one, to
    the rows that they read. options: as for HaloExchange. Returns the exchange, and this rank's outputs and rows.
    """
    sizes, group = split
    outputs = bounds(new)  # of every rank
    # All ranks compute all intervals, so that each knows what to send.
    intervals = []
    for first, last in outputs:
        if first < last:
            intervals.append(interval(first, last))
        else:
            intervals.append((0, 0))  # a rank without outputs reads nothing
    pending = HaloExchange(x, dim, sizes, intervals, group, **options)
    return pending, outputs[group.rank], intervals[group.rank]


def extended(
    x: Tensor,
    splits: Splits,
    along: Mapping[int, Window],
    shape: list[int],
    fill: float | None,
) -> tuple[Tensor, dict[int, Sizes], dict[int, Interval]]:
    """The rows that this rank's windows read along the dimensions of splits, padding at the ends included.

    shape: that of the whole output; its sizes of these dimensions become this rank's.
    Returns also {dimension: sizes of the outputs on all ranks}, and {dimension: this rank's outputs}.
    """
    new = {}
    owned = {}
    for dim in sorted(splits):
        window = along[dim]
        sizes, _ = splits[dim]
        new[dim] = window.output_sizes(sizes, shape[dim])
        pending, owned[dim], _ = request(x, dim, splits[dim], new[dim], window.interval, fill=fill)
        x = pending.rows()
        first, last = owned[dim]
        shape[dim] = last - first
    return x, new, owned


def read(
    x: Tensor,
    dim: int,
    split: tuple[Sizes, Group],
    new: Sizes,
    windows: Sequence[Interval],
    weights: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """The rows that this rank's outputs read, where windows[j] are those of output j of the whole, [first, last).

    The rows of all its windows follow each other; shorter windows repeat their last row. weights: b - a for each window
    [a, b); then one row for each window, their weighted sum, at least in float32.
    """

    def rows_of(first: int, last: int) -> Interval:
        starts, ends = zip(*windows[first:last], strict=True)
        return min(starts), max(ends)

    # While the rows travel, the host finds their places among those that this rank receives.
    pending, (first, last), (start, _) = request(x, dim, split, new, rows_of)
    own = windows[first:last]
    lengths = [b - a for a, b in own]
    longest = max([1, *lengths])
    places = []
    for a, b in own:
        for t in range(longest):
            row = min(a + t, b - 1)
            places.append(row - start)
    rows = pending.rows()
    if weights is not None:
        rows = at_least_float32(rows)
    index = tensor_on(x.device, places, torch.long)
    rows = rows.index_select(dim, index)  # (..., windows * longest, ...)
    if weights is None:
        return rows

    # The weighted sum of each window; a shorter window has weights of 0 at its end.
    rows = rows.unflatten(dim, (len(own), longest))  # (..., windows, longest, ...)
    factors: list[float] = []
    for of_window in weights[first:last]:
        zeros = [0.0] * (longest - len(of_window))
        factors += [*of_window, *zeros]
    ones_behind = [1] * (x.ndim - 1 - dim)
    factor = tensor_on(x.device, factors, rows.dtype)
    factor = factor.view(-1, longest, *ones_behind)  # (windows, longest, 1, ...)
    return (rows * factor).sum(dim + 1)


def splits_of(x: ShardTensor, dims: Iterable[int]) -> Splits:
    """{dimension: (sizes, Group)} of the split ones among dims. Raises CannotSplit where one is not in one piece."""
    splits = {dim: x.spec.split(dim) for dim in dims}
    return {dim: split for dim, split in splits.items() if split is not None}


def images(x: ShardTensor, func: Callable) -> range:
    """The spatial dimensions of x, (B, C, ...) or (C, ...)."""
    count = DIMENSIONS[func]
    ndim = len(x.spec.dims)
    if ndim not in (count + 1, count + 2):
        raise ValueError(f"{func.__name__}: a tensor of {count + 1} or {count + 2} dimensions, not {ndim}")
    return range(ndim - count, ndim)


def resulting(
    x: ShardTensor,
    y: Tensor,
    sizes: Mapping[int, Sizes],
) -> ShardTensor:
    """The local output y as a ShardTensor that is split as x. sizes: {dimension: those of all ranks}, where new."""
    # A function may change the sizes of dimensions that it does not split.
    new: dict[int, int | Sizes] = {}
    for dim, n in enumerate(y.shape):
        if dim in sizes:
            new[dim] = sizes[dim]
        elif not x.spec.is_split(dim):
            new[dim] = n
    return wrap(y, x.spec.resized(new))


def spatially(
    implementation: Callable[..., Output],
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> ShardTensor:
    """implementation(func, part, splits, ...) as a ShardTensor; func(part, ...) if no spatial dimension is split.

    Raises no_rule for weights that are ShardTensors, and for split channels where func mixes them.
    """
    has_split_weights = any(isinstance(a, ShardTensor) for a in flat(args, kwargs))
    if has_split_weights or not isinstance(input, ShardTensor):
        raise no_rule(func, (input, *args), kwargs, "the weights of a layer are plain tensors")
    x = sum_partial(input)
    dims = images(x, func)
    part = local(x)
    channels = dims[0] - 1
    mixes_channels = func in CONVOLUTIONS
    if mixes_channels and x.spec.is_split(channels):
        raise no_rule(func, (x,), {}, "channels are split")
    args = tuple([scale_grad_by_replicas(a, x.spec) for a in args])
    kwargs = {name: scale_grad_by_replicas(a, x.spec) for name, a in kwargs.items()}
    splits = splits_of(x, dims)
    if splits:
        y, sizes = implementation(func, part, splits, *args, **kwargs)
    else:  # every rank has whole images
        y = func(part, *args, **kwargs)
        sizes = {}
    return resulting(x, y, sizes)


def spatial_rule(kind: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule of kind1d, kind2d and kind3d, by a function of local tensors as described above."""

    def register(implementation: Rule) -> Rule:
        functions = named(f"{kind}1d", f"{kind}2d", f"{kind}3d")
        rule(*functions)(partial(spatially, implementation))
        return implementation

    return register
