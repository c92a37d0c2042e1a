"""Concatenate tensors, and reorder or repeat the rows of a tensor."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distributed.collectives import concatenated
from distributed.shard.core.axes import Axis, merged, mesh_dims_of, prefix_axes, unsplit_axes
from distributed.shard.core.halo import HaloExchange, bounds
from distributed.shard.core.operands import global_shape, joint_axes
from distributed.shard.core.plans import Plan, as_it_is, fit_of, planned_of_tensors
from distributed.shard.core.spec import Spec, shard_sizes
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from distributed.shard.ops.along import on_whole
from distributed.shard.ops.reductions import dims_of
from distributed.shard.ops.views import numbers


@rule(*named("stack"))
@planned_of_tensors
def stack(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Plan:
    """Stack along a new whole dimension, after bringing the tensors to one split. Raises RuntimeError as cat."""
    shapes = [tuple(global_shape(x)) for x in tensors]
    if len(set(shapes)) > 1:
        raise RuntimeError(f"stack: sizes differ: {shapes}")
    spec = common_split(tensors)
    fits = [fit_of(x, spec) for x in tensors]
    dims = list(spec.dims)
    dims.insert(dim % (len(dims) + 1), unsplit_axes(len(tensors)))
    stacked = spec.with_dims(dims)
    if all(fit is as_it_is for fit in fits):
        return Plan(torch.stack, stacked)

    def compute(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        parts = [fit(x) for fit, x in zip(fits, tensors, strict=True)]
        return torch.stack(parts, dim)

    return Plan(compute, stacked)


@rule(*named("cat", "concat", "concatenate"))
@planned_of_tensors
def cat(func: Callable, tensors: Sequence[Tensor], dim: int = 0) -> Plan:
    """Concatenate in global order. Along a split dimension rows move to the ranks that hold them in the result.

    Raises RuntimeError where other sizes differ, and no_rule for rows behind the tokens of tiles.
    """
    given = _with_rows(tensors)
    has_all = len(given) == len(tensors)
    dim, specs, joined = joined_specs(func, given, dim)
    fits = [fit_of(x, spec) for x, spec in zip(given, specs, strict=True)]
    join = concatenated if len(joined.shape) == 1 else torch.cat

    # Each rank joins the rows that it holds in the result.
    def compute(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = tensors if has_all else _with_rows(tensors)
        parts = [fit(x) for fit, x in zip(fits, given, strict=True)]
        return join(parts, dim)

    return Plan(compute, joined)


def _with_rows(tensors):
    """The tensors but empty ones of one dimension, which torch skips too."""
    return [x for x in tensors if tuple(global_shape(x)) != (0,)]


def common_split(tensors: Sequence[Tensor], *first: ShardTensor) -> Spec:
    """The spec of tensors of one shape, each dimension with the first split that one has, those of `first` ahead.

    It is partial where all of them are, over the same mesh dimensions.
    """
    split = [x.spec for x in (*first, *tensors) if isinstance(x, ShardTensor)]
    # Each dimension is its own label: all tensors have the same ones.
    labelled = [(spec, range(len(spec.dims))) for spec in split]
    sizes = dict(enumerate(split[0].shape))
    axes = joint_axes(labelled, sizes, set())
    kinds = {x.spec.partial if isinstance(x, ShardTensor) else None for x in tensors}
    partial = split[0].partial if len(kinds) == 1 else ()
    return split[0].with_dims(axes.values(), partial)


def joined_specs(
    func: Callable,
    tensors: Sequence[Tensor],
    dim: int,
) -> tuple[int, list[Spec], Spec]:
    """(dim, the spec of each tensor as its rows lie in the result, the spec of the result)."""
    parts = [x for x in tensors if isinstance(x, ShardTensor)]
    (dim,) = dims_of(parts[0].spec, dim)
    counts = _rows_of_each(tensors, dim)

    # The split of the other dimensions: of a tensor that is split along dim, where there is one.
    cut = [x for x in parts if x.spec.is_split(dim)]  # tensors that are split along dim
    base = common_split(tensors, *cut[:1])

    # The axes of dim: of each tensor, cut as its rows lie in the result (pieces), and of the result (joined).
    axes = cut[-1].spec.dims[dim] if cut else ()
    if not cut:
        pieces = [unsplit_axes(n) for n in counts]
        joined = unsplit_axes(sum(counts))
    elif len(axes) > 1:  # a product of axes, which are tokens of tiles
        if tensors[-1] is not cut[-1]:
            raise no_rule(func, tensors, {}, f"rows behind those of dimension {dim}, which is not in one piece")
        pieces, joined = _in_front_of_tiles(axes, counts)
    else:
        for part in cut:
            part.spec.split(dim)  # or CannotSplit
        pieces, joined = _in_one_piece(tensors, counts, dim, cut[0].spec)
    wanted = [base.with_axes(dim, piece) for piece in pieces]
    return dim, wanted, base.with_axes(dim, joined)


def _rows_of_each(tensors, dim):
    """The sizes of tensors along dim, which have the same size in all other dimensions."""
    shapes = [tuple(global_shape(x)) for x in tensors]
    other_sizes = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(other_sizes) > 1:
        raise RuntimeError(f"cat: sizes differ in other dimensions than {dim}: {shapes}")
    return [shape[dim] for shape in shapes]


def _in_front_of_tiles(axes, counts):
    """(axes of each tensor, axes of the result) of class tokens ahead of the tokens of tiles, which come last.

    The rank with the first tile holds the class tokens. For plain class tokens nothing is communicated.
    """
    in_front = counts[:-1]
    pieces = [prefix_axes(axes, n) for n in in_front]
    prefix = axes[0].prefix + sum(in_front)
    first = axes[0]._replace(prefix=prefix)
    return [*pieces, axes], (first, *axes[1:])


def _in_one_piece(tensors, counts, dim, spec):
    """(axes of each tensor, axes of the result) where each rank holds consecutive rows. spec: of a split tensor."""
    (axis,) = spec.dims[dim]
    mesh_dim = axis.mesh_dim
    group = spec.mesh.groups[mesh_dim]
    sizes = _new_sizes(tensors, counts, dim, mesh_dim, group)
    # Each tensor begins where the ones before it end.
    pieces = []
    for n, end in zip(counts, accumulate(counts), strict=True):
        pieces.append(_piece(n, end - n, mesh_dim, sizes))
    joined = (Axis(sum(counts), mesh_dim, sizes),)
    return pieces, joined


def _piece(count, start, mesh_dim, sizes):
    """The axes of `count` rows that begin at row `start` of a dimension with pieces of these sizes."""
    end = start + count
    # The result's pieces cut these rows: each rank holds what lies in its piece.
    held = []
    for first, last in bounds(sizes):
        overlap = min(last, end) - max(first, start)
        held.append(max(0, overlap))
    return (Axis(count, mesh_dim, tuple(held)),)


def _new_sizes(tensors, counts, dim, mesh_dim, group):
    """Sizes of the ranks' pieces. A large split tensor stays in place; the tensors beside it go to the outer ranks."""
    cut = []
    for x in tensors:
        split_by = mesh_dims_of(x.spec.dims[dim]) if isinstance(x, ShardTensor) else set()
        cut.append(mesh_dim in split_by)
    # Moving the largest split tensor would cost most.
    numbers = range(len(tensors))
    largest = max(numbers, key=lambda i: (cut[i], counts[i]))
    total = sum(counts)
    others = total - counts[largest]
    # Where the others are more than a rank's share, the outer ranks would hold too much: all pieces become even.
    if others * group.size > counts[largest]:
        return shard_sizes(total, group.size)
    (axis,) = tensors[largest].spec.dims[dim]
    sizes = list(axis.sizes)
    sizes[0] += sum(counts[:largest])  # the tensors in front
    sizes[-1] += sum(counts[largest + 1 :])  # and behind
    return tuple(sizes)


