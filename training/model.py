"""The model that a config describes, and its initial weights."""

import importlib
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distributed.protocol import points_kept_together
from distributed.split import Split
from distributed.weight_shards import fill_weights, keep_ties
from networks import MODELS
from networks.vit import PerAxis
from training.initial_weights import build_on_meta, build_whole, draw_by_module
from utils.config import nearest
from utils.errors import UsageError, first_line
from utils.schema import Config

log = logging.getLogger(__name__)


def build_model(config: Config, device: torch.device | str = "meta") -> nn.Module:
    """The model that `config.model` names, on the meta device: it has shapes and names, but no memory yet.

    Its class gets the settings that its signature names, and `config.model_args`. Raises UsageError for an unknown
    model, for arguments that it does not take, and for sizes that it refuses. device: "cpu" for a model in memory, with
    its initial weights.
    """
    model, _ = build_on_meta(_builder(config))
    if torch.device(device).type != "meta":
        with keep_ties(model):
            model.to_empty(device=device)
        fill_weights(model, initial_weights(config), Split())
    return model


def initial_weights(config: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and buffer of the whole model, on the CPU: they depend on the seed alone."""
    build = _builder(config)
    model, reason = build_on_meta(build)
    if not reason:
        yield from draw_by_module(model, config.seed)
        return
    log.info("Model %s is built on the CPU for its initial weights: %s", config.model, reason)
    model = build_whole(build, config.seed)
    yield from model.named_parameters()
    yield from model.named_buffers()


def _builder(config):
    """A function that builds the model wherever torch makes tensors. Raises UsageError as build_model."""
    Model = model_class(config.model)
    settings = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_channels": config.model_in_channels,
        "out_channels": config.n_out_channels,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "dropout": config.dropout,
    }
    accepted = inspect.signature(Model).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in config.model_args:
        if name not in accepted and not takes_any:
            raise UsageError(f"{config.config}: model_args: {config.model} takes no '{name}'{nearest(name, accepted)}")
    arguments = {name: value for name, value in settings.items() if name in accepted} | config.model_args

    def build() -> nn.Module:
        try:
            model = Model(**arguments)
        except Exception as error:
            raise UsageError(f"{config.config}: {_in_one_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{config.config}: model {config.model} makes a {type(model).__name__}, not an nn.Module")
        return model

    return build


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
    except Exception as error:
        raise UsageError(f"model '{name}': cannot be imported: {_in_one_line(error)}") from error


def output_shape(config: Config, x_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what the model gives for one input of a shape. Raises UsageError where it gives none."""
    try:
        return tuple(build_model(config).eval()(torch.empty(*x_shape, device="meta")).shape)
    except Exception:  # it may read numbers, which only memory has
        pass
    try:
        with torch.no_grad():
            return tuple(build_model(config, "cpu").eval()(torch.zeros(*x_shape)).shape)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{config.config}: model {config.model} fails on an input of {list(x_shape)}: {_in_one_line(error)}"
        ) from error


def _in_one_line(error):
    """What went wrong in somebody's model, and where, unless it is a refusal in words (ValueError, TypeError)."""
    if isinstance(error, ValueError | TypeError | ImportError | AttributeError):
        return first_line(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno})"


def patch_size(config: Config) -> PerAxis:
    """Points that stay on one rank where images are cut, see distributed.protocol.points_kept_together."""
    return points_kept_together(build_model(config))
