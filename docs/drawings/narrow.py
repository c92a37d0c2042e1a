"""Drawings for a phone: those that have no picture to step through, 340 points wide and from top to bottom.

Each has the name of its wide drawing, and says the same.
"""

from docs.drawings.canvas import RANKS, Drawing

WIDTH = 340


def ladder() -> Drawing:
    """The dimension that each rung splits, a rung below the other."""
    d = Drawing(
        WIDTH, 430, "What each rung of the ladder splits over two devices: nothing, the batch, the model, the image"
    )
    # Each rung is (title, script, what it splits, words in its model).
    rungs = [
        ("1  one device", "train.py: nothing is split", "whole\nmodel"),
        ("2  data parallel", "train.py: the batch is split", "whole\nmodel"),
        ("3  model parallel", "train_mp.py: the model is split", "half of\nevery layer"),
        ("4  domain parallel", "train_shard.py: each image is split", "whole\nmodel"),
    ]
    for rung, (name, what, model) in enumerate(rungs):
        y = 8 + rung * 105
        d.words(12, y + 10, name, size=14, bold=True)
        d.words(12, y + 29, what, size=12)
        _four_images(d, y + 44, rung)
        d.arrow((146, y + 66), (166, y + 66))
        if rung == 0:
            d.box(172, y + 44, 160, 44, model, "a", 12)
            continue
        for device in range(2):
            d.box(172 + 82 * device, y + 44, 78, 44, model, RANKS[device], 12)
    return d


def _four_images(d: Drawing, y: float, rung: int) -> None:
    """Four images of a batch, in the colours of the devices that read them."""
    for image in range(4):
        x = 12 + 34 * image
        if rung == 3:
            d.box(x, y + 6, 28, 16, "", "a")
            d.box(x, y + 22, 28, 16, "", "b")
            continue
        is_of_second = rung == 1 and image > 1
        d.box(x, y + 6, 28, 32, "", "b" if is_of_second else "a")


def step_time() -> Drawing:
    """Where the time of a step goes, and what reading ahead changes."""
    d = Drawing(WIDTH, 290, "Time of a training step, without and with a thread that reads ahead")
    work = [("a", 32), ("a", 46), ("c", 24)]
    d.words(12, 18, "Without: the device waits for each batch", size=12, bold=True)
    d.words(12, 49, "device", size=12)
    d.words(12, 79, "reader", size=12)
    for step in range(2):
        x = 60.0 + 134 * step
        d.box(x, 68, 30, 22, "", "b")
        for fill, width in [("wait", 30), *work]:
            d.box(x, 38, width, 22, "", fill)
            x += width
    d.words(12, 122, "With: the next batch is read meanwhile", size=12, bold=True)
    d.words(12, 153, "device", size=12)
    d.words(12, 183, "reader", size=12)
    x = 60.0
    for fill, width in [("wait", 30), *work, *work]:
        d.box(x, 142, width, 22, "", fill)
        x += width
    for batch in range(5):
        d.box(60 + 42 * batch, 172, 30, 22, str(batch + 1), "b", 12)
    d.arrow((60, 212), (330, 212))
    d.words(330, 226, "time", "end", 12)
    d.legend(12, 240, [("a", "forward, backward"), ("c", "update")], 160)
    d.legend(12, 264, [("b", "reads"), ("wait", "waits")], 160)
    return d


def buffers() -> Drawing:
    """The ring of buffers of the data loader, from top to bottom."""
    d = Drawing(WIDTH, 390, "A ring of four reused buffers between the threads that read and the device that trains")
    d.box(90, 14, 160, 40, "year files (HDF5, Zarr)", "none", 12)
    d.arrow((130, 56), (130, 92))
    d.arrow((210, 56), (210, 92))
    d.words(120, 74, "thread 1", "end", 12)
    d.words(220, 74, "thread 2", size=12)
    states = [("being read", "b"), ("being read", "b"), ("ready", "c"), ("in use", "a")]
    for buffer, (words, fill) in enumerate(states):
        d.box(90, 98 + 44 * buffer, 160, 36, f"buffer {buffer}: {words}", fill, 12)
    d.arrow((170, 270), (170, 296))
    d.box(90, 300, 160, 40, "training step\non the device", "a", 12)
    # A used buffer takes the way beside the others, back to where buffers are read into.
    d.arrow((254, 248), (290, 248), (290, 116), (254, 116))
    d.words(170, 362, "A used buffer is read into again:", "middle", 12)
    d.words(170, 378, "its memory is touched once", "middle", 12)
    return d


