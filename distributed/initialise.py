"""The same initial weights for every layout, without ever holding the whole model."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def initialise(model, weights, device):
    """Give a model on the meta device its memory, on `device`, and its initial weights.

    weights: yields (name, full tensor) of the whole model, one at a time, the same on every rank. A parameter that is
    sharded keeps its part; nothing is communicated.
    """
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    for name, full in weights:
        if name not in parameters:
            continue
        parameter = parameters[name]
        if isinstance(parameter, DTensor):
            full = full.to(parameter.device_mesh.device_type)
            part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(full)
