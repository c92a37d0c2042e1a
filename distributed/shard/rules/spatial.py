"""Convolution, pooling, interpolation and padding of images with split spatial dimensions.

Samples may be split too. Channels may be split for all of these except convolution, which mixes channels.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Sizes, copy_to_region
from distributed.shard.operands import copied, reduced, shared, to_spec
from distributed.shard.rules import resampling
from distributed.shard.rules.along import made_whole
from distributed.shard.rules.convolution import convolve, convolve_transposed
from distributed.shard.rules.pooling import adaptive_pool, avg_pool, max_pool
from distributed.shard.rules.windows import DIMENSIONS, Output, Splits, no_outputs, of_kind
from distributed.shard.spec import Spec, whole
from distributed.shard.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap
from networks.vit import PerAxis


def splits_of(func: Callable, x: ShardTensor, dims: Iterable[int]) -> Splits:
    """{dimension: (sizes, Group)} of the split ones among dims."""
    try:
        found = {dim: x.spec.split(dim) for dim in dims}
    except ValueError as error:
        raise no_rule(func, (x,), {}, str(error)) from error
    return {dim: split for dim, split in found.items() if split is not None}


def images(x: ShardTensor, func: Callable) -> range:
    """The spatial dimensions of x, (B, C, ...) or (C, ...)."""
    count, ndim = DIMENSIONS[func], len(x.spec.dims)
    if ndim not in (count + 1, count + 2):
        raise ValueError(f"{func.__name__}: a tensor of {count + 1} or {count + 2} dimensions, not {ndim}")
    return range(ndim - count, ndim)


def result(
    x: ShardTensor, y: Tensor, sizes: Mapping[int, Sizes], dims: Iterable[int], spec: Spec | None = None
) -> ShardTensor:
    """The local output y as a ShardTensor that is split as x, with new sizes of dims."""
    return wrap(y, (spec or x.spec).resized({dim: sizes.get(dim, y.shape[dim]) for dim in dims}))


def convolved(
    implementation: Callable[..., Output], func: Callable, input: ShardTensor, weight: Tensor,
    bias: Tensor | None = None, *args: Any, **kwargs: Any,
) -> ShardTensor:  # fmt: skip
    """Convolve with a function of convolution.py; with the plain one if no spatial dimension is split.

    Each rank fetches the rows that its outputs need, and computes these with its copy of the weights.
    """
    if not isinstance(input, ShardTensor) or isinstance(weight, ShardTensor) or isinstance(bias, ShardTensor):
        raise no_rule(func, (input, weight, bias), {}, "the weights of a layer are plain tensors")
    x, dims = reduced(input), images(input, func)
    channels = dims[0] - 1
    if x.spec.is_split(channels):
        raise no_rule(func, (x,), {}, "channels are split")
    splits, part = splits_of(func, x, dims), local(x)
    weights = shared(weight, x.spec), shared(bias, x.spec)
    if splits:
        y, sizes = implementation(func, part, splits, *weights, *args, **kwargs)
    else:
        y, sizes = func(part, *weights, *args, **kwargs), {}
    spec = x.spec.with_dims(whole(y.shape[d]) if d == channels else axes for d, axes in enumerate(x.spec.dims))
    return result(x, y, sizes, dims, spec)


rule(*of_kind("conv"))(partial(convolved, convolve))
rule(*of_kind("conv_transpose"))(partial(convolved, convolve_transposed))


def pooled(implementation: Callable[..., Output], func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Pool with a function of pooling.py, which fetches rows; with the plain one if no spatial dimension is split."""
    if kwargs.pop("return_indices", False):
        with_indices(func, input)
    x, dims = reduced(input), images(input, func)
    splits, part = splits_of(func, x, dims), local(x)
    y, sizes = implementation(func, part, splits, *args, **kwargs) if splits else (func(part, *args, **kwargs), {})
    return result(x, y, sizes, dims)


rule(*of_kind("max_pool"))(partial(pooled, max_pool))
rule(*of_kind("avg_pool"))(partial(pooled, avg_pool))
rule(*of_kind("adaptive_max_pool"))(partial(pooled, partial(adaptive_pool, average=False)))


