"""The model that a config describes, by the name of its class, and its initial weights.

These depend on the model's code and on a seed alone.

A model is built on the meta device, where tensors have shapes but no memory. In a model of networks/ each module alone
then fills its own parameters and buffers on the CPU, by its `reset_parameters`, from a seed of its name: the convention
of fully_shard, as modules of torch.nn follow it. No rank ever holds more than one module whole.

Any other model may change what its modules have drawn. It is built whole on the CPU, from the seed, on every rank, so
that it comes out as its author meant.
"""

import copy
import fnmatch
import hashlib
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distributed.checks.ties import keep_ties
from distributed.split import Split
from distributed.weight_shards import fill_weights
from networks import MODELS
from training.models.checks import check_matrices, check_registered, check_weights, unregistered_parts
from utils.errors import UsageError, first_line, nearest
from utils.host_random import HostRandom
from utils.schema import Config

Build = Callable[[], nn.Module]
ROOT = Path(__file__).parents[2]
# Folders whose code calls a model, or is called by it.
LOOKING_ON = (
    str(Path(torch.__file__).parent),
    *(str(ROOT / folder) for folder in ("distributed", "training", "utils", "tools")),
)


def build_model(config: Config, device: torch.device | str = "meta") -> nn.Module:
    """The model that `config.model` names, on the meta device: it has shapes and names, but no memory yet.

    Its class gets the settings that its signature names, and `config.model_args`. Raises UsageError for an unknown
    model, for arguments that it does not take, and for sizes that it refuses. device: "cpu" for a model in memory, with
    its initial weights.
    """
    # Shapes and names cost no memory on the meta device.
    model = build_on_meta(_builder(config))
    freeze(model, config)
    check_matrices(model, config)
    # Weights that share a tensor must share it in memory too.
    if torch.device(device).type != "meta":
        with keep_ties(model):
            model.to_empty(device=device)
        fill_weights(model, initial_weights(config), Split())
    return model


def freeze(model: nn.Module, config: Config) -> None:
    """Let the parameters that `config.freeze` names have no gradient, so no optimizer state and no reduction either.

    A pattern that begins with ! lets those that it matches be trained after all. Raises UsageError for a pattern that
    matches none, and where nothing is left to train.
    """
    names = dict(model.named_parameters())
    for pattern in config.freeze:
        matching = fnmatch.filter(names, pattern.removeprefix("!"))
        if not matching:
            raise UsageError(
                f"{config.config}: freeze '{pattern}' matches no parameter of model {config.model}, whose names are "
                f"like {', '.join(list(names)[:3])}"
            )
        for name in matching:
            names[name].requires_grad_(pattern.startswith("!"))
    if any(parameter.requires_grad for parameter in names.values()):
        return
    if config.freeze:
        raise UsageError(
            f"{config.config}: freeze {config.freeze} leaves no parameter of model {config.model} to train"
        )
    raise UsageError(f"{config.config}: model {config.model} has no weight with requires_grad: nothing can be trained")


def initial_weights(config: Config) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter and buffer of the whole model, on the CPU: they depend on the seed alone."""
    build = _builder(config)
    # Modules of our own networks draw their weights one by one; other models are built whole.
    if MODELS.get(config.model, config.model) in MODELS.values():
        yield from draw_by_module(build_on_meta(build), config.seed)
        return
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
        "noise_features": config.noise_of_model,
    }
    # A model takes of the settings what its signature names.
    named, takes_any = arguments_of(Model)
    for name in config.model_args:
        if name not in named and not takes_any:
            raise UsageError(f"{config.config}: model_args: {config.model} takes no '{name}'{nearest(name, named)}")
    if config.noise_of_model and "noise_features" not in named:
        raise UsageError(
            f"{config.config}: model {config.model} takes no noise, so the {config.ensemble_size} members of "
            "ensemble_size would be alike: its class needs an argument noise_features, and forward(x, noise)"
        )
    arguments = {name: value for name, value in settings.items() if name in named} | config.model_args

    def build() -> nn.Module:
        try:
            with HostRandom(config.seed):  # torch's generators are those of whoever builds
                model = call_with(Model, arguments, given=config.model_args)
        except Exception as error:
            raise UsageError(f"{config.config}: {describe_error(error)}") from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"{config.config}: model {config.model} makes a {type(model).__name__}, not an nn.Module")
        tensors = *model.parameters(), *model.buffers()
        if any(is_lazy(tensor) for tensor in tensors):
            complete(model, config)
        check_weights(model, config)
        check_registered(model, config)
        return model

    return build


def complete(model: nn.Module, config: Config) -> None:
    """Let lazy modules see an image, so that they know their shapes. Raises UsageError where the model fails on it."""
    inputs = blank_inputs(config, 1)  # on the device of the context
    image = inputs[0]
    try:
        with torch.no_grad():
            model.eval()(*inputs)
    except Exception as error:
        raise UsageError(
            f"{config.config}: model {config.model} has lazy modules and fails on an input of {list(image.shape)}: "
            f"{describe_error(error)}"
        ) from error
    model.train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{config.config}: model {config.model}: the shape of '{name}' is still unknown after a forward pass, "
                "which does not call its lazy module: give it a module with sizes"
            )


def blank_inputs(config: Config, samples: int, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
    """Zeros in the shapes of what a model takes: images (B, C, *img_size) and, of an ensemble, noise (B, K)."""
    images = torch.zeros(samples, config.model_in_channels, *config.img_size, device=device)
    if not config.noise_of_model:
        return (images,)
    return images, torch.zeros(samples, config.noise_of_model, device=device)


def build_on_meta(build: Build) -> nn.Module:
    """A model on the meta device. Raises whatever `build` raises on the CPU."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # for example for reading a number from a tensor that has no memory
        pass
    else:
        # Tensors that no state_dict names, and to(device) does not move.
        if not any(isinstance(part, Tensor) for _, _, part in unregistered_parts(model)):
            return model
    # Its numbers do not matter: only shapes and names are kept.
    model = build_whole(build, 0)
    with keep_ties(model):
        return model.to("meta")


