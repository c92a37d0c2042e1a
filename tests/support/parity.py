"""Split against whole: a model-parallel ViT and the serial one side by side on every rank, tensor by tensor."""

import copy
from collections import Counter
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from distributed.collectives import shard_sizes
from distributed.context_parallel import context_parallel
from distributed.tensor_parallel import tensor_parallel
from networks.vit import ViT
from tools.instruments.counting import CollectiveCounter

TOLERANCE = 1e-5
CHANNELS = 3
PATCH = (2, 3)
UNEVEN, EVEN = (9, 10), (8, 6)  # patches


def serial_vit(grid=UNEVEN, dtype=torch.float32, **changes):
    """A small ViT in which no weight, bias included, has a special value."""
    settings = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
    } | changes
    model = ViT((grid[0] * PATCH[0], grid[1] * PATCH[1]), PATCH, **settings)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=random) * 0.2 + ("norm" in name and "weight" in name)
            )
    return model.to(dtype)


def make_mesh(tp=1, cp=1):
    return init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))


def parallel_vit(serial, mesh, method="gather", sequence_parallel=False):
    """A copy of the model, split over the mesh; returns it with {parameter name: dim that is split}."""
    model = copy.deepcopy(serial)
    context_parallel(model, mesh["cp"], method)
    return model, tensor_parallel(model, mesh["tp"], sequence_parallel)


def error(found, expected):
    """Relative error of a tensor as a whole."""
    expected = expected.detach().double()
    return ((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def images(model, count=2, seed=2):
    random = torch.Generator().manual_seed(seed)
    rows, columns = (n * p for n, p in zip(model.head.grid, PATCH, strict=True))
    return torch.randn(count, CHANNELS, rows, columns, generator=random)


def banded_loss(prediction, target, norms):
    difference, size = norms((prediction - target).flatten(1), target.flatten(1))
    return (difference / size).mean()


def count_block(model, mesh, compiled, autocast, sequence_parallel):
    """Run a block of the split model on this rank's tokens; returns counts forward and backward, dtypes of y and dx."""
    block, n = model.blocks[0], model.pos_embed.tokens.stop - model.pos_embed.tokens.start
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, fullgraph=True)
    if sequence_parallel:
        n = shard_sizes(n, mesh["tp"].size())[mesh["tp"].get_local_rank()]
    x = torch.randn(2, n, 32, dtype=model.pos_embed.weight.dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), CollectiveCounter() as forward:
        y = block(x)
    with CollectiveCounter() as backward:
        y.sum().backward()
    return Counts(forward.calls, forward.bytes), Counts(backward.calls, backward.bytes), y.dtype, x.grad.dtype


class Counts(NamedTuple):
    """What a CollectiveCounter found, to be sent from a rank to the test."""

    calls: Counter
    bytes: Counter
