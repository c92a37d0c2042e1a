"""Windows along split dimensions: which rows each output of a convolution or a pooling reads, and who owns the output.

First the arithmetic, which communicates nothing, then the exchange that fetches the rows. Convolutions and poolings
are functions of plain local tensors, and spatial_rule makes rules of them. Samples may be split too, and channels for
all of them except convolution, which mixes channels. These functions take

    x: this rank's shard; splits: {dimension: (rows on each rank, Group)} of the split spatial dimensions

and return (this rank's shard of the output, {dimension: outputs on each rank}). If two dimensions are split, the rows
of one are fetched after those of the other; the second exchange includes the corners. Each rank computes a part of the
gradient of a weight; the sum of the parts is the whole gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Group, Sizes, at_least_float32, tensor_on
from distributed.shard.core.halo import HaloExchange, Interval, bounds
from distributed.shard.core.operands import sum_partial, whole_weight
from distributed.shard.core.tensor import (
    Rule,
    ShardTensor,
    local,
    named,
    no_rule,
    rule,
    wrap,
)

PerAxis = int | Sequence[int]  # one value for all spatial dimensions, or one for each
Padding = PerAxis | Literal["same", "valid"]
Splits = Mapping[int, tuple[Sizes, Group]]  # {dimension: (rows on each rank, Group)} of the split dimensions


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
        """Number of outputs for a number of rows; below 1 if no window fits."""
        padded = rows + self.before + self.after
        starts = padded - self.reach  # rows at which a whole window can begin
        return (starts - 1) // self.stride + 1  # every stride-th of them does

    def interval(self, first: int, last: int) -> Interval:
        """The rows [a, b) that the outputs [first, last), at least one, read. Rows of padding count from -before on."""
        last_output = last - 1
        first_row = first * self.stride - self.before
        start_of_last = last_output * self.stride - self.before
        return first_row, start_of_last + self.reach + 1

    def output_sizes(self, sizes: Sizes, length: int) -> Sizes:
        """Number of outputs of each rank: an output belongs to the rank that holds the middle of its window.

        sizes: rows of each rank. length: number of all outputs. With stride 1 the sizes stay the same, even if padding
        is a separate operation before the convolution.
        """
        first_middle = self.reach // 2 - self.before  # row in the middle of the first window

        def first_output(row: int) -> int:
            # The middle of output j is row first_middle + j * stride. The smallest j at or behind `row`, rounded up:
            return -((first_middle - row) // self.stride)

        return cut(sizes, length, first_output)


def cut(
    sizes: Sizes,
    length: int,
    place: Callable[..., int],
) -> Sizes:
    """The number of outputs that each rank owns, of `length` outputs in all.

    sizes: rows of each rank. place(row): the first output that belongs to this row or to a later one.
    """
    rows = sum(sizes)
    # A rank owns the outputs that belong to its rows, so each end of its rows gives an end of its outputs.
    ends_of_outputs = []
    for end in accumulate(sizes):
        if end == rows:
            ends_of_outputs.append(length)  # every output has an owner
        elif end == 0:
            ends_of_outputs.append(0)  # ranks without rows have no outputs
        else:
            first_of_next_rank = max(place(end), 0)
            ends_of_outputs.append(min(first_of_next_rank, length))
    starts_and_ends = pairwise([0, *ends_of_outputs])
    return tuple([end - start for start, end in starts_and_ends])


def in_proportion(sizes: Sizes, length: int) -> Sizes:
    """The number of outputs that each rank owns, of `length` in all, in proportion to its rows: `sizes`."""
    rows = sum(sizes)

    def first_output(row: int) -> int:
        return -(-row * length // rows)  # row * length / rows, rounded up

    return cut(sizes, length, first_output)


def ntuple(given: Any, count: int) -> tuple[Any, ...]:
    """One value for each of `count` dimensions, as torch's _ntuple: 3 -> (3, 3), and (3, 5) -> (3, 5)."""
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
    kernels = ntuple(kernel, count)
    strides = ntuple(stride, count)
    dilations = ntuple(dilation, count)
    has_stride = any(s != 1 for s in strides)
    if padding == "same" and has_stride:
        raise ValueError("padding='same' is not supported for strided convolutions")
    is_word = padding in ("same", "valid")
    pads = ntuple(0 if is_word else padding, count)
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
    window_of: Mapping[int, Window],
    ceil_mode: bool = False,
) -> list[int]:
    """The shape of the whole output, with the channels of x.

    x: this rank's shard. window_of: {spatial dimension: its Window}. ceil_mode: an incomplete last window counts unless
    it begins in the padding. Raises ValueError where a window is longer than the padded rows.
    """
    shape = list(x.shape)
    for dim, window in window_of.items():
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
Output = tuple[Tensor, dict[int, Sizes]]  # (the local output, {split dimension: outputs on each rank})


