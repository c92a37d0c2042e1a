"""Fetch rows of other ranks: any interval of a dimension that is split over a group. Halos are the common case.

A tensor of L rows is split into shards with `sizes` rows on each rank (sizes may differ or be 0). Every rank requests
an interval [first, last) of the whole dimension. All ranks know all intervals, so each rank computes by itself what to
send and what to receive. Nothing is sent if all intervals lie in their own shards. Backward returns the gradient of
each row to its owner, which adds it up.

    pending = HaloExchange(x, dim, sizes, intervals, group)   # begins to send and to receive
    y = f(pending.own)                                        # meanwhile, compute with rows of this rank only
    x = pending.rows()                                        # waits; this rank's interval in one piece

Backward overlaps in the same way: the gradients of the rows travel while the gradient of f is computed. Each exchange
is one all-to-all, in which most pairs of ranks send nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, all_to_all, concatenated, differentiated_again, start_all_to_all, wait

Interval = tuple[int, int]  # rows [first, last)
Counts = list[int]  # of rows, by rank


def bounds(sizes: Sequence[int]) -> list[Interval]:
    """The interval [first, last) of each shard: (4, 3) -> [(0, 4), (4, 7)]."""
    ends = accumulate(sizes)
    return [(last - n, last) for n, last in zip(sizes, ends, strict=True)]


class HaloExchange:
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
        one_for_each_rank = len(sizes) == len(intervals) == group.size
        if not one_for_each_rank or x.shape[dim] != sizes[group.rank]:
            raise ValueError(
                f"halo exchange over {group.size} ranks: sizes {tuple(sizes)} and {len(intervals)} intervals, and "
                f"{x.shape[dim]} rows on rank {group.rank}; every rank has one size, one interval, and so many rows"
            )
        # Every step repeats the same exchanges, so their plans are cached. A compiler traces through the planning,
        # because it cannot look into a cache.
        compiling = torch.compiler.is_compiling()
        make_plan = _plan.__wrapped__ if compiling else _plan
        omit_outside = fill is None
        plan = make_plan(tuple(sizes), tuple(intervals), group.rank, periodic, omit_outside)

        self.own = x
        self.dim = dim % x.ndim
        self.plan = plan
        self.fill = 0 if fill is None else fill
        self.format = _memory_format(x)
        self.arrived: dict[int | None, Tensor] | None = None
        self.traffic = plan.traffic
        owners = [piece.owner for piece in plan.pieces]
        self.joined = plan.traffic or owners != [group.rank]
        if self.traffic:
            self._begin(x, group, compiling)

    def _begin(self, x: Tensor, group: Group, compiling: bool) -> None:
        """Start the exchange; self.finish() waits for it and returns the rows of others, rows outermost."""
        blocks = self.plan.sent
        dim = self.dim
        sent = _counts(blocks)
        received = _counts(self.plan.received)
        if compiling:  # the compiler orders operations itself, so that one blocking exchange is enough
            self.finish = lambda: all_to_all(_packed(x, dim, blocks), sent, received, group)
        else:
            travelling: list[Tensor] = []
            self.own, token = _Start.apply(x, dim, blocks, sent, received, group, travelling)
            self.finish = lambda: _Finish.apply(token, sent, received, group, travelling)

    def rows(self, first: int | None = None, last: int | None = None) -> Tensor:
        """Wait for the exchange; return the interval, or its rows [first, last): (..., last - first, ...)."""
        first = self.plan.first if first is None else first
        last = self.plan.last if last is None else last
        if self.arrived is None:
            self.arrived = self._arrive() if self.traffic else {}
        parts = []
        place = self.plan.first  # the row of the whole dimension at which the next piece begins
        for i, piece in enumerate(self.plan.pieces):
            # The rows of the piece that lie in [first, last), counted from the beginning of the piece.
            end = place + piece.rows
            low = max(first, place) - place
            high = min(last, end) - place
            place = end
            if low >= high:
                continue
            if piece.owner is None:
                parts.append(self._outside(high - low))
            elif i in self.arrived:
                parts.append(self.arrived[i].narrow(self.dim, low, high - low))
            else:
                parts.append(self.own.narrow(self.dim, piece.start + low, high - low))
        # The result depends on x and on the exchange in the autograd graph, even if it has no row of them.
        if None in self.arrived:
            parts.append(self.arrived[None])
        elif all(piece.owner is None for piece in self.plan.pieces):
            parts.append(self.own.narrow(self.dim, 0, 0))
        return concatenated(parts, self.dim) if self.joined else parts[0]

    def _outside(self, rows):
        """Rows outside of the whole dimension."""
        shape = list(self.own.shape)
        shape[self.dim] = rows
        filled = self.own.new_full(shape, self.fill)  # (..., rows, ...)
        return filled.contiguous(memory_format=self.format)

    def _arrive(self):
        """{piece of the interval: its rows} for the pieces from other ranks.

        Returns {None: no rows} if there are no such pieces. The result must depend on them even so, because otherwise
        backward would skip this exchange while other ranks wait for it.
        """
        blocks = list(chain(*self.plan.received))
        if not blocks:
            blocks = [_Block(None, 0, 0)]
        arrived = {}
        packed = self.finish()  # (rows of all blocks, ...)
        for block, rows in zip(blocks, _unpacked(packed, self.dim, blocks), strict=True):
            arrived[block.piece] = rows.contiguous(memory_format=self.format)
        return arrived


class _Piece(NamedTuple):
    """Rows of an interval that follow each other in one shard, or lie outside of the whole dimension."""

    owner: int | None  # the rank that holds them; None: outside
    start: int  # the first row, in the owner's shard
    rows: int


class _Block(NamedTuple):
    """A piece as it travels: its number in the interval of the rank that asked for it, and where its owner has it."""

    piece: int | None
    start: int
    rows: int


class _Plan(NamedTuple):
    """Everything that this rank sends and receives for one exchange."""

    first: int  # this rank's interval [first, last)
    last: int
    pieces: tuple  # of the interval, in order
    sent: tuple  # for each rank, the blocks of this shard that it asked for
    received: tuple  # for each rank, the blocks of its shard that this rank asked for
    traffic: bool  # whether anything is sent between any two ranks


@lru_cache(maxsize=4096)
def _plan(sizes, intervals, rank, periodic, omit_outside):
    length = sum(sizes)
    ranks = range(len(sizes))
    if omit_outside and not periodic:
        intervals = [_clipped(interval, length) for interval in intervals]
    # All ranks know all intervals, so each rank plans the exchange of all of them.
    pieces = []  # of each rank's interval
    for first, last in intervals:
        pieces.append(_pieces(sizes, length, first, last, periodic))
    travels = []  # travels[asker][owner]: the blocks that one rank needs of another
    for asker in ranks:
        travels.append([_blocks(pieces[asker], asker, owner) for owner in ranks])
    first, last = intervals[rank]
    return _Plan(
        first,
        last,
        pieces=tuple(pieces[rank]),
        sent=tuple([travels[asker][rank] for asker in ranks]),
        received=tuple(travels[rank]),
        traffic=any(any(of_owners) for of_owners in travels),
    )


def _clipped(interval, length):
    """The interval without rows outside of the dimension."""
    first, last = interval
    first = min(max(first, 0), length)
    last = min(max(last, 0), length)
    return first, last


def _pieces(sizes, length, first, last, periodic):
    """Cut [first, last) at the bounds of the shards."""
    pieces = []
    while first < last:
        row = first % length if periodic and length else first
        left = last - first
        if 0 <= row < length:
            # The shard that holds the row is the first that ends behind it.
            owner, start, end = next((r, a, b) for r, (a, b) in enumerate(bounds(sizes)) if row < b)
            piece = _Piece(owner, row - start, min(end - row, left))
        else:
            end = min(last, 0) if row < 0 else last  # rows in front of the dimension, or behind it
            piece = _Piece(None, 0, end - first)
        pieces.append(piece)
        first += piece.rows
    return pieces


def _blocks(pieces, asker, owner):
    """The blocks that `owner` sends for these pieces of the asker's interval."""
    if owner == asker:
        return ()
    blocks = []
    for number, piece in enumerate(pieces):
        if piece.owner == owner:
            blocks.append(_Block(number, piece.start, piece.rows))
    return tuple(blocks)


