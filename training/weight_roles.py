"""What a weight is for the optimizer: whether it decays.

The answer depends on the weight's name, the kind of its module, and its shape in the whole model. Every layout has
these alike, whatever part of the weight a rank holds.
"""

import re
from typing import NamedTuple

import torch
from torch import nn

from distributed.parallel_model import ParallelModel
from utils import comm

# Embeddings of positions: pos_embed.weight, relative_position_bias_table, rpb.
OF_POSITIONS = re.compile(r"(^|[._])(pos|position|positional|rpb)([._]|$)")


class Role(NamedTuple):
    """A trained weight. parameter: this rank's part of it. shape: of the whole weight. decays: unless all do."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    decays: bool


def weight_roles(parallel: ParallelModel) -> list[Role]:
    """The roles of the weights that are not frozen, in the order of the model. A tied weight has its first name."""
    modules = dict(parallel.model.named_modules())
    roles = []
    for name, parameter in parallel.model.named_parameters():
        if parameter.requires_grad:
            shape = whole_shape(name, parameter, parallel)
            module = modules[name.rpartition(".")[0]]
            roles.append(Role(name, parameter, shape, may_decay(name, module, shape)))
    return roles


def whole_shape(name: str, parameter: nn.Parameter, parallel: ParallelModel) -> torch.Size:
    """The shape of a weight in the whole model."""
    split = parallel.split
    if name in split.specs:
        return split.specs[name].shape
    shape = list(parameter.shape)  # of a DTensor, of all its parts
    if name in split.dims:
        shape[split.dims[name]] *= comm.get_size("tp")
    return torch.Size(shape)


def may_decay(name: str, module: nn.Module, shape: torch.Size) -> bool:
    """Tell whether a weight decays: it is a matrix or a kernel, of no norm, no bias, and no embedding of positions.

    module: that it belongs to. Decay of the others would pull scales and offsets to zero, which does not make a network
    simpler (He et al. 2019, arXiv:1812.01187, section 3.1).
    """
    long_dims = [size for size in shape if size > 1]
    is_norm = "Norm" in type(module).__name__
    is_bias = "bias" in name.rpartition(".")[2]
    is_position = OF_POSITIONS.search(name) is not None
    return len(long_dims) > 1 and not (is_norm or is_bias or is_position)
