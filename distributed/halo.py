"""Fetch rows of other ranks: any interval of a dimension that is split over a group. Halos are the common case.

A tensor of L rows is split into shards with `sizes` rows on each rank (sizes may differ or be 0). Every rank requests
an interval [first, last) of the whole dimension. All ranks know all intervals, so each rank computes by itself what to
send and what to receive. Nothing is sent if all intervals lie in their own shards. Backward returns the gradient of
each row to its owner, which adds it up.

    coming = Fetch(x, dim, sizes, intervals, group)   # begins to send and to receive
    y = f(coming.own)                                 # meanwhile, compute with rows of this rank only
    x = coming.rows()                                 # waits; this rank's interval in one piece

Backward overlaps in the same way: the gradients of the rows travel while the gradient of f is computed.

method: p2p sends only between ranks that exchange rows; all_to_all involves all ranks, and torch.compile can trace it.
Both send the same rows. The default is p2p, and all_to_all while compiling.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group

from distributed.collectives import Group, all_to_all

Interval = tuple[int, int]  # rows [first, last)
Counts = list[int]  # of numbers, by rank
METHODS = ("p2p", "all_to_all")


def halo_exchange(
    x: Tensor,
    dim: int,
    sizes: Sequence[int],
    group: Group,
    before: int,
    after: int,
    periodic: bool = False,
    fill: float | None = 0,
    method: str | None = None,
) -> Tensor:
    """Extend a local shard by its neighbours' rows.

    x: local shard, (..., n_local, ...), split along `dim` over `group` (distributed.collectives.Group), `sizes` rows on
    each rank. before, after: rows needed from the previous and the next shard (if this exceeds a neighbour's size, the
    halo reaches further). periodic: the first and the last rank are neighbours (longitude); otherwise the rows outside
    are `fill`, or are omitted if fill is None.
    Returns the extended shard, (..., before + n_local + after, ...), or x itself if the halo is empty. Differentiable:
    backward adds the gradient of each halo to its owner. Raises ValueError if the halo is negative or longer than the
    whole dimension.
    """
    length = sum(sizes)
    if not (0 <= before <= length and 0 <= after <= length):
        raise ValueError(f"halo of {before} rows before and {after} after: the whole dimension has {length}")
    intervals = [(first - before, last + after) for first, last in bounds(sizes)]
    return Fetch(x, dim, sizes, intervals, group, periodic, fill, method).rows()


def bounds(sizes: Sequence[int]) -> list[Interval]:
    """The interval [first, last) of each shard: (4, 3) -> [(0, 4), (4, 7)]."""
    return [(last - n, last) for n, last in zip(sizes, accumulate(sizes), strict=True)]


class Fetch:
    """A fetch of an interval of rows, begun by the constructor and completed by rows(). All ranks make one together.

    x: local shard, (..., sizes[rank], ...). intervals: [(first, last)] of all ranks, in rows of the whole dimension.
    periodic, fill, method: as for halo_exchange.
    Attributes: own, x to compute with until rows() is called; traffic, whether any rank needs rows of another, the same
    on every rank; joined, whether rows() makes a new tensor. Without traffic and with an interval inside x, rows()
    returns a view of x.
    Raises ValueError if sizes, intervals and x do not fit together, or for an unknown method.
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
        method: str | None = None,
    ):
        compiling = torch.compiler.is_compiling()
        method = method or ("all_to_all" if compiling else "p2p")
        if method not in METHODS:
            raise ValueError(f"halo exchange: no method '{method}', there are {', '.join(METHODS)}")
        if not len(sizes) == len(intervals) == group.size or x.shape[dim] != sizes[group.rank]:
            raise ValueError(
                f"halo exchange over {group.size} ranks: sizes {tuple(sizes)} and {len(intervals)} intervals, and "
                f"{x.shape[dim]} rows on rank {group.rank}; every rank has one size, one interval, and so many rows"
            )
        plan = (_plan.__wrapped__ if compiling else _plan)(
            tuple(sizes), tuple(intervals), group.rank, periodic, fill is None
        )
        self.own, self.dim, self.plan, self.fill = x, dim % x.ndim, plan, 0 if fill is None else fill
        self.arrived: dict[int | None, Tensor] | None = None
        self.traffic, self.joined = plan.traffic, plan.traffic or [p[0] for p in plan.pieces] != [group.rank]
        self.format = _memory_format(x)
        if self.traffic:
            self._start(group, method)

    def _start(self, group, method):
        x, dim, sent = self.own, self.dim, self.plan.sent
        counts = _numbers(x, dim, sent), _numbers(x, dim, self.plan.received)
        if method == "all_to_all":
            self.finish = lambda: all_to_all(_packed(x, dim, sent), *counts, group)
        else:
            self.own, token = _Start.apply(x, dim, sent, *counts, group, travelling := [])
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
                outside = self.own.new_full(_with_rows(self.own, self.dim, high - low), self.fill)
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
        blocks = _unpacked(self.finish(), self.own, self.dim, pieces)
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
        travelling.append(_post(_packed(x, dim, pieces), sent, received, group))
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, token: Tensor) -> tuple[Tensor | None, ...]:
        gradient, pieces = gradient.clone(), [piece for pieces in ctx.pieces for piece in pieces]
        blocks = _unpacked(_wait(ctx.travelling.pop()), gradient, ctx.dim, pieces)
        for (_, start, n), block in zip(pieces, blocks, strict=True):
            gradient.narrow(ctx.dim, start, n).add_(block)
        return gradient, None, None, None, None, None, None


