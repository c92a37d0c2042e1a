"""Data parallelism by hand: what DistributedDataParallel does, in a loop that one reads at a glance.

torchrun --nproc_per_node 4 -m docs.examples.by_hand
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train() -> None:
    """Three steps; the losses are the same on any number of ranks that divides 16."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))  # other weights on each rank
    for p in model.parameters():
        dist.broadcast(p.data, 0)  # now those of rank 0
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))  # the global batch
    y = x.sum(1, keepdim=True)
    n = 16 // size
    mine = slice(rank * n, (rank + 1) * n)  # this rank's samples
    for step in range(3):
        model.zero_grad()
        loss = F.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)  # the sum over the ranks
            p.data -= 0.1 * p.grad / size  # with the mean: the gradient of the global batch
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / size:.6f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
