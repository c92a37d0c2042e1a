"""Attention over tokens that are split over a context-parallel group into contiguous pieces of any sizes.

Every rank holds the queries, keys and values of its own tokens, and needs the keys and values of all tokens. There are
three methods:

| method | forward | backward | bytes sent by a rank, forward | good for |
|---|---|---|---|---|
| gather | 1 all-gather | 1 reduce-scatter | 2 (size - 1) n B D | few ranks: one kernel for all keys |
| ring | size - 1 exchanges | 2 (size - 1) exchanges | the same | long sequences: all keys are never held |
| all_to_all | 2 all-to-alls | 2 all-to-alls | 4 (size - 1) / size n B D | many ranks, more heads |

Ring attention: Liu et al. 2023 (arXiv:2310.01889); merging blocks by their log-sum-exp: Dao et al. 2022
(arXiv:2205.14135). All-to-all: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).

Each function replaces F.scaled_dot_product_attention: q, k, v (B, heads, n, d) -> (B, heads, n, d), where n is
sizes[rank], the number of this rank's tokens among all N; it may be 0. The dtype is kept. Heads may be split over
another group at the same time. mask: bool (True: attend) or added to the scores; it broadcasts to (B, heads, n, N),
with keys in the order of the ranks. all_to_all takes all rows of the mask, (B, heads, N, N), in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.attention_kernels import kernel, without_infinity
from distributed.collectives import Group, Sizes, all_gather, all_to_all, differentiated_again, start_shift
from utils.errors import UsageError


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    *,
    sizes: Sizes,
    group: Group,
    mask: Tensor | None = None,
) -> Tensor:
    """Own queries attend to the gathered keys and values of all ranks."""
    # Keys and values travel in one collective. Their tokens come first, so that gathering them needs no copy.
    k = k.permute(2, 0, 1, 3)  # (n, B, heads, d)
    v = v.permute(2, 0, 1, 3)
    kv = torch.stack((k, v), 1)  # (n, 2, B, heads, d)
    kv = all_gather(kv, 0, sizes, group)  # (N, 2, B, heads, d)
    k, v = kv.permute(1, 2, 3, 0, 4).unbind()  # (B, heads, N, d)
    if not q.numel():  # no tokens here, but backward must take part in the collectives
        no_tokens = q * k.sum() * v.sum()
        return no_tokens if mask is None else no_tokens * mask.sum()
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    *,
    sizes: Sizes,
    group: Group,
    mask: Tensor | None = None,
) -> Tensor:
    """Exchange own tokens of all heads for all tokens of own heads, attend, and exchange back.

    Raises ValueError if the number of heads is not a multiple of the group's size.
    """
    heads = q.shape[1]
    n = q.shape[2]
    parts = group.size
    if heads % parts:
        raise ValueError(f"context parallel: all_to_all cannot split {heads} heads over {parts} ranks")

    # Each rank is sent its heads of own tokens, tokens outermost. The received rows, in rank order, are all tokens.
    rows_for_each = (n,) * parts
    qkv = torch.stack((q, k, v))  # (3, B, heads, n, d)
    qkv = torch.unflatten(qkv, 2, (parts, -1))  # (3, B, size, heads / size, n, d)
    qkv = qkv.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (size * n, 3, B, heads / size, d)
    qkv = all_to_all(qkv, rows_for_each, sizes, group)  # (N, 3, B, heads / size, d)
    q, k, v = qkv.permute(1, 2, 3, 0, 4).unbind()  # (B, heads / size, N, d)

    # A mask that differs between heads is cut to the heads of this rank.
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        by_rank = torch.unflatten(mask, -3, (parts, -1))  # (B, size, heads / size, N, N)
        mask = by_rank.select(-4, group.rank)  # (B, heads / size, N, N)
    x = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)  # (B, heads / size, N, d)

    # The same way back: each rank gets the results of its own tokens, from the rank that has the heads.
    x = x.permute(2, 0, 1, 3)  # (N, B, heads / size, d)
    x = all_to_all(x, sizes, rows_for_each, group)  # (size * n, B, heads / size, d)
    x = torch.unflatten(x, 0, (parts, n)).permute(2, 1, 0, 3, 4)  # (B, n, size, heads / size, d)
    return x.flatten(2, 3).transpose(1, 2)  # (B, heads, n, d)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    *,
    sizes: Sizes,
    group: Group,
    mask: Tensor | None = None,
) -> Tensor:
    """Pass keys and values around the ring of ranks; attend to each block that arrives, and merge the results.

    The next block travels while a rank computes with the current one. Accumulators are at least float32. Raises
    ValueError for dropout of the attention, because backward cannot reproduce its masks of blocks, and for a mask that
    requires a gradient. Under torch.compile the blocks of the forward pass are kept for the backward pass, which then
    needs size - 1 fewer exchanges but as much memory as gather.
    """
    if dropout_p:
        raise ValueError("context parallel: ring attention cannot drop out attention weights; use gather or all_to_all")
    if mask is not None and mask.requires_grad:
        raise ValueError("context parallel: ring attention gives no gradient of a mask; use gather or all_to_all")
    return _Ring.apply(q, k, v, sizes, group, mask)


class _Ring(torch.autograd.Function):
    """Attention to one block of keys after the other, as they come around the ring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sizes: Sizes,
        group: Group,
        mask: Tensor | None,
    ) -> Tensor:
        q = _dense(q)
        attend = kernel(q, mask)
        ctx.sizes = sizes
        ctx.group = group
        ctx.mask = mask
        out = None
        lse = None
        for step, kv in _blocks(torch.stack((k, v)), sizes, group):  # (2, B, heads, n_block, d)
            is_empty = not q.numel() or not kv.numel()
            if is_empty:
                continue
            k_block, v_block = kv.unbind()  # (B, heads, n_block, d)
            columns = _columns(mask, sizes, group, step)
            block_out, block_lse = attend.forward(q, k_block, v_block, *columns)
            out, lse = _merge(out, lse, block_out, block_lse)
            del block_out, block_lse  # their memory is free for the next block
        out = torch.zeros_like(q) if out is None else out.to(q.dtype)  # None: this rank has no tokens
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the blocks around again; the gradient of each follows it, collects all parts and ends at the owner."""
        if differentiated_again():
            raise UsageError(
                "attention in a ring has no second derivative (create_graph=True): choose the method gather or "
                "all_to_all (on split images --domain_method)"
            )
        q, k, v, out, lse = ctx.saved_tensors
        sizes = ctx.sizes
        group = ctx.group
        mask = ctx.mask
        attend = kernel(q, mask)
        grad = _dense(grad)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)  # (B, heads, n, d)
        own: Tensor  # gradient of this rank's keys and values, (2, B, heads, n, d)
        arrive_grad: Callable[[], Tensor] | None = None
        for step, kv in _blocks(torch.stack((k, v)), sizes, group):
            # What this rank's queries add to the gradients, (2, B, heads, n_block, d) for the block's keys and values.
            if q.numel() and kv.numel():
                k_block, v_block = kv.unbind()
                columns = _columns(mask, sizes, group, step)
                dq_part, *dkv_part = attend.backward(grad, q, k_block, v_block, out, lse, *columns)
                dq += dq_part
                dkv = torch.stack(dkv_part).to(wide)
                del dq_part, dkv_part  # their memory is free while the gradients travel
            else:
                dkv = torch.zeros_like(kv, dtype=wide)

            # The sum of the previous ranks' parts arrives one step behind its block. It travels on with ours added.
            if step == 0:
                own = dkv
                continue
            if arrive_grad is not None:
                dkv = dkv.add_(arrive_grad())
            next_shape = _block_shape(dkv, sizes, group, step + 1)
            arrive_grad = start_shift(dkv, next_shape, group)
        if arrive_grad is not None:
            own += arrive_grad()
        dk, dv = own.to(k.dtype).unbind()
        dq = dq.to(q.dtype)
        return dq, dk, dv, None, None, None


def _blocks(block, sizes, group):
    """Yield (step, block) of the ring, first this rank's own; meanwhile the next block travels. (2, B, heads, n, d)"""
    for step in range(group.size - 1):
        next_shape = _block_shape(block, sizes, group, step + 1)
        arrive = start_shift(block, next_shape, group)
        yield step, block
        block = arrive()
    yield group.size - 1, block


