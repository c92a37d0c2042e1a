"""Rows that constant indices choose along a split dimension: graphs, whose edges are pairs of numbers of nodes.

    nodes[:, source]                    each rank keeps the edges whose source it holds: nothing is sent
    torch.cat([.., nodes[:, target]])   edges that lie on other ranks there move: those that cross the border
    summed.index_add(1, target, ..)     a sum for each row of the border, where edges do not lie at their target
    nodes[:, neighbours]                (nodes, k): each rank fetches the rows of its border, once

The dimension of edges has an Order (order.py). The functions below know it, or treat each of its rows alike; for any
other one the edges come into their global order first, in contiguous pieces: one all-to-all.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves, tree_map

from distributed.collectives import Group
from distributed.shard.core import tensor as shard_tensor
from distributed.shard.core.axes import OutOfOrder, mesh_dims_of, unsplit_axes
from distributed.shard.core.calls import name_of
from distributed.shard.core.constants import Index, constant, row_numbers
from distributed.shard.core.hacks import adopt
from distributed.shard.core.operands import (
    check_writable,
    global_shape,
    gradient_spec,
    local_operand,
    split_alike,
    sum_partial,
    to_spec,
)
from distributed.shard.core.order import (
    Exchange,
    Order,
    exchange_of,
    held_rows,
    in_global_order,
    kept,
    ordered_axes,
    ordered_dim,
)
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import LocalTensors, ReorderedTensor, ShardTensor, local, no_rule, wrap
from distributed.shard.ops.elementwise import changes_in_place

IN_ANY_ORDER: set[Callable] = set()  # functions whose rules treat all rows alike, or raise OutOfOrder: any_order.py


def owner_order(x: Spec, dim: int, index: Index) -> Order:
    """The Order in which each rank has the places of the index whose rows it holds: of several rows, the first."""

    def make() -> Order:
        held, group = held_rows(x, dim)
        owner = np.empty(x.shape[dim], np.int64)
        for rank, rows in enumerate(held):
            owner[rows] = rank
        numbers = index.rows(x.shape[dim])
        of_each = numbers[:1].size or 1
        first = numbers.reshape(len(numbers), of_each)[:, 0]
        return Order(owner[first], group.size, x.dims[dim])

    return kept(index.plans, (x.dims[dim], x.mesh.groups), make)


def find_rows(x: ShardTensor, dim: int, tensor: Tensor) -> ShardTensor | None:
    """Rows of x (..., N, ...) by constant indices (E, ...) of its split dimension -> (..., E, ..., ...), or None.

    Indices (N, ...) find rows for each node, which stay where it is. Those of another length are edges, or triangles,
    which each rank has where it holds their first node. Rows of the border are fetched. Raises IndexError for numbers
    of no rows.
    """
    index = constant(tensor)
    spec = x.spec
    if index is None or spec.has_order or 0 in tensor.shape[1:]:
        return None
    is_of_nodes = len(tensor) == spec.shape[dim]
    part = local(x)

    def make() -> tuple[Exchange, Group, Spec]:
        numbers = index.rows(spec.shape[dim])
        held, group = held_rows(spec, dim)
        places = held
        axes = spec.dims[dim]
        if not is_of_nodes:
            order = owner_order(spec, dim, index)
            places = order.rows
            axes = ordered_axes(order, spec, axes)
        wanted = [numbers[rows].reshape(-1) for rows in places]
        of_each = map(unsplit_axes, numbers.shape[1:])
        result = spec.with_dims([*spec.dims[:dim], axes, *of_each, *spec.dims[dim + 1 :]])
        return exchange_of(held, wanted, group.rank, part.device), group, result

    key = (find_rows, spec.structure, spec.mesh.groups, dim, part.device)
    exchange, group, result = kept(index.plans, key, make)
    found = exchange.rows(part, dim, group)  # (..., rows here times those of each, ...)
    return wrap(found.reshape(result.local_shape), result)


def scatter_rows(
    func: Callable,
    input: Tensor,
    dim: int,
    tensor: Tensor,
    source: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor | None:
    """scatter_add, index_add and the like along a split dimension, by constant indices of whole rows; None for others.

    input: (..., N, ...), split along dim, or whole where the edges have an Order that says how it is to be split.
    source: (..., E, ...), of any split, or a number. Where a function adds, edges stay on their ranks, and each rank
    sends a sum for each row of the border. Other functions want each edge where its row is.
    """
    if is_dynamo_compiling():  # it has no values
        return None
    name = func.__name__
    dim = dim % input.dim()
    spec = _spec_of_target(input, dim, source)
    shape = None if spec is None else _shape_of_source(spec, dim, tensor, source)
    if spec is None or shape is None:
        return None
    is_index_of_rows = name.startswith("index_")
    index = constant(tensor if is_index_of_rows else row_numbers(tensor, dim, shape))
    if index is None or index.values.shape != shape[dim : dim + 1]:
        return None
    in_place = name.endswith("_")
    if in_place and not isinstance(input, ShardTensor):
        adopt(func, input, spec)
    target: Any = input
    if in_place and not split_alike(target.spec, spec):
        return None

    # Where a function adds, the edges stay where they are; else each comes to its row.
    of_edges = spec.with_axes(dim, ordered_axes(owner_order(spec, dim, index), spec, spec.dims[dim]))
    if isinstance(source, ShardTensor) and _adds(name, *args, **kwargs):
        axes = source.spec.dims[dim]
        if mesh_dims_of(axes) == mesh_dims_of(spec.dims[dim]):
            of_edges = spec.with_axes(dim, axes)
    if isinstance(source, Tensor):
        source = local_operand(sum_partial(source), of_edges)

    exchange, group = _to_rows(spec, of_edges, dim, index, tensor.device)
    places = exchange.places
    if not is_index_of_rows:
        ones = [1] * (len(shape) - dim - 1)
        places = places.view(-1, *ones).expand(of_edges.local_shape)
    if exchange.is_local and in_place:
        func(target, dim, places, source, *args, **kwargs)
        return check_writable(target)
    compute = getattr(torch, name.removesuffix("_"))
    before = local_operand(sum_partial(input), spec)
    out = exchange.add(compute, before, dim, places, source, group, *args, **kwargs)
    if in_place:
        target.copy_(out)
        return check_writable(target)
    return wrap(out, spec)


def _to_rows(
    spec: Spec,
    of_edges: Spec,
    dim: int,
    index: Index,
    device: torch.device,
) -> tuple[Exchange, Group]:
    """The Exchange that brings edges to the rows that they are added to, and its group."""

    def make() -> tuple[Exchange, Group]:
        numbers = index.rows(spec.shape[dim], lowest=0)  # a function that writes counts no rows from the end
        held, group = held_rows(spec, dim)
        edges, _ = held_rows(of_edges, dim)
        wanted = [numbers[own] for own in edges]
        return exchange_of(held, wanted, group.rank, device), group

    return kept(index.plans, (spec.dims[dim], of_edges.dims[dim], spec.mesh.groups, device), make)


def _spec_of_target(input, dim, source):
    """How the tensor is split that rows are added to: along dim; None where that is not known."""
    if isinstance(input, ShardTensor) and input.spec.is_split(dim):
        return None if input.spec.has_order else gradient_spec(input.spec)
    if isinstance(source, ShardTensor) and source.spec.has_order and ordered_dim(source.spec) == dim:
        axes = source.spec.dims[dim][0].order.axes
        spec = gradient_spec(source.spec).with_axes(dim, axes)
        return spec if spec.shape == global_shape(input) else None
    return None


def _shape_of_source(spec, dim, tensor, source):
    """The shape (..., E, ...) of what is added; None for that which has not the sizes of the target beside dim."""
    shape = list(spec.shape)
    shape[dim] = tensor.shape[0 if tensor.dim() == 1 else dim]
    fits = not isinstance(source, Tensor) or source.dim() == 0 or global_shape(source) == tuple(shape)
    return tuple(shape) if fits else None


def _adds(name, reduce="sum", include_self=True, **_):
    """Tell whether a function adds its source to what is there, so that sums may be added too."""
    if name.startswith("scatter_reduce"):
        return reduce == "sum" and include_self
    return name.startswith(("index_add", "scatter_add"))


# ---- tensors whose rows have an Order, in functions of torch


def in_any_order(
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Compute a function of ReorderedTensors: by its rule if it treats all rows alike, else of rows in global order."""
    in_place = changes_in_place(func) or func is Tensor.__setitem__
    if func in IN_ANY_ORDER:
        own_args, own_kwargs = aligned(args, kwargs, in_place)
        with suppress(OutOfOrder):
            return ShardTensor.__torch_function__(func, (), own_args, own_kwargs)
    first: Any = args[0] if args else None
    writes = in_place and isinstance(first, ReorderedTensor)
    args, kwargs = tree_map(_in_order, (args, kwargs))
    result = ShardTensor.__torch_function__(func, (), args, kwargs)
    if writes:  # what was written to the copy in order
        if args[0].spec.shape != first.spec.shape:
            raise no_rule(func, (first,), kwargs, "it gives rows that have an order another shape")
        with LocalTensors():
            first.copy_(local(to_spec(args[0], first.spec)))
        return first if result is args[0] else result
    for x in () if in_place else tree_leaves(result):
        if isinstance(x, ShardTensor):  # where torch's is a view, the copy is not to be written to
            x.copied_from = name_of(func)
    return result


def _in_order(x):
    """An argument, its rows in global order."""
    return in_global_order(x) if isinstance(x, ShardTensor) else x


def aligned(
    args: tuple,
    kwargs: dict[str, Any],
    in_place: bool,
) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with those of several Orders in one: in place that of the first, else the most even one.

    Of Orders as even as each other it is the last: most models put the ends of an edge as (source, target), and sum up
    at the target.
    """
    found = [x.spec for x in tree_leaves((args, kwargs)) if isinstance(x, ReorderedTensor)]
    chosen = found[0].dims[ordered_dim(found[0])]
    for spec in found[1:]:
        axes = spec.dims[ordered_dim(spec)]
        if axes[0].order.most <= chosen[0].order.most and not in_place:
            chosen = axes

    def fit(x: Any) -> Any:
        if not isinstance(x, ReorderedTensor):
            return x
        dim = ordered_dim(x.spec)
        axes = x.spec.dims[dim]
        is_other = axes != chosen and axes[0].size == chosen[0].size
        return to_spec(x, x.spec.with_axes(dim, chosen)) if is_other else x

    return (args, kwargs) if len(found) == 1 else tree_map(fit, (args, kwargs))


shard_tensor.in_any_order = in_any_order
shard_tensor.put_in_order = in_global_order
