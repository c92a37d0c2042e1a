"""Reductions, extrema and softmax of ShardTensors against those of the whole tensors."""

import itertools
import math
from operator import attrgetter

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all


def call(x, name, args=(), **keywords):
    """A function of torch, by its name."""
    return attrgetter(name)(torch)(x, *args, **keywords)


def method(x, name, args=(), **keywords):
    return getattr(x, name)(*args, **keywords)


def tied_amax(x, **keywords):
    return torch.amax((x > 0) * x.detach().round() + x * 0.0 + (x - x.detach()), **keywords)


def chained(x):
    """Partial results go through linear operations, and into others."""
    mean = x.mean((-1, -2), keepdim=True)
    return (x - mean) / (3 * mean.square() + x.sum() - 2 * mean.sum()).abs().sqrt()


def large_mean_var(x, **keywords):
    return torch.var(x + 1000, **keywords)


def constant_std(x):
    return torch.std(x * 0.0 + 1, 1)


def masked_softmax(x, dim, name):
    """Rows of which a rank has nothing that counts."""
    mask = torch.arange(x.shape[1])[:, None] < 2
    return getattr(F, name)(x.masked_fill(mask, -math.inf), dim=dim).masked_fill(mask, 0.0)


def masked_logsumexp(x):
    return x.masked_fill(torch.arange(x.shape[1])[:, None] < 2, -math.inf).logsumexp(1)


def zeros_counted(x):
    return torch.linalg.vector_norm(x.round().detach(), 0, dim=(0, 1))


def integers(x, name, **keywords):
    return call((x * 3).round().long(), name=name, **keywords)


def booleans(x, name, **keywords):
    return call(x > 0.5, name=name, **keywords)


def op(name, **keywords):
    return {"name": name, **keywords}


DIMS = [{"dim": 1}, {"dim": -1}, {"dim": (1, 2), "keepdim": True}, {"dim": (-2, 0)}, {"axis": 2, "keepdims": True}]
MANY = ("sum", "mean", "amax", "amin", "var", "std", "any", "all")
ONE = ("prod", "max", "min", "argmax", "argmin")


def operations():
    for name in MANY:
        for dims in [{}, *DIMS]:
            if name not in ("any", "all", "var", "std") or "axis" not in dims:
                yield op(name, **dims)
    for name in ONE:
        yield op(name)
        yield from (op(name, dim=d, keepdim=k) for d, k in itertools.product((0, 1, -1), (False, True)))
    yield from (op("logsumexp", **d) for d in DIMS[:4])
    yield from (op(name, dim=(1, 2), correction=0) for name in ("var", "std", "var_mean", "std_mean"))
    yield from (op("var", args=args) for args in [(False,), (1, False), (1, True, True)])
    yield from (op(name, dim=d) for name in ("cumsum", "softmax", "log_softmax") for d in (1, 2, -3))
    yield from (
        op("nn.functional.softmax", dim=-1),
        op("nn.functional.log_softmax", dim=1),
        op("special.softmax", dim=1),
    )
    for order in (1, 2, 3.5, math.inf, -math.inf):
        yield op("linalg.vector_norm", ord=order, dim=(1, 2))
        yield op("norm", p=order)
    yield from (op("norm"), op("norm", dim=1), op("norm", p="fro", dim=(1, 2)), op("linalg.norm", dim=1))
    yield op("linalg.norm", ord=1, dim=2, keepdim=True)
    yield from (op("count_nonzero"), op("count_nonzero", dim=1))
    yield from (op("sum", dtype=torch.float64), op("mean", dim=1, dtype=torch.float64))


METHODS = [
    *(op(name, args=args) for name in ("sum", "mean", "amax") for args in [(), (1,), ((1, 2), True)]),
    *(op(name, args=args) for name in ("max", "min", "argmax", "prod") for args in [(), (1,), (2, True)]),
    *(op(name, args=(d,)) for name in ("softmax", "log_softmax", "cumsum", "logsumexp") for d in (1, -1)),
    op("softmax", args=(1, torch.float64)), op("norm"), op("norm", args=(1, -1)), op("norm", args=(2, (1, 2), True)),
    op("var", args=(1,)), op("std", args=(1, False)), op("std"),
]  # fmt: skip


def layouts(ranks):
    """Even, uneven, with empty shards; samples, rows or columns."""
    yield X((3, 7, 5), (1,), {0: (*[0] * (ranks - 2), 2, 5)})
    yield X((1, 7, 5), (1,))
    if ranks == 2:
        yield X((3, 7, 5), (2,), {0: (5, 0)})
        yield X((4, 7, 5), (0,), {0: (1, 3)})


def reduction_cases(ranks):
    cases = [Case(call, (how,), keywords=o) for how in layouts(ranks) for o in operations()]
    cases += [Case(zeros_counted, (how,)) for how in layouts(ranks)]
    cases += [Case(method, (X((3, 7, 5), (1,)),), keywords=o) for o in METHODS]
    for how in layouts(ranks):
        cases += [Case(f, (how,)) for f in (chained, constant_std, masked_logsumexp)]
        cases += [Case(large_mean_var, (how,), dtype=torch.float64, keywords={"dim": d}) for d in (None, 1, (1, 2))]
        names = ("softmax", "log_softmax")
        cases += [Case(masked_softmax, (how,), keywords={"dim": 1, "name": n}) for n in names]
        cases += [Case(tied_amax, (how,), keywords={"dim": d}) for d in (1, (1, 2))]
        names = ("sum", "amax", "argmax", "argmin", "max", "prod", "cumsum")
        cases += [Case(integers, (how,), keywords={"name": n, "dim": 1}) for n in names]
        cases += [Case(booleans, (how,), keywords={"name": n, "dim": 2}) for n in ("sum", "any", "all")]
        cases += [Case(integers, (how,), keywords={"name": n}) for n in ("argmax", "argmin", "min", "sum")]
    long = X((2, 257, 3), (1,), {0: (160, 97 - 10 * (ranks - 2), *[10] * (ranks - 2))})
    for name, dtype in itertools.product(("softmax", "log_softmax", "mean", "var", "std", "logsumexp"), HALF):
        cases.append(Case(call, (long,), dtype=dtype, keywords=op(name, dim=1)))
    return cases


HALF = (torch.float32, torch.bfloat16)
PLANE_CASES = [
    Case(call, (how,), mesh=(2, 2), keywords=o)
    for how in [X((3, 7, 5), (1, 2)), X((3, 7, 5), (2, None), {0: (0, 5)}), X((4, 7, 5), (0, 1), {1: (0, 7)}),
                X((3, 7, 5), (2, 1), {0: (4, 1), 1: (2, 5)})]
    for o in operations()
]  # fmt: skip


@pytest.mark.parametrize("size", slow_but([3], [2, 3, 4], "other numbers of ranks"))
def test_reductions_are_those_of_the_whole(ranks, size):
    ranks(size, check_all, reduction_cases(size))


@pytest.mark.slow("four ranks")
def test_reductions_on_a_plane_of_ranks_are_those_of_the_whole(ranks):
    ranks(4, check_all, PLANE_CASES)
