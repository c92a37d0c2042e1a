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
    losses = []
    for target in targets:
        x = network(x)
        losses.append(F.mse_loss(x, target))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()
    # END
