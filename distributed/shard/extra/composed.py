"""Functions made of other functions, which have rules.

Those of BODIES are Python functions of torch: their bodies run as they are. Those of a line or two are in formulas.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from distributed.collectives import reduce_from_region
from distributed.shard.core.hacks import without_dispatch
from distributed.shard.core.operands import sum_partial
from distributed.shard.core.tensor import (
    NoRule,
    ShardTensor,
    composed,
    composed_as,
    local,
    named,
    no_rule,
    rule,
    wrap,
)
from distributed.shard.ops.elementwise import own_stream
from distributed.shard.ops.reductions import drop_dims
from distributed.shard.ops.windows import PerAxis, ntuple, windows_of

BODIES: list[Any] = [
    F.multi_head_attention_forward,
    F.lp_pool1d,
    F.lp_pool2d,
    F.lp_pool3d,
    F.local_response_norm,
    F.softmin,
    F.gaussian_nll_loss,
    F.max_unpool1d,
    F.max_unpool2d,
    F.max_unpool3d,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
]


for _function in BODIES:
    composed_as(without_dispatch(_function), _function)


@rule(*named("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"))
def new(
    func: Callable,
    input: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """A plain tensor of a global shape, with the dtype and device of the input."""
    if any(isinstance(x, ShardTensor) for x in args):  # new_tensor would copy the part
        raise no_rule(func, (input, *args), kwargs, "it copies numbers, of which a rank has a part")
    return func(local(input), *args, **kwargs)


@composed(torch.meshgrid, torch._VF.meshgrid)  # type: ignore[attr-defined]  # of a list, it is the second
def meshgrid(
    func: Callable,
    *tensors: Any,
    indexing: str | None = None,
) -> tuple[Tensor, ...]:
    """The coordinates (n_0,), (n_1,), ... of a grid at all its points, each (n_0, n_1, ...); xy: (n_1, n_0, ...)."""
    given = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    count = len(given)
    axes = []
    for i, x in enumerate(given):
        ones_behind = [1] * (count - 1 - i)
        axis = x.reshape(-1).view(-1, *ones_behind)  # (n_i, 1, ...)
        axes.append(axis)
    grids = torch.broadcast_tensors(*axes)
    if indexing == "xy" and count > 1:
        return tuple([grid.transpose(0, 1) for grid in grids])
    return tuple(grids)


@composed(*named("rot90"))
def rot90(
    func: Callable,
    input: Tensor,
    k: int = 1,
    dims: Sequence[int] = (0, 1),
) -> Tensor:
    """Turn a plane k times by 90 degrees."""
    turned = input.clone()
    for _ in range(k % 4):
        turned = turned.flip(dims[1]).transpose(*dims)
    return turned


@composed(*named("diff"))
def diff(
    func: Callable,
    input: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """The n-th difference of neighbours."""
    parts = [x for x in (prepend, input, append) if x is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        rows = x.shape[dim]
        length = max(rows - 1, 0)
        second = min(1, rows)  # a tensor may have no rows
        x = x.narrow(dim, second, length) - x.narrow(dim, 0, length)
    return x


@composed(*named("trapezoid", "trapz"))
def trapezoid(
    func: Callable,
    y: Tensor,
    x: Tensor | None = None,
    *,
    dx: float = 1,
    dim: int = -1,
) -> Tensor:
    """The integral along a dimension, by the trapezoidal rule. x: the places, one for each row or each element."""
    steps = cast("Any", dx)
    if x is not None:
        if x.dim() == 1:
            dims_behind = y.dim() - 1 - dim % y.dim()
            ones_behind = [1] * dims_behind
            x = x.view(-1, *ones_behind)  # (rows, 1, ...)
        rows_dim = dim if x.dim() == y.dim() else 0
        steps = x.diff(dim=rows_dim)
    length = y.shape[dim] - 1
    both_ends = y.narrow(dim, 1, length) + y.narrow(dim, 0, length)
    areas = both_ends * steps / 2
    return areas.sum(dim)


@composed(*named("as_strided"))
def as_strided(
    func: Callable,
    input: ShardTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> ShardTensor:
    """Windows of the elements of a tensor in row-major order: a copy, not a view.

    Each dimension is a view of those inside it if its rows do not overlap, and else an unfold. One message tells the
    host whether the parts of all ranks are in row-major order. Raises no_rule for tensors in another order, and where
    the ranks' pieces would be broken up.
    """
    if is_dynamo_compiling():
        raise no_rule(func, (input,), {}, "compiled code cannot ask the ranks how their memory is ordered")
    if not _is_row_major(input, storage_offset) or 0 in size:
        raise no_rule(func, (input,), {}, "it is empty, or not in row-major order")

    # All elements in order, from the first that is used. reach: the distance from it to the last that is used.
    x = input.flatten()
    offset = storage_offset or 0
    x = x.narrow(0, offset, x.shape[0] - offset)
    reach = 0
    for n, step in zip(size, stride, strict=True):
        reach += (n - 1) * step
    if reach >= x.shape[0]:
        raise RuntimeError(f"as_strided: sizes {list(size)} and strides {list(stride)} of {x.shape[0]} elements")

    # Cut off one dimension after the other, those of the longest strides first.
    moving = [d for d, n in enumerate(size) if n > 1 and stride[d]]
    moving.sort(key=lambda d: -stride[d])
    try:
        for d in moving:
            reach -= (size[d] - 1) * stride[d]  # which is then that of the dimensions inside of this one
            x = _cut_off(x, size[d], stride[d], reach)
    except NoRule as broken:
        raise no_rule(func, (input,), {}, str(broken)) from broken

    # Bring the dimensions into the order of `size`, and add those of size 1 or of stride 0.
    order = [moving.index(d) for d in sorted(moving)]
    x = x[..., 0].permute(order)
    for d in range(len(size)):
        if d not in moving:
            x = x.unsqueeze(d)
    expanded = cast(ShardTensor, x.expand(size))
    expanded.copied_from = "as_strided"
    return expanded


def _is_row_major(x, storage_offset):
    """Tell whether the parts of all ranks are in row-major order, from the beginning of their memory if that counts.

    All ranks call this together, and get the same answer.
    """
    part = local(x)
    row_major = torch.empty(part.shape, device="meta").stride()
    has_offset = storage_offset is not None and part.storage_offset() != 0
    is_own_ordered = part.stride() == row_major and not has_offset
    own_answer = torch.tensor(int(is_own_ordered), device=part.device)
    group = x.spec.mesh.joint
    ordered_ranks = reduce_from_region(own_answer, group).item()
    return ordered_ranks == group.size


def _cut_off(x, count, step, reach):
    """(..., elements) -> (..., count, elements inside), for rows that begin `step` elements apart.

    reach: distance from the first element of a row to its last one.
    """
    rows_are_apart = reach < step and count * step <= x.shape[-1]
    if rows_are_apart:
        return x.narrow(-1, 0, count * step).unflatten(-1, (count, step))
    # They overlap: windows of the elements.
    window = reach + 1
    used = window + (count - 1) * step
    return x.narrow(-1, 0, used).unfold(-1, window, step)


@composed(F.unfold)
def unfold(
    func: Callable,
    input: Tensor,
    kernel_size: PerAxis,
    dilation: PerAxis = 1,
    padding: PerAxis = 0,
    stride: PerAxis = 1,
) -> Tensor:
    """Windows of an image as columns: (B, C, H, W) -> (B, C kh kw, windows)."""
    kh, kw = ntuple(kernel_size, 2)
    dh, dw = ntuple(dilation, 2)
    ph, pw = ntuple(padding, 2)
    sh, sw = ntuple(stride, 2)
    x = F.pad(input, (pw, pw, ph, ph))

    # A window spans all rows from its first to its last, of which it has every dh-th.
    span_h = dh * (kh - 1) + 1
    span_w = dw * (kw - 1) + 1
    x = x.unfold(-2, span_h, sh)[..., ::dh]  # (B, C, h, W, kh)
    x = x.unfold(-2, span_w, sw)[..., ::dw]  # (B, C, h, w, kh, kw)
    x = x.movedim((-2, -1), (-4, -3))  # (B, C, kh, kw, h, w)
    return x.flatten(-2).flatten(-4, -2)  # (B, C kh kw, h w)


@composed(F.fold)
def fold(
    func: Callable,
    input: Tensor,
    output_size: PerAxis,
    kernel_size: PerAxis,
    dilation: PerAxis = 1,
    padding: PerAxis = 0,
    stride: PerAxis = 1,
) -> Tensor:
    """Add up windows to an image, (B, C kh kw, windows) -> (B, C, H, W): a transposed convolution that copies."""
    sizes = ntuple(output_size, 2)
    kernel = ntuple(kernel_size, 2)
    steps = ntuple(dilation, 2)
    pads = ntuple(padding, 2)
    strides = ntuple(stride, 2)
    windows = windows_of(range(2), kernel, strides, pads, steps).values()
    counts = []  # of windows along each axis
    more = []  # rows at the end that no window reaches
    for window, size in zip(windows, sizes, strict=True):
        count = window.length(size)
        reached = (count - 1) * window.stride - 2 * window.before + window.reach + 1
        counts.append(count)
        more.append(size - reached)
    area = math.prod(kernel)
    x = input.unflatten(-1, counts)  # (B, C kh kw, h, w)
    x = x.unflatten(-3, (-1, area))  # (B, C, kh kw, h, w)
    x = x.flatten(0, -4)  # (B C, kh kw, h, w)

    # The weight of each place in a window is 1 there and 0 elsewhere.
    identity = torch.eye(area, dtype=input.dtype, device=input.device)
    copies = identity.view(area, 1, *kernel)  # (kh kw, 1, kh, kw)
    y = F.conv_transpose2d(x, copies, None, strides, pads, more, 1, steps)  # (B C, 1, H, W)
    return y.view(*input.shape[:-2], -1, *sizes)  # (B, C, H, W)


@composed(
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
def channel_dropout(
    func: Callable,
    input: ShardTensor,
    p: float,
    training: bool,
) -> Tensor:
    """Drop whole channels, alike on all ranks that hold a part of them; alpha: to the limit of SELU."""
    if p == 0 or not training:
        return input
    if input.dim() < 3 or func.__name__.endswith("_"):
        raise no_rule(func, (input,), {}, "in place, or without samples")
    x = sum_partial(input)
    spatial_dims = range(2, len(x.spec.dims))
    spec = drop_dims(x.spec, spatial_dims, True)  # (B, C, 1, ...)

    # Every channel x becomes factor * x + shift. What becomes of 0 is the shift; of 1, factor + shift.
    samples_and_channels = spec.local_shape[:2]
    zero_and_one = torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device)
    probe = zero_and_one.expand(*samples_and_channels, 2)  # (b, c, 2)
    with own_stream(spec, x.device):
        zero, one = func(probe, p, True).unbind(-1)
    own_factor = one - zero
    factor = wrap(own_factor.reshape(spec.local_shape), spec)
    shift = wrap(zero.reshape(spec.local_shape), spec)
    return x * factor + shift
