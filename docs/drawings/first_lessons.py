"""Drawings of the two lessons that come before the rungs: the model, and collectives."""

from collections.abc import Sequence

from docs.drawings.canvas import RANKS, Drawing


def image_to_tokens() -> Drawing:
    """The way of an image through the model."""
    d = Drawing(800, 330, "An image becomes patches, tokens, passes the blocks, and becomes an image again")
    # The image is cut into patches, and each patch becomes a token. Two tokens of a row of patches are shown.
    _patches(d, 20, columns=4)
    d.words(72, 24, "image: C x H x W", "middle", 13, bold=True)
    d.words(72, 162, "patches of\np x p points", "middle", 12)
    d.arrow((132, 92), (190, 92), words="embed")
    # Tokens have the colour of the row of patches that they come from.
    for token in range(8):
        y = 36 + token * 14
        d.box(200, y, 90, 14, "", RANKS[token // 2])
    d.words(245, 24, "tokens: N x D", "middle", 13, bold=True)
    d.words(245, 170, "one row a patch,\nD features each", "middle", 12)

    # A block has two halves, each with a sum around it.
    d.arrow((298, 92), (338, 92))
    d.box(345, 36, 300, 116, "")
    d.words(495, 24, "a block, several times", "middle", 13, bold=True)
    attention = [
        ("norm", "wait", 40),
        ("qkv", "a", 36),
        ("attention", "talk", 66),
        ("proj", "a", 36),
    ]
    _layers(d, 46, attention)
    mlp = [
        ("norm", "wait", 40),
        ("fc1", "a", 36),
        ("GELU", "c", 66),
        ("fc2", "a", 36),
    ]
    _layers(d, 100, mlp)
    d.words(598, 66, "mixes\ntokens", "start", 11)
    d.words(598, 120, "mixes\nfeatures", "start", 11)

    # The head turns tokens into patches of the next image.
    d.arrow((652, 92), (694, 92), words="head")
    _patches(d, 702, columns=3)
    d.words(741, 24, "image", "middle", 13, bold=True)
    d.words(741, 162, "6 hours\nlater", "middle", 12)
    d.words(20, 216, "config quick, shapes of one batch:", bold=True)
    rows = [
        "image (16, 20, 32, 64): b = 16 samples, C = 20 channels, H x W = 32 x 64 points",
        "tokens (16, 128, 128): N = 8 x 16 = 128 patches of p = 4, D = 128 features",
        "q, k, v (16, 4, 128, 32): 4 heads with D / 4 = 32 features each; scores (16, 4, 128, 128)",
        "hidden (16, 128, 512): fc1 makes 4 D features of every token, fc2 makes D again",
    ]
    for i, words in enumerate(rows):
        d.words(36, 240 + i * 22, words, size=13)
    return d


def _patches(d: Drawing, x: float, columns: int) -> None:
    """An image of four rows of patches, each row in a colour of its own."""
    side = 26
    for row in range(4):
        for column in range(columns):
            d.box(x + column * side, 40 + row * side, side, side, "", RANKS[row])


def _layers(d: Drawing, y: float, layers: Sequence[tuple[str, str, int]]) -> None:
    """The layers of a half of a block from left to right, and the sum with its input. layers: (words, fill, width)."""
    x = 358.0  # just inside the frame of the block
    for words, fill, width in layers:
        d.box(x, y, width, 40, words, fill, 12)
        x += width + 8
    d.words(x + 4, y + 20, "+", "start", 16, bold=True)


def collectives() -> Drawing:
    """Five collectives on four ranks, with numbers."""
    d = Drawing(800, 620, "What broadcast, all-reduce, all-gather, reduce-scatter and all-to-all leave on four ranks")
    # Every number is another one, so that a reader sees where each goes.
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    columns = [list(column) for column in zip(*rows, strict=True)]
    firsts = [[row[0]] for row in rows]
    sums = [sum(column) for column in columns]
    pieces = [[total] for total in sums]
    # Each kind is (name, what it does, numbers of each rank before, and after).
    kinds = [
        ("broadcast", "rank 0 to all", [rows[0], [], [], []], [rows[0]] * 4),
        ("all-reduce", "the sum, on all", rows, [sums] * 4),
        ("all-gather", "all parts, on all", firsts, [columns[0]] * 4),
        ("reduce-scatter", "a part of the sum", rows, pieces),
        ("all-to-all", "part i to rank i", rows, columns),
    ]
    owner: dict[int, int] = {}  # {number: the rank that has it before}
    for rank, row in enumerate(rows):
        owner |= dict.fromkeys(row, rank)
    for k, (name, what, before, after) in enumerate(kinds):
        y = 34 + k * 116
        d.words(20, y + 36, name, bold=True, size=15)
        d.words(20, y + 58, what, size=12)
        for rank in range(4):
            line = y + rank * 24
            _numbers(d, 225, line, rank, before[rank], owner)
            _numbers(d, 520, line, rank, after[rank], owner)
        d.arrow((410, y + 48), (445, y + 48))
    d.words(300, 18, "before", "middle", 13, bold=True)
    d.words(595, 18, "after", "middle", 13, bold=True)
    d.words(690, 18, "coloured by origin;", size=11)
    d.words(690, 34, "grey: a sum", size=11)
    return d


def _numbers(d: Drawing, x: float, y: float, rank: int, numbers: list[int], owner: dict[int, int]) -> None:
    """The numbers of a rank in boxes, each in the colour of the rank that it comes from."""
    d.words(x - 8, y + 11, f"rank {rank}", "end", 12)
    for i, number in enumerate(numbers):
        # A sum comes from all ranks, so it has the colour of none.
        fill = RANKS[owner[number]] if number in owner else "wait"
        d.box(x + i * 38, y, 36, 21, str(number), fill, 12)
