"""Gradients of a model of which each rank holds only a part."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from distributed.split import Split
from utils import comm


@torch.no_grad()
def average_over_dp(model: nn.Module, names: Collection[str]) -> None:
    """Finish, once a step, the gradients of parameters that are split over the domain ranks: their mean over dp.

    names: these parameters; data parallelism ignores them. The loss was multiplied by the number of domain ranks
    (distributed/domain_parallel.py), so the gradients are divided by it here.
    """
    grads = [p.grad for name, p in model.named_parameters() if name in names and p.grad is not None]
    dp = comm.get_size("dp")
    for grad in grads:
        grad /= comm.get_size("domain") * dp
        if dp > 1:
            dist.all_reduce(grad, group=comm.get_group("dp"))


@torch.no_grad()
def clip_gradients(model: nn.Module, split: Split, max_norm: float) -> None:
    """Scale all gradients so that their global L2 norm is at most max_norm.

    split: the result of model parallelism. Every rank sums the squares that it holds, each divided by the number of
    ranks that hold the same gradient: one all-reduce of one number over all ranks.
    """
    local, squares = [], []
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is None:
            continue
        parts = comm.get_size("pp")  # ranks that hold different ones
        parts *= comm.get_size("tp") if name in split.dims else 1
        parts *= comm.get_size("domain") if name in split.specs else 1
        if isinstance(grad, DTensor):
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                parts *= size if isinstance(placement, Shard) else 1
            grad = grad.to_local()
        local.append(grad)
        squares.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square() * (parts / comm.world_size()))
    norm = comm.all_reduce(torch.stack(squares).sum()).sqrt()
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
