"""Exercise 6, rung 3: an MLP split over ranks, forward and backward.

The first layer is split by its output features, the second by its input features: what lies between them, nonlinear as
it is, never leaves its rank. Each rank ends with a summand of the output, and begins its backward pass with all of it.
Two functions say what crosses the border, f where the split part begins and g where it ends. Each is the transpose of
the other: where one adds up forward, the other adds up backward (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

Below neither does anything, and the second bias is added by every rank. Mend it. `dist.all_reduce` works in place, and
autograd does not see it.

Done for real in distributed/collectives.py (copy_to_region, reduce_from_region) and distributed/layers.py. Chapter:
docs/model_parallel.md, "The idea" and "The code".
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def summed(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors, as a new tensor."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class EnterSplit(torch.autograd.Function):
    """f: every rank goes on with the same x, in its own way."""

    # TODO: forward and backward; `summed` is of use in one of them
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: (N, D), the same on all ranks. Returns what a rank goes on with."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: of what forward returned on this rank. Returns that of x."""
        return grad

    # END


class LeaveSplit(torch.autograd.Function):
    """g: the ranks' summands become one x, with which every rank goes on in the same way."""

    # TODO: forward and backward
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: (N, D), this rank's summand. Returns what all ranks go on with."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: of what forward returned. Returns that of this rank's x."""
        return grad

    # END


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The split MLP: (N, D) -> (N, D), the same on every rank.

    w1 (H / ranks, D), b1 (H / ranks,) and w2 (D, H / ranks) are this rank's parts, b2 (D,) is whole on every rank.
    """
    # TODO: where do f and g come in, and where is b2 added?
    h = F.gelu(F.linear(x, w1, b1))  # (N, H / ranks)
    return F.linear(h, w2, b2)
    # END
