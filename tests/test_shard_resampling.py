"""Pooling, interpolation and padding of images that are split, against the whole."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all
from tests.support.spatial_cases import check_on_images, images

MAX = ["2", "3, 2, 1", "3, 1, 1, dilation=2", "3, 2, ceil_mode=True", "2, 3, 1, ceil_mode=True"]
AVG = ["2", "3, 2, 1", "3, 2, 1, ceil_mode=True, count_include_pad=False", "5, 3, 2, True", "2, 3, 1, ceil_mode=True"]
ADAPTIVE = {1: [1, 2], 2: [1, 2, 5, 12, (None, 4)], 3: [5]}
SCALES = ["size=5", "size=23", "scale_factor=2", "scale_factor=1.7", "scale_factor=0.6"]
SCALES += ["scale_factor=1.3, recompute_scale_factor=True"]
MODES = ["mode='nearest'", "mode='nearest-exact'", "mode='area'"]
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
PADS = ["(0, 0, 2, 1)", "(1, 2, -1, -2), value=3.0", "(0, 0, 3, 4, 1, 0)"]
PADS += [f"{pad}, mode='{m}'" for pad in ((1, 1, 2, 1), (0, 0, 7, 7)) for m in ("circular", "reflect", "replicate")]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pooling(ranks, world):
    operations = [(2, "F.avg_pool2d(x, 3, padding=1, divisor_override=5)")]
    for count, first in ((1, 1), (2, 0), (3, 2)):
        operations += [(count, f"F.max_pool{count}d(x, {options})") for options in MAX[first:]]
        operations += [(count, f"F.avg_pool{count}d(x, {options})") for options in AVG[first:]]
    check_on_images(ranks, world, operations)


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_adaptive_pooling(ranks, world, kind):
    operations = [(n, f"F.adaptive_{kind}_pool{n}d(x, {size})") for n, sizes in ADAPTIVE.items() for size in sizes]
    check_on_images(ranks, world, operations)


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
    operations = []
    for count, name in LINEAR.items():
        modes = MODES + [f"mode='{name}', align_corners={align}" for align in (False, True)]
        scales = SCALES if count == 2 else SCALES[1:4:2]
        operations += [(count, f"F.interpolate(x, {scale}, {mode})") for mode in modes for scale in scales]
    check_on_images(ranks, world, operations)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_padding(ranks, world):
    check_on_images(ranks, world, [(2, f"F.pad(x, {pad})") for pad in PADS])
