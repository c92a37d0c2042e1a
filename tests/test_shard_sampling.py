"""Samples of split images at any places: halos where the places are near, whole images where they are not."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, messages, split

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")


def moved(x, y, reach, mode="bilinear", padding="zeros", align=False):
    """Samples of x (B, C, *image) near the places that a grid (B, *places, axes) has in it; y moves each of them."""
    plain = torch.eye(y.shape[-1], y.shape[-1] + 1, dtype=x.dtype).expand(len(x), -1, -1)
    grid = F.affine_grid(plain, (len(x), 1, *y.shape[1:-1]), align_corners=align) + reach * y.tanh()
    return F.grid_sample(x, grid, mode, padding, align)


def shifted(x, y):
    """Samples of x (B, C, 32, 8) in even columns 2.5 rows below the places of a grid, in odd ones 1.5 rows above."""
    rows = torch.arange(8, dtype=x.dtype) % 2 * -4 + 2.5
    return moved(x, y + torch.stack([0 * rows, rows / 16], -1).atanh(), 1.0)


def turned(x, y):
    """Samples of the image turned by half a turn: the places of every rank are far from its rows."""
    plain = -torch.eye(2, 3, dtype=x.dtype).expand(len(x), -1, -1)
    return F.grid_sample(x, F.affine_grid(plain, (len(x), 1, *y.shape[1:-1])) + y / 9)


def layouts(world):
    """(split image (2, 3, H, W), split displacements (2, h, w, 2), mesh): bands, uneven ones, empty ranks and tiles."""
    for sizes in {2: [(8, 8), (11, 5), (16, 0)], 3: [(6, 1, 9), (9, 0, 7)], 4: [(4, 4, 4, 4)]}[world]:
        rows = sum(sizes)
        yield X((2, 3, rows, 7), (2,), {0: sizes}), X((2, rows, 7, 2), (1,), {0: sizes}), ()
        yield X((2, 3, 7, rows), (3,), {0: sizes}), X((2, 5, 2 * rows, 2), (2,)), ()
    if world == 4:
        for h, w in (((8, 8), (6, 6)), ((10, 3), (4, 9))):
            image, places = (2, 3, sum(h), sum(w)), (2, sum(h), sum(w), 2)
            yield X(image, (2, 3), {0: h, 1: w}), X(places, (1, 2), {0: h, 1: w}), (2, 2)
            yield X(image, (2, 1), {0: h}), X(places, (1, None), {0: h}), (2, 2)


def cases(world):
    for x, y, mesh in layouts(world):
        for reach in (0.0, 0.15, 3.0):
            for i, padding in enumerate(PADDINGS):
                for align in (False, True):
                    keywords = {"reach": reach, "mode": MODES[i], "padding": padding, "align": align}
                    yield Case(moved, (x, y), (), mesh, torch.float64, keywords)
                    yield Case(moved, (x, y), (), mesh, torch.float64, keywords | {"mode": "bilinear"})
        yield Case(turned, (x, y), (), mesh, torch.float64)


def volumes(world):
    mesh, over = ((2, 2), (2, 3)) if world == 4 else ((), (2,))
    places = tuple(d - 1 for d in over)
    for align in (False, True):
        for mode in MODES[:2]:
            keywords = {"reach": 0.1, "mode": mode, "align": align, "padding": "border"}
            pair = X((1, 2, 9, 8, 5), over), X((1, 9, 8, 5, 3), places)
            yield Case(moved, pair, (), mesh, torch.float64, keywords)


@pytest.mark.parametrize("world", slow_but([3, 4], [2, 3, 4], "bands of two ranks"))
def test_samples_near_and_far_are_those_of_the_whole_image(ranks, world):
    ranks(world, check_all, [*cases(world), *volumes(world)])


def counted(function, *args, splits=(2,), sizes=None, mesh=()):
    """Calls and bytes of function(x, y, *args), and calls of its backward pass. x: an image (1, 2, 32, 8)."""
    x = split(draw((1, 2, 32, 8), torch.float32, 0), X((1, 2, 32, 8), splits, sizes), domain_mesh(mesh))
    y = X((1, 32, 8, 2), tuple(d - 1 for d in splits), sizes)
    y = split(torch.zeros(y.shape).requires_grad_(), y, domain_mesh(mesh))
    return messages(function, x, y, *args)[:3]


ROW, NUMBERS = 2 * 8 * 4, 2 * 8  # bytes: a row of the image; two numbers for each rank
EXCHANGE = {"all_to_all": 1}


def test_near_places_cost_two_numbers_and_the_rows_that_they_reach(ranks):
    first, second = ranks(2, counted, shifted, sizes={0: (20, 12)})
    assert first == [{"all_gather": 1} | EXCHANGE, {"all_gather": NUMBERS, "all_to_all": 2 * ROW}, EXCHANGE]
    assert second == [{"all_gather": 1} | EXCHANGE, {"all_gather": NUMBERS, "all_to_all": 3 * ROW}, EXCHANGE]


def test_on_tiles_one_message_agrees_on_rows_and_columns(ranks):
    for forward, sent, _ in ranks(4, counted, shifted, splits=(2, 3), mesh=(2, 2)):
        assert forward["all_gather"] == 1 and sent["all_gather"] == 3 * 2 * NUMBERS  # to three other ranks
        assert forward["all_to_all"] in (1, 2) and sent["all_to_all"] < 4 * ROW


def test_far_places_gather_the_image(ranks):
    for forward, sent, backward in ranks(2, counted, turned):
        assert forward == {"all_gather": 2} and sent == {"all_gather": 16 * ROW + NUMBERS}
        assert backward == {"all_reduce": 1}
    for forward, sent, _ in ranks(2, counted, moved, 0.0, "bicubic"):  # needs no numbers
        assert forward == {"all_gather": 1} and sent == {"all_gather": 16 * ROW}