def build_whole(build: Build, seed: int) -> nn.Module:
    """The model in memory on the CPU, from a seed; the random state of the program stays as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return build()


def draw_by_module(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of every parameter and buffer of a model on the meta device; its modules have reset_parameters."""
    for prefix, module in model.named_modules():
        if not _own_tensors(module):
            continue
        # A copy of the module alone gets memory, and is forgotten when its tensors have been handed on.
        alone = copy.copy(module)
        alone._parameters = dict(module._parameters)
        alone._buffers = dict(module._buffers)
        alone.to_empty(device="cpu", recurse=False)  # its children stay on the meta device
        # Every module has a seed of its own, so that its weights do not depend on the modules before it.
        digest = hashlib.sha256(f"{seed} {prefix}".encode()).digest()
        module_seed = int.from_bytes(digest[:8], "little")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(module_seed)
            alone.reset_parameters()  # type: ignore[operator]  # one of its tensors, as far as mypy knows
        for name, value in _own_tensors(alone).items():
            full_name = f"{prefix}.{name}" if prefix else name
            yield full_name, value.detach()


def _own_tensors(module):
    tensors = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def model_class(name: str) -> Callable[..., nn.Module]:
    """The class of a model in the registry (networks/__init__.py), or of 'package.module:Class'. Raises UsageError."""
    path = MODELS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise UsageError(
            f"model '{name}'{nearest(name, MODELS)}: give one of {', '.join(MODELS)}, or package.module:Class"
        )
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise UsageError(f"model '{name}': cannot be imported: {describe_error(error)}") from error
    # The data and all other models of this process would follow it.
    if before != (torch.get_default_dtype(), torch.is_grad_enabled()):
        raise UsageError(
            f"model '{name}': {module} calls torch.set_default_dtype or torch.set_grad_enabled where it is imported, "
            "for the whole program: give layers their dtype, and use a context of torch.no_grad()"
        )
    return found


def arguments_of(Model: Callable[..., Any]) -> tuple[set[str], bool]:
    """(names of the arguments that a class or function takes, whether it takes any other).

    A class that passes **kwargs on takes those of the next class that it inherits from.
    """
    makers = [Model]
    if isinstance(Model, type):
        bases = [cls for cls in Model.__mro__ if cls not in (nn.Module, object)]
        makers = [cls for cls in bases if "__init__" in vars(cls)] or makers
    named: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        without_name = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)  # **kwargs and *args
        named |= {name for name, kind in kinds.items() if kind not in without_name}
        if Parameter.VAR_KEYWORD not in kinds.values():
            return named, False
    return named, True


def call_with(
    Model: Callable[..., Any],
    arguments: dict[str, Any],
    given: Collection[str],
) -> Any:
    """Model(**arguments), without those that a class gives the class it inherits from itself. given: not left out."""
    try:
        return Model(**arguments)
    except TypeError as error:
        twice = re.search(r"multiple values for keyword argument '(\w+)'", str(error))
        if twice is None or twice[1] not in arguments or twice[1] in given:
            raise
        left = {name: value for name, value in arguments.items() if name != twice[1]}
    return call_with(Model, left, given)


def describe_error(error: Exception) -> str:
    """Describe an error in a user's model and its place; a ValueError or TypeError only by its words."""
    if isinstance(error, ValueError | TypeError | ImportError | AttributeError):
        return first_line(error)
    # The place in the user's code says more than the words alone: the innermost line outside of torch and of whoever
    # looks on.
    every = traceback.extract_tb(error.__traceback__)
    of_model = [frame for frame in every if not frame.filename.startswith(LOOKING_ON)]
    last = (of_model or every)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno})"
