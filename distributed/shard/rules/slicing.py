"""Slices by their names: narrow, split, chunk, unbind, select, index_select. Each is an index (indexing.py)."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from distributed.shard.rules.indexing import getitem
from distributed.shard.spec import Spec, shard_sizes
from distributed.shard.tensor import ShardTensor, named, rule, wrap


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


@rule(*named("unbind"))
def unbind(
    func: Callable,
    input: ShardTensor,
    dim: int = 0,
) -> tuple[ShardTensor, ...]:
    """All rows, each without its dimension. Rows of a split dimension are partial tensors."""
    spec = input.spec
    dim = dim % len(spec.dims)
    if spec.is_split(dim):
        indices = [index_in(input, dim, i) for i in range(spec.shape[dim])]
        return tuple([getitem(func, input, index) for index in indices])

    def without_dim() -> Spec:
        before = spec.dims[:dim]
        behind = spec.dims[dim + 1 :]
        return spec.with_dims([*before, *behind])

    left = spec.derived(("unbind", dim), without_dim)
    return tuple([wrap(part, left) for part in input.unbind(dim)])


@rule(*named("split", "split_with_sizes"))
def split(
    func: Callable,
    tensor: ShardTensor,
    *args: Any,
    dim: int = 0,
    **named_sizes: Any,
) -> tuple[ShardTensor, ...]:
    """Split into pieces. Along a split dimension each rank holds its own part of every piece."""
    # dim may stand among the other arguments, behind the sizes.
    sizes, dim, *_ = (*args, *named_sizes.values(), dim)
    dim = dim % len(tensor.spec.dims)
    size = tensor.spec.shape[dim]
    if isinstance(sizes, int):
        each = sizes
        starts = range(0, size, each)
        sizes = [min(each, size - first) for first in starts] or [0]  # no rows are one empty piece
    if sum(sizes) != size:
        raise RuntimeError(f"split: sizes {list(sizes)} do not make up dimension {dim} of {size}")
    cuts = list(accumulate(sizes))[:-1]  # first rows of all pieces but the first
    return tensor_split(func, tensor, cuts, dim)


@rule(*named("tensor_split"))
def tensor_split(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    dim: int = 0,
    **named_cuts: Any,
) -> tuple[ShardTensor, ...]:
    """Split into pieces as even as possible, or at given rows."""
    # dim may stand among the other arguments, behind the cuts.
    cuts, dim, *_ = (*args, *named_cuts.values(), dim)
    size = input.spec.shape[dim]
    dim = dim % len(input.spec.dims)
    # torch makes the first pieces the longer ones, as shard_sizes does.
    if isinstance(cuts, int):  # a number of pieces
        *cuts, _ = accumulate(shard_sizes(size, cuts))
    ends = [0, *cuts, size]
    pieces = []
    for first, last in pairwise(ends):
        index = index_in(input, dim, slice(first, last))
        pieces.append(getitem(func, input, index))
    return tuple(pieces)


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


@rule(*named("chunk"))
def chunk(
    func: Callable,
    input: ShardTensor,
    chunks: int,
    dim: int = 0,
) -> tuple[ShardTensor, ...]:
    """Split into pieces of one size, of which the last may be shorter."""
    size = input.spec.shape[dim]
    longest = -(-size // chunks)
    sizes = longest if size else [0] * chunks
    return split(func, input, sizes, dim)
