"""Functions made of other functions, which have rules.

Those of BODIES are Python functions of torch: their bodies run as they are. The others are written here.
"""

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.shard.operands import reduced
from distributed.shard.rules.reductions import kept
from distributed.shard.rules.windows import Window, spatial
from distributed.shard.tensor import Rule, ShardTensor, local, named, no_rule, rule, wrap
from networks.vit import PerAxis

BODIES: list[Any] = [
    F.multi_head_attention_forward, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.local_response_norm, F.softmin,
    F.gaussian_nll_loss,
]  # fmt: skip


def composed(*functions: Callable) -> Callable[[Rule], Rule]:
    """Decorator: a rule in which ShardTensors are ShardTensors, so that it is written as on whole tensors."""

    def register(implementation: Rule) -> Rule:
        def run(func: Callable, *args: Any, **kwargs: Any) -> Any:
            with torch._C._EnableTorchFunction():
                return implementation(func, *args, **kwargs)

        rule(*functions)(run)
        return implementation

    return register


def body(function: FunctionType) -> FunctionType:
    """The function without its question whether an argument has a __torch_function__."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | {name: lambda *args: False for name in asks}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _run_body(function):
    copy = body(function)
    composed(function)(lambda func, *args, **kwargs: copy(*args, **kwargs))


for _function in BODIES:
    _run_body(_function)


@rule(*named("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"))
def new(func: Callable, input: ShardTensor, *args: Any, **kwargs: Any) -> Tensor:
    """A plain tensor of a global shape, with the dtype and device of the input."""
    if any(isinstance(x, ShardTensor) for x in args):  # new_tensor would copy the part
        raise no_rule(func, (input, *args), kwargs, "it copies numbers, of which a rank has a part")
    return func(local(input), *args, **kwargs)


@composed(*named("prelu"))
def prelu(func: Callable, input: Tensor, weight: Tensor) -> Tensor:
    """The weight is one number, or one for each channel, dimension 1."""
    weight = weight.view(-1, *[1] * (input.dim() - 2)) if weight.numel() > 1 and input.dim() > 2 else weight
    return torch.where(input > 0, input, weight * input)


@composed(*named("channel_shuffle", "native_channel_shuffle"))
def channel_shuffle(func: Callable, input: Tensor, groups: int) -> Tensor:
    """(B, groups x n, ...) -> (B, n x groups, ...)."""
    return input.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


@composed(*named("rot90"))
def rot90(func: Callable, input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turn a plane k times by 90 degrees."""
    first, second = dims
    if k % 4 == 2:
        return input.flip(first, second)
    turned = input.flip(second if k % 4 == 1 else first) if k % 4 else input
    return turned.transpose(first, second) if k % 4 else turned * 1


