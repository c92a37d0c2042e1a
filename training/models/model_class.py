"""The class of a model: found by its name, called with the settings that it takes; and how errors in it are told."""

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from networks import MODELS
from utils.errors import UsageError, first_line, nearest

ROOT = Path(__file__).parents[2]
# Folders whose code calls a model, or is called by it.
LOOKING_ON = (
    str(Path(torch.__file__).parent),
    *(str(ROOT / folder) for folder in ("distributed", "training", "utils", "tools")),
)


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