def _block_shape(block, sizes, group, step):
    """Shape of the block that a rank holds at a step of the ring: first its own, then those of previous ranks."""
    owner = (group.rank - step) % group.size
    kv, batch, heads, _, features = block.shape
    return (kv, batch, heads, sizes[owner], features)


def _dense(x):
    """Make the features contiguous: the fused kernels give wrong results for other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(mask, sizes, group, step):
    """The part of the mask for the block at a step of the ring, as an argument of the kernel."""
    if mask is None:
        return ()
    owner = (group.rank - step) % group.size
    first_key = sum(sizes[:owner])
    columns = mask.narrow(-1, first_key, sizes[owner])  # (B, heads, n, n_block)
    return (columns,)


def _merge(out, lse, block_out, block_lse):
    """Merge the attention to two sets of keys, weighted by their sums of exponentials.

    out: (B, heads, n, d), lse: (B, heads, n); None at the start.
    """
    block_out = block_out.to(block_lse.dtype)
    if out is None:
        return block_out, block_lse
    total = torch.logaddexp(lse, block_lse)
    top = without_infinity(total)
    weight = (lse - top).exp().unsqueeze(-1)  # (B, heads, n, 1)
    block_weight = (block_lse - top).exp().unsqueeze(-1)
    merged = out * weight + block_out * block_weight
    return merged, total


METHODS = {
    "gather": gather_attention,
    "ring": ring_attention,
    "all_to_all": all_to_all_attention,
}