@composed(*named("diff"))
def diff(
    func: Callable, input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The n-th difference of neighbours."""
    parts = [x for x in (prepend, input, append) if x is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        rows = x.shape[dim]
        x = x.narrow(dim, min(1, rows), max(rows - 1, 0)) - x.narrow(dim, 0, max(rows - 1, 0))
    return x


@composed(*named("trapezoid", "trapz"))
def trapezoid(func: Callable, y: Tensor, x: Tensor | None = None, *, dx: float = 1, dim: int = -1) -> Tensor:
    """The integral along a dimension, by the trapezoidal rule. x: the places, one for each row or each element."""
    rows, steps = y.shape[dim], cast("Any", dx)
    if x is not None:
        x = x.view(-1, *[1] * (y.dim() - 1 - dim % y.dim())) if x.dim() == 1 else x
        steps = x.diff(dim=dim if x.dim() == y.dim() else 0)
    return ((y.narrow(dim, 1, rows - 1) + y.narrow(dim, 0, rows - 1)) * steps / 2).sum(dim)


@composed(*named("cosine_similarity"))
def cosine_similarity(func: Callable, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The product of two unit vectors."""
    x1, x2 = (x / torch.linalg.vector_norm(x, 2, dim, True).clamp(min=eps) for x in (x1, x2))
    return (x1 * x2).sum(dim)


@composed(*named("bilinear"))
def bilinear(func: Callable, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., I) x (O, I, J) x (..., J) -> (..., O)."""
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


@composed(F.unfold)
def unfold(
    func: Callable, input: Tensor, kernel_size: PerAxis, dilation: PerAxis = 1, padding: PerAxis = 0,
    stride: PerAxis = 1,
) -> Tensor:  # fmt: skip
    """Windows of an image as columns: (B, C, H, W) -> (B, C kh kw, windows)."""
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (spatial(v, 2) for v in (kernel_size, dilation, padding, stride))
    x = F.pad(input, (pw, pw, ph, ph)).unfold(-2, dh * (kh - 1) + 1, sh)[..., ::dh]  # (B, C, h, W, kh)
    x = x.unfold(-2, dw * (kw - 1) + 1, sw)[..., ::dw].movedim((-2, -1), (-4, -3))  # (B, C, kh, kw, h, w)
    return x.flatten(-2).flatten(-4, -2)


@composed(F.fold)
def fold(
    func: Callable, input: Tensor, output_size: PerAxis, kernel_size: PerAxis, dilation: PerAxis = 1,
    padding: PerAxis = 0, stride: PerAxis = 1,
) -> Tensor:  # fmt: skip
    """Add up windows to an image, (B, C kh kw, windows) -> (B, C, H, W): a transposed convolution that copies."""
    sizes, kernel, steps, pads, strides = (spatial(v, 2) for v in (output_size, kernel_size, dilation, padding, stride))
    windows = [Window(k, s, p, p, d) for k, d, p, s in zip(kernel, steps, pads, strides, strict=True)]
    counts = [w.length(n) for w, n in zip(windows, sizes, strict=True)]
    plain = [(c - 1) * w.stride - 2 * w.before + w.reach + 1 for c, w in zip(counts, windows, strict=True)]
    more = [n - length for n, length in zip(sizes, plain, strict=True)]
    area = math.prod(kernel)
    x = input.unflatten(-1, counts).unflatten(-3, (-1, area))  # (B, C, kh kw, h, w)
    copies = torch.eye(area, dtype=input.dtype, device=input.device).view(area, 1, *kernel)
    y = F.conv_transpose2d(x.flatten(0, -4), copies, None, strides, pads, more, 1, steps)  # (B C, 1, H, W)
    return y.view(*input.shape[:-2], -1, *sizes)


def channel_noise(x: ShardTensor, p: float, of_channels: bool) -> Tensor:
    """1 / (1 - p) or 0, one number for each element or for each channel of each sample: (B, C, 1, ...)."""
    spec = kept(x.spec, range(2, len(x.spec.dims)), True) if of_channels else x.spec
    return F.dropout(wrap(torch.ones(spec.local_shape, dtype=x.dtype, device=x.device), spec), p)


@composed(F.dropout1d, F.dropout2d, F.dropout3d, *named("feature_dropout"))
def channel_dropout(
    func: Callable, input: ShardTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drop whole channels, alike on all ranks that hold a part of them."""
    if p == 0 or not training:
        return input
    if inplace or input.dim() < 3 or (func is F.dropout1d and input.dim() != 3):
        raise no_rule(func, (input,), {}, "in place, or without samples")
    return input * channel_noise(reduced(input), p, True)


@composed(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(
    func: Callable, input: ShardTensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Replace elements, or channels, by the limit of SELU, and keep mean and variance."""
    if p == 0 or not training:
        return input
    if inplace or p == 1:
        raise no_rule(func, (input,), {}, "in place, or of everything")
    limit = -1.7580993408473766  # of SELU at minus infinity
    kept_ones = channel_noise(reduced(input), p, func is F.feature_alpha_dropout) * (1 - p)
    scale = ((1 - p) * (1 + p * limit**2)) ** -0.5
    return (input * kept_ones + limit * (1 - kept_ones)) * scale - scale * p * limit
