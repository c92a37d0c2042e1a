"""Drawings of rung 4."""

from docs.drawings.canvas import RANKS, Drawing


def halo() -> Drawing:
    """A rank borrows its neighbours' rows for a convolution."""
    d = Drawing(
        800, 300, "Halo exchange: each rank gets the rows next to its band from its neighbours before a convolution"
    )
    d.words(130, 24, "one image, three bands", "middle", bold=True)
    for k in range(3):
        d.box(50, 46 + k * 76, 160, 76, f"rank {k}", RANKS[k])

    # The band of rank 1 with a row of either neighbour.
    d.words(520, 24, "what rank 1 computes on", "middle", bold=True)
    d.box(400, 70, 240, 24, "last row of rank 0", "a", 12)
    d.box(400, 94, 240, 96, "own rows", "b")
    d.box(400, 190, 240, 24, "first row of rank 2", "c", 12)
    # The halo comes from the last row of the band above and from the first row of the band below.
    d.arrow((212, 112), (396, 82), words="halo")
    d.arrow((212, 208), (396, 202), words="halo")
    d.arrow((646, 142), (690, 142))
    d.box(694, 94, 90, 96, "output:\nown rows", "b")
    d.words(
        520,
        246,
        "3 x 3 kernel: one row from each side. Backward, each\nhalo's gradient is added on the rank that owns the row.",
        "middle",
        12,
    )
    return d


def tiles() -> Drawing:
    """Four tiles of an image, and the halo of one of them."""
    d = Drawing(
        800,
        300,
        "An image cut into two by two tiles: halos come from the rows, then from the columns, corners included",
    )
    d.words(170, 24, "2 x 2 tiles", "middle", bold=True)
    for row in range(2):
        for column in range(2):
            rank = 2 * row + column
            x = 50 + column * 120
            y = 50 + row * 100
            d.box(x, y, 120, 100, f"rank {rank}", RANKS[rank])
    d.arrow((44, 268), (296, 268), both=True)
    d.words(170, 282, "longitude: the first and the last column are neighbours", "middle", 12)

    # The tile of rank 0 with its halo: columns on both sides, rows below, and corners.
    d.words(490, 24, "what rank 0 computes on", "middle", bold=True)
    # Longitude is periodic, so rank 1 is the neighbour on both sides.
    d.box(400, 60, 24, 110, "", "b")
    d.box(424, 60, 130, 110, "own points", "a")
    d.box(554, 60, 24, 110, "", "b")
    d.box(400, 170, 24, 24, "", "d")
    d.box(424, 170, 130, 24, "from rank 2", "c", 12)
    d.box(554, 170, 24, 24, "", "d")
    d.words(594, 84, "first, rows: exchanged along\nlatitude with rank 2", size=12)
    d.words(594, 136, "then columns, with the new\nrows in them, with rank 1", size=12)
    d.words(594, 184, "so the corners of rank 3 arrive\nwithout a message of their own", size=12)
    # Latitude is not periodic, so the top row of tiles has no rows above it.
    d.words(490, 226, "(no halo at the top: it ends at the pole)", "middle", 12)
    return d
