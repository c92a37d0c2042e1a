"""Orders: rows of a dimension that lie on the ranks in any way, and the exchanges between two such ways.

A graph has nodes, which are split, and edges, which are pairs of numbers of nodes. Its edges come in any order. Each
rank keeps those whose node it holds, so that most of what an edge needs is there, and only rows of the border travel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from distributed.collectives import Group, all_to_all, gather_from_region, shard_sizes
from distributed.shard.core.axes import Axes, Axis, has_order
from distributed.shard.core.spec import Spec, cut_over
from distributed.shard.core.tensor import ShardTensor, local, wrap

MOST_PLANS = 64  # of a tensor of indices or an Order; each is as large as its rows
Rows = list[np.ndarray]  # numbers of the rows that each rank of a group holds, or wants


class Order:
    """Which rank of a group holds each row of a dimension. Orders are equal where all rows are on the same ranks.

    owners: (rows,), the rank of each. axes: of the nodes by which the rows were shared out.
    """

    def __init__(self, owners: np.ndarray, ranks: int, axes: Axes):
        self.rows: Rows = [np.flatnonzero(owners == rank) for rank in range(ranks)]
        self.axes = axes
        self.most = max(map(len, self.rows))  # on any rank
        self.exchanges: dict[tuple, Any] = {}  # with other ways to hold these rows, and the rows on devices
        self.owners = owners.astype(np.int32).tobytes()
        self.hash = hash(self.owners)

    def on(self, device: torch.device, place: int) -> Tensor:
        """The rows of a rank of the group, as a tensor."""
        return kept(self.exchanges, (device, place), lambda: on_device(self.rows[place], device))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Order) and self.owners == other.owners)


def kept(plans: dict[tuple, Any], key: tuple, make: Callable[[], Any]) -> Any:
    """What make() plans, kept in a table, which begins anew when it is full."""
    if key not in plans:
        plan = make()
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[key] = plan
    return plans[key]


def ordered_axes(order: Order, spec: Spec, axes: Axes) -> Axes:
    """The axes of rows in an Order, which has the ranks over which `axes` are split."""
    mesh_dims = _mesh_dims(axes)
    total = sum(map(len, order.rows))
    result = []
    for m in mesh_dims:
        ranks = spec.mesh.groups[m].size
        held = [len(rows) for rows in order.rows] if len(mesh_dims) == 1 else [0] * ranks
        size = total if m == mesh_dims[0] else 1
        result.append(Axis(size, m, tuple(held), order=order))
    return tuple(result)


def _mesh_dims(axes):
    """The mesh dimensions that split axes, in the order in which their ranks are numbered."""
    return sorted({axis.mesh_dim for axis in axes if axis.sizes is not None})


def ordered_dim(spec: Spec) -> int:
    """The dimension that has an Order."""
    return next(dim for dim, axes in enumerate(spec.dims) if has_order(axes))


def held_rows(spec: Spec, dim: int) -> tuple[Rows, Group]:
    """(rows of a split dimension that each rank holds, the Group of these ranks)."""
    axes = spec.dims[dim]
    (group,) = spec.mesh.groups_of(_mesh_dims(axes))
    if has_order(axes):
        return axes[0].order.rows, group
    # The rows ahead of the product of axes, and a dimension for each axis.
    ahead, behind = np.split(np.arange(spec.shape[dim]), [axes[0].prefix])
    product = behind.reshape([axis.size for axis in axes])
    held = []
    for rank in spec.ranks(dim):
        own = product
        for place, axis in enumerate(axes):
            if axis.sizes is not None:
                coordinate = spec.coordinate(axis.mesh_dim, rank)
                start = sum(axis.sizes[:coordinate])
                own = own.take(range(start, start + axis.sizes[coordinate]), place)
        first = ahead if spec.is_first(axes, rank) else ahead[:0]
        held.append(np.concatenate([first, own.reshape(-1)]))
    return held, group


class Exchange(NamedTuple):
    """What this rank sends and receives so that each rank gets the rows it wants, and where it finds these.

    sent: places of rows in its own part, for one rank after the other. to, of: the number of rows for each rank, and
    from each. places: of each wanted row, in the own part with the received rows behind it.
    """

    sent: Tensor
    to: list[int]
    of: list[int]
    places: Tensor
    is_local: bool  # every rank holds what it wants
    own: int  # rows of the part

    def rows(self, part: Tensor, dim: int, group: Group) -> Tensor:
        """The wanted rows of dimension dim: (..., own, ...) -> (..., wanted, ...); one all-to-all."""
        if not self.is_local:
            outgoing = part.index_select(dim, self.sent).movedim(dim, 0)  # (rows, ...)
            arrived = all_to_all(outgoing, self.to, self.of, group)
            part = torch.cat([part, arrived.movedim(0, dim)], dim)
        return part.index_select(dim, self.places)

    def add(
        self,
        func: Callable,
        part: Tensor,
        dim: int,
        index: Tensor,
        source: Any,
        group: Group,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Let func(part, dim, index, source) add to wanted rows; each rank adds up what others add to its own rows.

        The transpose of `rows`: a sum for each row of the border travels. index: `places` in the form that func takes.
        """
        if self.is_local:
            return func(part, dim, index, source, *args, **kwargs)
        border = [part.shape[d] if d != dim else sum(self.of) for d in range(part.dim())]
        extended = torch.cat([part, part.new_zeros(border)], dim)
        summed = func(extended, dim, index, source, *args, **kwargs)
        own, of_others = summed.split([self.own, sum(self.of)], dim)
        arrived = all_to_all(of_others.movedim(dim, 0), self.of, self.to, group)  # (rows, ...)
        return own.index_add(dim, self.sent, arrived.movedim(0, dim))


