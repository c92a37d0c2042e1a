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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed.collectives import Group, Sizes, all_gather, all_to_all, start_shift

aten = torch.ops.aten


def gather_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, sizes: Sizes, group: Group, mask: Tensor | None = None
) -> Tensor:
    """Own queries attend to the gathered keys and values of all ranks."""
    kv = torch.stack((k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)), 1)  # (n, 2, B, heads, d): one collective, no copy
    k, v = all_gather(kv, 0, sizes, group).permute(1, 2, 3, 0, 4).unbind()  # (B, heads, N, d)
    if not q.numel():
        return q * k.sum() * v.sum()  # no tokens here, but backward must take part in the collectives
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, sizes: Sizes, group: Group, mask: Tensor | None = None
) -> Tensor:
    """Exchange own tokens of all heads for all tokens of own heads, attend, and exchange back.

    Raises ValueError if the number of heads is not a multiple of the group's size.
    """
    heads, n, parts = q.shape[1], q.shape[2], group.size
    if heads % parts:
        raise ValueError(f"context parallel: all_to_all cannot split {heads} heads over {parts} ranks")
    # Each rank is sent its heads of own tokens, tokens outermost. The received rows, in rank order, are all tokens.
    qkv = torch.stack((q, k, v)).unflatten(2, (parts, -1))  # (3, B, size, heads / size, n, d)
    qkv = qkv.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (size * n, 3, B, heads / size, d)
    qkv = all_to_all(qkv, (n,) * parts, sizes, group)  # (N, 3, B, heads / size, d)
    q, k, v = qkv.permute(1, 2, 3, 0, 4).unbind()  # (B, heads / size, N, d)
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.unflatten(-3, (parts, -1)).select(-4, group.rank)
    x = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    x = all_to_all(x.permute(2, 0, 1, 3), sizes, (n,) * parts, group)  # (size * n, B, heads / size, d)
    return x.unflatten(0, (parts, n)).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, sizes: Sizes, group: Group, mask: Tensor | None = None
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
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, group: Group, mask: Tensor | None) -> Tensor:
        q = _dense(q)
        attend = kernel(q, mask)
        ctx.sizes, ctx.group, ctx.mask = sizes, group, mask
        out = lse = None
        for step, kv in _blocks(torch.stack((k, v)), sizes, group):
            if q.numel() and kv.numel():
                out, lse = _merge(out, lse, *attend.forward(q, *kv.unbind(), *_columns(mask, sizes, group, step)))
        out = torch.zeros_like(q) if out is None else out.to(q.dtype)  # None: this rank has no tokens
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the blocks around again; the gradient of each follows it, collects all parts and ends at the owner."""
        (q, k, v, out, lse), sizes, group, mask = ctx.saved_tensors, ctx.sizes, ctx.group, ctx.mask
        attend, grad = kernel(q, mask), _dense(grad)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        own: Tensor  # gradient of this rank's keys and values
        arrive_grad: Callable[[], Tensor] | None = None
        for step, kv in _blocks(torch.stack((k, v)), sizes, group):
            if q.numel() and kv.numel():
                columns = _columns(mask, sizes, group, step)
                dq_part, *dkv_part = attend.backward(grad, q, *kv.unbind(), out, lse, *columns)
                dq += dq_part
                dkv = torch.stack(dkv_part).to(wide)
                del dq_part, dkv_part
            else:
                dkv = torch.zeros_like(kv, dtype=wide)
            if step == 0:
                own = dkv
            else:
                dkv = dkv if arrive_grad is None else dkv.add_(arrive_grad())
                arrive_grad = start_shift(dkv, _block_shape(dkv, sizes, group, step + 1), group)
        if arrive_grad is not None:
            own += arrive_grad()
        dk, dv = own.to(k.dtype).unbind()
        return dq.to(q.dtype), dk, dv, None, None, None


def _blocks(block, sizes, group):
    """Yield (step, block) of the ring, first this rank's own; meanwhile the next block travels. (2, B, heads, n, d)"""
    for step in range(group.size - 1):
        arrive = start_shift(block, _block_shape(block, sizes, group, step + 1), group)
        yield step, block
        block = arrive()
    yield group.size - 1, block


