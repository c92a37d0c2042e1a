"""Attention over split tokens, by the methods of distributed/attention.py, and in windows of a split grid."""

# mypy: allow-redefinition
# (q, k and v are ShardTensors, then their local parts)

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.attention import METHODS
from distributed.collectives import copy_to_region
from distributed.shard.operands import (
    as_replicated,
    global_shape,
    replicate,
    scale_grad_by_replicas,
    sum_grad_over_replicas,
    sum_partial,
    to_spec,
)
from distributed.shard.rules.along import unshard_dims
from distributed.shard.rules.elementwise import own_stream
from distributed.shard.rules.windows import no_outputs, request
from distributed.shard.spec import part_of, unsplit_axes
from distributed.shard.tensor import ShardTensor, dispatch, local, no_rule, rule, wrap
from networks.neighborhood import attend_windows, neighborhood_attention, per_axis, window_starts
from networks.vit import PerAxis

_chosen = "gather"


def set_attention_method(method: str) -> None:
    """Choose the method for split tokens, for all models from now on: gather, ring or all_to_all."""
    if method not in METHODS:
        raise ValueError(f"attention: no method '{method}', there are {', '.join(METHODS)}")
    global _chosen
    _chosen = method


@rule(F.scaled_dot_product_attention)
def attention(
    func: Callable,
    q: ShardTensor,
    k: ShardTensor,
    v: ShardTensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardTensor:
    """Attention of q (..., heads, N, d) to k, v (..., heads, M, d), of which some may be plain tensors.

    Keys and values are brought to the queries' split of samples and heads; queries that are whole, to that of the keys.
    """
    like = next(x for x in (q, k, v, attn_mask) if isinstance(x, ShardTensor))
    q = _with_whole_features(q, like.spec)
    k = _with_whole_features(k, like.spec)
    v = _with_whole_features(v, like.spec)
    if len(q.spec.dims) != 4:
        lead = tuple(torch.broadcast_shapes(q.spec.shape[:-2], k.spec.shape[:-2], v.spec.shape[:-2]))
        q, k, v = _as_four(q, lead), _as_four(k, lead), _as_four(v, lead)
        if attn_mask is not None and len(global_shape(attn_mask)) > 2:
            attn_mask = _as_four(attn_mask, lead)
        y = attention(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return dispatch(torch.reshape, y, (*lead, *y.spec.shape[2:]))

    # From here on q is (B, heads, N, d).
    if not q.spec.split_dims and k.spec.shape[:2] == q.spec.shape[:2]:  # learned queries, the same for all samples
        samples, heads, *_ = k.spec.dims
        q = to_spec(q, q.spec.with_dims((samples, heads, *q.spec.dims[2:])))
    # Keys that are split as the queries stay so, for the methods; others become whole.
    is_self_attention = k.spec.dims[2] == q.spec.dims[2] and k.spec.shape[3] == v.spec.shape[3]
    tokens = q.spec.dims[2] if is_self_attention else unsplit_axes(k.spec.shape[2])
    k = _split_as_queries(func, q, k, tokens, enable_gqa)
    v = _split_as_queries(func, q, v, tokens, enable_gqa)
    with own_stream(q.spec, q.device) if dropout_p else contextlib.nullcontext():
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _with_whole_features(x, spec):
    """Queries, keys or values as a ShardTensor on the mesh of `spec`, whose last dimension is whole."""
    features = len(global_shape(x)) - 1
    return unshard_dims(as_replicated(x, spec), (features,))


def _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Attention of this rank's queries, with the samples and heads of which this rank has the keys and values."""
    rows = q.spec
    columns = k.spec
    out = rows.with_dims((*rows.dims[:3], v.spec.dims[3]))
    q, k, v = local(q), local(k), local(v)  # (b, heads, n, d)
    attn_mask = _of_own_heads(attn_mask, rows)
    if scale is not None:
        q = q * (scale * math.sqrt(q.shape[-1]))
    if enable_gqa:  # several heads of queries share a head of keys
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    if not rows.is_split(2):
        return wrap(_fused(q, k, v, attn_mask, dropout_p, is_causal), out)

    mask = _mask(attn_mask, is_causal, rows, columns, q.device)
    sizes, group = rows.shares(2)
    if columns.is_split(2):
        if _chosen != "all_to_all":
            mask = _own_rows(mask, rows)
        return wrap(METHODS[_chosen](q, k, v, dropout_p, sizes=sizes, group=group, mask=mask), out)
    # Every rank has all keys, and different queries.
    k = copy_to_region(k, group)
    v = copy_to_region(v, group)
    return wrap(_fused(q, k, v, _own_rows(mask, rows), dropout_p), out)


def _fused(q, k, v, mask, dropout_p, is_causal=False):
    """The plain operation, and no values where there is nothing to compute."""
    if not q.numel():  # this rank has no samples, heads or queries, and torch 2.11 divides by their number
        return q @ k.mT @ v
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)


def _as_four(x, shape):
    """X (..., N, d) or a mask as (B, heads, N, d); shape: that of its leading dimensions after broadcasting."""
    if len(shape) > 1:
        ahead = (math.prod(shape[:-1]), shape[-1])
    else:
        missing = 2 - len(shape)
        ahead = (*shape, *[1] * missing)
    rest = global_shape(x)[-2:]
    if isinstance(x, ShardTensor):
        expanded = dispatch(torch.broadcast_to, x, (*shape, *rest))
        return dispatch(torch.reshape, expanded, (*ahead, *rest))
    return x.expand(*shape, *rest).reshape(*ahead, *rest)


def _split_as_queries(func, q, x, tokens, grouped):
    """The keys or values x with the samples and heads of the queries, and their split of these. tokens: axes."""
    rows = q.spec
    samples, heads = x.spec.shape[:2]
    if samples == 1:
        samples = rows.shape[0]
    if heads == 1 and not grouped:
        heads = rows.shape[1]
    if (samples, heads) != tuple(x.spec.shape[:2]):
        x = dispatch(torch.broadcast_to, x, (samples, heads, *x.spec.shape[2:]))
    spec = x.spec
    splits_heads = rows.is_split(1) or spec.is_split(1)
    if spec.shape[1] != rows.shape[1] and splits_heads:
        raise no_rule(func, (q, x), {}, "split heads of which several share keys")
    head_axes = rows.dims[1] if rows.is_split(1) else unsplit_axes(spec.shape[1])
    return to_spec(x, spec.with_dims((rows.dims[0], head_axes, tokens, spec.dims[3])))


def _of_own_heads(mask, rows):
    """The mask of this rank's samples and heads, and of all queries and keys, as a plain tensor."""
    if mask is None:
        return None
    mask = (
        sum_grad_over_replicas(replicate(mask), rows)
        if isinstance(mask, ShardTensor)
        else scale_grad_by_replicas(mask, rows)
    )
    missing = 4 - mask.dim()
    return part_of(mask, rows.with_dims(rows.dims[missing:2]))


def _mask(mask, is_causal, rows, columns, device):
    """The mask of all queries and keys, (..., N, M), both in the order of the ranks."""
    if is_causal:
        mask = torch.ones(rows.shape[2], columns.shape[2], dtype=torch.bool, device=device).tril()
    if mask is None:
        return None
    for dim, spec in ((-2, rows), (-1, columns)):
        axes = spec.dims[2]
        if mask.shape[dim] > 1 and len(axes) > 1:  # tiles: the ranks' tokens do not follow each other
            tokens = torch.arange(spec.shape[2], device=device)
            of_tokens = spec.with_dims((axes,))
            order = torch.cat([part_of(tokens, of_tokens, rank) for rank in spec.ranks(2)])
            mask = mask.index_select(dim, order)
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], columns.shape[2])
    return mask