def no_outputs(
    x: Tensor,
    shape: Sequence[int],
    *weights: Tensor | None,
) -> Tensor:
    """The output of a rank that computes nothing: zeros of a shape, which is mostly an empty one.

    Its backward pass gives x and the weights gradients of 0, because the exchange that fetched x runs backward on every
    rank.
    """
    out = x.new_zeros(shape)
    for tensor in (x, *weights):
        if tensor is not None and tensor.requires_grad:
            zero = tensor.narrow(0, 0, 0).sum()  # a sum over no elements, with `tensor` in its graph
            out = out + zero
    return out


def request(
    x: Tensor,
    dim: int,
    split: tuple[Sizes, Group],
    out_sizes: Sizes,
    interval: Callable[[int, int], Interval],
    **options: Any,
) -> tuple[HaloExchange, Interval, Interval]:
    """Begin to fetch the rows that every rank's outputs read along a split dimension. All ranks call this together.

    x: this rank's shard. split: (rows on each rank, Group). out_sizes: outputs on each rank. interval(first, last): the
    rows that the outputs [first, last), at least one, read. options: `periodic` and `fill` of HaloExchange.
    Returns (the exchange, this rank's outputs [first, last), the rows [first, last) that they read).
    """
    sizes, group = split
    outputs = bounds(out_sizes)  # of every rank
    # All ranks compute all intervals, so that each knows what to send.
    intervals = []
    for first, last in outputs:
        if first < last:
            intervals.append(interval(first, last))
        else:
            intervals.append((0, 0))  # a rank without outputs reads nothing
    pending = HaloExchange(x, dim, sizes, intervals, group, **options)
    return pending, outputs[group.rank], intervals[group.rank]


def fetch_halos(
    x: Tensor,
    splits: Splits,
    window_of: Mapping[int, Window],
    shape: list[int],
    fill: float | None,
) -> tuple[Tensor, dict[int, Sizes], dict[int, Interval]]:
    """Extend this rank's shard by the rows that its windows read along the dimensions of `splits`.

    x: this rank's shard. window_of: {dimension: its Window}. fill: value of padding at the ends; None leaves it out.
    shape: that of the whole output. It is changed in place: split dimensions get this rank's number of outputs.
    Returns (the extended shard, {split dimension: outputs on each rank}, {split dimension: this rank's outputs}).
    """
    out_sizes = {}
    owned = {}  # {dimension: outputs [first, last) of this rank}
    for dim in sorted(splits):
        window = window_of[dim]
        sizes, _ = splits[dim]
        out_sizes[dim] = window.output_sizes(sizes, shape[dim])
        pending, owned[dim], _ = request(x, dim, splits[dim], out_sizes[dim], window.interval, fill=fill)
        x = pending.rows()
        first, last = owned[dim]
        shape[dim] = last - first
    return x, out_sizes, owned


def pad_whole_dims(
    x: Tensor,
    splits: Splits,
    window_of: Mapping[int, Window],
) -> tuple[Tensor, list[int]]:
    """(x, padding that the plain operation has still to add at both ends of each spatial dimension).

    Split dimensions get their padding with their halos. The plain operation pads both ends of a whole dimension by the
    same number. Where they differ, x is padded here.
    """
    own_padding = []
    for dim, window in window_of.items():
        is_whole = dim not in splits
        is_even = window.before == window.after
        missing = window.before if is_whole and is_even else 0
        own_padding.append(missing)
        if is_whole and not is_even:
            # F.pad takes a pair (before, after) for each dimension, the last dimension first.
            later_dims = [0, 0] * (x.ndim - 1 - dim)
            x = F.pad(x, [*later_dims, window.before, window.after])
    return x, own_padding


