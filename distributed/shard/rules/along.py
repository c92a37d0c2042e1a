"""Operations along one dimension, alike for all others: sorting, cumulative products, Fourier and recurrent layers.

Where that dimension is whole, each rank computes its part and nothing is communicated. A split one is made whole: its
split moves to another dimension by one all-to-all, and moves back if the result has rows to split.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from distributed.shard.operands import (
    as_replicated,
    global_shape,
    local_operand,
    redistribute,
    scale_grad_by_replicas,
    sum_partial,
)
from distributed.shard.redistribute import sizes_of
from distributed.shard.rules.reductions import Dims, dims_of, drop_dims
from distributed.shard.rules.spatial import fetch_halos, no_outputs, splits_of
from distributed.shard.rules.windows import Window, output_shape
from distributed.shard.spec import Spec, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap

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
    """The tensor with whole dims: another dimension, the longest whole one, is split instead.

    Costs one all-to-all for each mesh dimension that splits dims, or one all-gather if there is no other dimension.
    """
    # Functions of a whole dimension are not linear.
    x = sum_partial(x)
    dims = tuple(dims)
    for m, placement in enumerate(x.spec.placements):
        if isinstance(placement, Shard) and placement.dim in dims:
            x = moved(x, m, dims)
    return x


def moved(x: ShardTensor, m: int, dims: Iterable[int]) -> ShardTensor:
    """The tensor of which mesh dimension m splits the longest whole dimension that is not among dims, or none."""
    shape = x.spec.shape
    free = []
    for d, n in enumerate(shape):
        is_whole = not x.spec.is_split(d)
        if d not in dims and is_whole and n > 1:
            free.append(d)
    # The longest dimension keeps the parts most even.
    placements: list[Placement] = list(x.spec.placements)
    if free:
        longest = max(free, key=shape.__getitem__)
        placements[m] = Shard(longest)
    else:
        placements[m] = Replicate()
    return redistribute(x, placements)


def split_again(x: ShardTensor) -> ShardTensor:
    """A partial tensor summed up and split along its longest whole dimensions, batch and channels aside."""
    for m in x.spec.partial:
        x = moved(x, m, (0, 1))
    return x


def restore_sharding(y: ShardTensor, before: Spec) -> ShardTensor:
    """The tensor split as one of as many dimensions was, in the same sizes where the dimensions are as long."""
    # Nothing has moved.
    if y.spec.placements == before.placements:
        return y
    places: Any = before.placements
    sizes = {}
    for m, pieces in sizes_of(before).items():
        dim = places[m].dim
        if y.spec.shape[dim] == sum(pieces):
            sizes[m] = pieces
    return redistribute(y, places, sizes)


def on_whole(
    x: ShardTensor,
    dims: Sequence[int],
    compute: Callable[[Tensor], Any],
    resizes: bool = False,
) -> Any:
    """compute(local part of x, of which dims are whole), as ShardTensors that are split as x if they have its shape.

    A result has all dimensions of x, perhaps with other sizes of dims, or it lacks dims. A rank without elements
    computes with a placeholder, because many functions reject empty tensors. resizes: split those with other sizes too.
    """
    moved = unshard_dims(x, dims)
    part = local(moved)
    spec = moved.spec
    empty = [d for d, n in enumerate(part.shape) if n == 0 and d not in dims]
    # A sum over no rows is a row of zeros, which keeps this rank in the graph of its input.
    placeholder = part.sum(empty, keepdim=True, dtype=part.dtype) if empty else part
    out = compute(placeholder)

    def wrapped(y: Tensor) -> ShardTensor:
        """A result as a ShardTensor, split as x where it has the shape for it."""
        keepdim = y.dim() == part.dim()
        nothing_is_split = len(dims) == part.dim()
        if nothing_is_split:
            whole_dims = map(unsplit_axes, y.shape)
            result = wrap(y, spec.with_dims(whole_dims))
        else:
            for d in empty:  # drop the placeholder's row
                removed = [] if keepdim else [other for other in dims if other < d]
                y = y.narrow(d - len(removed), 0, 0)
            axes = list(drop_dims(spec, dims, keepdim).dims)
            if keepdim:
                for d in dims:
                    axes[d] = unsplit_axes(y.shape[d])
            result = wrap(y, spec.with_dims(axes))
        splits_back = resizes or result.spec.shape == x.spec.shape
        return restore_sharding(result, x.spec) if splits_back else result

    # A function may return one tensor, several, or a named tuple of them.
    if isinstance(out, Tensor):
        return wrapped(out)
    results = [wrapped(y) for y in out]
    if type(out) in (tuple, list):
        return tuple(results)
    return type(out)(results)  # a named tuple of torch.return_types


@rule(*named(*ALONG))
def along(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The functions of ALONG. Without dim they see the whole tensor, which every rank gathers."""
    others = (*args, *kwargs.values())
    if any(isinstance(value, ShardTensor) for value in others):
        raise no_rule(func, (input, *args), kwargs, "of two ShardTensors")
    place, default = ALONG[func.__name__]
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
    # The spacing is one number for all dimensions, or one for each.
    steps = spacing if isinstance(spacing, list | tuple) else [spacing] * len(dims)
    # torch.gradient gives one tensor for each dimension.
    slopes = []
    for d, step in zip(dims, steps, strict=True):
        if isinstance(step, Tensor):  # the coordinates of the rows
            step = (step,)
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
    """Windows of a dimension, whose rows become the last dimension: each rank fetches the rows of its windows."""
    x = sum_partial(input)
    dim = dimension % len(input.spec.dims)
    part = local(x)
    splits = splits_of(x, (dim,))
    windows = {dim: Window(size, step)}
    shape = output_shape(func, part, splits, windows)  # (..., windows, ...)
    # A window belongs to the rank that holds its middle row.
    part, new, _ = fetch_halos(part, splits, windows, shape, fill=None)
    resized = x.spec.resized({dim: new.get(dim, shape[dim])})
    out = x.spec.with_dims((*resized.dims, unsplit_axes(size)))
    if 0 in shape:
        return wrap(no_outputs(part, out.local_shape), out)
    unfolded = part.unfold(dim, size, step)  # (..., windows, ..., size)
    return wrap(unfolded, out)


