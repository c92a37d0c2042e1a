"""Exercise 2, rung 2: all-reduce by hand, in a ring of sends and receives.

All-reduce leaves the sum of the ranks' tensors on every rank. If each rank sent its tensor to all others, bytes would
grow with the number of ranks n. The ring sends 2 (n-1)/n of the tensor per rank, however many there are. Cut the tensor
into n chunks; then twice n - 1 times every rank passes one chunk to the next rank:

  reduce-scatter: what arrives is added to the own chunk, which is passed on next. In the end a rank has one whole sum.
  all-gather: the whole sums go round once more, and replace what is there.

Fill in `ring_all_reduce`. Hint: with 3 ranks, write down which chunk each rank sends in each of the 4 steps, first.
Done for real by NCCL and gloo in every `dist.all_reduce`. Chapter: docs/data_parallel.md, "The idea" (bytes of a step).
"""

import torch
import torch.distributed as dist
from torch import Tensor


def shift(x: Tensor) -> Tensor:
    """Send x to the next rank of the ring; returns what the previous rank sent, a tensor of the same shape."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    sending = dist.isend(x.contiguous(), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()  # type: ignore[union-attr]  # None only outside of the group
    return received


def ring_all_reduce(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, on every rank: (N,) -> (N,), where N is a multiple of the number of ranks.

    x stays as it is.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(x.clone().chunk(size))
    # TODO: two loops of size - 1 shifts each
    for step in range(size - 1):
        own, coming = (rank - step) % size, (rank - step - 1) % size
        chunks[coming] = chunks[coming] + shift(chunks[own])
    for step in range(size - 1):
        whole, coming = (rank + 1 - step) % size, (rank - step) % size
        chunks[coming] = shift(chunks[whole])
    # END
    return torch.cat(chunks)
