"""Normalization layers of ShardTensors against those of the whole tensors."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all

TOKENS = (3, 6, 5, 4)  # (B, C, H, W)


def layer_norm(x, *weights, normalized=1, eps=1e-5):
    return F.layer_norm(x * 2 + 3, x.shape[-normalized:], *weights, eps=eps)


def rms_norm(x, *weights, normalized=1, eps=None):
    return F.rms_norm(x * 2 + 3, x.shape[-normalized:], *weights, eps=eps)


def group_norm(x, *weights, groups=3):
    return F.group_norm(x * 2 + 3, groups, *weights)


def batch_norm(x, *weights):
    return F.batch_norm(x * 2 + 3, None, None, *weights, training=True)


def batch_norm_eval(x, *weights):
    mean, var = (torch.linspace(a, 2, x.shape[1], dtype=x.dtype) for a in (-1, 0.5))
    return F.batch_norm(x, mean, var, *weights, training=False)


def instance_norm(x, *weights):
    return F.instance_norm(x * 2 + 3, None, None, *weights)


def unit_norm(x, dim=1):
    return F.normalize(x, dim=dim)


def cuts(size, ranks):
    """Even, uneven and with an empty shard."""
    uneven = [1] * (ranks - 1) + [size - ranks + 1]
    return [None, {0: tuple(uneven)}, {0: (0, *uneven[:-2], uneven[-1] + uneven[-2])}]


def norm_cases(ranks):
    cases = []
    for dim, batch in itertools.product((0, 1, 2, 3), (1, 3)):
        shape = (batch, *TOKENS[1:])
        for how in [X(shape, (dim,), sizes) for sizes in cuts(shape[dim], ranks)] if shape[dim] >= ranks else []:
            cases += [Case(layer_norm, (how,), (shape[-n:], shape[-n:]), keywords={"normalized": n}) for n in (1, 2, 3)]
            cases += [Case(rms_norm, (how,), (shape[-2:],), keywords={"normalized": 2})]
            cases += [Case(f, (how,), ((6,), (6,))) for f in (batch_norm, batch_norm_eval)]
            cases += [Case(unit_norm, (how,))]
            groups = 6 if dim == 1 else 3  # whole groups on every rank
            cases += [Case(group_norm, (how,), ((6,), (6,)), keywords={"groups": groups})]
            cases += [Case(instance_norm, (how,), ((6,), (6,)))]
    whole = X(TOKENS)
    cases += [Case(layer_norm, (whole,), ((4,), (4,))), Case(batch_norm, (whole,), ((6,), (6,)))]
    cases += [Case(group_norm, (whole,), ((6,), (6,))), Case(layer_norm, (whole,)), Case(rms_norm, (X((2, 7), (1,)),))]
    half = X((2, 6, 33, 7), (2,), {0: tuple([10] * (ranks - 1) + [33 - 10 * (ranks - 1)])})
    for dtype in (torch.bfloat16, torch.float64):
        cases += [Case(layer_norm, (half,), ((33, 7),) * 2, dtype=dtype, keywords={"normalized": 2})]
        cases += [Case(rms_norm, (half,), ((33, 7),), dtype=dtype, keywords={"normalized": 2})]
        cases += [Case(f, (half,), ((6,), (6,)), dtype=dtype) for f in (group_norm, batch_norm, batch_norm_eval)]
    return cases


PLANE_CASES = [
    Case(f, (X((2, 6, 5, 7), split, sizes),), weights, (2, 2), keywords=keywords)
    for f, weights, keywords in [
        (layer_norm, ((5, 7), (5, 7)), {"normalized": 2}),
        (layer_norm, ((7,), (7,)), {"normalized": 1}),
        (rms_norm, ((6, 5, 7),), {"normalized": 3}),
        (group_norm, ((6,), (6,)), {"groups": 2}),
        (batch_norm, ((6,), (6,)), {}),
        (batch_norm_eval, ((6,), (6,)), {}),
        (instance_norm, ((6,), (6,)), {}),
    ]
    for split, sizes in [((2, 3), None), ((2, 3), {0: (4, 1), 1: (0, 7)}), ((3, None), None), ((0, 3), None),
                         ((None, 2), {1: (5, 0)})]
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
def test_norms_are_those_of_the_whole(ranks, size):
    ranks(size, check_all, norm_cases(size))


def test_norms_on_a_plane_of_ranks_are_those_of_the_whole(ranks):
    ranks(4, check_all, PLANE_CASES)