def read_windows(
    x: Tensor,
    dim: int,
    split: tuple[Sizes, Group],
    out_sizes: Sizes,
    windows: Sequence[Interval],
    weights: Sequence[Sequence[float]] | None = None,
) -> Tensor:
    """The rows that this rank's outputs read, one window behind the other; of windows of any place and length.

    x: this rank's shard. split: (rows on each rank, Group). out_sizes: outputs on each rank. windows: for each output
    of the whole, the rows [a, b) that it reads. weights: for each output b - a numbers, by which its rows are summed.

    Returns (..., outputs * longest, ...) along dim, where `longest` is the number of rows of the longest window of this
    rank, and shorter windows repeat their last row. With weights (..., outputs, ...), in float32 at least.
    """

    def rows_of(first: int, last: int) -> Interval:
        starts, ends = zip(*windows[first:last], strict=True)
        return min(starts), max(ends)

    # While the rows travel, the host finds the place of each in what this rank receives.
    pending, (first, last), (first_row, _) = request(x, dim, split, out_sizes, rows_of)
    own_windows = windows[first:last]
    lengths = [b - a for a, b in own_windows]
    longest = max([1, *lengths])
    places = []
    for a, b in own_windows:
        for t in range(longest):
            row = min(a + t, b - 1)
            places.append(row - first_row)
    rows = pending.rows()  # (..., rows from first_row on, ...)
    if weights is not None:
        rows = at_least_float32(rows)
    index = tensor_on(x.device, places, torch.long)
    rows = rows.index_select(dim, index)  # (..., outputs * longest, ...)
    if weights is None:
        return rows

    # The weighted sum of each window; a shorter window has weights of 0 at its end.
    rows = torch.unflatten(rows, dim, (len(own_windows), longest))  # (..., outputs, longest, ...)
    factors: list[float] = []
    for of_window in weights[first:last]:
        zeros = [0.0] * (longest - len(of_window))
        factors += [*of_window, *zeros]
    ones_behind = [1] * (x.ndim - 1 - dim)
    factor = tensor_on(x.device, factors, rows.dtype)
    factor = factor.view(-1, longest, *ones_behind)  # (outputs, longest, 1, ...)
    return (rows * factor).sum(dim + 1)  # (..., outputs, ...)


def splits_of(x: ShardTensor, dims: Iterable[int]) -> Splits:
    """{dimension: (rows on each rank, Group)} of the split ones among dims.

    Raises CannotSplit for a dimension of which a rank's part is not in one piece.
    """
    splits = {dim: x.spec.split(dim) for dim in dims}
    return {dim: split for dim, split in splits.items() if split is not None}


def spatial_dims_of(x: ShardTensor, func: Callable) -> range:
    """The spatial dimensions of x, (B, C, ...) or (C, ...), by the name of func. Raises ValueError for other x."""
    count = DIMENSIONS[func]
    ndim = len(x.spec.dims)
    if ndim not in (count + 1, count + 2):
        raise ValueError(f"{func.__name__}: a tensor of {count + 1} or {count + 2} dimensions, not {ndim}")
    return range(ndim - count, ndim)


def wrap_output(
    x: ShardTensor,
    y: Tensor,
    sizes: Mapping[int, Sizes],
) -> ShardTensor:
    """The local output y as a ShardTensor that is split as x.

    sizes: {split dimension: rows of y on each rank}, for those whose sizes have changed.
    """
    # Whole dimensions may have changed their size too, which y itself tells.
    new_sizes: dict[int, int | Sizes] = {}
    for dim, n in enumerate(y.shape):
        if dim in sizes:
            new_sizes[dim] = sizes[dim]
        elif not x.spec.is_split(dim):
            new_sizes[dim] = n
    return wrap(y, x.spec.resized(new_sizes))


def spatially(
    implementation: Callable[..., Output],
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> ShardTensor:
    """Call a function of local tensors on this rank's part of the input, and wrap its output.

    implementation(func, part, splits, ...) computes where a spatial dimension is split, func(part, ...) where none is.
    Raises no_rule for split channels where func mixes them.
    """
    x = sum_partial(input)
    dims = spatial_dims_of(x, func)
    part = local(x)
    channels = dims[0] - 1
    mixes_channels = func in CONVOLUTIONS
    if mixes_channels and x.spec.is_split(channels):
        raise no_rule(func, (x,), {}, "channels are split")
    args = tuple([whole_weight(a, x.spec) for a in args])
    kwargs = {name: whole_weight(a, x.spec) for name, a in kwargs.items()}
    splits = splits_of(x, dims)
    if splits:
        y, sizes = implementation(func, part, splits, *args, **kwargs)
    else:  # every rank has whole images
        y = func(part, *args, **kwargs)
        sizes = {}
    return wrap_output(x, y, sizes)


def spatial_rule(kind: str) -> Callable[[Rule], Rule]:
    """Decorator: make a function of local tensors, as this module describes it, the rule of kind1d, kind2d, kind3d."""

    def register(implementation: Rule) -> Rule:
        functions = named(f"{kind}1d", f"{kind}2d", f"{kind}3d")
        rule(*functions)(partial(spatially, implementation))
        return implementation

    return register
