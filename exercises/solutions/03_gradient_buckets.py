"""Exercise 3, rung 2: average the gradients by hand, in buckets.

Each rank has the gradient of its own samples; the mean over the ranks is that of the whole batch. One all-reduce per
parameter would be hundreds of small messages, each with its latency. One for all could start only when the backward
pass is over. So DDP puts gradients into buckets, from the last layer to the first, which is the order in which the
backward pass makes them, and reduces a bucket as soon as it is full.

Below there is one message per parameter, and the sum is left a sum. Mend it: a bucket takes the next gradient as long
as it holds no more than `limit` bytes then; a gradient larger than that gets a bucket of its own.

Done for real in distributed/data_parallel.py (replicate: bucket_cap_mb). Chapter: docs/data_parallel.md, "The idea";
docs/reference/data_parallel.md, "Fewer, smaller, later messages".
"""

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def average_gradients(parameters: list[nn.Parameter], limit: int) -> None:
    """Replace each p.grad by its mean over the ranks. parameters: from the first layer to the last.

    limit: bytes of a bucket. Parameters whose grad is None, the same ones on every rank, are passed over.
    """
    # TODO: fill buckets from the last to the first; flatten, all-reduce, divide, copy back
    buckets: list[list[torch.Tensor]] = [[]]
    size = 0
    for p in reversed(parameters):
        if p.grad is None:
            continue
        if buckets[-1] and size + p.grad.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(p.grad)
        size += p.grad.nbytes
    for bucket in buckets:
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
    # END
