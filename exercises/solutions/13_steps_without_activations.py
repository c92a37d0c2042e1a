"""Exercise 13, rung 1: the gradient of a forecast of several steps, with the activations of one.

A forecast of k steps feeds each state into the network again, and its gradient runs back through all of them. The
backward pass needs the activations of every step: k times the memory of one. But a step's activations follow from the
state it began with, which is small. So keep the states alone, and go back one step at a time: compute the step again,
this time with a graph, and let two gradients into it: that of its own loss, and the one that came back from the step
after it.

Below everything is kept, and the gradient is right. Keep less: at no time may more than one step have a graph. Each
step may be computed twice.

Done for real by torch.utils.checkpoint in training/step/speed_options.py (activation_checkpointing: step). Chapter:
docs/longer_forecast.md, "What it costs".
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def backward_over_steps(network: nn.Module, x: Tensor, targets: list[Tensor]) -> Tensor:
    """Add the gradient of the loss to each parameter's grad, and return the loss, a tensor without a graph.

    The loss is the mean over the steps of F.mse_loss(state, target). network: from a state to the next one, each of the
    shape of x. targets: the state after each step.
    """
    # TODO: forward without a graph, keeping the states; then backward, from the last step to the first
    starts, count = [x], len(targets)
    with torch.no_grad():
        for _ in targets[1:]:
            starts.append(network(starts[-1]))
    losses: list[Tensor] = []
    later = torch.zeros_like(x)  # the gradient of a state that comes from the steps after it
    for start, target in zip(reversed(starts), reversed(targets), strict=True):
        start = start.detach().requires_grad_()
        state = network(start)
        loss = F.mse_loss(state, target) / count
        losses.append(loss.detach())
        own = torch.autograd.grad(loss, state, retain_graph=True)[0]
        state.backward(own + later)
        assert start.grad is not None
        later = start.grad
    return torch.stack(losses).sum()
    # END
