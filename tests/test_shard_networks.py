"""Models of networks/ on split images, unchanged: the classifier, the convolutional one, neighborhood attention."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.shard_tensor import ShardTensor
from networks.classifier import Classifier
from networks.convnet import ConvNet
from networks.neighborhood import NeighborhoodBlock, neighborhood_attention
from tests.parity import error
from tests.shard_parity import Case, X, check_all, domain_mesh, draw, split

SHAPE = {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


def make(name, img_size):
    torch.manual_seed(0)
    if name == "convnet":
        return ConvNet(3, 2, width=8, groups=2)
    if name == "neighborhood":
        return NeighborhoodBlock(8, 2, 3)
    return Classifier(img_size, 4, 3, **SHAPE)


def trained(model, x, target, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # not the sign of noise
    losses = []
    for _ in range(steps):
        y = model(x)
        loss = nn.functional.cross_entropy(y, target) if y.ndim == 2 else (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if isinstance(x, ShardTensor):
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def check_model(name, shape, splits, mesh_shape, batch):
    """Losses of ten steps, and the gradient of the input, are those of the whole image; weights stay equal."""
    mesh, image = domain_mesh(mesh_shape), shape[2:]
    shape = (batch, *shape[1:])
    whole, parts = make(name, image), make(name, image)
    x = draw(shape, torch.float32, 1)
    how = X(shape, tuple(d for d, _ in splits), {m: sizes for m, (_, sizes) in enumerate(splits) if sizes})
    own = split(x, how, mesh)
    if name == "classifier":
        target = own_target = torch.arange(batch) % 5
    else:
        out = whole(x).shape
        target = draw(out, torch.float32, 2).detach()
        own_target = split(target, how._replace(shape=out), mesh) if name == "convnet" or out == shape else target
    expected = trained(whole, x, target, 10)
    found = trained(parts, own, own_target, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert error(own.grad.full_tensor(), x.grad) < 1e-4
    for (parameter, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert error(q, p) < 1e-4, parameter


IMAGES = {
    "classifier, 80 rows over 4": ("classifier", (1, 3, 80, 8), [(2, (20, 20, 20, 20))], ()),
    "classifier, 72 rows over 2": ("classifier", (1, 3, 72, 8), [(2, (36, 36))], ()),
    "classifier, 45 patches over 4": ("classifier", (1, 3, 180, 8), [(2, (48, 44, 44, 44))], ()),
    "classifier, columns over 3": ("classifier", (1, 3, 8, 28), [(3, (12, 12, 4))], ()),
    "classifier, tiles": ("classifier", (1, 3, 20, 28), [(2, (12, 8)), (3, (16, 12))], (2, 2)),
    "classifier 3-D": ("classifier", (1, 3, 8, 12, 8), [(3, (8, 4))], ()),
    "classifier 3-D, 3 ranks": ("classifier", (1, 3, 8, 12, 8), [(3, (4, 4, 4))], ()),
    "classifier 3-D, tiles": ("classifier", (1, 3, 8, 12, 8), [(2, (4, 4)), (3, (8, 4))], (2, 2)),
    "convnet": ("convnet", (1, 3, 12, 16), [(2, (8, 4))], ()),
    "convnet, longitude": ("convnet", (1, 3, 12, 16), [(3, (6, 10))], ()),
    "convnet, uneven": ("convnet", (1, 3, 12, 16), [(2, (5, 3, 4))], ()),
    "convnet, tiles": ("convnet", (1, 3, 12, 16), [(2, (6, 6)), (3, (10, 6))], (2, 2)),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("image", IMAGES)
def test_ten_steps_of_an_unchanged_model_are_those_on_whole_images(ranks, image, batch):
    name, shape, splits, mesh = IMAGES[image]
    size = 4 if mesh else len(splits[0][1])
    ranks(size, check_model, name, shape, splits, mesh, batch)


def attend(q, k, v, **options):
    return neighborhood_attention(q, k, v, **options)


def block(x):
    torch.manual_seed(0)
    return NeighborhoodBlock(8, 2, 3)(x)


def alike(shape, *how):
    return (X(shape, *how),) * 3


def neighborhoods(size):
    if size == 4:
        yield Case(attend, alike((2, 3, 12, 9, 4), (2, 3)), mesh=(2, 2), keywords={"kernel_size": 5})
        yield Case(attend, alike((1, 3, 12, 9, 5, 4), (2, 4)), mesh=(2, 2), keywords={"kernel_size": 3})
        yield Case(block, (X((2, 12, 9, 8), (1, 2)),), mesh=(2, 2))
        return
    yield Case(attend, alike((2, 3, 12, 4), (2,)), keywords={"kernel_size": 5})
    for sizes in {2: [(5, 7), (1, 11), (0, 12)], 3: [(5, 3, 4), (1, 10, 1), (0, 12, 0)]}[size]:
        yield Case(attend, alike((2, 3, 12, 9, 4), (2,), {0: sizes}), keywords={"kernel_size": (7, 3)})
    yield Case(attend, alike((2, 3, 12, 9, 4), (3,)), keywords={"kernel_size": 3, "dilation": 2})
    yield Case(attend, alike((2, 3, 6, 9, 5, 4), (4,)), keywords={"kernel_size": 3})
    yield Case(attend, alike((2, 6, 12, 9, 4), (1,)), keywords={"kernel_size": 3})
    yield Case(block, (X((2, 12, 9, 8), (1,)),))


def check_neighborhoods(size):
    check_all(neighborhoods(size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_neighborhood_attention_reaches_over_the_edge(ranks, size):
    ranks(size, check_neighborhoods, size)
