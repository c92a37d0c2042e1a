"""Operations of images that are split, in one, two and three dimensions: what their tests share."""

from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all

BANDS = {2: [(5, 4), (9, 8), (1, 7)], 3: [(6, 0, 3), (1, 9, 2)], 4: [(3, 3, 3, 3), (0, 5, 1, 4)]}
TILES = [((5, 4), (3, 6)), ((6, 7), (8, 0))]  # of 2 x 2 ranks: rows, columns
COUNTS = {"1d": 1, "2d": 2, "3d": 3}


def operation(x, *weights, name, **options):
    return getattr(F, name)(x, *weights, **options)


def images(world, count):
    """(image (B, 4, ...) with its rows split, mesh); of 4 ranks tiles as well."""
    for sizes in BANDS[world]:
        batch = (1, 3)[sizes == BANDS[world][0]]
        yield X((batch, 4, sum(sizes), *(9, 6)[: count - 1]), (2,), {0: sizes}), ()
    if world == 4 and count > 1:
        for h, w in TILES:
            yield X((1, 4, sum(h), sum(w), *(5,)[: count - 2]), (2, 3), {0: h, 1: w}), (2, 2)


def cases(world, name, *options, count=None):
    """name with each of the options, on all images of this many ranks; weights as the kernel says."""
    count = count or COUNTS[name[-2:]]
    for option in options:
        option, weights = dict(option), ()
        if name.startswith("conv"):
            kernel = [option.pop("kernel")] * count
            groups = option.get("groups", 1)
            weights = ((4, 6 // groups, *kernel), (6,)) if "transpose" in name else ((6, 4 // groups, *kernel), (6,))
        for x, mesh in images(world, count):
            yield Case(operation, (x,), weights, mesh, keywords={"name": name} | option)


def check_all_of(ranks, world, options):
    """options: {name: options of cases}."""
    found = [case for name, them in options.items() for case in cases(world, name, *them)]
    ranks(world, check_all, found)
