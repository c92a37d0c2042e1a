"""Weights that several modules share: they stay one, however a model is moved or split."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from utils.errors import LayoutError


@contextmanager
def keep_ties(model: nn.Module) -> Iterator[None]:
    """Inside, the model may move to another device: a parameter or buffer that several modules share stays one."""
    ties = tied_names(model)
    yield
    tie(model, ties)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter or buffer that has several."""
    names: dict[int, list[str]] = {}  # {id of a tensor: its names}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, ties: Iterable[Sequence[str]]) -> None:
    """Let the modules of a model share the parameters and buffers of these names again: the first of each group."""
    for first, *others in ties:
        shared = _named(model, first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            held = module._parameters if attribute in module._parameters else module._buffers
            held[attribute] = shared


def tie_pieces(
    model: nn.Module,
    ties: Iterable[Sequence[str]],
    kind: str,
) -> None:
    """As `tie`, after each module has been split by itself. kind: of parallelism, for the message.

    Raises LayoutError where modules that share a weight need different pieces of it.
    """
    # Modules have split the weight one by one, so that each holds a piece of its own now.
    for first, *others in ties:
        for name in others:
            if _piece(model, first) != _piece(model, name):
                raise LayoutError(
                    f"{kind}: '{first}' and '{name}' are one weight, of which their modules need different pieces: "
                    "train this model without it, or give the modules weights of their own"
                )
    tie(model, ties)


def _piece(model, name):
    """What tells pieces of one weight apart: shape, placements of a DTensor, whether a rank has a part of the gradient.

    (distributed/tensor_parallel.py: partial_gradients)
    """
    owner, _, attribute = name.rpartition(".")
    tensor = _named(model, name)
    module = model.get_submodule(owner)
    is_partial = attribute in getattr(module, "partial_gradients", ())
    placements = getattr(tensor, "placements", None)
    return tensor.shape, placements, is_partial


def _named(model, name):
    """The parameter or buffer of a name."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters.get(attribute)
    if parameter is None:
        return module._buffers[attribute]
    return parameter
