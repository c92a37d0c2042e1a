"""Clipping by the gradient of the whole model, when each rank holds only a part of it."""

import torch
from torch.distributed.tensor import DTensor, Shard

from utils import comm


@torch.no_grad()
def clip_gradients(model, split, max_norm):
    """Scale all gradients so that their global L2 norm is at most max_norm.

    split: names of the parameters that are split over the tensor-parallel ranks. Every rank adds up the squares that it
    holds, each divided by the number of ranks that hold the same: one all-reduce of one number over all ranks.
    """
    local, squares = [], []
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is None:
            continue
        parts = comm.get_size("pp") * (comm.get_size("tp") if name in split else 1)  # ranks that hold different ones
        if isinstance(grad, DTensor):
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                parts *= size if isinstance(placement, Shard) else 1
            grad = grad.to_local()
        local.append(grad)
        squares.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square() * (parts / comm.world_size()))
    norm = comm.all_reduce(torch.stack(squares).sum()).sqrt()
    torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
