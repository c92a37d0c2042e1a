"""Attention over split tokens, by one of the methods that ShardTensor was given (given.py)."""

# mypy: allow-redefinition
# (q, k and v are ShardTensors, then their local parts)

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import copy_to_region
from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.given import attention_methods
from distributed.shard.core.operands import (
    as_replicated,
    global_shape,
    to_spec,
    whole_weight,
)
from distributed.shard.core.spec import part_of
from distributed.shard.core.tensor import ShardTensor, dispatch, local, no_rule, on_shard_tensors, rule, wrap
from distributed.shard.ops.along import unshard_dims
from distributed.shard.ops.elementwise import own_stream

_chosen = "gather"


def set_attention_method(method: str) -> None:
    """Choose the method for split tokens, for all models from now on: gather, ring or all_to_all."""
    if method not in attention_methods:
        raise ValueError(f"attention: no method '{method}', there are {', '.join(attention_methods)}")
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
    """Attention of q (..., heads, N, d) to k, v (..., heads, M, d), of which some may be plain -> (..., heads, N, d).

    Keys and values are brought to the queries' split of samples and heads; queries that are whole, to that of the keys.
    Tokens that are split go by the chosen method. Raises no_rule for split heads of which several share keys.
    """
    # Plain tensors among them, such as learned queries, are the same on every rank.
    like = next(x for x in (q, k, v, attn_mask) if isinstance(x, ShardTensor))
    q = _with_whole_features(q, like.spec)
    k = _with_whole_features(k, like.spec)
    v = _with_whole_features(v, like.spec)
    if len(q.spec.dims) != 4:
        leading_shapes = [x.spec.shape[:-2] for x in (q, k, v)]
        lead = tuple(torch.broadcast_shapes(*leading_shapes))
        q = on_shard_tensors(_as_four, q, lead)
        k = on_shard_tensors(_as_four, k, lead)
        v = on_shard_tensors(_as_four, v, lead)
        mask_dims = 0 if attn_mask is None else len(global_shape(attn_mask))
        if mask_dims > 2:
            attn_mask = on_shard_tensors(_as_four, attn_mask, lead)
        y = attention(func, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return dispatch(torch.reshape, y, (*lead, *y.spec.shape[2:]))

    # From here on q is (B, heads, N, d).
    # Learned queries, which are whole, take the keys' split of samples and heads: no rank then attends for another.
    same_samples_and_heads = k.spec.shape[:2] == q.spec.shape[:2]
    if not q.spec.split_dims and same_samples_and_heads:
        samples, heads, *_ = k.spec.dims
        _, _, *rest = q.spec.dims
        q = to_spec(q, q.spec.with_dims((samples, heads, *rest)))

    # The methods exchange keys that are split as the queries, with values of as many features. Other keys become whole.
    same_tokens = k.spec.dims[2] == q.spec.dims[2]
    same_features = k.spec.shape[3] == v.spec.shape[3]
    suits_methods = same_tokens and same_features
    tokens = q.spec.dims[2] if suits_methods else unsplit_axes(k.spec.shape[2])
    k = _split_as_queries(func, q, k, tokens, enable_gqa)
    v = _split_as_queries(func, q, v, tokens, enable_gqa)

    # Dropout draws for this rank's queries alone.
    random_numbers = own_stream(q.spec, q.device) if dropout_p else contextlib.nullcontext()
    with random_numbers:
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _with_whole_features(x, spec):
    """Queries, keys or values as a ShardTensor on the mesh of `spec`, whose last dimension is whole."""
    features = len(global_shape(x)) - 1
    x = as_replicated(x, spec)
    return unshard_dims(x, (features,))


def _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Attention of this rank's queries to all keys, by one of three ways: which depends on what splits the tokens.

    q, k, v: ShardTensors (B, heads, N or M, d), which split samples and heads alike.
    """
    rows = q.spec  # of the scores, (N, M)
    columns = k.spec
    out = rows.with_dims((*rows.dims[:3], v.spec.dims[3]))
    q = local(q)  # (b, heads, n, d)
    k = local(k)  # (b, heads, m, d)
    v = local(v)  # (b, heads, m, d of the values)
    attn_mask = _of_own_heads(attn_mask, rows)
    if scale is not None:
        # The methods know the default scale only, d ** -0.5, so the queries take the rest of another one.
        factor = scale * math.sqrt(q.shape[-1])
        q = q * factor
    if enable_gqa:  # several heads of queries share a head of keys
        heads = q.shape[1]
        k = k.repeat_interleave(heads // k.shape[1], 1)
        v = v.repeat_interleave(heads // v.shape[1], 1)
    # 1. This rank has all queries and all keys of its samples and heads.
    if not rows.is_split(2):
        y = _fused(q, k, v, attn_mask, dropout_p, is_causal)
        return wrap(y, out)

    # 2. Queries and keys are split alike: ranks exchange keys.
    mask = _mask(attn_mask, is_causal, rows, columns, q.device)
    sizes, group = rows.shares(2)
    if columns.is_split(2):
        if _chosen != "all_to_all":
            mask = _own_rows(mask, rows)
        method = attention_methods[_chosen]
        y = method(q, k, v, dropout_p, sizes=sizes, group=group, mask=mask)
        return wrap(y, out)
    # 3. Every rank has all keys, and different queries. Gradients of the keys are summed over the ranks.
    k = copy_to_region(k, group)
    v = copy_to_region(v, group)
    mask = _own_rows(mask, rows)
    y = _fused(q, k, v, mask, dropout_p)
    return wrap(y, out)


def _fused(q, k, v, mask, dropout_p, is_causal=False):
    """The plain operation, and no values where there is nothing to compute."""
    if not q.numel():  # this rank has no samples, heads or queries, and torch 2.11 divides by their number
        scores = q @ k.mT
        return (scores if mask is None else scores * mask) @ v
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)


def _as_four(x, shape):
    """A tensor (..., N, d), or a mask, as (B, heads, N, d).

    shape: of its leading dimensions after broadcasting. The last of these are the heads, all others the samples.
    """
    if len(shape) > 1:
        samples_and_heads = (math.prod(shape[:-1]), shape[-1])
    else:
        ones = [1] * (2 - len(shape))
        samples_and_heads = (*shape, *ones)
    rest = x.shape[-2:]
    expanded = x.expand(*shape, *rest)
    return expanded.reshape(*samples_and_heads, *rest)


def _split_as_queries(func, q, x, tokens, grouped):
    """The keys or values x with the samples and heads of the queries q, split as these are.

    tokens: axes that the tokens get. grouped: several heads of queries may share a head of keys.
    """
    rows = q.spec
    # Samples and heads of size 1 broadcast over those of the queries.
    samples, heads = x.spec.shape[:2]
    if samples == 1:
        samples = rows.shape[0]
    if heads == 1 and not grouped:
        heads = rows.shape[1]
    if (samples, heads) != tuple(x.spec.shape[:2]):
        _, _, *rest = x.spec.shape
        x = dispatch(torch.broadcast_to, x, (samples, heads, *rest))
    spec = x.spec
    splits_heads = rows.is_split(1) or spec.is_split(1)
    shares_keys = spec.shape[1] != rows.shape[1]
    if shares_keys and splits_heads:
        raise no_rule(func, (q, x), {}, "split heads of which several share keys")
    sample_axes = rows.dims[0]
    head_axes = rows.dims[1] if rows.is_split(1) else unsplit_axes(spec.shape[1])
    feature_axes = spec.dims[3]
    wanted = spec.with_dims((sample_axes, head_axes, tokens, feature_axes))
    return to_spec(x, wanted)


def _of_own_heads(mask, rows):
    """The mask of this rank's samples and heads, and of all queries and keys, as a plain tensor."""
    if mask is None:
        return None
    mask = whole_weight(mask, rows)
    missing = 4 - mask.dim()
    samples_and_heads = rows.dims[missing:2]
    return part_of(mask, rows.with_dims(samples_and_heads))


def _mask(mask, is_causal, rows, columns, device):
    """The mask of all queries and keys, (..., N, M), both in the order of the ranks; None without one.

    The methods join keys rank by rank. Their tokens follow each other as in the image only if ranks hold bands of it.
    """
    n_queries = rows.shape[2]
    n_keys = columns.shape[2]
    if is_causal:
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        mask = mask.tril()
    if mask is None:
        return None
    # Bring rows and columns of the mask to the order of the ranks, where these hold tiles.
    for dim, spec in ((-2, rows), (-1, columns)):
        axes = spec.dims[2]
        are_tiles = len(axes) > 1
        if are_tiles and mask.shape[dim] > 1:
            tokens = torch.arange(spec.shape[2], device=device)
            of_tokens = spec.with_dims((axes,))
            tokens_of_ranks = [part_of(tokens, of_tokens, rank) for rank in spec.ranks(2)]
            order = torch.cat(tokens_of_ranks)
            mask = mask.index_select(dim, order)
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], n_keys)
    return mask


def _own_rows(mask, rows):
    """The rows of a mask (..., N, M) that belong to this rank's queries."""
    sizes, group = rows.shares(2)
    if mask is None or mask.shape[-2] == 1:
        return mask
    first = sum(sizes[: group.rank])
    return mask.narrow(-2, first, sizes[group.rank])
