"""Functions that are a formula of others, which have rules: inside, ShardTensors are ShardTensors."""

import string
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.shard.core.tensor import composed_as, named
from distributed.shard.ops.normalization import of_channels


def _bilinear(input1, input2, weight, bias=None):
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product + (0 if bias is None else bias)


def _channel_shuffle(input, groups):
    by_group = input.unflatten(1, (groups, -1))  # (B, groups, C / groups, ...)
    return by_group.transpose(1, 2).flatten(1, 2)  # (B, C, ...)


def _cosine_similarity(x1, x2, dim=1, eps=1e-8):
    unit1 = F.normalize(x1, dim=dim, eps=eps)
    unit2 = F.normalize(x2, dim=dim, eps=eps)
    return (unit1 * unit2).sum(dim)


def _dist(input, other, p=2):
    return torch.linalg.vector_norm(input - other, p)


def _pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _vecdot(x, y, *, dim=-1):
    return (x.conj() * y).sum(dim)


def _fliplr(input):
    return input.flip(1)


def _flipud(input):
    return input.flip(0)


def _prelu(input, weight):
    scaled = of_channels(weight, input) * input
    return torch.where(input > 0, input, scaled)


def _at_least(count, *tensors):
    if not isinstance(tensors[0], Tensor):
        return tuple([_at_least(count, x) for x in tensors[0]])
    if len(tensors) > 1:
        return _at_least(count, tensors)
    (x,) = tensors
    if x.dim() == 0:
        return x.reshape([1] * count)
    if x.dim() == 1 and count > 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(2) if x.dim() == 2 and count == 3 else x


def _hstack(tensors):
    rows = _at_least(1, tensors)
    return torch.cat(rows, min(rows[0].dim() - 1, 1))


def _vstack(tensors):
    return torch.cat(_at_least(2, tensors), 0)


def _dstack(tensors):
    return torch.cat(_at_least(3, tensors), 2)


def _column_stack(tensors):
    columns = [x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors]
    return torch.cat(columns, 1)


def _split_along(dim, input, indices_or_sections):
    dim = min(dim, input.dim() - 1)
    length = input.shape[dim]
    if isinstance(indices_or_sections, int) and length % indices_or_sections:
        raise RuntimeError(f"dimension {dim} of size {length} does not split into {indices_or_sections} equal pieces")
    return torch.tensor_split(input, indices_or_sections, dim)


def _tensordot(a, b, dims=2, out=None):
    count = dims if isinstance(dims, int) else None
    of_a, of_b = dims if count is None else (range(-count, 0), range(count))
    # Each dimension has a letter; those that are summed have the same one in both tensors.
    first = list(string.ascii_lowercase[: a.dim()])
    second = list(string.ascii_uppercase[: b.dim()])
    for i, j in zip(of_a, of_b, strict=True):
        second[j] = first[i]
    kept = [letter for letter in (*first, *second) if (letter in first) != (letter in second)]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", a, b)


def _inner(input, other):
    has_number = 0 in (input.dim(), other.dim())
    return input * other if has_number else _tensordot(input, other, ([-1], [-1]))


def _vdot(input, other):
    return torch.dot(input.conj(), other)


def _addr(input, vec1, vec2, *, beta=1, alpha=1):
    return beta * input + alpha * torch.outer(vec1, vec2)


def _addbmm(input, batch1, batch2, *, beta=1, alpha=1):
    return beta * input + alpha * (batch1 @ batch2).sum(0)


def _nansum(input, dim=(), keepdim=False, *, dtype=None):
    numbers = input.masked_fill(input.isnan(), 0)
    return numbers.sum(dim, keepdim, dtype=dtype)


def _nanmean(input, dim=(), keepdim=False, *, dtype=None):
    count = (~input.isnan()).sum(dim, keepdim)
    return _nansum(input, dim, keepdim, dtype=dtype) / count


def _equal(input, other):
    return input.shape == other.shape and bool((input == other).all())


def _allclose(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _reversed(input):
    return input.flip(0) if input.dim() else input


# {names in torch: the formula, with torch's names of its arguments}
FORMULAS: dict[str, Callable[..., Any]] = {
    "addbmm": _addbmm,
    "addr": _addr,
    "allclose": _allclose,
    "atleast_1d": partial(_at_least, 1),
    "atleast_2d": partial(_at_least, 2),
    "atleast_3d": partial(_at_least, 3),
    "bilinear": _bilinear,
    "channel_shuffle native_channel_shuffle": _channel_shuffle,
    "column_stack": _column_stack,
    "cosine_similarity": _cosine_similarity,
    "dist": _dist,
    "dsplit": partial(_split_along, 2),
    "dstack": _dstack,
    "equal": _equal,
    "fliplr": _fliplr,
    "flipud": _flipud,
    "hsplit": partial(_split_along, 1),
    "hstack": _hstack,
    "inner": _inner,
    "nanmean": _nanmean,
    "nansum": _nansum,
    "pairwise_distance": _pairwise_distance,
    "prelu": _prelu,
    "__reversed__": _reversed,
    "tensordot": _tensordot,
    "vdot": _vdot,
    "vecdot": _vecdot,
    "vsplit": partial(_split_along, 0),
    "vstack row_stack": _vstack,
}
for _names, _formula in FORMULAS.items():
    composed_as(_formula, *named(*_names.split()))
