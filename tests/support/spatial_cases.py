"""Operations of images that are split, in one, two and three dimensions: what their tests share."""

from tests.support.shard_parity import Case, X, check_all

BANDS = {2: [(5, 4), (9, 8), (1, 7)], 3: [(6, 0, 3), (1, 9, 2)], 4: [(3, 3, 3, 3), (0, 5, 1, 4)]}
TILES = [((5, 4), (3, 6)), ((6, 7), (8, 0))]  # of 2 x 2 ranks: rows, columns


def images(world, count):
    """(image (B, 4, ...) with its rows split, mesh); of 4 ranks tiles as well."""
    for sizes in BANDS[world]:
        batch = (1, 3)[sizes == BANDS[world][0]]
        yield X((batch, 4, sum(sizes), *(9, 6)[: count - 1]), (2,), {0: sizes}), ()
    if world == 4 and count > 1:
        for h, w in TILES:
            yield X((1, 4, sum(h), sum(w), *(5,)[: count - 2]), (2, 3), {0: h, 1: w}), (2, 2)


def check_on_images(ranks, world, operations):
    """Check operations on all images of this many ranks. Each is (dimensions, function or expression, *weights)."""
    found = []
    for count, function, *weights in operations:
        found += [Case(function, (x,), weights, mesh) for x, mesh in images(world, count)]
    ranks(world, check_all, found)
