"""Intervals of rows of a tensor that lies in shards: values and gradients against the whole, and what is sent."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from distributed.collectives import as_group
from distributed.shard.core.halo import HaloExchange, bounds
from tests.support.shard_parity import messages
from tools.instruments.counting import CollectiveCounter


class Halo(NamedTuple):
    sizes: tuple
    before: int
    after: int
    periodic: bool = False
    fill: Any = 0
    dim: int = 1
    dtype: Any = torch.float32


def world():
    return as_group(dist.group.WORLD)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(whole, dim, first, last, periodic, fill):
    """The rows that a rank has to get, by indices into the whole."""
    length = whole.shape[dim]
    if periodic:
        return whole.index_select(dim, torch.arange(first, last) % length)
    inside = whole.narrow(dim, max(first, 0), max(0, min(last, length) - max(first, 0)))
    if fill is None:
        return inside
    ends = [max(0, -first), max(0, last - length)]
    return F.pad(inside, [0, 0] * (whole.ndim - 1 - dim) + ends, value=fill)


def halo_exchange(x, dim, sizes, group, before, after, periodic=False, fill=0):
    intervals = [(first - before, last + after) for first, last in bounds(sizes)]
    return HaloExchange(x, dim, sizes, intervals, group, periodic, fill).rows()


def check_halos(halos, group=None):
    group = group or world()
    for halo in halos:
        sizes, before, after, periodic, fill, dim, dtype = halo
        shape = [2, 3, 4]
        shape[dim] = sum(sizes)
        whole = random(*shape).to(dtype).double().requires_grad_()
        mine = whole.detach().split(sizes, dim)[group.rank].to(dtype).requires_grad_()
        if halo.dim == 2:
            mine = mine.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # not contiguous
        found = halo_exchange(mine, dim, sizes, group, before, after, periodic, fill)
        assert found.dtype == dtype, halo
        expected = [rows_of(whole, dim, a - before, b + after, periodic, fill) for a, b in bounds(sizes)]
        upstream = [random(*y.shape, seed=r).to(dtype) for r, y in enumerate(expected)]
        assert torch.equal(found.double(), expected[group.rank]), halo
        found.backward(upstream[group.rank])
        torch.autograd.backward(expected, [u.double() for u in upstream])
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            mine.grad.double(), whole.grad.split(sizes, dim)[group.rank], rtol=tolerance, atol=tolerance, msg=str(halo)
        )


SIZES = {
    2: [(4, 4), (160, 96), (129, 128), (0, 5), (1, 6)],
    3: [(4, 4, 4), (5, 1, 3), (3, 0, 4), (0, 0, 5), (2, 5, 0)],
    4: [(3, 3, 3, 3), (1, 1, 1, 5), (0, 4, 0, 3)],
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_halos_are_slices_of_the_whole(ranks, size):
    halos = []
    for sizes in SIZES[size]:
        halos += [Halo(sizes, *n, p) for n in [(1, 1), (2, 0), (0, 3), (5, 4)] for p in (False, True)]
        halos += [Halo(sizes, 2, 3, False, fill) for fill in (None, -torch.inf, 7.0)]
        halos += [Halo(sizes, 3, 1, True, dim=dim, dtype=torch.bfloat16) for dim in (0, 2)]
    ranks(size, check_halos, halos)


def count_traffic(sizes, before, after):
    group = world()
    x = torch.randn(2, sizes[group.rank], 4, requires_grad=True)  # rows of 32 bytes
    return messages(halo_exchange, x, 1, sizes, group, before, after)


def test_only_the_rows_asked_for_travel(ranks):
    once = {"all_to_all": 1}
    sent = [(32, 64), (96, 96), (64, 32)]  # by rank: rows forward, and their gradients back
    assert ranks(3, count_traffic, (4, 4, 4), 1, 2) == [
        [once, {"all_to_all": forward}, once, {"all_to_all": backward}] for forward, backward in sent
    ]
    reaches_far = ranks(3, count_traffic, (4, 0, 1), 2, 0)
    assert [forward["all_to_all"] for _, forward, *_ in reaches_far] == [4 * 32, 0, 0]


def test_nothing_is_sent_where_nothing_is_asked_for(ranks):
    assert ranks(3, count_traffic, (4, 5, 0), 0, 0) == [[{}] * 4] * 3


def check_format_and_second_derivative():
    group, sizes = world(), (3, 4)
    x = random(2, 4, sizes[group.rank], 5).to(memory_format=torch.channels_last).requires_grad_()
    y = halo_exchange(x, 2, sizes, group, 1, 1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    gradient.sum().backward()
    # A row is squared wherever it is: at home, and at the neighbour to which it was sent.
    uses = torch.ones(sizes[group.rank])
    uses[-1 if group.rank == 0 else 0] = 2
    torch.testing.assert_close(x.grad, (2 * uses)[:, None].expand_as(x))


def test_the_memory_format_is_kept_and_a_second_derivative_travels_too(ranks):
    ranks(2, check_format_and_second_derivative)


def overlapped():
    """The order of events: the exchange begins before the computation and ends after it, in backward as well."""
    group, events = world(), []
    x = torch.randn(4, 3, requires_grad=True)
    pending = HaloExchange(x, 0, (4, 4), [(0, 5), (3, 8)], group)
    inner = pending.own * 2
    inner.register_hook(lambda _: events.append("computation"))
    y = pending.rows()

    class Seen(CollectiveCounter):
        def __torch_dispatch__(self, func, *args, **kwargs):
            before = sum(self.calls.values())
            result = super().__torch_dispatch__(func, *args, **kwargs)
            events.extend(["exchange begins"] * (before == 0 < sum(self.calls.values())))
            return result

    with Seen():
        (inner.sum() + y.sum()).backward()
    return events


def test_backward_computes_while_gradients_travel(ranks):
    assert ranks(2, overlapped) == [["exchange begins", "computation"]] * 2


def test_what_cannot_be_is_refused():
    group, x = as_group(None), torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"sizes \(4,\) and 1 intervals, and 5 rows on rank 0"):
        halo_exchange(x, 1, (4,), group, 1, 1)


def test_a_single_rank_fetches_from_itself():
    x = torch.arange(5.0).view(1, 5)
    found = halo_exchange(x, 1, (5,), as_group(None), 2, 1, periodic=True)
    assert found.tolist() == [[3, 4, 0, 1, 2, 3, 4, 0]]
