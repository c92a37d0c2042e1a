"""Models of networks/ on split images, unchanged: the classifier, the convolutional one, neighborhood attention."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed.domain_parallel import OnParts, domain_parallel
from distributed.shard_tensor import ShardTensor
from networks.classifier import Classifier
from networks.convnet import ConvNet
from networks.neighborhood import NeighborhoodAttention, neighborhood_attention
from networks.vit import Block, ViT
from tests.support.marks import slow_but
from tests.support.parity import error
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, split
from utils import comm
from utils.layout import Layout

SHAPE = {"embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}


def make(name, img_size):
    torch.manual_seed(0)
    if name == "convnet":
        return ConvNet(3, 2, width=8, groups=2)
    if name == "neighborhood":
        return Block(NeighborhoodAttention(8, 2, 3), 8, 4, 0.0)
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


@pytest.mark.parametrize("batch", slow_but([3], [1, 3], "a batch of one image"))
@pytest.mark.parametrize("image", IMAGES)
def test_ten_steps_of_an_unchanged_model_are_those_on_whole_images(ranks, image, batch):
    name, shape, splits, mesh = IMAGES[image]
    size = 4 if mesh else len(splits[0][1])
    ranks(size, check_model, name, shape, splits, mesh, batch)


def attend(q, k, v, **options):
    return neighborhood_attention(q, k, v, **options)


def block(x):
    torch.manual_seed(0)
    return Block(NeighborhoodAttention(8, 2, 3), 8, 4, 0.0)(x)


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


def less_the_mean(x):
    return x - x.mean(1, keepdim=True)


def turned(x):
    return x.transpose(1, 2)


def identity(forward):
    return forward


def recomputed(forward):
    return partial(checkpoint, forward, use_reentrant=False)


def blocks_on_parts(transform):
    """One shape, split in one way after the other; and an output that is split in another way than the input."""
    mesh, x = domain_mesh(), draw((2, 6, 6), torch.float32, 1).detach()
    block, other = OnParts(less_the_mean), OnParts(turned)
    for on_parts in (block, other):
        on_parts.transforms.append(transform)
    for how in (X(x.shape, (1,)), X(x.shape, (2,)), X(x.shape, (2,), {0: (4, 2)}), X(x.shape, (1,))):
        torch.testing.assert_close(block(split(x, how, mesh)).full_tensor(), less_the_mean(x))
    assert len(block.regions) == 3
    with pytest.raises(ValueError, match=r"must be split as its input is, .*S\(1\).*, not .*S\(2\)"):
        other(split(x, X(x.shape, (1,)), mesh))


@pytest.mark.parametrize("transform", [identity, recomputed])
def test_a_block_on_parts_minds_how_they_are_split(ranks, transform):
    ranks(2, blocks_on_parts, transform)


def refusals(domain, changes):
    comm.build_mesh(torch.device("cpu"), Layout(comm.world_size(), domain=domain))
    settings = {"embed_dim": 12, "depth": 1, "num_heads": 3} | changes
    found = {}
    for method in ("gather", "ring", "all_to_all", "rings"):
        try:
            domain_parallel(ViT((8, 8), 4, 3, 3, **settings), (8, 8), 4, method)
        except ValueError as refused:
            found[method] = str(refused)
    return found


HEADS = "domain parallel: all_to_all cannot split 3 heads over 2 ranks"
DROPOUT = "domain parallel: ring attention cannot drop out attention weights; use gather or all_to_all"
UNKNOWN = "attention: no method 'rings', there are gather, ring, all_to_all"
ROWS = "domain parallel: 2 rows of patches cannot be split over 3 ranks"


@pytest.mark.parametrize(
    ("domain", "changes", "lines"),
    [
        ((2, 1), {"dropout": 0.1}, {"ring": DROPOUT, "all_to_all": HEADS, "rings": UNKNOWN}),
        ((3, 1), {}, {"gather": ROWS, "ring": ROWS, "all_to_all": ROWS, "rings": UNKNOWN}),
        ((1, 1), {"dropout": 0.1}, {"rings": UNKNOWN}),
    ],
)
def test_what_cannot_be_split_is_refused_whoever_asks(ranks, domain, changes, lines):
    size = domain[0] * domain[1]
    assert ranks(size, refusals, domain, changes) == [lines] * size
