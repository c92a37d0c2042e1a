"""The tensors of a run in a checkpoint, collected and put back: weights, optimizer moments, random state."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.checkpoints.model_state import collect_weights, restore_weights
from training.step.muon import Muon
from training.step.random_streams import RandomStreams

# {"model", "ema", "optimizer" or "random": {name: tensor, or a parameter's moments}}
State = dict[str, dict[str, Any]]


def collect_state(model: nn.Module, optimizer: Optimizer, streams: RandomStreams | None = None) -> State:
    """This rank's tensors of a run: weights and buffers, optimizer moments by parameter name, random state.

    model: without a DistributedDataParallel around it; its parameters may be sharded by fully_shard (DTensor).
    optimizer: of torch.optim, or a ZeroRedundancyOptimizer, of which each rank gives the moments that it owns.
    streams: of random numbers; by default those of torch alone, by rank.
    The tensors are the run's own, not copies. An optimizer that has not made a step yet gets moments of zero.
    """
    optimizer = _local(optimizer)
    make_moments(optimizer)
    weights = collect_weights(model)  # first: fully_shard shares out again what it has gathered
    # Frozen parameters have no moments.
    moments = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            moments[name] = {key: value.contiguous() for key, value in state.items()}
    streams = streams or RandomStreams()
    return {"model": weights, "optimizer": moments, "random": streams.tensors()}


def restore_state(
    tensors: State,
    model: nn.Module,
    optimizer: Optimizer,
    streams: RandomStreams | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Put the tensors of `collect_state` back. The hyperparameters of the optimizer stay those of the config.

    extra: of model_state.collect_extra. Moments are written into those that are there: they keep the strides of their
    parameter, on which a fused optimizer relies.
    """
    optimizer = _local(optimizer)
    make_moments(optimizer)
    restore_weights(model, tensors["model"], extra or {})
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
            value.copy_(tensors["optimizer"][name][key])
    (streams or RandomStreams()).restore(tensors["random"])


@torch.no_grad()
def make_moments(optimizer: Optimizer) -> None:
    """Let an optimizer have moments for all of its parameters, as before a first step, where it has none yet.

    That is of all parameters before the first step, and later of those that no step has used. The optimizer makes them
    itself, in a step whose learning rate is zero.
    """
    if isinstance(optimizer, Muon):  # a step of it is one of all ranks together
        optimizer.make_momentum()
        optimizer = optimizer.adam
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unused = [parameter for parameter in parameters if parameter not in optimizer.state]
    if not unused:
        return
    # Everything that the step below changes is put back afterwards.
    gradients = [parameter.grad for parameter in parameters]
    # A rate of zero leaves the weights as they are.
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None  # the optimizer passes over those that have moments
    for parameter in unused:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    # This step makes the moments.
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    unused_ones = set(unused)
    for group in optimizer.param_groups:
        for parameter in unused_ones.intersection(group["params"]):
            # Of that step nothing remains: moments are zero, but for those of which the group says otherwise.
            for name, value in optimizer.state[parameter].items():
                value.fill_(group.get("initial", {}).get(name, 0))


def _local(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds this rank's moments: the one inside a ZeroRedundancyOptimizer, else itself."""
    return getattr(optimizer, "optim", optimizer)
