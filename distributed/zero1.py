"""The optimizer of zero1: its state is shared out over ranks that have all weights (Rajbhandari et al. 2020)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from utils import comm


def build_zero1_optimizer(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer whose state is shared out: each rank updates its share of the parameters and broadcasts them.

    groups: of parameters, as any optimizer takes them, each shared out by itself.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    parameters = [parameter for group in groups for parameter in group["params"]]
    strides = [parameter.stride() for parameter in parameters]
    optimizer = ZeroRedundancyOptimizer(
        groups,
        optimizer_class,  # type: ignore[arg-type]  # or a function that makes one
        process_group=comm.get_group("grad_reduce"),
        parameters_as_bucket_view=True,
        **options,
    )
    for parameter, stride in zip(parameters, strides, strict=True):
        set_strides(parameter, stride)
    return optimizer


@torch.no_grad()
def set_strides(parameter: nn.Parameter, stride: Sequence[int]) -> None:
    """Arrange the elements of a parameter in the memory that it has, which is contiguous, by other strides.

    ZeroRedundancyOptimizer makes parameters contiguous in its buckets; gradients keep the strides of before. A fused
    optimizer reads both element by element as they lie in memory.
    """
    if parameter.stride() == stride:
        return
    value = parameter.clone()
    parameter.data = parameter.as_strided(parameter.shape, stride)
    parameter.copy_(value)
