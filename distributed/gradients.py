"""Gradients of a model of which each rank holds only a part."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
def squared_norm(model: nn.Module, split: Split) -> Tensor:
    """This rank's share of the square of the gradients' global L2 norm: the shares of all ranks add up to it.

    split: the result of model parallelism. Every rank sums the squares that it holds, each divided by the number of
    ranks that hold the same gradient. A float32 scalar on the device of the gradients; nothing is communicated.
    """
    held: dict[tuple[torch.device, int], list[Tensor]] = {}  # by place, and number of ranks with different gradients
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is None:
            continue
        parts = comm.get_size("pp")
        parts *= comm.get_size("tp") if name in split.dims else 1
        parts *= comm.get_size("domain") if name in split.specs else 1
        if isinstance(grad, DTensor):
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                parts *= size if isinstance(placement, Shard) else 1
            grad = grad.to_local()
        held.setdefault((grad.device, parts), []).append(grad)
    squares = [
        torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).square().sum() * (parts / comm.world_size())
        for (_, parts), grads in held.items()
    ]
    return sum((square.to(squares[0].device) for square in squares[1:]), squares[0])


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose global L2 norm is `norm`, so that it is at most max_norm."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    held: dict[torch.device, list[Tensor]] = {}
    for parameter in model.parameters():
        if (grad := parameter.grad) is not None:
            grad = grad.to_local() if isinstance(grad, DTensor) else grad
            held.setdefault(grad.device, []).append(grad)
    for place, grads in held.items():
        torch._foreach_mul_(grads, scale.to(place))