def _own_rows(mask, rows):
    """The rows of a mask (..., N, M) that belong to this rank's queries."""
    sizes, group = rows.shares(2)
    if mask is None or mask.shape[-2] == 1:
        return mask
    first = sum(sizes[: group.rank])
    return mask.narrow(-2, first, sizes[group.rank])


@rule(neighborhood_attention)
def attend(
    func: Callable,
    q: ShardTensor,
    k: ShardTensor,
    v: ShardTensor,
    kernel_size: PerAxis,
    dilation: PerAxis = 1,
    scale: float | None = None,
) -> ShardTensor:
    """Attention of q, k, v (B, heads, *spatial, d), which split samples, heads and spatial axes in the same way."""
    if not all(isinstance(x, ShardTensor) for x in (q, k, v)):
        raise no_rule(func, (q, k, v), {}, "q, k and v must be ShardTensors")
    q, k, v = sum_partial(q), sum_partial(k), sum_partial(v)
    spec = q.spec
    out = v.spec
    split_alike = k.spec == spec and out.dims[:-1] == spec.dims[:-1]
    if not split_alike or spec.is_split(-1) or out.is_split(-1):
        raise no_rule(func, (q, k, v), {}, "they must be split in the same way, and not along features")

    # Fetch the keys and values that this rank's queries see, along each split axis.
    q = local(q)
    keys = torch.cat([local(k), local(v)], -1)  # one exchange for both
    count = len(spec.dims) - 3
    kernels = per_axis(kernel_size, count)
    steps = per_axis(dilation, count)
    starts = []  # for each axis, the first key of each query's window
    for dim, kernel, step in zip(range(2, 2 + count), kernels, steps, strict=True):
        first = window_starts(spec.shape[dim], kernel, step)
        split = spec.split(dim)
        if split is not None:
            reach = (kernel - 1) * step + 1

            def seen(low, high, first=first, reach=reach):
                return min(first[low:high]), max(first[low:high]) + reach

            pending, (low, high), (start, _) = request(keys, dim, split, split[0], seen, fill=None)
            keys = pending.rows()
            first = [row - start for row in first[low:high]]
        starts.append(first)
    if not all(starts):
        return wrap(no_outputs(keys, out.local_shape, q), out)
    features = q.shape[-1]
    k, v = keys.split([features, keys.shape[-1] - features], -1)
    return wrap(attend_windows(q, k, v, kernel_size, starts, dilation, scale), out)
