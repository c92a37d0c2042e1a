"""Normalization layers of ShardTensors against those of the whole tensors."""

import pytest
import torch

from tests.support.shard_parity import Case, X, refused

LAYER, GROUPS, CHANNELS = "F.layer_norm(x * 2 + 3, {}, y, z)", "F.group_norm(x * 2 + 3, {}, y, z)", ((6,), (6,))
BATCH = "F.batch_norm(x * 2 + 3, None, None, y, z, training=True)"
EVALUATED = "F.batch_norm(x, torch.linspace(-1, 2, 6).to(x), torch.linspace(0.5, 2, 6).to(x), y, z)"
NORMS = {  # of x (B, 6, 5, 4): shapes of the weights
    **{LAYER.format(shape): (shape, shape) for shape in ((4,), (5, 4), (6, 5, 4))},
    "F.layer_norm(x * 2 + 3, (4,), eps=1e-3)": (),
    "F.rms_norm(x * 2 + 3, (5, 4), y)": ((5, 4),),
    "F.rms_norm(x * 2 + 3, (4,))": (),
    GROUPS.format(3): CHANNELS,
    GROUPS.format(6): CHANNELS,
    BATCH: CHANNELS,
    EVALUATED: CHANNELS,
    "F.instance_norm(x * 2 + 3, None, None, y, z)": CHANNELS,
    "F.normalize(x, dim=1)": (),
}
LONG = {
    LAYER.format((33, 4)): ((33, 4),) * 2,
    "F.rms_norm(x * 2 + 3, (33, 4), y)": ((33, 4),),
    **dict.fromkeys((GROUPS.format(3), BATCH, EVALUATED), CHANNELS),
}


def cuts(size, ranks):
    """Even, uneven and with an empty shard."""
    uneven = [1] * (ranks - 1) + [size - ranks + 1]
    return [None, {0: tuple(uneven)}, {0: (0, *uneven[:-2], uneven[-1] + uneven[-2])}]


def cases(ranks):
    images = [X((3, 6, 5, 4))]
    for shape in ((1, 6, 5, 4), (3, 6, 5, 4)):
        for dim in (dim for dim in range(4) if shape[dim] >= ranks):
            images += [X(shape, (dim,), sizes) for sizes in cuts(shape[dim], ranks)]
    found = [Case(code, (x,), weights) for x in images for code, weights in NORMS.items()]
    long = X((2, 6, 33, 4), (2,), {0: (*[10] * (ranks - 1), 33 - 10 * (ranks - 1))})
    for dtype in (torch.bfloat16, torch.float64):
        found += [Case(code, (long,), weights, dtype=dtype) for code, weights in LONG.items()]
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_norms_are_those_of_the_whole(ranks, size):
    """Only groups of channels that are broken up are refused."""
    assert ranks(size, refused, cases(size))[0] <= {GROUPS.format(3)}


def test_norms_on_a_plane_of_ranks_are_those_of_the_whole(ranks):
    splits = [((2, 3), None), ((2, 3), {0: (4, 1), 1: (0, 4)}), ((3, None), None), ((0, 3), None),
              ((None, 2), {1: (5, 0)})]  # fmt: skip
    images = [X((2, 6, 5, 4), *split) for split in splits]
    found = [Case(code, (x,), weights, (2, 2)) for x in images for code, weights in NORMS.items()]
    assert ranks(4, refused, found)[0] == set()