class _Finish(torch.autograd.Function):
    """Forward waits for the rows; backward begins to send their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, sent: Counts, received: Counts, group: Group, travelling: list) -> Tensor:
        ctx.args, ctx.travelling = (received, sent, group), travelling
        return _wait(travelling.pop())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travelling.append(_post(gradient.contiguous(), *ctx.args))
        return gradient.new_empty(0), None, None, None, None


def _post(flat, sent, received, group):
    """Begin to send sent[i] numbers of flat to rank i, and to receive received[i] from it."""
    buffer, calls = flat.new_empty(sum(received)), []
    process_group = _connected(_resolve_process_group(group.name), flat)
    for call, whole, counts in ((dist.isend, flat, sent), (dist.irecv, buffer, received)):
        for peer, part in enumerate(whole.split(counts)):
            if part.numel():
                calls.append(dist.P2POp(call, part, group=process_group, group_peer=peer))
    return buffer, flat, dist.batch_isend_irecv(calls) if calls else []


def _wait(posted):
    buffer, _, works = posted
    for work in works:
        work.wait()
    return buffer


_ready: WeakSet[dist.ProcessGroup] = WeakSet()


def _connected(process_group, like):
    """The group after a first communication of all ranks, which NCCL requires before sending between pairs."""
    if like.device.type != "cpu" and process_group not in _ready:
        dist.all_reduce(like.new_zeros(1), group=process_group)
        _ready.add(process_group)
    return process_group


def _memory_format(x):
    """The memory format of x; torch.cat keeps it if all pieces have it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    found = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    return last if found else torch.contiguous_format


def _with_rows(x, dim, rows):
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _numbers(x, dim, pieces):
    """The number of elements in each rank's pieces of x."""
    row = math.prod(_with_rows(x, dim, 1))
    return [row * sum(n for _, _, n in of_rank) for of_rank in pieces]


def _packed(x, dim, pieces):
    """The pieces for all ranks in one flat tensor."""
    parts = [x.narrow(dim, start, n).reshape(-1) for of_rank in pieces for _, start, n in of_rank]
    return torch.cat(parts) if parts else x.narrow(dim, 0, 0).reshape(-1)


def _unpacked(flat, like, dim, pieces):
    """The blocks of rows in a flat tensor, shaped as `like` except for the number of rows."""
    blocks = [_with_rows(like, dim, n) for _, _, n in pieces]
    parts = flat.split([math.prod(block) for block in blocks]) if blocks else ()
    return [part.view(block) for part, block in zip(parts, blocks, strict=True)]
