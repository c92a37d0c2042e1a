"""Exercise 2, rung 2: all-reduce by hand, in a ring of sends and receives.

All-reduce leaves the sum of the ranks' tensors on every rank. If each rank sent its tensor to all others, bytes would
grow with the number of ranks n. The ring sends 2 (n-1)/n of the tensor per rank, however many there are. Cut the tensor
into n chunks; then twice n - 1 times every rank passes one chunk to the next rank:

  reduce-scatter: what arrives is added to the own chunk, which is passed on next. In the end a rank has one whole sum.
  all-gather: the whole sums go round once more, and replace what is there.

Fill in both; each is checked by itself. Hint: with 3 ranks, write down which chunk each rank sends in each of the 4
steps, first. A rank begins with the chunk of its own number.
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


def reduce_scatter(chunks: list[Tensor]) -> None:
    """The first phase: rank r ends with the whole sum in chunk r + 1, the last rank in chunk 0.

    chunks: this rank's, one for each rank, in order. Entries are replaced; the other chunks hold unfinished sums then.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # TODO: a loop of size - 1 shifts
    for step in range(size - 1):
        own, coming = (rank - step) % size, (rank - step - 1) % size
        chunks[coming] = chunks[coming] + shift(chunks[own])
    # END


def all_gather(chunks: list[Tensor]) -> None:
    """The second phase: chunks as the first one leaves them; in the end each holds the whole sum, on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # TODO: a loop of size - 1 shifts
    for step in range(size - 1):
        whole, coming = (rank + 1 - step) % size, (rank - step) % size
        chunks[coming] = shift(chunks[whole])
    # END


def ring_all_reduce(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, on every rank: (N,) -> (N,), where N is a multiple of the number of ranks.

    x stays as it is.
    """
    chunks = list(x.clone().chunk(dist.get_world_size()))
    reduce_scatter(chunks)
    all_gather(chunks)
    return torch.cat(chunks)
