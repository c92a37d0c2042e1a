"""The tensors of a run in a checkpoint, collected and put back: weights, optimizer moments, random state.

Every weight and buffer is kept once, whatever the number of its names: a weight that several modules share, and
whatever belongs to a module that the model knows under several names, is stored under its first name and loaded under
all of them. What a module gives as its extra state (get_extra_state) is stored among the tensors where it is one, and
else as JSON.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed.weight_shards import take_parts
from training.checkpoints.files import Marker
from training.step.muon import Muon
from training.step.random_streams import RandomStreams
from training.step.step import TrainingStep
from utils import comm
from utils.errors import UsageError
from utils.torch_private import storage_id

# {"model", "ema", "optimizer" or "random": {name: tensor, or a parameter's moments}}
State = dict[str, dict[str, Any]]
EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


def collect_tensors(step: TrainingStep) -> State:
    """The tensors of this rank: of the model, the optimizer, random streams, and averaged weights if there are any."""
    tensors = collect_state(step.parallel.model, step.optimizer, step.streams)
    if step.average:
        tensors |= {"ema": step.average.weights}
    return tensors


def restore_tensors(step: TrainingStep, tensors: State, view: State, marker: Marker) -> None:
    """Put a checkpoint back into a step. tensors: of collect_tensors; view: their global view, into which it was read.

    marker: of the checkpoint.
    """
    # Tensors that the domain ranks split were gathered for the view, so each rank takes its part of what was read.
    take_parts(tensors, view, step.parallel.split)
    restored = tensors | {"random": view["random"]}
    extra = marker["trainer"].get("extra")
    restore_state(restored, step.parallel.model, step.optimizer, step.streams, extra)


def collect_named_state(model: nn.Module) -> dict[str, Any]:
    """Extra states and further names of weights, of all ranks: each stage of a pipeline has its own."""
    found: dict[str, Any] = {"extra": {}, "tied": {}}
    own = collect_extra(model), later_names(model)
    # The first rank that has a name is the one whose state counts.
    for extra, tied in reversed(comm.gather(own)):
        found["extra"] |= extra
        found["tied"] |= tied
    return found


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

    extra: of collect_extra. Moments are written into those that are there: they keep the strides of their
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


def later_names(model: nn.Module) -> dict[str, str]:
    """{name: first name} of everything in the model's state that has a name before this one."""
    firsts: dict[Any, str] = {}
    later: dict[str, str] = {}
    for identity, name in _identities(model):
        # Whoever comes first gives the name.
        first = firsts.setdefault(identity, name)
        if first != name:
            later[name] = first
    return later


def _identities(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """(identity, name) of all that may stand in the state, under every name.

    A parameter is one whoever holds it. A buffer may be replaced in forward, so it is known by its place in a module.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for attribute, parameter in module._parameters.items():
            yield id(parameter), before + attribute
        # A buffer is known by its module and attribute, an extra state too.
        for attribute in (*module._buffers, EXTRA_STATE):
            yield (id(module), attribute), before + attribute


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """{first name: tensor} of the parameters, the persistent buffers, and the extra states that are tensors.

    The tensors are the model's own, except for those in another memory format (channels last) and for buffers that are
    views: these are copies.
    """
    later = later_names(model)
    weights: dict[str, Tensor] = {}
    seen = set[int]()  # memory that belongs to a buffer already
    buffers = {name for name, _ in model.named_buffers()}
    for name, value in model.state_dict().items():
        if name in later or not isinstance(value, Tensor):
            continue
        is_strided = value.layout == torch.strided
        weights[name] = value.contiguous() if is_strided else value
        # A buffer may be a view, or share its memory with another one.
        if name in buffers and type(value) is Tensor and is_strided:
            weights[name] = _in_own_memory(weights[name], seen)
    return weights


def _in_own_memory(buffer, seen):
    """A buffer, copied where it is a part of other memory or shares it with a buffer of `seen`, where it is entered."""
    memory = storage_id(buffer)
    is_alone = buffer.untyped_storage().nbytes() == buffer.nbytes and memory not in seen
    seen.add(memory)
    return buffer if is_alone else buffer.clone()


def collect_extra(model: nn.Module) -> dict[str, Any]:
    """{first name: value} of the extra states that are no tensors, all of which JSON must be able to hold.

    Raises UsageError for one that it cannot.
    """
    later = later_names(model)
    extra: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name in later or isinstance(value, Tensor):
            continue
        # The marker of a checkpoint is JSON.
        if not _survives_json(value):
            raise UsageError(
                f"the model's state '{name}' is a {type(value).__name__} that no checkpoint can hold: let "
                "get_extra_state return a tensor, or lists, dicts with text as keys, numbers and text"
            )
        extra[name] = value
    return extra


def _survives_json(value):
    """Tell whether a value is the same after it has been written as JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return json.loads(text) == value


def restore_weights(
    model: nn.Module,
    weights: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    """Put back what `collect_weights` and `collect_extra` have given. Raises RuntimeError where names do not fit."""
    # What is stored once is loaded under every name.
    held = weights | extra
    later = later_names(model)
    state = {}
    for name in model.state_dict():
        first_name = later.get(name, name)
        if first_name in held:
            state[name] = held[first_name]
    model.load_state_dict(state)


def described(weights: dict[str, Tensor]) -> dict[str, str]:
    """{name: shape and type} of the tensors of `collect_weights`."""
    descriptions = {}
    for name, value in weights.items():
        dtype = str(value.dtype).removeprefix("torch.")
        descriptions[name] = f"{list(value.shape)} {dtype}"
    return descriptions


def check_unchanged(before: dict[str, str], now: dict[str, str]) -> None:
    """Raise UsageError where a step has made a state that a new run of the same model could not read.

    before, now: of `described`.
    """
    for name in sorted(before | now):
        if before.get(name) != now.get(name):
            was = before.get(name, "not there")
            became = now.get(name, "not there")
            raise UsageError(
                f"the model's state '{name}' was {was} before the first step and is {became} now, so a checkpoint "
                "could not be read back: make it in __init__ as it will be; a buffer with persistent=False is left out"
            )
