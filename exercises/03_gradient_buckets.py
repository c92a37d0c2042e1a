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
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
    # END