class _Start(torch.autograd.Function):
    """Forward begins to send rows; backward waits for their gradients and adds them up.

    The list `travelling` holds the exchange in progress. The token connects _Start and _Finish in the autograd graph.
    Where the gradient is differentiated again, what travels back has a graph of its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        blocks: tuple,
        sent: Counts,
        received: Counts,
        group: Group,
        travelling: list,
    ) -> tuple[Tensor, Tensor]:
        ctx.dim = dim
        ctx.blocks = blocks
        ctx.travelling = travelling
        packed = _packed(x, dim, blocks)  # (rows, ...)
        travelling.append(start_all_to_all(packed, sent, received, group))
        token = x.new_empty(0)
        return x.view_as(x), token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.clone()
        # Where this rank has sent nothing, its gradient depends on the exchange all the same: see _arrive.
        blocks = list(chain(*ctx.blocks)) or [_Block(None, 0, 0)]
        packed = ctx.travelling.pop()
        if not differentiated_again():
            packed = wait(packed)
        arrived = _unpacked(packed, ctx.dim, blocks)
        for block, gradient_of_block in zip(blocks, arrived, strict=True):
            gradient.narrow(ctx.dim, block.start, block.rows).add_(gradient_of_block)
        return gradient, None, None, None, None, None, None


class _Finish(torch.autograd.Function):
    """Forward waits for the rows; backward begins to send their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        sent: Counts,
        received: Counts,
        group: Group,
        travelling: list,
    ) -> Tensor:
        ctx.backward_exchange = received, sent, group  # gradients travel the other way
        ctx.travelling = travelling
        return wait(travelling.pop())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        exchange = all_to_all if differentiated_again() else start_all_to_all
        pending = exchange(gradient.contiguous(), *ctx.backward_exchange)
        ctx.travelling.append(pending)
        return gradient.new_empty(0), None, None, None, None


def _memory_format(x):
    """The memory format of x; torch.cat keeps it if all pieces have it."""
    by_dims = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = by_dims.get(x.ndim)
    if channels_last is None or x.is_contiguous():
        return torch.contiguous_format
    is_channels_last = x.is_contiguous(memory_format=channels_last)
    return channels_last if is_channels_last else torch.contiguous_format


def _counts(blocks):
    """Rows for each rank."""
    counts = []
    for of_rank in blocks:
        rows = [block.rows for block in of_rank]
        counts.append(sum(rows))
    return counts


def _packed(x, dim, blocks):
    """The blocks for all ranks in one tensor, rows outermost: (rows, ...)."""
    parts = [x.narrow(dim, block.start, block.rows) for block in chain(*blocks)]
    if not parts:
        parts = [x.narrow(dim, 0, 0)]
    rows_first = [part.movedim(dim, 0) for part in parts]
    return concatenated(rows_first).contiguous()


def _unpacked(rows, dim, blocks):
    """The blocks of such a tensor, as they lie in x: each (..., rows of the block, ...)."""
    if not blocks:
        return []
    parts = rows.split([block.rows for block in blocks])
    return [part.movedim(0, dim) for part in parts]