FOURIER = [
    torch.fft.fft,
    torch.fft.fft2,
    torch.fft.fftn,
    torch.fft.rfft,
    torch.fft.rfft2,
    torch.fft.rfftn,
    torch.fft.ifft,
    torch.fft.ifft2,
    torch.fft.ifftn,
    torch.fft.irfft,
    torch.fft.irfft2,
    torch.fft.irfftn,
]


@rule(*FOURIER)
def fourier(
    func: Callable,
    input: ShardTensor,
    s: Any = None,
    dim: Dims = None,
    norm: str | None = None,
    **keywords: Any,
) -> ShardTensor:
    """Fourier transforms of one or more dimensions: two all-to-alls for each that is split.

    The last dimension of a real transform comes first, that of the inverse last.
    """
    name = func.__name__.removeprefix("fft_")  # "irfft2": inverse, real, of two dimensions
    real = "rfft" in name
    inverse = name.startswith("i")

    # The dimensions, and the length of each: None keeps the length of the input.
    s = keywords.get("n", s)
    if name.endswith("fft"):  # of one dimension
        s = None if s is None else (s,)
        dim = -1 if dim is None else dim
    elif dim is None and name.endswith("2"):
        dim = (-2, -1)
    elif dim is None:
        count = len(s or input.spec.shape)
        dim = range(-count, 0)
    dims = dims_of(input.spec, dim)
    lengths = [None] * len(dims)
    if s is not None:
        lengths = [None if n == -1 else n for n in s]

    # One transform after the other. The real one is the first, or the last of an inverse.
    steps = list(zip(dims, lengths, strict=True))
    if not inverse:
        steps.reverse()
    real_step = len(steps) - 1 if inverse else 0
    x = input
    for i, (d, n) in enumerate(steps):
        if real and i == real_step:
            single = torch.fft.irfft if inverse else torch.fft.rfft
        else:
            single = torch.fft.ifft if inverse else torch.fft.fft
        transform = partial(single, n=n, dim=d, norm=norm)
        x = on_whole(x, (d,), transform, resizes=True)
    return x


@rule(torch.fft.fftshift, torch.fft.ifftshift)
def fourier_shift(func: Callable, input: ShardTensor, dim: Dims = None) -> ShardTensor:
    """Roll the frequency 0 to the middle, and back."""
    dims = dims_of(input.spec, dim)
    # A shift is a roll by half of each dimension.
    sign = 1 if func is torch.fft.fftshift else -1
    half_lengths = [input.spec.shape[d] // 2 for d in dims]
    shifts = [sign * half for half in half_lengths]
    return dispatch(torch.roll, input, shifts, dims)


@rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(
    func: Callable,
    input: Tensor,
    hx: Any,
    weights: Any,
    biases: Any,
    layers: Any = None,
    dropout: Any = 0.0,
    train: Any = False,
    bidirectional: Any = False,
    batch_first: Any = False,
) -> tuple[ShardTensor, ...]:
    """(B, T, D) or (T, B, D) -> the same with other features, and the last states (layers, B, D)."""
    states: Sequence[Tensor] = [hx] if isinstance(hx, Tensor) else list(hx)
    is_packed = not isinstance(weights, list | tuple) or not isinstance(train, bool)
    if is_packed or (dropout and train):
        raise no_rule(func, (input, *states), {}, "packed sequences, or dropout between layers")
    like = next(x for x in (input, *states) if isinstance(x, ShardTensor))
    # The input may be plain, where only the states are split.
    x = as_replicated(input, like.spec)
    if batch_first:
        x = dispatch(torch.transpose, x, 0, 1)
    # Each step needs the state of the one before, and all features.
    x = unshard_dims(x, (0, 2))  # (T, B, D), of which only B may be split
    # The states take the split of the samples.
    batch = x.spec.dims[1]
    parts = []  # (layers, b, D) each
    for state in states:
        count, _, features = global_shape(state)
        of_state = x.spec.with_dims((unsplit_axes(count), batch, unsplit_axes(features)))
        parts.append(local_operand(sum_partial(state), of_state))
    # Weights are plain: ranks with the same samples share their gradient.
    own_weights = [scale_grad_by_replicas(weight, x.spec) for weight in weights]

    def compute(part: Tensor) -> tuple[Tensor, ...]:
        """(T, b, D) of this rank's samples -> the outputs and last states of them."""
        first = []
        for state in parts:
            is_placeholder = state.shape[1] < part.shape[1]  # this rank has no samples
            first.append(state.sum(1, keepdim=True) if is_placeholder else state)
        hidden = first[0] if isinstance(hx, Tensor) else first
        return func(part, hidden, own_weights, biases, layers, dropout, train, bidirectional, False)

    y, *last = on_whole(x, (0, 2), compute)
    if batch_first:
        y = dispatch(torch.transpose, y, 0, 1)
    return y, *last