def rollout() -> Drawing:
    """Several steps of a forecast in one step of training, from top to bottom."""
    d = Drawing(WIDTH, 350, "Training over three steps of a forecast: each prediction is the next input")
    d.box(20, 14, 100, 34, "x0, read", "c", 12)
    for step in range(1, 4):
        y = 14 + 78 * step
        d.arrow((70, y - 42), (70, y - 4))
        d.words(80, y - 24, "model", size=12)
        d.box(20, y, 100, 34, f"forecast {step}", "a", 12)
        d.arrow((124, y + 17), (196, y + 17), both=True)
        d.words(160, y + 6, f"loss {step}", "middle", 12)
        d.box(200, y, 90, 34, f"x{step}, read", "c", 12)
    # The gradient takes the way of the forecast backwards.
    d.arrow((312, 282), (312, 30), dashed=True)
    d.words(20, 312, "dashed: the gradient runs back through all", size=12)
    d.words(20, 330, "steps; their activations are kept for it", size=12)
    return d


def resharding() -> Drawing:
    """A checkpoint that one layout writes and another reads, from top to bottom."""
    d = Drawing(
        WIDTH, 440, "A checkpoint of whole tensors, written by four ranks and read by two, along another dimension"
    )
    d.words(170, 18, "4 ranks wrote: rows", "middle", 13, bold=True)
    for rank, fill in enumerate(RANKS):
        d.box(90, 34 + 24 * rank, 160, 24, f"rank {rank}", fill, 12)
    d.arrow((170, 134), (170, 166))
    d.words(180, 150, "own part", size=12)
    d.words(170, 180, "the checkpoint: one tensor", "middle", 13, bold=True)
    d.box(90, 194, 160, 70, "model.blocks.0.\nattn.qkv.weight\n(1152, 384)", "wait", 12)
    d.arrow((170, 268), (170, 300))
    d.words(180, 284, "what it needs", size=12)
    d.words(170, 314, "2 ranks read: columns", "middle", 13, bold=True)
    for rank in range(2):
        d.box(90 + 80 * rank, 328, 80, 60, f"rank {rank}", RANKS[rank], 12)
    d.words(170, 408, "Each part has its place in the tensor,", "middle", 12)
    d.words(170, 425, "so no layout has to know the other one.", "middle", 12)
    return d


def zero_stages() -> Drawing:
    """Memory of one of four ranks under each strategy, to scale; remarks below."""
    d = Drawing(WIDTH, 370, "Parameters, gradients and optimizer state on one of four ranks, by strategy, to scale")
    # Sizes of parameters, gradients and moments on a rank, in units of 4P bytes.
    strategies = [
        ("ddp", (1, 1, 2), "4P + 4P + 8P"),
        ("zero1", (1, 1, 0.5), "4P + 4P + 8P/4"),
        ("zero2", (1.25, 0.25, 0.5), "4P/4 and a gathered copy, 4P/4, 8P/4"),
        ("fsdp", (0.25, 0.25, 0.5), "a quarter of all, and one unit gathered"),
        ("hsdp", (0.5, 0.5, 1), "in groups of two ranks: a half of all"),
    ]
    unit = 66.0  # points for 4P bytes
    for number, (name, sizes, remark) in enumerate(strategies):
        y = 12 + number * 56
        d.words(52, y + 13, name, "end", 13, bold=True)
        x = 62.0
        for size, fill in zip(sizes, ("a", "b", "c"), strict=True):
            d.box(x, y, size * unit, 26, "", fill)
            x += size * unit
        d.words(62, y + 38, remark, size=12)
    for number, (fill, words) in enumerate((("a", "parameters"), ("b", "gradients"), ("c", "two moments of Adam"))):
        d.legend(62, 300 + 22 * number, [(fill, words)])
    return d


def mesh() -> Drawing:
    """Eight ranks as a mesh of data parallel and tensor parallel groups."""
    d = Drawing(
        WIDTH, 330, "Eight ranks as a mesh: tensor parallel groups inside a node, data parallel groups across nodes"
    )
    for node in range(2):
        y = 26 + node * 112
        d.words(56, y - 10, f"node {node}", size=13, bold=True)
        d.box(8, y, 324, 64, "", "wait")
        for local in range(4):
            x = 16 + local * 80
            d.box(x, y + 12, 62, 40, f"rank {node * 4 + local}", RANKS[local], 12)
            if local < 3:
                d.arrow((x + 63, y + 32), (x + 79, y + 32), both=True)
    for local in range(4):
        x = 47 + local * 80
        d.arrow((x, 80), (x, 148), both=True, dashed=True)
    d.words(12, 224, "solid, tp: [0 1 2 3] and [4 5 6 7], neighbours,", size=12)
    d.words(12, 241, "an all-reduce in every block, fast links", size=12)
    d.words(12, 266, "dashed, dp: [0 4] [1 5] [2 6] [3 7], across nodes,", size=12)
    d.words(12, 283, "the gradients once a step", size=12)
    d.words(12, 310, "One colour: the same part of the model", size=12)
    return d