def _block_shape(block, sizes, group, step):
    """Shape of the block that a rank holds at a step of the ring: first its own, then those of previous ranks."""
    return (*block.shape[:3], sizes[(group.rank - step) % group.size], block.shape[4])


def _dense(x):
    """Make the features contiguous: the fused kernels give wrong results for other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _columns(mask, sizes, group, step):
    """The part of the mask for the block at a step of the ring, as an argument of the kernel."""
    if mask is None:
        return ()
    owner = (group.rank - step) % group.size
    return (mask.narrow(-1, sum(sizes[:owner]), sizes[owner]),)


def _merge(out, lse, block_out, block_lse):
    """Merge the attention to two sets of keys, weighted by their sums of exponentials.

    out: (B, heads, n, d), lse: (B, heads, n); None at the start.
    """
    block_out = block_out.to(block_lse.dtype)
    if out is None:
        return block_out, block_lse
    total = torch.logaddexp(lse, block_lse)
    top = _finite(total)
    weight, block_weight = (lse - top).exp().unsqueeze(-1), (block_lse - top).exp().unsqueeze(-1)
    return out * weight + block_out * block_weight, total


def _finite(lse):
    """Replace -inf by 0, so that the weights of queries without any key so far become 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


class Kernel(NamedTuple):
    """Attention to a block of keys, of several blocks that are merged.

    forward(q, k, v) -> the output (B, heads, n, d) and the log-sum-exp of the scores (B, heads, n).
    backward(grad, q, k, v, out, lse), with the last two of *all* keys -> the block's part of the gradients of q, k, v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel(q: Tensor, mask: Tensor | None, device_type: str | None = None) -> Kernel:
    """The fused kernel that also returns the log-sum-exp, or Plain if there is none."""
    device_type, d = device_type or q.device.type, q.shape[-1]
    if mask is not None:
        return Plain
    if device_type == "cpu":
        return CpuFlash
    half = q.dtype in (torch.float16, torch.bfloat16) and d % 8 == 0 and d <= 256
    if device_type == "cuda" and half and has_flash(q.device):
        return CudaFlash
    return CudaEfficient if device_type == "cuda" and q.dtype == torch.float32 and d % 4 == 0 else Plain


def has_flash(device: torch.device) -> bool:
    """Tell whether a GPU has the flash kernel: NVIDIA's from the A100 on. ROCm's builds say so themselves."""
    if device.type != "cuda" or torch.version.hip:  # an imagined GPU of the planner is a new one
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _cuda_flash_backward(grad, q, k, v, out, lse):
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # random state of the dropout
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, unused, unused
    )


def _cuda_efficient(q, k, v):
    """It pads the log-sum-exp to a multiple of 32 queries."""
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]
    return out, lse[..., : q.shape[2]]


def _cuda_efficient_backward(grad, q, k, v, out, lse):
    if not torch.version.hip:  # whose kernel does not pad
        lse = F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state of the dropout
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False]
    )[:3]


def _plain(q, k, v, mask=None):
    scores = _scores(q, k, mask)
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse).unsqueeze(-1)).exp() @ v.to(scores.dtype), lse


def _plain_backward(grad, q, k, v, out, lse, mask=None):
    weights = (_scores(q, k, mask) - _finite(lse).unsqueeze(-1)).exp()  # (B, heads, n, n_block)
    grad, q, k, v, out = (t.to(weights.dtype) for t in (grad, q, k, v, out))
    dscores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return dscores @ k, dscores.mT @ q, weights.mT @ grad


def _scores(q, k, mask):
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


CpuFlash = Kernel(
    aten._scaled_dot_product_flash_attention_for_cpu,
    lambda *args: aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, False),
)
# In float16 and bfloat16 (arXiv:2205.14135).
CudaFlash = Kernel(lambda *args: aten._scaled_dot_product_flash_attention(*args)[:2], _cuda_flash_backward)
CudaEfficient = Kernel(_cuda_efficient, _cuda_efficient_backward)  # the memory-efficient kernel, also in float32
Plain = Kernel(_plain, _plain_backward)  # at least in float32, also with a mask, of which it gets the block's part

METHODS = {"gather": gather_attention, "ring": ring_attention, "all_to_all": all_to_all_attention}
