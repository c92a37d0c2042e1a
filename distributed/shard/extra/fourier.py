"""Fourier transforms: a transform of several dimensions is one of each, along a whole dimension (see along.py)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distributed.shard.core.tensor import ShardTensor, dispatch, rule
from distributed.shard.ops.along import on_whole
from distributed.shard.ops.reductions import Dims, dims_of

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
    name = str(func.__name__).removeprefix("fft_")  # "irfft2": inverse, real, of two dimensions
    is_real = "rfft" in name
    is_inverse = name.startswith("i")
    dims, lengths = _dims_and_lengths(name, input.spec, keywords.get("n", s), dim)

    # One transform after the other. The real one is the first, or the last of an inverse.
    steps = list(zip(dims, lengths, strict=True))
    if not is_inverse:
        steps.reverse()
    real_step = len(steps) - 1 if is_inverse else 0
    x = input
    for i, (d, n) in enumerate(steps):
        if is_real and i == real_step:
            single = torch.fft.irfft if is_inverse else torch.fft.rfft
        else:
            single = torch.fft.ifft if is_inverse else torch.fft.fft
        transform = partial(single, n=n, dim=d, norm=norm)
        x = on_whole(x, (d,), transform, resizes=True)
    return x


def _dims_and_lengths(name, spec, s, dim):
    """(dimensions that a transform of this name transforms, the length of each; None: that of the input).

    s: the lengths that were asked for. dim: the dimensions that were asked for. None: torch's defaults.
    """
    if name.endswith("fft"):  # of one dimension
        s = None if s is None else (s,)
        dim = -1 if dim is None else dim
    elif dim is None and name.endswith("2"):
        dim = (-2, -1)
    elif dim is None:
        count = len(s or spec.shape)
        dim = range(-count, 0)
    dims = dims_of(spec, dim)
    if s is None:
        return dims, [None] * len(dims)
    return dims, [None if n == -1 else n for n in s]


@rule(torch.fft.fftshift, torch.fft.ifftshift)
def fourier_shift(func: Callable, input: ShardTensor, dim: Dims = None) -> ShardTensor:
    """Roll the frequency 0 to the middle, and back."""
    dims = dims_of(input.spec, dim)
    # A shift is a roll by half of each dimension.
    sign = 1 if func is torch.fft.fftshift else -1
    half_lengths = [input.spec.shape[d] // 2 for d in dims]
    shifts = [sign * half for half in half_lengths]
    return dispatch(torch.roll, input, shifts, dims)
