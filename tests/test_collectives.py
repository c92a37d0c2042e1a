"""Collectives of model parallelism: values, gradients, and what the counter sees of them."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distributed import collectives as c
from tools.instruments.counting import CollectiveCounter

SIZES = [(3, 3, 3), (4, 3, 3), (5, 0, 2)]


def world():
    return c.as_group(dist.group.WORLD)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(function, x, upstream):
    """function's value and gradient of <function(x), upstream>."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(upstream)
    return y.detach(), x.grad


def whole_and_slices(sizes, dim, dtype):
    """On every rank: one tensor a rank, whole along dim, and each rank's slice of the first."""
    shape = [2, 3, 4]
    shape[dim] = sum(sizes)
    wholes = [random(*shape, seed=rank, dtype=dtype) for rank in range(len(sizes))]
    return wholes, wholes[0].split(sizes, dim)


def check_values_and_gradients(sizes, dim, dtype):
    group = world()
    wholes, slices = whole_and_slices(sizes, dim, dtype)
    mine, upstream, total = slices[group.rank], wholes[group.rank], sum(w.double() for w in wholes)

    def same(found, *expected):
        for value, other in zip(found, expected, strict=True):
            assert value.dtype == dtype
            close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(value, other.to(dtype), **close)

    own = total.split(sizes, dim)[group.rank]
    same(run(lambda x: c.copy_to_region(x, group), wholes[0], upstream), wholes[0], total)
    same(run(lambda x: c.reduce_from_region(x, group), upstream, wholes[0]), total, wholes[0])
    same(run(lambda x: c.scatter_to_region(x, dim, sizes, group), wholes[0], mine), mine, wholes[0])
    same(run(lambda x: c.gather_from_region(x, dim, sizes, group), mine, wholes[0]), wholes[0], mine)
    same(run(lambda x: c.all_gather(x, dim, sizes, group), mine, upstream), wholes[0], own)
    same(run(lambda x: c.reduce_scatter(x, dim, sizes, group), upstream, mine), own, wholes[0])
    same(run(lambda x: c.sum_over_ranks(x, group), upstream, wholes[0]), total, wholes[0] * group.size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_collective_and_its_transpose(ranks, sizes, dim, dtype):
    ranks(3, check_values_and_gradients, sizes, dim, dtype)


def test_a_group_of_one_communicates_nothing():
    alone, x = c.as_group(None), torch.randn(4, 3)
    with CollectiveCounter() as counted:
        for function in (c.copy_to_region, c.reduce_from_region, c.sum_over_ranks):
            assert function(x, alone) is x
        for function in (c.scatter_to_region, c.gather_from_region, c.all_gather, c.reduce_scatter):
            assert function(x, 0, (4,), alone) is x
    assert not counted.calls


def test_shards_are_as_even_as_can_be_and_make_up_the_whole():
    assert c.shard_sizes(45, 4) == (12, 11, 11, 11)
    x = torch.randn(3, 10)
    torch.testing.assert_close(torch.cat([c.shard(x, 1, rank, 4) for rank in range(4)], 1), x)


def count_torch_distributed():
    model = DistributedDataParallel(torch.nn.Linear(3, 5))  # 20 numbers
    with CollectiveCounter() as of_ddp:
        model(torch.ones(2, 3)).sum().backward()
    with CollectiveCounter() as counted:
        x = torch.ones(6)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(6), torch.empty(6)], x)
        dist.all_gather_into_tensor(torch.empty(12), x)
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.all_to_all_single(torch.empty(6), x)
        _ = dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        dist.barrier()
    return dict(of_ddp.calls), dict(of_ddp.bytes), dict(counted.calls), dict(counted.bytes)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_counter_sees_ddp_and_plain_collectives(ranks):
    first, second = ranks(2, count_torch_distributed)
    assert first[:2] == ({"all_reduce": 1}, {"all_reduce": 80})
    both = {"all_reduce": 1, "broadcast": 1, "all_gather": 2, "reduce_scatter": 1, "all_to_all": 1, "barrier": 1}
    sent = {"all_reduce": 24, "broadcast": 24, "all_gather": 48, "reduce_scatter": 12, "all_to_all": 12, "barrier": 0}
    assert first[2:] == (both | {"send": 1}, sent | {"send": 24})
    assert second[2:] == (both | {"recv": 1}, sent | {"recv": 0})
