"""A model's state as a checkpoint keeps it: every weight and buffer once, whatever the number of its names.

A weight that several modules share, and whatever belongs to a module that the model knows under several names, is
stored under its first name and loaded under all of them. What a module gives as its extra state (get_extra_state) is
stored among the tensors where it is one, and else as JSON.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UsageError
from utils.torch_private import storage_id

EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


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
