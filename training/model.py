"""The model that a config describes, and its initial weights."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from networks import MODELS
from networks.vit import PerAxis
from utils.config import nearest
from utils.errors import UsageError, first_line, reported_as_usage_error
from utils.schema import Config


def build_model(config: Config, device: torch.device | str = "meta") -> nn.Module:
    """The model that `config.model` names, on the meta device: it has shapes and names, but no memory yet.

    Its class gets the settings that its signature names, and `config.model_args`. Raises UsageError for an unknown
    model, for arguments that it does not take, and for sizes that it refuses.
    """
    Model = model_class(config.model)
    settings = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_channels": config.n_in_channels,
        "out_channels": config.n_out_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "dropout": config.dropout,
    }
    accepted = inspect.signature(Model).parameters
    for name in config.model_args:
        if name not in accepted:
            raise UsageError(f"{config.config}: model_args: {config.model} takes no '{name}'{nearest(name, accepted)}")
    arguments = {name: value for name, value in settings.items() if name in accepted} | config.model_args
    with reported_as_usage_error((ValueError, TypeError), config.config), torch.device(device):
        return Model(**arguments)


def model_class(name: str) -> Callable[..., nn.Module]:
    """The class of a model in the registry (networks/__init__.py), or of 'package.module:Class'. Raises UsageError."""
    path = MODELS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise UsageError(
            f"model '{name}'{nearest(name, MODELS)}: give one of {', '.join(MODELS)}, or package.module:Class"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"model '{name}': cannot be imported: {first_line(error)}") from None


def patch_size(config: Config) -> PerAxis:
    """Points that stay on one rank where images are cut: the model's `patch_size`; 1 where it names none."""
    return getattr(build_model(config), "patch_size", 1)


def initial_weights(config: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of the whole model, drawn on the CPU: they depend on config.seed alone."""
    model: Any = build_model(config)
    return model.initial_weights(torch.Generator().manual_seed(config.seed))
