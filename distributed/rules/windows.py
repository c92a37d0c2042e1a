"""What convolution and pooling have in common: windows that slide over rows which are cut over the ranks of a group.

The operations of convolution.py, pooling.py and resampling.py compute on plain local tensors. All take

    x: this rank's shard; splits: {dimension: (sizes of all ranks, Group)} of the spatial dimensions that are cut

and give (this rank's shard of the output, {dimension: its sizes on all ranks}). Of two dimensions that are cut one is
fetched after the other, so the corners come along. Each rank's gradient of a weight is a part: their sum is the whole.
"""

from itertools import accumulate
from typing import NamedTuple

import torch


class Window(NamedTuple):
    """Along one dimension: output j reads the rows j * stride - before + dilation * t, for t < kernel."""

    kernel: int
    stride: int = 1
    before: int = 0  # rows of padding
    after: int = 0
    dilation: int = 1

    @property
    def reach(self):
        return self.dilation * (self.kernel - 1)

    def length(self, rows):
        return (rows + self.before + self.after - self.reach - 1) // self.stride + 1

    def interval(self, first, last):
        """The rows that the outputs [first, last) read."""
        first, last = first * self.stride - self.before, (last - 1) * self.stride - self.before + self.reach + 1
        return (first, max(first, last))

    def output_sizes(self, sizes, length):
        """Outputs of each rank: an output belongs to the rank that has the middle of its window.

        So stride 1 keeps the sizes, also where padding is an operation of its own before an unpadded convolution.
        """
        middle = self.reach // 2 - self.before
        return cut(sizes, length, lambda end: -((middle - end) // self.stride))


def cut(sizes, length, place):
    """Sizes of `length` outputs on each rank; place(row): the first output that belongs to it or a later one."""
    rows = sum(sizes)
    ends = [length if end == rows else min(max(place(end), 0), length) * (end > 0) for end in accumulate(sizes)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def in_proportion(sizes, length):
    """Sizes of `length` outputs that are spread evenly over the rows."""
    return cut(sizes, length, lambda end: -(-end * length // sum(sizes)))


def of_kind(name):
    """The functions called name1d, name2d, name3d, of torch and of torch.nn.functional: {function: its dimensions}."""
    homes = (torch, torch.nn.functional)
    return {f: n for n in (1, 2, 3) for home in homes if (f := getattr(home, f"{name}{n}d", None)) is not None}


DIMENSIONS = {}
for _name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
    DIMENSIONS |= of_kind(_name)


def spatial(values, count):
    """One value for each of `count` dimensions: 3 -> (3, 3)."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * count if len(values) == 1 else values


def whole_length(x, dim, splits):
    return sum(splits[dim][0]) if dim in splits else x.shape[dim]


def no_outputs(x, shape, *weights):
    """The output, of `shape`, of a rank that has none: backward comes by and gives zeros."""
    return _Nothing.apply(x.new_empty(shape), x, *(w for w in weights if w is not None))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, *inputs):
        ctx.save_for_backward(*inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, gradient):
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def is_empty(shape, dims):
    return any(shape[dim] == 0 for dim in dims)


def cropped(x, ranges):
    """x with {dimension: (first, rows)} of it; of its own, as what an operation gives."""
    part = x
    for dim, (first, rows) in ranges.items():
        part = part.narrow(dim, first, rows)
    return x if part.shape == x.shape else part.clone()
