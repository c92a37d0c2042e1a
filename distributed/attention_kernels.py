"""Kernels of attention to a block of keys, which blocks can be merged from: torch's fused ones, and the formula.

Ring attention (attention.py) needs the log-sum-exp of the scores beside the output, and a backward pass of one block.
F.scaled_dot_product_attention gives neither.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


class Kernel(NamedTuple):
    """Attention to a block of keys, of several blocks that are merged.

    forward(q, k, v) -> the output (B, heads, n, d) and the log-sum-exp of the scores (B, heads, n).
    backward(grad, q, k, v, out, lse), with the last two of *all* keys -> the block's part of the gradients of q, k, v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel(q: Tensor, mask: Tensor | None, device_type: str | None = None) -> Kernel:
    """The fused kernel that also returns the log-sum-exp, or Plain if there is none."""
    device_type = device_type or q.device.type
    d = q.shape[-1]
    # Blocks with a mask go by the formula.
    if mask is not None:
        return Plain
    if device_type == "cpu":
        return CpuFlash
    if device_type != "cuda":
        return Plain
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    fits_flash = is_half and d % 8 == 0 and d <= 256
    if fits_flash and has_flash(q.device):
        return CudaFlash
    fits_efficient = q.dtype == torch.float32 and d % 4 == 0
    return CudaEfficient if fits_efficient else Plain


def has_flash(device: torch.device) -> bool:
    """Tell whether a GPU has the flash kernel: NVIDIA's from the A100 on. ROCm's builds say so themselves."""
    if device.type != "cuda" or torch.version.hip:  # an imagined GPU of the planner is a new one
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _cuda_flash(q, k, v):
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse


def _cuda_flash_backward(grad, q, k, v, out, lse):
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # random state of the dropout
    no_offsets = None  # offsets of sequences that are packed into one
    n_queries = q.shape[2]
    n_keys = k.shape[2]
    dropout = 0.0
    is_causal = False
    return aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        no_offsets,
        no_offsets,
        n_queries,
        n_keys,
        dropout,
        is_causal,
        unused,
        unused,
    )


def _cuda_efficient(q, k, v):
    """It pads the log-sum-exp to a multiple of 32 queries."""
    no_bias = None
    wants_lse = True
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, no_bias, wants_lse)
    n_queries = q.shape[2]
    return out, lse[..., :n_queries]


def _cuda_efficient_backward(grad, q, k, v, out, lse):
    # ROCm's kernel does not pad the log-sum-exp. An infinite one gives the missing queries the weight 0.
    if not torch.version.hip:
        lse = F.pad(lse, (0, -q.shape[2] % 32), value=torch.inf)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state of the dropout
    no_bias = None
    dropout = 0.0
    wanted = [True, True, True, False]  # gradients of q, k, v, not of the bias
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        no_bias,
        out,
        lse,
        unused,
        unused,
        dropout,
        wanted,
    )
    return dq, dk, dv


def _plain(q, k, v, mask=None):
    scores = _scores(q, k, mask)  # (B, heads, n, n_block)
    lse = scores.logsumexp(-1)  # (B, heads, n)
    top = without_infinity(lse).unsqueeze(-1)
    weights = (scores - top).exp()
    out = weights @ v.to(scores.dtype)  # (B, heads, n, d)
    return out, lse


def _plain_backward(grad, q, k, v, out, lse, mask=None):
    # The weights are computed again, since they take n times the memory of the log-sum-exp.
    top = without_infinity(lse).unsqueeze(-1)  # (B, heads, n, 1)
    weights = (_scores(q, k, mask) - top).exp()  # (B, heads, n, n_block)
    grad, q, k, v, out = (t.to(weights.dtype) for t in (grad, q, k, v, out))

    # The gradient of a softmax is weights * (gradient of the weights - its weighted mean over the row). That mean is
    # the product of grad and out. Each line replaces its operand, so that no more than two such matrices are held.
    row_mean = (grad * out).sum(-1, keepdim=True)  # (B, heads, n, 1)
    dscores = grad @ v.mT  # (B, heads, n, n_block)
    dscores = dscores - row_mean
    dscores = weights * dscores
    dscores = dscores * q.shape[-1] ** -0.5
    dq = dscores @ k
    dk = dscores.mT @ q
    dv = weights.mT @ grad
    return dq, dk, dv


def _scores(q, k, mask):
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT  # (B, heads, n, n_block)
    scores = scores * q.shape[-1] ** -0.5
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask


def _cpu_flash_backward(grad, q, k, v, out, lse):
    dropout = 0.0
    is_causal = False
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, dropout, is_causal)


def without_infinity(lse: Tensor) -> Tensor:
    """Replace -inf by 0, so that the weights of queries without any key so far become 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


CpuFlash = Kernel(aten._scaled_dot_product_flash_attention_for_cpu, _cpu_flash_backward)
# This kernel takes float16 and bfloat16 (arXiv:2205.14135).
CudaFlash = Kernel(_cuda_flash, _cuda_flash_backward)
# The memory-efficient kernel also takes float32.
CudaEfficient = Kernel(_cuda_efficient, _cuda_efficient_backward)
# The formula computes at least in float32. It alone takes a mask: the part that belongs to the block.
Plain = Kernel(_plain, _plain_backward)
