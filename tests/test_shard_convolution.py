"""Convolution and transposed convolution of images that are split, against the whole."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distributed.collectives import as_group
from distributed.shard.ops import convolution
from distributed.shard.ops.convolution import convolve
from tests.support.marks import slow_but
from tests.support.shard_parity import X, domain_mesh, draw, split
from tests.support.spatial_cases import BANDS, check_on_images
from tools.instruments.counting import CollectiveCounter

CONVOLUTIONS = [  # kernel, options
    (3, "padding=1"), (3, "stride=3"), (3, "stride=2, padding=1"), (5, "stride=5, padding=2"),
    (7, "stride=7, padding=3"), (7, "padding=3"), (5, "padding=4, dilation=2"), (2, "padding='same'"),
    (4, "stride=2, padding=1"), (2, "stride=2"), (1, "stride=3, padding=2"), (3, "padding='valid', groups=2"),
]  # fmt: skip
TRANSPOSED = [
    (2, "stride=2"), (4, "stride=2, padding=1"), (3, "stride=2, padding=1, output_padding=1"), (3, "padding=1"),
    (3, "padding=0, dilation=2, groups=2"), (1, "stride=3, output_padding=2"),
    (5, "stride=3, padding=3, output_padding=1"),
]  # fmt: skip


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_convolution(ranks, world):
    operations = []
    for count, table in ((1, CONVOLUTIONS[2:6]), (2, CONVOLUTIONS), (3, CONVOLUTIONS[1:4])):
        for kernel, options in table:
            weight = 6, 2 if "groups" in options else 4, *[kernel] * count
            operations.append((count, f"F.conv{count}d(x, y, z, {options})", weight, (6,)))
    check_on_images(ranks, world, operations)


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_transposed_convolution(ranks, world):
    operations = []
    for count, table in ((1, TRANSPOSED[4:]), (2, TRANSPOSED), (3, TRANSPOSED[5:])):
        for kernel, options in table:
            weight = 4, 3 if "groups" in options else 6, *[kernel] * count
            operations.append((count, f"F.conv_transpose{count}d(x, y, z, {options})", weight, (6,)))
    check_on_images(ranks, world, operations)


def circular(x, weight, bias):
    """As nn.Conv of padding_mode circular does it."""
    count, kernel = weight.dim() - 2, weight.shape[-1]
    layer = getattr(nn, f"Conv{count}d")(4, 6, kernel, padding=kernel // 2, padding_mode="circular")
    return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_circular_convolution_keeps_the_sizes(ranks, world):
    kernels = (1, (5,)), (2, (3, 3)), (3, (3, 3, 3))
    check_on_images(ranks, world, [(count, circular, (6, 4, *kernel), (6,)) for count, kernel in kernels])
    assert ranks(world, sizes_of_circular, BANDS[world][0]) == [BANDS[world][0]] * world


def sizes_of_circular(sizes):
    x = split(torch.randn(1, 4, sum(sizes), 6), X((), (2,), {0: sizes}), domain_mesh())
    return circular(x, torch.randn(6, 4, 3, 3), torch.randn(6)).spec.split(2)[0]


def check_overlap(sizes, overlaps):
    """The inner outputs apart from the outer ones, and all at once."""
    group = as_group(domain_mesh())
    for options in ({"padding": 3}, {"stride": 2, "padding": 3}, {"padding": 6, "dilation": 2}, {}):
        results = []
        for allowed in (True, False):
            x = draw((2, 4, sizes[group.rank], 15), torch.float32, group.rank)
            weight = draw((6, 4, 7, 7), torch.float32, 5)
            with (
                mock.patch.object(convolution, "may_overlap", return_value=allowed),
                mock.patch.object(convolution, "overlapped", wraps=convolution.overlapped) as overlapped,
            ):
                y, new = convolve(F.conv2d, x, {2: (sizes, group)}, weight, **options)
            assert overlapped.called == (allowed and overlaps)
            grads = torch.autograd.grad(y, (x, weight), draw(y.shape, torch.float32, 8 + group.rank).detach())
            results.append((y, *grads, torch.tensor(new[2])))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("sizes", "overlaps"), [((61, 52, 65), True), ((61, 3, 65), False)])
def test_overlap_changes_no_number_and_every_rank_overlaps_or_none(ranks, sizes, overlaps):
    ranks(3, check_overlap, sizes, overlaps)


def check_autocast():
    x = split(draw((1, 4, 8, 4), torch.float32, 0), X((), (2,), {0: (4, 4)}), domain_mesh())
    with torch.autocast("cpu", torch.bfloat16), CollectiveCounter() as counted:
        y = F.conv2d(x, draw((4, 4, 3, 3), torch.float32, 1), padding=1)
    assert y.dtype == torch.bfloat16 and counted.bytes["all_to_all"] == 2 * 4 * 4


def test_rows_travel_in_the_dtype_of_autocast(ranks):
    ranks(2, check_autocast)
