"""NATTEN's functions on split grids: as on one device, on the rows that each rank's queries see."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from distributed import neighborhood as natten_rule
from distributed.domain_parallel import domain_parallel
from distributed.shard.missing_rules.fallback import calls
from distributed.shard.ops import windows
from distributed.shard_tensor import ShardTensor, set_fallback
from tests.support.marks import needs_torch, slow_but
from tests.support.natten_stand_in import installed
from tests.support.shard_parity import Case, X, check, check_all, domain_mesh, draw, split
from utils import comm
from utils.layout import Layout

CPU = torch.device("cpu")

LONG = {2: (5, 18), 3: (5, 9, 9)}  # the second rank begins inside a group of 3
BANDS = {2: [(6, 6), (5, 7), (1, 11), (0, 12)], 3: [(4, 4, 4), (5, 3, 4), (1, 10, 1), (0, 12, 0)], 4: []}
WINDOWS = [
    {"kernel_size": 5},
    {"kernel_size": (3, 5), "dilation": (2, 1), "scale": 0.3},
    {"kernel_size": (5, 3), "dilation": (2, 3)},
    {"kernel_size": 1, "dilation": 4},
    {"kernel_size": (4, 6)},
    {"kernel_size": (5, 3), "stride": (3, 2), "dilation": (2, 1)},
    {"kernel_size": 4, "stride": (4, 2), "backend": "any"},
    {"kernel_size": (4, 3), "is_causal": (True, False), "dilation": (3, 1)},
    {"kernel_size": (5, 4), "is_causal": True, "stride": (3, 1), "dilation": (2, 2)},
]


def by_module(q, k, v, **options):
    return getattr(sys.modules["natten.functional"], f"na{q.dim() - 3}d")(q, k, v, **options)


def by_name(q, k, v, kernel_size, **options):
    return getattr(sys.modules["users_model"], f"na{q.dim() - 3}d")(key=k, query=q, value=v, kernel_size=kernel_size)


def alike(shape, *how):
    return (X(shape, *how),) * 3


def cases(size):
    for sizes in BANDS[size]:
        yield Case(by_module, alike((2, 12, 3, 4), (1,), {0: sizes}), keywords={"kernel_size": 3, "dilation": 2})
        for options in WINDOWS:
            yield Case(by_module, alike((1, 12, 9, 2, 3), (1,), {0: sizes}), keywords=options)
        options = {"kernel_size": (3, 3, 1), "dilation": (2, 1, 1)}
        yield Case(by_module, alike((1, 12, 4, 3, 2, 3), (1,), {0: sizes}), keywords=options)
    if size == 4:
        for sizes in (None, {0: (1, 11), 1: (7, 2)}, {0: (12, 0), 1: (4, 5)}):
            for options in WINDOWS:
                yield Case(by_module, alike((1, 12, 9, 2, 3), (1, 2), sizes), mesh=(2, 2), keywords=options)
        options = {"kernel_size": 3, "dilation": (2, 1, 1)}
        yield Case(by_module, alike((1, 12, 4, 7, 2, 3), (1, 3)), mesh=(2, 2), keywords=options)
        return
    long = alike((1, 23, 2, 3), (1,), {0: LONG[size]})
    yield Case(by_module, long, keywords={"kernel_size": 5, "stride": 3})
    yield Case(by_name, alike((2, 12, 9, 2, 3), (1,)), keywords={"kernel_size": 3})
    yield Case(by_module, alike((6, 12, 9, 2, 3), (0,)), keywords={"kernel_size": 3, "stride": 2})
    yield Case(by_module, alike((2, 12, 9, 6, 3), (3,)), keywords={"kernel_size": 4})
    few_heads = (X((1, 12, 9, 4, 3), (1,)), X((1, 12, 9, 2, 3), (1,)), X((1, 12, 9, 2, 5), (1,)))
    yield Case(by_module, few_heads, keywords={"kernel_size": 3})
    options = {"kernel_size": 4, "is_causal": (False, True), "return_lse": True}
    yield Case(by_module, alike((1, 12, 9, 2, 3), (1,), {0: BANDS[size][-1]}), keywords=options)


def check_cases(size, without_backward):
    doubles = [case._replace(dtype=torch.float64) for case in cases(size)]
    with installed(), mock.patch.object(natten_rule, "WITHOUT_BACKWARD", without_backward):
        check_all(doubles)


@pytest.mark.parametrize("size", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
@pytest.mark.parametrize("without_backward", [(), ("cpu",)], ids=["library", "cpu"])
def test_natten_on_a_split_grid_is_natten_on_the_whole(ranks, size, without_backward):
    ranks(size, check_cases, size, without_backward)


def shapes_that_the_library_gets(without_backward):
    mesh, q = domain_mesh(), draw((1, 12, 9, 2, 3), torch.float64, 0).detach()
    with installed() as library, mock.patch.object(natten_rule, "WITHOUT_BACKWARD", without_backward):
        part = split(q, X(q.shape, (1,)), mesh)
        by_module(part, part, part, kernel_size=5)
    return library.calls


def test_the_library_computes_on_the_rows_that_are_seen_and_our_code_on_a_cpu(ranks):
    """Bands of 4 rows: 2 rows of a neighbour on the outer ranks, 2 of each on the inner one."""
    shapes = ranks(3, shapes_that_the_library_gets, ())
    assert shapes == [[(1, 6, 9, 2, 3)], [(1, 8, 9, 2, 3)], [(1, 6, 9, 2, 3)]]
    assert ranks(3, shapes_that_the_library_gets, ("cpu",)) == [[], [], []]


def rows_of_its_own(x, dim, split, new, interval, **options):
    """As windows.request, but a rank's region ends at its own rows."""
    sizes, group = split

    def own(first, last):
        return first, last

    return windows.request(x, dim, (sizes, group), new, own, **options)


