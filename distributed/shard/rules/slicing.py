"""Slices by their names: narrow, split, chunk, unbind, select, index_select. Each is an index (indexing.py)."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from distributed.shard.plans import Plan, planned, planned_else
from distributed.shard.rules.indexing import getitem, index_items, locate
from distributed.shard.spec import shard_sizes
from distributed.shard.tensor import ShardTensor, named, rule


def index_in(x: ShardTensor, dim: int, item: Any) -> tuple:
    """The index that selects `item` in a dimension of x, and all of the others: x.select(1, 3) is x[:, 3]."""
    dim = dim % len(x.spec.dims)
    all_rows = [slice(None)] * dim
    return (*all_rows, item)


@rule(*named("narrow"))
def narrow(
    func: Callable,
    input: ShardTensor,
    dim: int,
    start: Any,
    length: int,
) -> ShardTensor:
    """A slice of rows. start may be a tensor with one number."""
    dim = dim % len(input.spec.dims)
    size = input.spec.shape[dim]
    start = int(start)
    if start < 0:
        start += size
    end = start + length
    if not 0 <= start <= end <= size:
        raise RuntimeError(f"narrow: rows {start} to {end} of {size}")
    index = index_in(input, dim, slice(start, end))
    return getitem(func, input, index)


def plan_of_rows(func: Callable, input: ShardTensor, dim: int = 0) -> Plan | None:
    """All rows of a dimension that every rank has whole."""
    spec = input.spec
    dim = dim % len(spec.dims)
    if spec.is_split(dim):
        return None
    before = spec.dims[:dim]
    behind = spec.dims[dim + 1 :]
    row = spec.with_dims([*before, *behind])
    return Plan(func, [row] * spec.shape[dim])


@rule(*named("unbind"))
@planned_else(plan_of_rows)
def unbind(
    func: Callable,
    input: ShardTensor,
    dim: int = 0,
) -> tuple[ShardTensor, ...]:
    """All rows of a split dimension, each without it: partial tensors."""
    indices = [index_in(input, dim, i) for i in range(input.spec.shape[dim])]
    return tuple([getitem(func, input, index) for index in indices])


def plan_of_pieces(func: Callable, input: ShardTensor, dim: int, ends: Iterable[int]) -> Plan:
    """Pieces of a dimension; each rank holds its own part of every piece. ends: behind the last row of each piece."""
    specs = []
    own_sizes = []
    for first, last in pairwise([0, *ends]):
        items = index_items(func, input, index_in(input, dim, slice(first, last)))
        piece, _ = locate(func, input, items)
        specs.append(piece)
        own_sizes.append(piece.local_shape[dim])

    def compute(part: Tensor, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        return part.split_with_sizes(own_sizes, dim)

    return Plan(compute, specs)


@rule(*named("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"))
@planned
def split(
    func: Callable,
    tensor: ShardTensor,
    *args: Any,
    dim: int = 0,
    **named_sizes: Any,
) -> Plan:
    """Split into pieces of one size, or of some sizes."""
    # dim may stand among the other arguments, behind the sizes.
    sizes, dim, *_ = (*args, *named_sizes.values(), dim)
    dim = dim % len(tensor.spec.dims)
    size = tensor.spec.shape[dim]
    if isinstance(sizes, int):
        starts = range(0, size, sizes)
        sizes = [min(sizes, size - first) for first in starts] or [0]  # no rows are one empty piece
    if sum(sizes) != size:
        raise RuntimeError(f"split: sizes {list(sizes)} do not make up dimension {dim} of {size}")
    return plan_of_pieces(func, tensor, dim, accumulate(sizes))


@rule(*named("tensor_split"))
@planned
def tensor_split(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    dim: int = 0,
    **named_cuts: Any,
) -> Plan:
    """Split into pieces as even as possible, or at given rows."""
    # dim may stand among the other arguments, behind the cuts.
    cuts, dim, *_ = (*args, *named_cuts.values(), dim)
    dim = dim % len(input.spec.dims)
    size = input.spec.shape[dim]
    # torch makes the first pieces the longer ones, as shard_sizes does.
    if isinstance(cuts, int):  # a number of pieces
        *cuts, _ = accumulate(shard_sizes(size, cuts))
    return plan_of_pieces(func, input, dim, [*cuts, size])


@rule(*named("chunk", "unsafe_chunk"))
@planned
def chunk(
    func: Callable,
    input: ShardTensor,
    chunks: int,
    dim: int = 0,
) -> Plan:
    """Split into pieces of one size, of which the last may be shorter."""
    dim = dim % len(input.spec.dims)
    size = input.spec.shape[dim]
    longest = -(-size // chunks)
    ends = [min(end, size) for end in range(longest, size + longest, longest)] if size else [0] * chunks
    return plan_of_pieces(func, input, dim, ends)


@rule(*named("select"))
def select(
    func: Callable,
    input: ShardTensor,
    dim: int,
    index: Any,
) -> ShardTensor:
    """One row, without its dimension."""
    return getitem(func, input, index_in(input, dim, int(index)))


@rule(*named("index_select"))
def index_select(
    func: Callable,
    input: ShardTensor,
    dim: int,
    index: Tensor,
) -> ShardTensor:
    """Some rows, by their indices."""
    return getitem(func, input, index_in(input, dim, index.reshape(-1)))