@rule(*of_kind("adaptive_avg_pool"))
def adaptive_avg_pooling(func: Callable, input: ShardTensor, output_size: PerAxis) -> ShardTensor:
    """Each rank gets outputs in proportion to its rows; the mean over all rows is a partial tensor."""
    if output_size in (1, (1,) * DIMENSIONS[func], [1] * DIMENSIONS[func]):
        # The mean is a sum over the ranks; otherwise one rank would fetch all rows.
        return dispatch(torch.mean, input, tuple(images(input, func)), keepdim=True)
    return pooled(partial(adaptive_pool, average=True), func, input, output_size)


@rule(*(f for kind in ("max", "adaptive_max") for n in (1, 2, 3) for f in named(f"{kind}_pool{n}d_with_indices")))
@rule(torch.adaptive_max_pool1d)  # always returns indices
def with_indices(func: Callable, x: ShardTensor, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise no_rule, because indices into a part are not indices into the whole."""
    raise no_rule(func, (x,), {}, "return_indices")


@rule(F.interpolate)
def interpolate(
    func: Callable, input: ShardTensor, size: PerAxis | None = None,
    scale_factor: float | Sequence[float] | None = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> ShardTensor:  # fmt: skip
    """Every mode; of split images with two rows of weights a row, bilinear and bicubic, antialiased too."""
    x, dims = reduced(input), range(2, len(input.spec.dims))
    splits, part = splits_of(func, x, dims), local(x)
    if not splits:
        y = func(part, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return result(x, y, {}, dims)
    if mode == "area":
        lengths, _ = resampling.wanted_lengths(part, splits, size, scale_factor, True)
        return adaptive_avg_pooling(getattr(F, f"adaptive_avg_pool{len(dims)}d"), x, lengths)
    if len(dims) == 2 and (mode == "bicubic" or antialias):
        y, sizes = resampling.by_matrix(
            part, splits, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
        return result(x, y, sizes, dims)
    if antialias or not resampling.supported(mode, len(dims)):
        raise no_rule(func, (x,), {}, f"mode '{mode}'" + antialias * " with antialias")
    y, sizes = resampling.interpolate(part, splits, size, scale_factor, mode, align_corners, recompute_scale_factor)
    return result(x, y, sizes, dims)


@rule(F.grid_sample)
def grid_sample(func: Callable, input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """Samples of images (B, C, ...) at places (B, ..., 2 or 3): split as the places are, of images made whole."""
    like = next(y for y in (input, grid) if isinstance(y, ShardTensor)).spec
    x, places = reduced(copied(input, like)), reduced(copied(grid, like))
    places = made_whole(places, (len(places.spec.dims) - 1,))
    free = lambda axes, other: not any(a.mesh_dim in other for a in axes if a.sizes)  # noqa: E731
    if free(x.spec.dims[0], _mesh_dims(places.spec)):
        places = to_spec(places, places.spec.with_axes(0, x.spec.dims[0]))
    used, (samples, *rows, _) = _mesh_dims(places.spec), places.spec.dims
    channels = x.spec.dims[1] if free(x.spec.dims[1], used) else whole(x.spec.shape[1])
    images = x.spec.with_dims([samples, channels, *[whole(n) for n in x.spec.shape[2:]]])
    out = x.spec.with_dims([samples, channels, *rows])
    parts: list[Tensor] = []
    for operand, spec in ((x, images), (places, places.spec)):
        part = local(to_spec(operand, spec))
        for mesh_dim in sorted(_mesh_dims(out) - _mesh_dims(spec)):  # each rank uses its copy with another part
            part = copy_to_region(part, spec.mesh.groups[mesh_dim])
        parts.append(part)
    y = func(*parts, *args, **kwargs) if out.local_shape.numel() else no_outputs(parts[0], out.local_shape, parts[1])
    return wrap(y, out)


def _mesh_dims(spec):
    """The mesh dimensions that split a tensor."""
    return {axis.mesh_dim for axes in spec.dims for axis in axes if axis.sizes is not None}


@rule(*named("pad"))
def pad(
    func: Callable, input: ShardTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardTensor:
    """Pad. In a split dimension the first and the last rank with rows hold the padding."""
    x, ndim = reduced(input), len(input.spec.dims)
    dims = [ndim - 1 - i for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])]
    y, sizes = resampling.pad(local(x), splits_of(func, x, dims), pad, mode, value)
    return result(x, y, sizes, dims)