def sequence_parallel() -> Drawing:
    """Where tokens are split and where features are, in a block, from top to bottom."""
    d = Drawing(
        WIDTH,
        440,
        "A block with sequence parallelism: tokens are split outside of the pairs of layers, features inside",
    )
    d.words(170, 18, "one block, on each of t ranks", "middle", 13, bold=True)
    parts = [
        ("norm", "a"),
        ("all-gather", "talk"),
        ("qkv, attention, proj", "c"),
        ("reduce-scatter", "talk"),
        ("add, norm", "a"),
        ("all-gather", "talk"),
        ("fc1, gelu, fc2", "c"),
        ("reduce-scatter", "talk"),
        ("add", "a"),
    ]
    for number, (words, fill) in enumerate(parts):
        d.box(80, 34 + 31 * number, 180, 27, words, fill, 12)
    d.legend(12, 324, [("a", "1/t of the tokens, all features")])
    d.legend(12, 348, [("c", "all tokens, 1/t of the heads or features")])
    d.legend(12, 372, [("talk", "the same bytes as two all-reduces")])
    d.words(12, 404, "Without it, the blue parts hold all tokens", size=12)
    d.words(12, 421, "on every rank.", size=12)
    return d


def tiles() -> Drawing:
    """Four tiles of an image, and below them the halo of one."""
    d = Drawing(
        WIDTH,
        510,
        "An image cut into two by two tiles: halos come from the rows, then from the columns, corners included",
    )
    d.words(170, 18, "2 x 2 tiles", "middle", 13, bold=True)
    for rank in range(4):
        row, column = divmod(rank, 2)
        d.box(60 + column * 110, 34 + row * 70, 110, 70, f"rank {rank}", RANKS[rank], 12)
    d.arrow((54, 190), (286, 190), both=True)
    d.words(170, 206, "longitude: first and last column are neighbours", "middle", 12)

    d.words(170, 240, "what rank 0 computes on", "middle", 13, bold=True)
    # Longitude is periodic, so rank 1 is the neighbour on both sides.
    d.box(81, 254, 24, 90, "", "b")
    d.box(105, 254, 130, 90, "own points", "a", 12)
    d.box(235, 254, 24, 90, "", "b")
    d.box(81, 344, 24, 24, "", "d")
    d.box(105, 344, 130, 24, "from rank 2", "c", 12)
    d.box(235, 344, 24, 24, "", "d")
    notes = [
        "First, rows: along latitude with rank 2.",
        "Then columns, with the new rows, with rank 1:",
        "so corners of rank 3 need no own message.",
        "No halo at the top: it ends at the pole.",
    ]
    for line, words in enumerate(notes):
        d.words(12, 396 + 24 * line, words, size=12)
    return d


def image_to_tokens() -> Drawing:
    """The way of an image through the model, from top to bottom."""
    d = Drawing(WIDTH, 560, "An image becomes patches, tokens, passes the blocks, and becomes an image again")
    d.words(80, 18, "image: C x H x W", "middle", 13, bold=True)
    d.words(255, 18, "tokens: N x D", "middle", 13, bold=True)
    _small_patches(d, 36, 32)
    d.words(80, 134, "patches of p x p", "middle", 12)
    d.arrow((136, 76), (196, 76), words="embed")
    # Tokens have the colour of the row of patches that they come from.
    for token in range(8):
        d.box(205, 32 + 11 * token, 100, 11, "", RANKS[token // 2])
    d.words(255, 134, "D features each", "middle", 12)

    d.arrow((255, 146), (255, 172))
    d.words(12, 164, "a block, several times", size=13, bold=True)
    halves = [("norm", "qkv", "attention", "proj", "mixes tokens"), ("norm", "fc1", "GELU", "fc2", "mixes features")]
    for half, (*layers, mixes) in enumerate(halves):
        y = 178 + 64 * half
        x = 12.0
        for words, fill, width in zip(
            layers, ("wait", "a", "talk" if half == 0 else "c", "a"), (54, 54, 80, 54), strict=True
        ):
            d.box(x, y, width, 32, words, fill, 12)
            x += width + 8
        d.words(x + 4, y + 16, "+", size=16, bold=True)
        d.words(12, y + 46, mixes, size=12)
    d.arrow((80, 302), (80, 332))
    d.words(92, 318, "head", size=12)
    _small_patches(d, 36, 338)
    d.words(150, 380, "image, 6 hours later", size=13, bold=True)
    shapes = [
        "config quick, a batch of b = 16:",
        "image (16, 20, 32, 64): 20 channels",
        "tokens (16, 128, 128): N = 8 x 16, D = 128",
        "q, k, v (16, 4, 128, 32): 4 heads",
        "scores (16, 4, 128, 128)",
        "hidden (16, 128, 512): fc1 makes 4 D",
    ]
    for line, words in enumerate(shapes):
        d.words(12, 444 + 20 * line, words, size=12, bold=line == 0)
    return d


def _small_patches(d: Drawing, x: float, y: float) -> None:
    """An image of four rows of patches, each row in a colour of its own."""
    for row in range(4):
        for column in range(4):
            d.box(x + 22 * column, y + 22 * row, 22, 22, "", RANKS[row])
