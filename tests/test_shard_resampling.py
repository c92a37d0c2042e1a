"""Pooling, interpolation and padding of images that are split, against the whole."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all
from tests.support.spatial_cases import cases, check_all_of, images

MAX = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
]
AVG = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True},
    {"kernel_size": 5, "stride": 3, "padding": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
]
ADAPTIVE = [{"output_size": n} for n in (1, 2, 5, 12)]
SCALES = [{"size": 5}, {"size": 23}, {"scale_factor": 2}, {"scale_factor": 1.7}, {"scale_factor": 0.6}]
SCALES += [{"scale_factor": 1.3, "recompute_scale_factor": True}]
PADS = [
    {"pad": (0, 0, 2, 1)},
    {"pad": (1, 2, -1, -2), "value": 3.0},
    {"pad": (0, 0, 3, 4, 1, 0)},
    *({"pad": (1, 1, 2, 1), "mode": mode} for mode in ("circular", "reflect", "replicate")),
    *({"pad": (0, 0, 7, 7), "mode": mode} for mode in ("circular", "reflect", "replicate")),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pooling(ranks, world):
    options = {
        f"{kind}_pool{n}d": them[i:] for kind, them in (("max", MAX), ("avg", AVG)) for n, i in ((1, 1), (2, 0), (3, 2))
    }
    options["avg_pool2d"] = [*AVG, {"kernel_size": 3, "padding": 1, "divisor_override": 5}]
    check_all_of(ranks, world, options)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_adaptive_pooling(ranks, world):
    them = {1: ADAPTIVE[:2], 2: [*ADAPTIVE, {"output_size": (None, 4)}], 3: ADAPTIVE[2:3]}
    options = {f"adaptive_{kind}_pool{n}d": them[n] for kind in ("avg", "max") for n in (1, 2, 3)}
    options["adaptive_avg_pool2d"] = [*them[2], {"output_size": 1}]
    check_all_of(ranks, world, options)


def pooled_and_put_back(x, name, **options):
    """Maxima, their places, and an image with the maxima at their places."""
    count = x.dim() - 2
    y, places = getattr(F, f"{name}_pool{count}d")(x, return_indices=True, **options)
    if "kernel_size" not in options:
        return y, places
    unpool = getattr(F, f"max_unpool{count}d")
    stride, padding = options.get("stride", options["kernel_size"]), options.get("padding", 0)
    return y, places, unpool(y * y, places, options["kernel_size"], stride, padding, x.shape)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_places_of_maxima_are_those_in_the_whole_image_and_lead_back(ranks, world):
    found = []
    for count in (1, 2, 3):
        for x, mesh in images(world, count):
            for options in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"output_size": 3}):
                keywords = {"name": "max" if "kernel_size" in options else "adaptive_max"} | options
                found.append(Case(pooled_and_put_back, (x,), (), mesh, torch.float64, keywords))
    channels = X((2, 4, 9, 6), (1, 3), {1: (4, 2)}), X((3, 4, 9, 6), (0, 2), {0: (2, 1), 1: (5, 4)})
    one = X((1, 1, 9, 6), (2, 3), {0: (5, 4)})  # no other dimension can be split instead
    if world == 4:
        keywords = {"name": "max", "kernel_size": 2}
        found += [Case(pooled_and_put_back, (x,), (), (2, 2), torch.float64, keywords) for x in (*channels, one)]
    ranks(world, check_all, found)


@pytest.mark.parametrize("world", slow_but([3], [2, 3, 4], "other numbers of ranks"))
def test_interpolation(ranks, world):
    found = []
    for count, name in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
        scales = SCALES if count == 2 else SCALES[1:4:2]
        options = [{"mode": mode} | s for mode in ("nearest", "nearest-exact", "area") for s in scales]
        options += [{"mode": name, "align_corners": align} | s for align in (False, True) for s in scales]
        found += cases(world, "interpolate", *options, count=count)
    ranks(world, check_all, found)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_padding(ranks, world):
    ranks(world, check_all, list(cases(world, "pad", *PADS, count=2)))
