"""Operations along one dimension that treat all others alike: sorting, cumulative products, medians, quantiles.

Where that dimension is whole, each rank computes its part and nothing is communicated. A split one is made whole: its
split moves to another dimension by one all-to-all, and moves back if the result has rows to split. Fourier transforms
(fourier.py) and recurrent layers (recurrent.py) are computed so, too.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.operands import (
    gradient_spec,
    redistribute,
    sum_partial,
    to_spec,
    whole_weight,
)
from distributed.shard.core.redistribute import sizes_of
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from distributed.shard.ops.reductions import Dims, dims_of, drop_dims
from distributed.shard.ops.windows import Window, fetch_halos, no_outputs, output_shape, splits_of

# {name: (position of dim among the arguments, its default; None: all dimensions)}
ALONG: dict[str, tuple[int, Dims]] = {
    "sort": (1, -1),
    "argsort": (1, -1),
    "msort": (1, 0),
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "mode": (1, -1),
    "median": (1, None),
    "nanmedian": (1, None),
    "quantile": (2, None),
    "nanquantile": (2, None),
    "prod": (1, None),
    "cumprod": (1, None),
    "logcumsumexp": (1, None),
    "cummax": (1, None),
    "cummin": (1, None),
    "glu": (1, -1),
    "unique": (9, None),
    "unique_consecutive": (9, None),
    "aminmax": (9, None),
}


def unshard_dims(x: ShardTensor, dims: Iterable[int]) -> ShardTensor:
    """Make dims whole on every rank: what splits them splits another dimension instead, the longest whole one.

    dims: not negative. Costs one all-to-all for each mesh dimension that splits dims, or one all-gather if there is no
    other dimension.
    """
    # Functions of a whole dimension are not linear.
    x = sum_partial(x)
    dims = tuple(dims)
    for m, placement in enumerate(x.spec.placements):
        if isinstance(placement, Shard) and placement.dim in dims:
            x = move_split(x, m, dims)
    return x


def move_split(x: ShardTensor, m: int, dims: Iterable[int]) -> ShardTensor:
    """Let mesh dimension m split the longest whole dimension of x that is not among dims; none if there is none."""
    shape = x.spec.shape
    candidates = []
    for d, n in enumerate(shape):
        is_whole = not x.spec.is_split(d)
        if d not in dims and is_whole and n > 1:
            candidates.append(d)
    # The longest dimension keeps the parts most even.
    placements: list[Placement] = list(x.spec.placements)
    if candidates:
        longest = max(candidates, key=shape.__getitem__)
        placements[m] = Shard(longest)
    else:
        placements[m] = Replicate()
    return redistribute(x, placements)


def split_again(x: ShardTensor) -> ShardTensor:
    """Sum up a partial tensor (B, C, ...), and split it along its longest whole dimensions other than B and C."""
    for m in x.spec.partial:
        x = move_split(x, m, (0, 1))
    return x


def restore_sharding(y: ShardTensor, before: Spec) -> ShardTensor:
    """Split y as the tensor with the spec `before` was, which has as many dimensions.

    A dimension that is as long as before gets the same sizes on the ranks; one of another length is cut evenly.
    """
    before = gradient_spec(before)  # y is no sum, whatever it was computed of
    # Nothing has moved.
    if y.spec.placements == before.placements:
        return y
    if y.spec.shape == before.shape:
        return to_spec(y, before)
    placements: Any = list(before.placements)
    sizes = {}
    dims_cut = set()
    for m, pieces in sizes_of(before).items():
        dim = placements[m].dim
        if dim in dims_cut:  # a product of axes, which has another length now: one mesh dimension cuts it
            placements[m] = Replicate()
        elif y.spec.shape[dim] == sum(pieces):
            sizes[m] = pieces
        dims_cut.add(dim)
    return redistribute(y, placements, sizes)


def on_whole(
    x: ShardTensor,
    dims: Sequence[int],
    compute: Callable[[Tensor], Any],
    resizes: bool = False,
) -> Any:
    """compute(local part of x, of which dims are whole), as ShardTensors that are split as x if they have its shape.

    compute: gives a tensor, several, or a named tuple of torch.return_types; this function gives the same of
    ShardTensors. A result has all dimensions of x, perhaps with other sizes of dims, or it lacks dims. resizes: split
    results with other sizes as x, too.
    """
    whole = unshard_dims(x, dims)
    part = local(whole)

    # A rank without elements computes with a placeholder, because many functions reject empty tensors.
    empty = [d for d, n in enumerate(part.shape) if n == 0 and d not in dims]
    # A sum over no rows is a row of zeros, which keeps this rank in the graph of its input.
    placeholder = part.sum(empty, keepdim=True, dtype=part.dtype) if empty else part
    out = compute(placeholder)

    # A function may return one tensor, several, or a named tuple of them.
    if isinstance(out, Tensor):
        return _wrap_result(out, x.spec, whole.spec, dims, empty, resizes)
    results = [_wrap_result(y, x.spec, whole.spec, dims, empty, resizes) for y in out]
    if type(out) in (tuple, list):
        return tuple(results)
    return type(out)(results)  # a named tuple of torch.return_types


def _wrap_result(y, before, whole, dims, empty, resizes):
    """A local result y of on_whole as a ShardTensor, split as x where it has the shape for it.

    before, whole: specs of x, and of x with whole dims. empty: dimensions without rows on this rank, in which y has the
    row of a placeholder.
    """
    count = len(whole.dims)
    keepdim = y.dim() == count
    if len(dims) == count:  # nothing of x is split, nor of the result
        axes = list(map(unsplit_axes, y.shape))
    else:
        # Drop the placeholder's rows. Where y lacks dims, the dimensions behind them have moved up.
        for d in empty:
            removed_before = [] if keepdim else [other for other in dims if other < d]
            y = y.narrow(d - len(removed_before), 0, 0)
        # The dimensions that y has kept are split as before; dims, which are whole, may have other sizes.
        axes = list(drop_dims(whole, dims, keepdim).dims)
        if keepdim:
            for d in dims:
                axes[d] = unsplit_axes(y.shape[d])
    result = wrap(y, whole.with_dims(axes))
    splits_back = resizes or result.spec.shape == before.shape
    return restore_sharding(result, before) if splits_back else result


@rule(*named(*ALONG))
def along(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The functions of ALONG. Without dim they see the whole tensor, which every rank gathers.

    Raises no_rule for a second ShardTensor among the arguments.
    """
    others = (*args, *kwargs.values())
    if any(isinstance(value, ShardTensor) for value in others):
        raise no_rule(func, (input, *args), kwargs, "of two ShardTensors")
    place, default = ALONG[func.__name__]
    # `input` is the argument at place 0, and `args` begin behind it.
    by_position = args[place - 1] if len(args) >= place else default
    dim = kwargs.get("dim", by_position)
    dims = dims_of(input.spec, dim)

    def compute(part: Tensor) -> Any:
        return func(part, *args, **kwargs)

    return on_whole(input, dims, compute)


