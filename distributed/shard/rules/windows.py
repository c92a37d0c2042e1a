"""Common parts of convolution and pooling: windows that slide over rows split over the ranks of a group.

The operations of convolution.py, pooling.py and resampling.py compute on plain local tensors. All of them take

    x: this rank's shard; splits: {dimension: (sizes of all ranks, Group)} of the split spatial dimensions

and return (this rank's shard of the output, {dimension: its sizes on all ranks}). If two dimensions are split, the rows
of one are fetched after those of the other; the second exchange includes the corners. Each rank computes a part of the
gradient of a weight; the sum of the parts is the whole gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, Sizes
from distributed.halo import Interval
from networks.vit import PerAxis

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
        return (rows + self.before + self.after - self.reach - 1) // self.stride + 1

    def interval(self, first: int, last: int) -> Interval:
        """The rows that the outputs [first, last) read; (0, 0) for no outputs."""
        if first >= last:
            return 0, 0
        return first * self.stride - self.before, (last - 1) * self.stride - self.before + self.reach + 1

    def output_sizes(self, sizes: Sizes, length: int) -> Sizes:
        """Number of outputs of each rank: an output belongs to the rank that holds the middle of its window.

        With stride 1 the sizes stay the same, even if padding is a separate operation before the convolution.
        """
        middle = self.reach // 2 - self.before
        return cut(sizes, length, lambda end: -((middle - end) // self.stride))


def cut(sizes: Sizes, length: int, place: Callable[..., int]) -> Sizes:
    """Sizes of `length` outputs on each rank. place(row): the first output that belongs to this row or a later one."""
    rows = sum(sizes)
    ends = [length if end == rows else min(max(place(end), 0), length) * (end > 0) for end in accumulate(sizes)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def in_proportion(sizes: Sizes, length: int) -> Sizes:
    """Sizes of `length` outputs in proportion to the rows of each rank."""
    return cut(sizes, length, lambda end: -(-end * length // sum(sizes)))


def of_kind(name: str) -> dict[Callable, int]:
    """{function: its spatial dimensions} of name1d, name2d, name3d in torch and torch.nn.functional."""
    homes = (torch, torch.nn.functional)
    return {f: n for n in (1, 2, 3) for home in homes if (f := getattr(home, f"{name}{n}d", None)) is not None}


DIMENSIONS: dict[Callable, int] = {}
for _name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
    DIMENSIONS |= of_kind(_name)


def spatial(values: PerAxis, count: int) -> tuple[int, ...]:
    """One value for each of `count` dimensions: 3 -> (3, 3)."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * count if len(values) == 1 else values


def whole_length(x: Tensor, dim: int, splits: Splits) -> int:
    """Global number of rows along a dimension of the local tensor x, whether it is split or not."""
    return sum(splits[dim][0]) if dim in splits else x.shape[dim]


def no_outputs(x: Tensor, shape: Sequence[int], *weights: Tensor | None) -> Tensor:
    """The empty output of a rank without outputs; its backward pass runs too and gives gradients of 0."""
    return _Nothing.apply(x.new_empty(shape), x, *(w for w in weights if w is not None))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def is_empty(shape: Sequence[int], dims: Iterable[int]) -> bool:
    """Whether a local tensor of this shape has no elements along one of the split dims."""
    return any(shape[dim] == 0 for dim in dims)


def cropped(x: Tensor, ranges: Mapping[int, tuple[int, int]]) -> Tensor:
    """The part {dimension: (first, rows)} of x, in memory of its own as the output of any operation."""
    part = x
    for dim, (first, rows) in ranges.items():
        part = part.narrow(dim, first, rows)
    return x if part.shape == x.shape else part.clone()