@rule(*named("flip"))
def flip(
    func: Callable,
    input: ShardTensor,
    *dims: Any,
    **keywords: Any,
) -> ShardTensor:
    """Reverse dimensions, given as numbers or as one tuple. Ranks of a split one send their piece to the opposite."""
    # The ranks reverse their own rows, and exchange pieces along split dimensions.
    dims = numbers(dims, keywords)
    spec = input.spec
    part = local(input)
    for dim in dims_of(spec, dims) if dims else ():
        split = spec.split(dim)
        if split is None:
            continue
        sizes, group = split
        # The opposite rank's rows come as they are; this rank reverses them below.
        spec = spec.resized({dim: sizes[::-1]})
        opposite = bounds(sizes)[::-1]
        exchange = HaloExchange(part, dim, sizes, opposite, group)
        part = exchange.rows()
    return wrap(part.flip(dims), spec)


@rule(*named("roll"))
def roll(
    func: Callable,
    input: ShardTensor,
    shifts: int | Sequence[int],
    dims: int | Sequence[int] | None = None,
) -> ShardTensor:
    """Shift rows cyclically along dims; without dims, elements of the flattened tensor."""
    if dims is None or dims == ():
        flat = dispatch(torch.flatten, input)
        is_product = len(flat.spec.dims[0]) > 1  # the rows of each rank are in many pieces
        if is_product:
            return on_whole(input, range(len(input.spec.dims)), lambda part: part.roll(shifts))
        rolled = roll(func, flat, shifts, 0)
        return dispatch(torch.reshape, rolled, input.spec.shape)
    spec = input.spec
    part = local(input)
    shifts = (shifts,) if isinstance(shifts, int) else shifts
    for shift, dim in zip(shifts, dims_of(spec, dims), strict=True):
        split = spec.split(dim)
        length = spec.shape[dim]
        if split is None:
            part = part.roll(shift, dim)
        elif length:
            sizes, group = split
            shift %= length
            # Row i of the result is row i - shift of the input, modulo the length.
            rows = [(first - shift, last - shift) for first, last in bounds(sizes)]
            pending = HaloExchange(part, dim, sizes, rows, group, periodic=True)
            # Where nothing is joined, rows() is a view of this rank's part, and roll never returns a view.
            part = pending.rows() if pending.joined else part.clone()
    return wrap(part, spec)