@rule(*named("quantile", "nanquantile"))
def quantile(
    func: Callable,
    input: ShardTensor,
    q: Any,
    *args: Any,
    **kwargs: Any,
) -> ShardTensor:
    """One quantile, or several as a new first dimension."""
    q = whole_weight(q, input.spec)
    has_several = isinstance(q, Tensor) and q.dim() > 0
    if has_several:
        quantiles = [along(func, input, each, *args, **kwargs) for each in q.unbind()]
        return dispatch(torch.stack, quantiles)
    return along(func, input, q, *args, **kwargs)


@rule(torch.gradient)
def gradient(
    func: Callable,
    input: ShardTensor,
    *,
    spacing: Any = 1,
    dim: Dims = None,
    edge_order: int = 1,
) -> list:
    """Central differences along each of the dimensions."""
    dims = dims_of(input.spec, dim)
    # The spacing is one for all dimensions, or one for each: a number, or the coordinates of the rows.
    steps = spacing if isinstance(spacing, list | tuple) else [spacing] * len(dims)
    # torch.gradient gives one tensor for each dimension.
    slopes = []
    for d, step in zip(dims, steps, strict=True):
        if isinstance(step, Tensor):  # the coordinates of the rows
            step = (whole_weight(step, input.spec),)
        central = partial(torch.gradient, spacing=step, dim=d, edge_order=edge_order)
        slopes += on_whole(input, (d,), central)
    return slopes


@rule(Tensor.unfold)
def unfold(
    func: Callable,
    input: ShardTensor,
    dimension: int,
    size: int,
    step: int,
) -> ShardTensor:
    """(..., rows, ...) -> (..., windows, ..., size): each rank fetches the rows of its windows."""
    x = sum_partial(input)
    dim = dimension % len(input.spec.dims)
    part = local(x)
    splits = splits_of(x, (dim,))
    window_of = {dim: Window(size, step)}
    shape = output_shape(func, part, splits, window_of)  # (..., windows, ...) of the whole
    # A window belongs to the rank that holds its middle row. From here on `shape` has this rank's windows.
    part, out_sizes, _ = fetch_halos(part, splits, window_of, shape, fill=None)
    resized = x.spec.resized({dim: out_sizes.get(dim, shape[dim])})
    out = x.spec.with_dims((*resized.dims, unsplit_axes(size)))
    if 0 in shape:
        return wrap(no_outputs(part, out.local_shape), out)
    unfolded = part.unfold(dim, size, step)  # (..., windows, ..., size)
    return wrap(unfolded, out)
