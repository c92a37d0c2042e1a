"""Models of networks/ on split images, unchanged: the classifier, the convolutional one, neighborhood attention."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distributed.domain_parallel import OnParts
from networks.neighborhood import NeighborhoodAttention, neighborhood_attention
from networks.vit import Block
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, split


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
