"""Exercise 8, rung 4: rows of the neighbours, for a convolution over an image in bands.

Each rank holds a band of rows. A convolution of 2 r + 1 rows needs r rows beyond each edge of the band: the halo, which
the neighbours own. In the forward pass they send it. In the backward pass the halo has a gradient too, which belongs to
its owner: it travels back and is *added* to what the owner has itself. Without that the loss falls all the same,
and the gradients are wrong along every seam.

Fill in both. At the top and at the bottom of the image the halo is 0, and its gradient goes nowhere.

Done for real in distributed/shard/core/halo.py (HaloExchange). Chapter: docs/domain_parallel.md, "Halos".
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Send `up` to the previous rank and `down` to the next, tensors of one shape; what came (from above, from below).

    The first rank gets 0 from above, the last one 0 from below.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    above, below, calls = torch.zeros_like(up), torch.zeros_like(down), []
    for peer, sent, received in ((rank - 1, up, above), (rank + 1, down, below)):
        if 0 <= peer < size:
            calls += [dist.P2POp(dist.isend, sent.contiguous(), peer), dist.P2POp(dist.irecv, received, peer)]
    for call in dist.batch_isend_irecv(calls):
        call.wait()
    return above, below


class Halo(torch.autograd.Function):
    """Extend a band by r rows of each neighbour: (C, h, W) -> (C, r + h + r, W), where h is at least r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: int) -> Tensor:
        """x: (C, h, W), this rank's band. Returns the extended one, (C, r + h + r, W)."""
        ctx.r = r
        # TODO: which rows go up, which go down, and what becomes of those that come
        above, below = exchange(x[:, :r], x[:, -r:])
        return torch.cat((above, x, below), 1)
        # END

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """grad: (C, r + h + r, W), of the extended band. Returns that of x, (C, h, W), and None for r."""
        r = ctx.r
        # TODO: the halo's gradient goes back to its owner, who adds it to its own
        above, below = exchange(grad[:, :r], grad[:, -r:])
        own = grad[:, r:-r].clone()
        own[:, :r] += above
        own[:, -r:] += below
        return own, None
        # END
