"""The same initial weights for every layout, although no rank ever holds the whole model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.collectives import shard
from distributed.shard.spec import part_of
from distributed.split import Split
from utils import comm


@torch.no_grad()
def fill_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]], split: Split) -> None:
    """Fill this rank's parameters and buffers, whole or in part, with their initial values.

    weights: yields (name, full tensor) of the whole model, one at a time, the same on every rank. split: the result of
    model parallelism. Nothing is communicated.
    """
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in weights:
        if name not in held:  # of another stage
            continue
        parameter = held[name]
        if name in split.dims:
            value = shard(value, split.dims[name], comm.get_rank("tp"), comm.get_size("tp"))
        if name in split.specs:
            value = part_of(value, split.specs[name])
        if isinstance(parameter, DTensor):
            value, parameter = local_part(value, parameter), parameter.to_local()
        parameter.copy_(value)


def local_part(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's part of the full value of a DTensor: split over tp first, then over the data-parallel ranks."""
    mesh = parameter.device_mesh
    dims = zip(mesh.mesh_dim_names or (), parameter.placements, mesh.shape, mesh.get_coordinate() or (), strict=True)
    for _, placement, size, rank in sorted(dims, key=lambda item: item[0] != "tp"):
        if hasattr(placement, "dim"):  # sharded
            chunks = full.chunk(size, placement.dim)
            full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


@contextmanager
def keep_ties(model: nn.Module) -> Iterator[None]:
    """Inside, the model may move to another device: a parameter that several modules share stays one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    yield
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = model.get_parameter(first)
