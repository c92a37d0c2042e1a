"""An exponential moving average of the weights: it forecasts better than the weights of any one step.

Polyak and Juditsky 1992, Acceleration of stochastic approximation by averaging, SIAM J. Control Optim. 30, 838-855.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from utils.torch_private import is_dtensor, is_fsdp_module


class AveragedWeights:
    """The average of a model's parameters over the steps: average = decay x average + (1 - decay) x parameter.

    Each rank averages what it holds, and nothing is communicated, so the average is exact however the model is split.
    weights: {name: tensor, sharded as the parameter}. The decay is smaller in the first steps, (1 + n) / (10 + n) after
    n of them, so that the initial weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            self.weights[name] = parameter.detach().clone().contiguous()

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Take in the parameters after the step of an iteration, counted from 0."""
        # Early averages would be mostly of the initial weights.
        decay = min(self.decay, (1 + iteration) / (10 + iteration))
        torch._foreach_lerp_(*self._pairs(), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget all but the parameters of now."""
        torch._foreach_copy_(*self._pairs())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside this context the model has the average for its parameters."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self):
        for module in self.model.modules():
            if is_fsdp_module(module):
                module.reshard()  # what it has gathered would be neither the one nor the other
        # Values are exchanged, not tensors: optimizer and buckets hold on to the tensors.
        averages, parameters = self._pairs()
        for average, parameter in zip(averages, parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The averages and the parameters, as this rank holds them."""
        averages = [w.to_local() if is_dtensor(w) else w for w in self.weights.values()]
        detached = [parameter.detach() for parameter in self.model.parameters()]
        parameters = [p.to_local() if is_dtensor(p) else p for p in detached]
        return averages, parameters
