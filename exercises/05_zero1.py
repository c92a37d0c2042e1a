"""Exercise 5, rung 2: ZeRO-1 by hand.

Adam keeps two moments of every parameter, as large as the model twice over, and under DDP every rank keeps and updates
the same ones. ZeRO-1 shares them out: every parameter has one rank that owns it, keeps its moments and updates it; then
the owner broadcasts the new value. The update is the same, to the bit; a rank keeps 1/n of the moments.

Below every rank updates everything. Mend it. Owners must hold about the same amount: give each parameter, in order, to
the rank that owns least so far (the first of them). No rank is told: all of them work it out alike.

Done for real in distributed/zero1.py (build_zero1_optimizer). Chapter: docs/data_parallel.md, "The idea".
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class Zero1:
    """An optimizer whose state is shared out over all ranks.

    parameters: list, the same on all ranks, with gradients that are averaged already. make_optimizer: called with the
    list of those parameters that this rank owns. self.optimizer: what it gave.
    """

    def __init__(self, parameters: list[nn.Parameter], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]):
        self.parameters = parameters
        rank, size = dist.get_rank(), dist.get_world_size()
        # TODO: self.owners, the rank of each parameter
        self.owners = [rank for _ in parameters]
        self.size = size
        # END
        self.optimizer = make_optimizer([p for p, owner in zip(parameters, self.owners, strict=True) if owner == rank])

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters, on all ranks."""
        self.optimizer.step()
        # TODO: what the others have updated
        # END
