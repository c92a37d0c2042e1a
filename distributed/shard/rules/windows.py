"""Windows along split dimensions: which rows each output of a convolution or a pooling reads, and who owns the output.

Arithmetic alone: nothing here communicates. spatial.py fetches the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor

from distributed.collectives import Group, Sizes
from distributed.halo import Interval
from networks.vit import PerAxis

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
