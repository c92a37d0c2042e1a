"""Drawings of rung 2."""

from docs.drawings.canvas import RANKS, Drawing


def ddp_buckets() -> Drawing:
    """Gradients leave bucket by bucket, while the backward pass goes on."""
    d = Drawing(
        800, 220, "DistributedDataParallel reduces buckets of gradients while the backward pass computes the next ones"
    )
    blocks = [(k * 110, 110, f"block {6 - k}", "a") for k in range(6)]
    d.row(110, 40, "backward", blocks)
    # A bucket is sent once the last of its gradients is there, beside the blocks that follow.
    hidden_buckets = [
        (220, 150, "bucket 1: blocks 6, 5", "talk"),
        (440, 150, "bucket 2: 4, 3", "talk"),
    ]
    d.row(110, 90, "all-reduce", hidden_buckets)
    # The third bucket begins only when the backward pass ends, so nothing hides it.
    d.box(770, 90, 14, 26, "", "talk")
    for x in (330, 550, 770):
        d.line((x, 66), (x, 90), dashed=True)
    d.words(700, 140, "bucket 3: only the last\none is waited for", "middle", 12)
    d.arrow((110, 178), (784, 178))
    d.words(784, 192, "time", "end", 12)
    d.legend(110, 192, [("a", "computes"), ("talk", "sends")])
    return d


def ring() -> Drawing:
    """Four ranks, four chunks: what is whole after each phase of a ring all-reduce."""
    d = Drawing(
        800, 190, "A ring all-reduce on four ranks: after the reduce-scatter each has one whole chunk, then all"
    )
    phases = [
        ("before", 60, lambda rank, chunk: "a"),
        ("after the reduce-scatter: 3 steps", 310, lambda rank, chunk: "c" if chunk == (rank + 1) % 4 else "wait"),
        ("after the all-gather: 3 more", 560, lambda rank, chunk: "c"),
    ]
    for title, x, fill in phases:
        d.words(x + 90, 20, title, "middle", bold=True)
        for rank in range(4):
            for chunk in range(4):
                d.box(x + chunk * 46, 38 + rank * 28, 44, 24, str(chunk), fill(rank, chunk), 12)
    for rank in range(4):
        d.words(52, 50 + rank * 28, f"rank {rank}", "end", 12)
    for x in (250, 500):
        d.arrow((x, 92), (x + 50, 92))
    d.legend(60, 164, [("a", "own numbers"), ("wait", "unfinished sums"), ("c", "whole sums")], 150)
    return d


def zero_stages() -> Drawing:
    """Memory of one of four ranks under each strategy, to scale."""
    d = Drawing(800, 306, "Parameters, gradients and optimizer state on one of four ranks, by strategy, to scale")
    # Sizes of parameters, gradients and moments on a rank, in units of 4P bytes.
    strategies = [
        ("ddp", (1, 1, 2), ""),
        ("zero1", (1, 1, 0.5), ""),
        ("zero2", (1.25, 0.25, 0.5), "1/4 and a gathered copy from forward to backward"),
        ("fsdp", (0.25, 0.25, 0.5), "and one unit at a time, gathered"),
        ("hsdp", (0.5, 0.5, 1), "in groups of two ranks; and one unit at a time, gathered"),
    ]
    unit = 130.0  # points for 4P bytes
    for k, (name, sizes, remark) in enumerate(strategies):
        y = 36 + k * 46
        d.words(78, y + 15, name, "end", bold=True)
        x = 90.0
        for size, fill, words in zip(sizes, ("a", "b", "c"), ("4P", "4P", "8P"), strict=True):
            whole = 2 if words == "8P" else 1  # in the same units
            shares = {
                1: words,
                0.5: f"{words}/2",
                0.25: f"{words}/4",
                1.25: "4P + 4P/4",
            }
            width = size * unit
            d.box(x, y, width, 30, shares[size / whole], fill, 12)
            x += width
        d.words(x + 10, y + 15, remark, size=12)
    d.legend(90, 272, [("a", "parameters"), ("b", "gradients"), ("c", "two moments of Adam")], 150)
    return d


def fsdp_units() -> Drawing:
    """Units are gathered just before they compute and dropped after it."""
    d = Drawing(
        800, 270, "Fully sharded data parallelism gathers each unit before it computes, and frees it afterwards"
    )
    width = 70.0  # of the computation of a unit
    sends = 0.6 * width
    order = [1, 2, 3, 4, 4, 3, 2, 1]  # units forward, then backward
    last_forward = 3  # place in the order
    begins = []
    for k in range(8):
        # The first gather of either pass is waited for. All others run beside the computation of the unit before.
        waited = 1.2 if k > last_forward else 0.6
        begins.append((k + waited) * width)

    computes = []
    for k, x in enumerate(begins):
        words = f"bwd {order[k]}" if k > last_forward else f"fwd {order[k]}"
        computes.append((x, width, words, "a"))
    d.row(100, 76, "compute", computes)
    # Each gather begins with the computation before it, except where a pass begins and waits.
    gather_begins = [0.0, *begins[:3], begins[4] - sends, *begins[4:7]]
    gathers = [(x, sends, f"{order[k]}", "talk") for k, x in enumerate(gather_begins)]
    d.row(100, 40, "gather", gathers)
    reduces = [(begins[k] + width, sends, f"{order[k]}", "b") for k in range(4, 8)]
    d.row(100, 112, "reduce", reduces)
    d.words(90, 182, "whole\nunits held", "end")
    for k, x in enumerate(begins):
        # The last unit of either pass has no next one that would be gathered beside it.
        held = 1 if k in (3, 7) else 2
        for level in range(held):
            y = 200 - 22 * (level + 1)
            d.box(100 + x, y, width, 22, "", "c")
    d.words(100, 222, "beside them, all the time: 1/N of every parameter, gradient and moment", size=12)
    entries = [("talk", "all-gather"), ("a", "computes"), ("b", "reduce-scatter"), ("c", "a gathered unit")]
    d.legend(100, 244, entries, 150)
    return d


def mesh() -> Drawing:
    """Eight ranks as a mesh of data parallel and tensor parallel groups."""
    d = Drawing(
        800, 260, "Eight ranks as a mesh: tensor parallel groups inside a node, data parallel groups across nodes"
    )
    for node in range(2):
        y = 60 + node * 90
        d.box(110, y - 16, 480, 72, "", "wait")
        d.words(100, y + 20, f"node {node}", "end", bold=True)
        for local in range(4):
            x = 130 + local * 115
            rank = node * 4 + local
            d.box(x, y, 90, 40, f"rank {rank}", RANKS[local])
            if local < 3:
                d.arrow((x + 92, y + 20), (x + 113, y + 20), both=True)
    for local in range(4):
        x = 175 + local * 115
        d.arrow((x, 102), (x, 148), both=True, dashed=True)
    d.words(610, 80, "tp: [0 1 2 3] and [4 5 6 7]\nneighbours, fast links", size=13)
    d.words(610, 170, "dp: [0 4] [1 5] [2 6] [3 7]\none colour, across nodes", size=13)
    d.words(
        350, 236, "--tensor_parallel 4 on 8 ranks; ranks of one colour hold the same part of the model", "middle", 12
    )
    d.words(
        350,
        24,
        "all-reduce in every block: inside a node   (solid)      gradients once a step: across (dashed)",
        "middle",
        12,
    )
    return d
