"""Refusals of models with weights that would be lost, or trained into something else, where the run would not show it.

Weights are made anew on their device, some of them in parts, and PyTorch finds them by their registration in modules.
What it does not find is neither trained nor saved.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distributed.split import Split
from training.models.weight_roles import weight_roles
from utils.errors import UsageError
from utils.schema import Config


def check_matrices(model: nn.Module, config: Config) -> None:
    """Raise UsageError where the optimizer is Muon and no weight of the whole model is for it."""
    if not config.optimizer_kind.trains_matrices:
        return
    roles = weight_roles(model, Split(), config.muon_weights)
    if not any(role.is_hidden for role in roles):
        raise UsageError(
            f"{config.config}: optimizer Muon trains matrices of hidden layers, and model {config.model} has none "
            f"whose name matches muon_weights {config.muon_weights}: use AdamW"
        )


def check_weights(model: nn.Module, config: Config) -> None:
    """Raise UsageError for weights that cannot be moved, split or trained as those of other models are."""
    where = f"{config.config}: model {config.model}"
    is_in_memory = not torch.empty(0).is_meta  # where the context puts tensors that name no device
    for name, weight in model.named_parameters():
        if weight.layout != torch.strided:
            raise UsageError(f"{where}: the weight '{name}' is sparse, and none is trained so: make it dense")
        if weight.is_meta and is_in_memory:
            raise UsageError(f"{where}: the weight '{name}' is made on the meta device and has no values: leave it out")
        # Weights are made anew on their device, and in parts: hooks would stay behind.
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            raise UsageError(
                f"{where}: the weight '{name}' has a hook on its gradient, which would not be called: change what "
                "the forward pass makes of it instead (freeze keeps whole weights as they are)"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{where}: '{name}' is made by torch.jit, whose weights cannot be moved or split: use the module itself"
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UsageError(f"{where}: '{name}' has sparse gradients, which no rank reduces or clips: sparse=False")


def check_registered(model: nn.Module, config: Config) -> None:
    """Raise UsageError for weights in a plain list, tuple, set or dict: no optimizer and no checkpoint sees them."""
    for place, kind, part in unregistered_parts(model):
        is_module_with_weights = isinstance(part, nn.Module) and bool(part.state_dict())
        if isinstance(part, nn.Parameter) or is_module_with_weights:
            raise UsageError(
                f"{config.config}: model {config.model}: '{place}' is a plain {kind} that holds a "
                f"{type(part).__name__}, whose weights nothing would train or save: use nn.ModuleList, nn.ModuleDict "
                "or nn.ParameterList"
            )
    # Weights are made anew on their device, and in parts: what a list holds would stay what it was.
    names = {id(weight): name for name, weight in model.named_parameters()}
    for place, kind, part in _held_parts(model):
        if id(part) in names:
            raise UsageError(
                f"{config.config}: model {config.model}: '{place}' is a plain {kind} that holds the weight "
                f"'{names[id(part)]}' too, and would keep what it was at first: look the weight up in the forward pass"
            )


def check_made(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    config: Config,
) -> None:
    """Raise UsageError where a forward pass has made a weight. weights: those that the model had before it, by name."""
    for name, parameter in model.named_parameters():
        if parameter is not weights.get(name):
            raise UsageError(
                f"{config.config}: model {config.model} makes the weight '{name}' in its forward pass, so no optimizer "
                "would train it: make it in __init__, or by a lazy module of torch (nn.LazyConv2d)"
            )


def unregistered_parts(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(name of an attribute, type of its value, part of it): what modules hold that PyTorch does not know of."""
    known_parts = *model.modules(), *model.parameters(), *model.buffers()
    registered = {id(part) for part in known_parts}
    for place, kind, part in _held_parts(model):
        if id(part) not in registered:
            yield place, kind, part


def _held_parts(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """As unregistered_parts, of all that modules hold as attributes of Python."""
    internal = vars(nn.Module()).keys()
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # what it holds is torch's
            continue
        is_recurrent = isinstance(module, nn.RNNBase)  # torch keeps its list of weights up to date
        for name, value in vars(module).items():
            if name in internal or (is_recurrent and name == "_flat_weights"):
                continue
            place = f"{prefix}.{name}" if prefix else name
            # torch's walk through containers looks into neither of these.
            container = value
            if isinstance(value, set | frozenset):
                container = list(value)
            elif isinstance(value, functools.partial):
                container = [value.args, value.keywords]
            for part in tree_leaves(container):
                yield place, type(value).__name__, part
