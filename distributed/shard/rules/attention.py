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
from distributed.shard.operands import copied, global_shape, reduced, replicated, shared, to_spec, used_apart
from distributed.shard.rules.along import made_whole
from distributed.shard.rules.elementwise import own_stream
from distributed.shard.rules.windows import no_outputs, request
from distributed.shard.spec import part_of, whole
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
    func: Callable, q: ShardTensor, k: ShardTensor, v: ShardTensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> ShardTensor:  # fmt: skip
    """Attention of q (..., heads, N, d) to k, v (..., heads, M, d), of which some may be plain tensors.

    Keys and values are brought to the queries' split of samples and heads; queries that are whole, to that of the keys.
    """
    like = next(x for x in (q, k, v, attn_mask) if isinstance(x, ShardTensor))
    q, k, v = (made_whole(copied(x, like.spec), (len(global_shape(x)) - 1,)) for x in (q, k, v))
    if len(q.spec.dims) != 4:
        lead = tuple(torch.broadcast_shapes(*[x.spec.shape[:-2] for x in (q, k, v)]))
        q, k, v = (_as_four(x, lead) for x in (q, k, v))
        if attn_mask is not None and len(global_shape(attn_mask)) > 2:
            attn_mask = _as_four(attn_mask, lead)
        y = attention(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return dispatch(torch.reshape, y, (*lead, *y.spec.shape[2:]))
    if not q.spec.split_dims and k.spec.shape[:2] == q.spec.shape[:2]:  # learned queries, the same for all samples
        q = to_spec(q, q.spec.with_dims((*k.spec.dims[:2], *q.spec.dims[2:])))
    alike = k.spec.dims[2] == q.spec.dims[2] and k.spec.shape[3] == v.spec.shape[3]
    tokens = q.spec.dims[2] if alike else whole(k.spec.shape[2])
    k, v = (_beside(func, q, x, tokens, enable_gqa) for x in (k, v))
    with own_stream(q.spec, q.device) if dropout_p else contextlib.nullcontext():
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    rows, columns = q.spec, k.spec
    out = rows.with_dims((*rows.dims[:3], v.spec.dims[3]))
    q, k, v, attn_mask = local(q), local(k), local(v), _of_own_heads(attn_mask, rows)
    if scale is not None:
        q = q * (scale * math.sqrt(q.shape[-1]))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if not rows.is_split(2):
        return wrap(_fused(q, k, v, attn_mask, dropout_p, is_causal), out)
    mask = _mask(attn_mask, is_causal, rows, columns, q.device)
    sizes, group = rows.shares(2)
    if columns.is_split(2):
        mask = mask if _chosen == "all_to_all" else _own_rows(mask, rows)
        return wrap(METHODS[_chosen](q, k, v, dropout_p, sizes=sizes, group=group, mask=mask), out)
    k, v = copy_to_region(k, group), copy_to_region(v, group)  # every rank has different queries
    return wrap(_fused(q, k, v, _own_rows(mask, rows), dropout_p), out)


def _fused(q, k, v, mask, dropout_p, is_causal=False):
    if not q.numel():  # this rank has no samples, heads or queries, and torch 2.11 divides by their number
        return q @ k.mT @ v
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)


def _as_four(x, shape):
    """X (..., N, d) or a mask as (B, heads, N, d); shape: that of its leading dimensions after broadcasting."""
    ahead = (math.prod(shape[:-1]), *shape[-1:]) if len(shape) > 1 else (*shape, *[1] * (2 - len(shape)))
    rest = global_shape(x)[-2:]
    if isinstance(x, ShardTensor):
        return dispatch(torch.reshape, dispatch(torch.broadcast_to, x, (*shape, *rest)), (*ahead, *rest))
    return x.expand(*shape, *rest).reshape(*ahead, *rest)


