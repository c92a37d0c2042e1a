"""Fetch rows of other ranks: any interval of a dimension that is split over a group. Halos are the common case.

A tensor of L rows is split into shards with `sizes` rows on each rank (sizes may differ or be 0). Every rank requests
an interval [first, last) of the whole dimension. All ranks know all intervals, so each rank computes by itself what to
send and what to receive. Nothing is sent if all intervals lie in their own shards. Backward returns the gradient of
each row to its owner, which adds it up.

    coming = Fetch(x, dim, sizes, intervals, group)   # begins to send and to receive
    y = f(coming.own)                                 # meanwhile, compute with rows of this rank only
    x = coming.rows()                                 # waits; this rank's interval in one piece

Backward overlaps in the same way: the gradients of the rows travel while the gradient of f is computed. Each exchange
is one all-to-all, in which most pairs of ranks send nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distributed.collectives import Group, all_to_all, start_all_to_all, wait

Interval = tuple[int, int]  # rows [first, last)
Counts = list[int]  # of rows, by rank


def bounds(sizes: Sequence[int]) -> list[Interval]:
    """The interval [first, last) of each shard: (4, 3) -> [(0, 4), (4, 7)]."""
    return [(last - n, last) for n, last in zip(sizes, accumulate(sizes), strict=True)]


class Fetch:
    """A fetch of an interval of rows, begun by the constructor and completed by rows(). All ranks make one together.

    x: local shard, (..., sizes[rank], ...). intervals: [(first, last)] of all ranks, in rows of the whole dimension.
    periodic: the first and the last rank are neighbours (longitude); otherwise rows outside of the dimension are
    `fill`, or are omitted if fill is None.
    Attributes: own, x to compute with until rows() is called; traffic, whether any rank needs rows of another, the same
    on every rank; joined, whether rows() makes a new tensor. Without traffic and with an interval inside x, rows()
    returns a view of x.
    Raises ValueError if sizes, intervals and x do not fit together.
    """

    def __init__(
        self,
        x: Tensor,
        dim: int,
        sizes: Sequence[int],
        intervals: Sequence[Interval],
        group: Group,
        periodic: bool = False,
        fill: float | None = 0,
    ):
        if not len(sizes) == len(intervals) == group.size or x.shape[dim] != sizes[group.rank]:
            raise ValueError(
                f"halo exchange over {group.size} ranks: sizes {tuple(sizes)} and {len(intervals)} intervals, and "
                f"{x.shape[dim]} rows on rank {group.rank}; every rank has one size, one interval, and so many rows"
            )
        compiling = torch.compiler.is_compiling()
        plan = (_plan.__wrapped__ if compiling else _plan)(
            tuple(sizes), tuple(intervals), group.rank, periodic, fill is None
        )
        self.own, self.dim, self.plan, self.fill = x, dim % x.ndim, plan, 0 if fill is None else fill
        self.arrived: dict[int | None, Tensor] | None = None
        self.traffic, self.joined = plan.traffic, plan.traffic or [p[0] for p in plan.pieces] != [group.rank]
        self.format = _memory_format(x)
        if self.traffic:
            counts = _counts(plan.sent), _counts(plan.received)
            if compiling:  # the compiler orders operations itself
                self.finish = lambda: all_to_all(_packed(x, self.dim, plan.sent), *counts, group)
            else:
                travelling: list[Tensor] = []
                self.own, token = _Start.apply(x, self.dim, plan.sent, *counts, group, travelling)
                self.finish = lambda: _Finish.apply(token, *counts, group, travelling)

    def rows(self, first: int | None = None, last: int | None = None) -> Tensor:
        """Wait for the exchange; return the interval, or its rows [first, last): (..., last - first, ...)."""
        first, last = self.plan.first if first is None else first, self.plan.last if last is None else last
        if self.arrived is None:
            self.arrived = self._arrive() if self.traffic else {}
        parts, place = [], self.plan.first
        for i, (owner, start, n) in enumerate(self.plan.pieces):
            low, high = max(first, place) - place, min(last, place + n) - place
            if low < high and owner is None:
                shape = (*self.own.shape[: self.dim], high - low, *self.own.shape[self.dim + 1 :])
                outside = self.own.new_full(shape, self.fill)
                parts.append(outside.contiguous(memory_format=self.format))
            elif low < high:
                source, start = (self.arrived[i], 0) if i in self.arrived else (self.own, start)
                parts.append(source.narrow(self.dim, start + low, high - low))
            place += n
        if None in self.arrived:
            parts.append(self.arrived[None])
        elif all(owner is None for owner, _, _ in self.plan.pieces):
            parts.append(self.own.narrow(self.dim, 0, 0))  # so that the result depends on x in the autograd graph
        return torch.cat(parts, self.dim) if self.joined else parts[0]

    def _arrive(self):
        """{piece of the interval: its rows} for the pieces from other ranks.

        Returns {None: no rows} if there are no such pieces. The result must depend on them even so, because otherwise
        backward would skip this exchange while other ranks wait for it.
        """
        pieces = [piece for pieces in self.plan.received for piece in pieces] or [(None, 0, 0)]
        blocks = _unpacked(self.finish(), self.dim, pieces)
        return {i: block.contiguous(memory_format=self.format) for (i, _, _), block in zip(pieces, blocks, strict=True)}


class _Plan(NamedTuple):
    first: int
    last: int  # of this rank's interval
    pieces: tuple  # of the interval, in order: (owner, or None outside the whole; first row in its shard; rows)
    sent: tuple  # pieces of this shard for each rank, and
    received: tuple  # pieces of each rank's shard: (number of the piece, first row in the shard, rows)
    traffic: bool


@lru_cache(maxsize=4096)
def _plan(sizes, intervals, rank, periodic, clip):
    length, ranks = sum(sizes), range(len(sizes))
    if clip and not periodic:
        intervals = [tuple(min(max(row, 0), length) for row in interval) for interval in intervals]
    pieces = [_pieces(sizes, length, *interval, periodic) for interval in intervals]
    travels = [
        [tuple((i, *p[1:]) for i, p in enumerate(pieces[asker]) if p[0] == owner != asker) for owner in ranks]
        for asker in ranks
    ]
    sent = tuple(travels[asker][rank] for asker in ranks)
    traffic = any(any(of_owners) for of_owners in travels)
    return _Plan(*intervals[rank], tuple(pieces[rank]), sent, tuple(travels[rank]), traffic)


def _pieces(sizes, length, first, last, periodic):
    """Cut [first, last) at the bounds of the shards: [(owner, first row in its shard, rows)]."""
    pieces = []
    while first < last:
        row = first % length if periodic and length else first
        if 0 <= row < length:
            owner, (start, end) = next((r, b) for r, b in enumerate(bounds(sizes)) if row < b[1])
            pieces.append((owner, row - start, min(end - row, last - first)))
        else:
            pieces.append((None, 0, (min(last, 0) if row < 0 else last) - first))
        first += pieces[-1][-1]
    return pieces


class _Start(torch.autograd.Function):
    """Forward begins to send rows; backward waits for their gradients and adds them up.

    The list `travelling` holds the exchange in progress. The token connects _Start and _Finish in the autograd graph.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, pieces: tuple, sent: Counts, received: Counts, group: Group, travelling: list
    ) -> tuple[Tensor, Tensor]:
        ctx.dim, ctx.pieces, ctx.travelling = dim, pieces, travelling
        travelling.append(start_all_to_all(_packed(x, dim, pieces), sent, received, group))
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        gradient, pieces = gradient.clone(), [piece for pieces in ctx.pieces for piece in pieces]
        blocks = _unpacked(wait(ctx.travelling.pop()), ctx.dim, pieces)
        for (_, start, n), block in zip(pieces, blocks, strict=True):
            gradient.narrow(ctx.dim, start, n).add_(block)
        return gradient, None, None, None, None, None, None


class _Finish(torch.autograd.Function):
    """Forward waits for the rows; backward begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, sent: Counts, received: Counts, group: Group, travelling: list) -> Tensor:
        ctx.args, ctx.travelling = (received, sent, group), travelling
        return wait(travelling.pop())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travelling.append(start_all_to_all(gradient.contiguous(), *ctx.args))
        return gradient.new_empty(0), None, None, None, None


def _memory_format(x):
    """The memory format of x; torch.cat keeps it if all pieces have it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    channels_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if channels_last else torch.contiguous_format


def _counts(pieces):
    """Rows for each rank."""
    return [sum(n for _, _, n in of_rank) for of_rank in pieces]


def _packed(x, dim, pieces):
    """The pieces for all ranks in one tensor, rows outermost."""
    parts = [x.narrow(dim, start, n) for of_rank in pieces for _, start, n in of_rank] or [x.narrow(dim, 0, 0)]
    return torch.cat([part.movedim(dim, 0) for part in parts]).contiguous()


def _unpacked(rows, dim, pieces):
    """The blocks of rows in such a tensor, as they lie in x."""
    return [block.movedim(0, dim) for block in rows.split([n for _, _, n in pieces])] if pieces else []
