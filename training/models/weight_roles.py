"""What a weight is for the optimizer: whether it decays, and whether it is a matrix of a hidden layer, for Muon.

The answer depends on the weight's name, the kind of its module, and its shape in the whole model. Every layout has
these alike, whatever part of the weight a rank holds.
"""

import fnmatch
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from distributed.split import Split
from utils import comm

# Embeddings of positions: pos_embed.weight, relative_position_bias_table, rpb.
OF_POSITIONS = re.compile(r"(^|[._])(pos|position|positional|rpb)([._]|$)")


class Role(NamedTuple):
    """A trained weight. parameter: this rank's part of it. shape: of the whole weight.

    decays: where not all weights do. is_hidden: it is a matrix of a hidden layer.
    """

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    decays: bool
    is_hidden: bool


def weight_roles(
    model: nn.Module,
    split: Split,
    hidden: Sequence[str] = (),
) -> list[Role]:
    """The roles of the weights that are not frozen, in the order of the model. A tied weight has its first name.

    model: this rank's part. hidden: patterns of the names of hidden layers' matrices; the last one that matches a name
    decides, and those that begin with ! exclude it. A tied weight is one if all its names are.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # a module may stand under two names
    # A tied weight stands in several places: all its names have a say.
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            places.setdefault(parameter, []).append(name)
    roles = []
    for parameter, names in places.items():
        shape = whole_shape(names[0], parameter, split)
        decays = True
        is_hidden = True
        for name in names:
            module = modules[name.rpartition(".")[0]]
            decays = decays and may_decay(name, module, shape)
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            is_hidden = is_hidden and is_chosen(name, hidden) and not is_embedding
        is_matrix = decays and len(shape) == 2 and not parameter.is_complex()
        roles.append(Role(names[0], parameter, shape, decays, is_hidden and is_matrix))
    return roles


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether the last of some patterns that matches a name does not begin with !."""
    chosen = False
    for pattern in patterns:
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!")):
            chosen = not pattern.startswith("!")
    return chosen


def whole_shape(name: str, parameter: nn.Parameter, split: Split) -> torch.Size:
    """The shape of a weight in the whole model."""
    # The split may know the whole shape.
    if name in split.specs:
        return split.specs[name].shape
    shape = list(parameter.shape)  # of a DTensor, of all its parts
    # Tensor parallelism cuts one dimension into equal parts.
    if name in split.dims:
        shape[split.dims[name]] *= comm.get_size("tp")
    return torch.Size(shape)


def may_decay(name: str, module: nn.Module, shape: torch.Size) -> bool:
    """Tell whether a weight decays: it is a matrix or a kernel, of no norm, no bias, and no embedding of positions.

    module: that it belongs to. Decay of the others would pull scales and offsets to zero, which does not make a network
    simpler (He et al. 2019, arXiv:1812.01187, section 3.1).
    """
    # A weight of one row or column is a vector, whatever its shape says.
    long_dims = [size for size in shape if size > 1]
    is_norm = "Norm" in type(module).__name__
    is_bias = "bias" in name.rpartition(".")[2]
    is_position = OF_POSITIONS.search(name) is not None
    return len(long_dims) > 1 and not (is_norm or is_bias or is_position)