def exchange_of(
    held: Rows,
    wanted: Rows,
    rank: int,
    device: torch.device,
) -> Exchange:
    """The Exchange of a rank. wanted: rows may repeat; each travels once to a rank."""
    total = sum(map(len, held))
    owner = np.empty(total, np.int64)
    place = np.empty(total, np.int64)
    for r, rows in enumerate(held):
        owner[rows] = r
        place[rows] = np.arange(len(rows))

    # All ranks know what all of them want, so each knows what the others ask it for.
    borders = []  # rows of others that each rank wants, by their owners
    for r, rows in enumerate(wanted):
        of_others = np.unique(rows[owner[rows] != r])
        by_owner = np.argsort(owner[of_others], kind="stable")
        borders.append(of_others[by_owner])
    asked = [border[owner[border] == rank] for border in borders]
    own = borders[rank]
    ranks = len(held)
    found = place.copy()
    found[own] = len(held[rank]) + np.arange(len(own))
    sent = place[np.concatenate(asked)]
    return Exchange(
        sent=on_device(sent, device),
        to=[len(rows) for rows in asked],
        of=np.bincount(owner[own], minlength=ranks).tolist(),
        places=on_device(found[wanted[rank]], device),
        is_local=not any(map(len, borders)),
        own=len(held[rank]),
    )


def on_device(rows: np.ndarray, device: torch.device) -> Tensor:
    """Numbers of rows as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(device)


def moved(x: ShardTensor, spec: Spec) -> ShardTensor:
    """The tensor with the rows of its ordered dimension where another spec has them; one all-to-all.

    spec: split over the same mesh dimensions there, and as x in all other dimensions.
    """
    dim = ordered_dim(x.spec)
    axes = x.spec.dims[dim]
    part = local(x)

    def make() -> tuple[Exchange, Group]:
        held, group = held_rows(x.spec, dim)
        wanted, _ = held_rows(spec, dim)
        return exchange_of(held, wanted, group.rank, part.device), group

    key = (spec.dims[dim], spec.mesh.groups, part.device)
    exchange, group = kept(axes[0].order.exchanges, key, make)
    return wrap(exchange.rows(part, dim, group), spec)


def in_global_order(x: ShardTensor) -> ShardTensor:
    """The same tensor with contiguous pieces, as even as possible. Of several mesh dimensions the first splits it."""
    if not x.spec.has_order:
        return x
    spec = x.spec
    dim = ordered_dim(spec)
    first, *others = spec.dims[dim]
    contiguous = cut_over(spec.mesh, first.mesh_dim, first.size)
    if not others:
        return moved(x, spec.with_axes(dim, contiguous))

    # Each piece is in pieces itself, of the ranks along the other mesh dimension, which join it.
    (other,) = others
    group = spec.mesh.groups[other.mesh_dim]
    of_others = [shard_sizes(size, group.size) for size in contiguous[0].sizes or ()]
    lengths = np.concatenate(of_others)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = Order(owners, len(lengths), first.order.axes)
    x = moved(x, spec.with_axes(dim, ordered_axes(order, spec, spec.dims[dim])))
    own_sizes = of_others[spec.coordinate(first.mesh_dim)]
    part = gather_from_region(local(x), dim, own_sizes, group)
    return wrap(part, spec.with_axes(dim, contiguous))
