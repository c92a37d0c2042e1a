"""A small ViT that is split over tensor- and context-parallel ranks, and what a block of it sends."""

from collections import Counter
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch._functorch import compile_utils
from torch.distributed.device_mesh import init_device_mesh

from distributed.collectives import shard_sizes
from distributed.context_parallel import context_parallel
from distributed.tensor_parallel import tensor_parallel
from networks.vit import ViT
from tools.instruments.counting import CollectiveCounter

PATCH = (2, 3)
UNEVEN, EVEN = (9, 10), (8, 6)  # patches


def split_vit(mesh, method="gather", sequence_parallel=False, grid=UNEVEN, dtype=torch.float32, **changes):
    """This rank's part of a small ViT with the same weights in every layout; changes: of its other arguments."""
    img_size = grid[0] * PATCH[0], grid[1] * PATCH[1]
    model = ViT(img_size, PATCH, 3, 3, embed_dim=32, depth=2, num_heads=4, **changes).to(dtype)
    context_parallel(model, mesh["cp"], method)
    tensor_parallel(model, mesh["tp"], sequence_parallel)
    return model


def make_mesh(tp=1, cp=1):
    return init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))


def error(found, expected):
    """Relative error of a tensor as a whole."""
    expected = expected.detach().double()
    return ((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def count_block(
    tp=1, cp=1, method="gather", sequence_parallel=False, compiled=False, autocast=False, dtype=torch.float32, grid=EVEN
):
    """Run a block of a split model on this rank's tokens; returns counts forward and backward, dtypes of y and dx."""
    mesh = make_mesh(tp, cp)
    model = split_vit(mesh, method, sequence_parallel, grid, dtype)
    block, n = model.blocks[0], model.pos_embed.tokens.stop - model.pos_embed.tokens.start
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, fullgraph=True)
    if sequence_parallel:
        n = shard_sizes(n, mesh["tp"].size())[mesh["tp"].get_local_rank()]
    x = torch.randn(2, n, 32, dtype=dtype, requires_grad=True)
    # Where ShardTensors are used, equal messages of forward and backward pass stay two. Rung 3 has none.
    merged = [op for op in compile_utils.rand_ops if "c10d" not in str(op)]
    as_rung_3 = patch.object(compile_utils, "rand_ops", merged)
    with as_rung_3, torch.autocast("cpu", torch.bfloat16, enabled=autocast), CollectiveCounter() as forward:
        y = block(x)
    with CollectiveCounter() as backward:
        y.sum().backward()
    return Counts(forward.calls, forward.bytes), Counts(backward.calls, backward.bytes), y.dtype, x.grad.dtype


class Counts(NamedTuple):
    """The counts of a CollectiveCounter, to be sent from a rank to the test."""

    calls: Counter
    bytes: Counter