def _beside(func, q, x, tokens, grouped):
    """The keys or values x with the samples and heads of the queries, and their split of these. tokens: axes."""
    rows, spec = q.spec, x.spec
    shape = [n if n > 1 or (grouped and d) else rows.shape[d] for d, n in enumerate(spec.shape[:2])]
    if shape != list(spec.shape[:2]):
        x = dispatch(torch.broadcast_to, x, (*shape, *spec.shape[2:]))
    spec = x.spec
    if spec.shape[1] != rows.shape[1] and (rows.is_split(1) or spec.is_split(1)):
        raise no_rule(func, (q, x), {}, "split heads of which several share keys")
    heads = rows.dims[1] if rows.is_split(1) else whole(spec.shape[1])
    return to_spec(x, spec.with_dims((rows.dims[0], heads, tokens, spec.dims[3])))


def _of_own_heads(mask, rows):
    """The mask of this rank's samples and heads, and of all queries and keys, as a plain tensor."""
    if mask is None:
        return None
    mask = used_apart(replicated(mask), rows) if isinstance(mask, ShardTensor) else shared(mask, rows)
    return part_of(mask, rows.with_dims(rows.dims[4 - mask.dim() : 2]))


def _mask(mask, is_causal, rows, columns, device):
    """The mask of all queries and keys, (..., N, M), both in the order of the ranks."""
    if is_causal:
        mask = torch.ones(rows.shape[2], columns.shape[2], dtype=torch.bool, device=device).tril()
    if mask is None:
        return None
    for dim, spec in ((-2, rows), (-1, columns)):
        if mask.shape[dim] > 1 and len(spec.dims[2]) > 1:
            tokens, axes = torch.arange(spec.shape[2], device=device), spec.with_dims((spec.dims[2],))
            mask = mask.index_select(dim, torch.cat([part_of(tokens, axes, rank) for rank in spec.ranks(2)]))
    return mask if mask.shape[-1] > 1 else mask.expand(*mask.shape[:-1], columns.shape[2])


def _own_rows(mask, rows):
    sizes, group = rows.shares(2)
    if mask is None or mask.shape[-2] == 1:
        return mask
    return mask.narrow(-2, sum(sizes[: group.rank]), sizes[group.rank])


@rule(neighborhood_attention)
def attend(
    func: Callable, q: ShardTensor, k: ShardTensor, v: ShardTensor, kernel_size: PerAxis, dilation: PerAxis = 1,
    scale: float | None = None,
) -> ShardTensor:  # fmt: skip
    """Attention of q, k, v (B, heads, *spatial, d), which split samples, heads and spatial axes in the same way."""
    if not all(isinstance(x, ShardTensor) for x in (q, k, v)):
        raise no_rule(func, (q, k, v), {}, "q, k and v must be ShardTensors")
    q, k, v = reduced(q), reduced(k), reduced(v)
    spec, count = q.spec, len(q.spec.dims) - 3
    if k.spec != spec or v.spec.dims[:-1] != spec.dims[:-1] or spec.is_split(-1) or v.spec.is_split(-1):
        raise no_rule(func, (q, k, v), {}, "they must be split in the same way, and not along features")
    q, keys = local(q), torch.cat([local(k), local(v)], -1)  # one exchange for both
    starts = []
    for dim, kernel, step in zip(
        range(2, 2 + count), per_axis(kernel_size, count), per_axis(dilation, count), strict=True
    ):
        first = window_starts(spec.shape[dim], kernel, step)
        if (split := spec.split(dim)) is not None:

            def seen(low, high, first=first, reach=(kernel - 1) * step + 1):
                return min(first[low:high]), max(first[low:high]) + reach

            coming, own, (start, _) = request(keys, dim, split, split[0], seen, fill=None)
            keys, first = coming.rows(), [row - start for row in first[slice(*own)]]
        starts.append(first)
    out = v.spec
    if not all(starts):
        return wrap(no_outputs(keys, out.local_shape, q), out)
    k, v = keys.split([q.shape[-1], keys.shape[-1] - q.shape[-1]], -1)
    return wrap(attend_windows(q, k, v, kernel_size, starts, dilation, scale), out)