@rule(*named("repeat", "tile"))
def repeat(
    func: Callable,
    input: ShardTensor,
    *repeats: Any,
    **keywords: Any,
) -> ShardTensor:
    """Repeat along whole and split dimensions: every rank repeats its piece."""
    repeats = numbers(repeats, keywords)
    # More repeats than dimensions add dimensions in front, as in torch.
    count = len(input.spec.dims)
    if len(repeats) < count:
        if func.__name__ == "repeat":
            raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions")
        ones = [1] * (count - len(repeats))
        repeats = (*ones, *repeats)
    new_dims = len(repeats) - count
    dims = [unsplit_axes(n) for n in repeats[:new_dims]]
    for axes, n in zip(input.spec.dims, repeats[new_dims:], strict=True):
        if n > 1 and axes and axes[0].prefix:
            raise no_rule(func, (input,), {}, "of class tokens and tiles")
        # The repetition is an outer axis: (n, rows), of which each rank holds its rows n times.
        repeated = merged((Axis(n), *axes))
        dims.append(repeated)
    return wrap(input.repeat(*repeats), input.spec.with_dims(dims))


@rule(*named("repeat_interleave"))
def repeat_interleave(
    func: Callable,
    input: ShardTensor,
    repeats: int,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> ShardTensor:
    """Repeat every row `repeats` times."""
    if not isinstance(repeats, int):
        raise no_rule(func, (input,), {}, "a number of repetitions for each row")
    if dim is None:
        input = dispatch(torch.flatten, input)
        dim = 0
    spec = input.spec
    dim = dim % len(spec.dims)
    axes = spec.dims[dim]
    if axes and axes[0].prefix:
        raise no_rule(func, (input,), {}, "of class tokens and tiles")
    repeated = merged((*axes, Axis(repeats)))  # an inner axis: each row has its copies beside it
    return wrap(input.repeat_interleave(repeats, dim), spec.with_axes(dim, repeated))


@rule(*named("tril", "triu"))
def triangle(func: Callable, input: ShardTensor, diagonal: int = 0) -> ShardTensor:
    """Lower or upper triangle of the whole matrix, whose rows and columns may be split."""
    spec = input.spec
    rows, columns = spec.dims[-2:]
    for axes in (rows, columns):
        is_product = len(axes) > 1
        if is_product and mesh_dims_of(axes):
            raise no_rule(func, (input,), {}, "rows or columns are not in one piece")
    # The diagonal of the whole matrix crosses this rank's part at another place.
    first_row = sum(spec.offset(axis) for axis in rows)
    first_column = sum(spec.offset(axis) for axis in columns)
    own_diagonal = diagonal + first_row - first_column
    plain = torch.tril if func.__name__ == "tril" else torch.triu
    return wrap(plain(input, own_diagonal), spec)
