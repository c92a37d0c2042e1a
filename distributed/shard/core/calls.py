"""What a call of a torch function says of itself, for messages and counts: its name, its arguments, and its place."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))  # of ShardTensor and of torch


def name_of(func: Callable) -> str:
    """The name by which messages call a torch function."""
    name: Any = getattr(func, "__name__", None) or getattr(func, "name", str(func))
    is_accessor = name in ("__get__", "__set__")
    if not is_accessor:
        return name
    attribute = getattr(func, "__self__", None)  # the descriptor, which has the name of the attribute
    return getattr(attribute, "__name__", name)


def place_of_call() -> str:
    """Where a model called the operation, for messages: the innermost line outside of torch and of ShardTensor."""
    if torch.compiler.is_compiling():
        return ""
    # Follow the call stack outwards from here.
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename.startswith(INSIDE) or passes_on(frame)):
        frame = frame.f_back
    if frame is None:
        return ""
    file = Path(frame.f_code.co_filename)
    return f" in {file.name}, line {frame.f_lineno}"


def passes_on(frame: FrameType) -> bool:
    """Tell whether a frame is that of a mode or a subclass of tensors, which stands between a model and torch."""
    return frame.f_code.co_name == "__torch_function__"


def flatten_arguments(
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
) -> Iterator[Any]:
    """The arguments of a call, those in lists and tuples too."""
    for a in (*args, *kwargs.values()):
        if isinstance(a, list | tuple):
            yield from flatten_arguments(a, {})
        else:
            yield a
