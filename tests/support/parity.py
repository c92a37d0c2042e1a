"""Split against whole: a model-parallel ViT and the serial one side by side on every rank, tensor by tensor."""

import copy
from collections import Counter
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distributed.collectives import shard, shard_sizes
from distributed.context_parallel import context_parallel, l2_norms
from distributed.tensor_parallel import reduce_partial_gradients, tensor_parallel
from networks.vit import ViT
from tools.instruments.counting import CollectiveCounter
from training.losses import relative_l2

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


def check_parity(tp=1, cp=1, method="gather", sequence_parallel=False, grid=UNEVEN, steps=4, **changes):
    """Run on every rank: output, input gradient, all weight gradients, and the weights after Adam, are the serial ones.

    Returns the losses and a hash of the weights that are whole on every rank.
    """
    mesh = make_mesh(tp, cp)
    serial = serial_vit(grid, **changes)
    model, dims = parallel_vit(serial, mesh, method, sequence_parallel)
    assert list(model.state_dict()) == list(serial.state_dict())
    ends = [0, *(PATCH[0] * n for n in accumulate(shard_sizes(grid[0], cp)))]
    band = slice(*ends[mesh["cp"].get_local_rank() :][:2])
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, eps=1e-5) for m in (serial, model)]
    norms = partial(l2_norms, group=mesh["cp"])
    target, losses = images(serial, seed=3), []
    for step in range(steps):
        x = images(serial, seed=4 + step).requires_grad_()
        x_band = x[:, :, band].detach().clone().requires_grad_()
        y, y_band = serial(x), model(x_band)
        assert error(y_band, y[:, :, band]) < TOLERANCE, f"step {step}: output"
        loss, loss_band = relative_l2(y, target).mean(), banded_loss(y_band, target[:, :, band], norms)
        loss.backward()
        loss_band.backward()
        assert error(loss_band, loss) < TOLERANCE, f"step {step}: loss"
        reduce_partial_gradients(model, mesh["tp"])
        average_gradients(model, mesh["cp"])
        if step == 0:
            assert error(x_band.grad / cp, x.grad[:, :, band]) < TOLERANCE, "input gradient"
            compare(model, serial, dims, mesh, lambda p: p.grad, "gradient of")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_band.item())
    compare(model, serial, dims, mesh, lambda p: p, f"after {steps} steps:")
    return losses, [p.detach().numpy().tobytes() for name, p in model.named_parameters() if name not in dims]


def banded_loss(prediction, target, norms):
    difference, size = norms((prediction - target).flatten(1), target.flatten(1))
    return (difference / size).mean()


def average_gradients(model, mesh):
    """What data parallelism does over the flattened dp-cp group."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=mesh.get_group())


def compare(model, serial, dims, mesh, attribute, what):
    tp, problems = mesh["tp"], {}
    for name, expected in serial.named_parameters():
        expected = attribute(expected)
        if name in dims:
            expected = shard(expected, dims[name], tp.get_local_rank(), tp.size())
        found = attribute(model.get_parameter(name))
        assert found.shape == expected.shape, name
        if error(found, expected) >= TOLERANCE:
            problems[name] = error(found, expected)
    assert not problems, f"{what} {problems}"


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