def without_halos():
    case = Case(by_module, alike((1, 12, 9, 2, 3), (1,)), dtype=torch.float64, keywords={"kernel_size": 3})
    with (
        installed(),
        mock.patch.object(natten_rule, "WITHOUT_BACKWARD", ()),
        mock.patch.object(natten_rule, "request", rows_of_its_own),
        pytest.raises(AssertionError, match="output 0"),
    ):
        check(case)


def test_without_the_halo_the_comparison_fails(ranks):
    ranks(2, without_halos)


def refusals():
    mesh, full = domain_mesh(), draw((1, 12, 9, 2, 3), torch.float64, 0).detach()
    q = split(full, X(full.shape, (1,)), mesh)
    more = draw((1, 4, 2, 3), torch.float64, 1).detach()
    other = split(full, X(full.shape, (1,), {0: (4, 8)}), mesh)
    with installed() as library:
        na2d = library.na2d
        with pytest.raises(NotImplementedError, match="no rule for na2d .*: additional_keys on a split grid"):
            na2d(q, q, q, 3, additional_keys=more, additional_values=more)
        with pytest.raises(NotImplementedError, match="query, key and value must be ShardTensors"):
            na2d(q, full, full, 3)
        with pytest.raises(NotImplementedError, match="they must be split in the same way"):
            na2d(q, other, other, 3)
        with pytest.raises(ValueError, match="kernel_size 7 with dilation 2 is longer than the axis, 12 points"):
            na2d(q, q, q, (7, 3), dilation=(2, 1))
        with pytest.raises(ValueError, match="kernel_size 3, stride 0, dilation 1: below 1"):
            na2d(q, q, q, 3, stride=0)
        expected = na2d(full, full, full, 3, additional_keys=more, additional_values=more)
        set_fallback("gather")
        try:
            found = na2d(q, q, q, 3, additional_keys=more, additional_values=more)
            assert calls["na2d"] == 1
        finally:
            set_fallback("error")
        torch.testing.assert_close(found.full_tensor(), expected)


def test_what_a_split_cannot_honour_is_refused_or_gathered(ranks):
    ranks(2, refusals)


class OfNatten(nn.Module):
    def forward(self, x):
        """x: (B, C, H, W) -> the same."""
        q = x.movedim(1, -1).unsqueeze(-2)
        return by_name(q, q, q, 3).squeeze(-2).movedim(-1, 1)


def a_model_on_bands(transform, without_backward):
    comm.build_mesh(CPU, Layout(2, domain=(2, 1)))
    x = draw((1, 3, 12, 9), torch.float32, 0).detach()
    with (
        mock.patch("tests.support.natten_stand_in.find_libraries"),
        installed(),
        mock.patch.object(natten_rule, "WITHOUT_BACKWARD", without_backward),
    ):
        model = OfNatten()
        expected = model(x)
        domain_parallel(model, (12, 9), 1)
        rank = comm.get_rank("domain")
        found = transform(model.forward)(x.chunk(2, 2)[rank])
        torch.testing.assert_close(found, expected.chunk(2, 2)[rank])


def as_it_is(forward):
    return forward


def compiled(forward):
    return torch.compile(forward, backend="aot_eager", fullgraph=True)


def test_a_model_of_natten_runs_on_bands(ranks):
    ranks(2, a_model_on_bands, as_it_is, ("cpu",))


@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a model")
@pytest.mark.parametrize(
    "without_backward",
    slow_but([()], [(), ("cpu",)], "a graph over the stand-in for a kernel without a backward pass"),
    ids=["library", "cpu"],
)
def test_a_model_of_natten_is_one_graph(ranks, without_backward):
    ranks(2, a_model_on_bands, compiled, without_backward)


def imported_later():
    full = draw((1, 12, 9, 2, 3), torch.float64, 0).detach()
    with mock.patch("tests.support.natten_stand_in.find_libraries"), installed() as library:
        own = library.na2d
        part = full.chunk(2, 1)[domain_mesh().get_local_rank()]
        q = ShardTensor.from_local(part, domain_mesh(), [Shard(1)])
        assert library.na2d is not own
        asking = library.na2d
        torch.testing.assert_close(by_name(q, q, q, 3).full_tensor(), own(full, full, full, 3))
        assert library.na2d(full, full, full, 3).equal(own(full, full, full, 3))  # plain tensors: as before
        ShardTensor.from_local(part, domain_mesh(), [Shard(1)])
        assert library.na2d is asking  # asked once


def test_natten_may_be_imported_after_us(ranks):
    ranks(2, imported_later)
