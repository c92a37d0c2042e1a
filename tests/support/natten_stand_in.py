"""NATTEN's functions for tests, in plain torch on any device: every query with every key, under a mask.

The library has kernels for GPUs alone that can train. `installed` puts this module in its place.
"""

import contextlib
import importlib.util
import sys
from types import ModuleType

import torch

from distributed.shard.core.tensor import find_libraries

NAMES = ("natten", "natten.functional", "users_model")


@contextlib.contextmanager
def installed():
    """A new natten.functional, and the modules natten and users_model that have imported its functions by name."""
    spec = importlib.util.spec_from_file_location("natten.functional", __file__)
    functional = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functional)
    functional.calls = []  # the shapes of the queries that came
    natten, users_model = ModuleType("natten"), ModuleType("users_model")
    natten.functional = functional
    for name in ("na1d", "na2d", "na3d"):
        setattr(natten, name, getattr(functional, name))
        setattr(users_model, name, getattr(functional, name))
    sys.modules.update(zip(NAMES, (natten, functional, users_model), strict=True))
    try:
        find_libraries()
        yield functional
    finally:
        for name in NAMES:
            del sys.modules[name]


def per_axis(value, axes):
    return tuple(value) if isinstance(value, tuple | list) else (value,) * axes


def seen_keys(length, kernel, stride, dilation, causal):
    """Which keys each query of an axis sees, (length, length)."""
    if kernel * dilation > length:
        raise ValueError(f"kernel_size {kernel} x dilation {dilation} > {length}")
    seen = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        points = list(range(query % dilation, length, dilation))
        place = points.index(query)
        group = place // stride * stride
        if causal:
            leader = min(group + stride - 1, len(points) - 1)
            keys = points[max(leader - kernel + 1, 0) : place + 1]
        else:
            leader = min(group + stride // 2, len(points) - 1)
            start = min(max(leader - kernel // 2, 0), len(points) - kernel)
            keys = points[start : start + kernel]
        seen[query, keys] = True
    return seen


def neighborhood_attention_generic(
    query,
    key,
    value,
    kernel_size,
    stride=1,
    dilation=1,
    is_causal=False,
    scale=None,
    additional_keys=None,
    additional_values=None,
    backend=None,
    return_lse=False,
):
    axes = query.dim() - 3
    calls.append(tuple(query.shape))  # noqa: F821
    lengths = query.shape[1:-2]
    settings = [per_axis(setting, axes) for setting in (kernel_size, stride, dilation, is_causal)]
    mask = torch.ones(1, 1, dtype=torch.bool)
    for axis in zip(lengths, *settings, strict=True):
        mask = torch.kron(mask, seen_keys(*axis))
    q, k, v = (x.flatten(1, axes).transpose(1, 2) for x in (query, key, value))  # (B, heads, N, d)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, -torch.inf)
    if additional_keys is not None:
        scores = torch.cat([scores, q @ additional_keys.transpose(1, 2).mT * q.shape[-1] ** -0.5], -1)
        v = torch.cat([v, additional_values.transpose(1, 2)], 2)
    out = (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, lengths)
    if return_lse:
        return out, scores.logsumexp(-1).transpose(1, 2).unflatten(1, lengths)
    return out


def na1d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, **options):
    return neighborhood_attention_generic(query, key, value, kernel_size, stride, dilation, is_causal, scale, **options)


def na2d(query, key, value, kernel_size, stride=1, dilation=1, is_causal=False, scale=None, **options):
    return neighborhood_attention_generic(query, key, value, kernel_size, stride, dilation, is_causal, scale, **options)


def na3d(query, key, value, kernel_size, dilation=1, is_causal=False, rpb=None, scale=None):
    """As releases before 0.20 have it."""
    assert rpb is None
    return neighborhood_attention_generic(query, key, value, kernel_size, 1, dilation, is_causal, scale)
