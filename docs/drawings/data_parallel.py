"""Drawings of rung 2."""

from docs.drawings.canvas import RANKS, Drawing


def ddp_buckets() -> Drawing:
    """Gradients leave bucket by bucket, while the backward pass goes on."""
    d = Drawing(
        800, 220, "DistributedDataParallel reduces buckets of gradients while the backward pass computes the next ones"
    )
    blocks = [(k * 110, 110, f"block {6 - k}", "a") for k in range(6)]
    d.row(110, 40, "backward", blocks)
    buckets = [(220, 150, "bucket 1: blocks 6, 5", "talk"), (440, 150, "bucket 2: 4, 3", "talk"), (660, 0, "", "talk")]
    d.row(110, 90, "all-reduce", [buckets[0], buckets[1]])
    d.box(770, 90, 14, 26, "", "talk")
    for x in (330, 550, 770):
        d.line((x, 66), (x, 90), dashed=True)
    d.words(700, 140, "bucket 3: only the last\none is waited for", "middle", 12)
    d.arrow((110, 178), (784, 178))
    d.words(784, 192, "time", "end", 12)
    d.legend(110, 192, [("a", "computes"), ("talk", "sends")])
    return d


def zero_stages() -> Drawing:
    """Memory of one of four ranks under each strategy, to scale."""
    d = Drawing(800, 306, "Parameters, gradients and optimizer state on one of four ranks, by strategy, to scale")
    strategies = [
        ("ddp", (1, 1, 2), ""),
        ("zero1", (1, 1, 0.5), ""),
        ("zero2", (1.25, 0.25, 0.5), "1/4 and a gathered copy from forward to backward"),
        ("fsdp", (0.25, 0.25, 0.5), "and one unit at a time, gathered"),
        ("hsdp", (0.5, 0.5, 1), "in groups of two ranks; and one unit at a time, gathered"),
    ]
    unit = 130.0  # points for 4P bytes
    for k, (name, sizes, remark) in enumerate(strategies):
        x, y = 90.0, 36 + k * 46
        d.words(78, y + 15, name, "end", bold=True)
        for size, fill, words in zip(sizes, ("a", "b", "c"), ("4P", "4P", "8P"), strict=True):
            part = size / (2 if words == "8P" else 1)
            share = {1: words, 0.5: f"{words}/2", 0.25: f"{words}/4", 1.25: "4P + 4P/4"}[part]
            d.box(x, y, size * unit, 30, share, fill, 12)
            x += size * unit
        d.words(x + 10, y + 15, remark, size=12)
    d.legend(90, 272, [("a", "parameters"), ("b", "gradients"), ("c", "two moments of Adam")], 150)
    return d


def fsdp_units() -> Drawing:
    """Units are gathered just before they compute and dropped after it."""
    d = Drawing(
        800, 270, "Fully sharded data parallelism gathers each unit before it computes, and frees it afterwards"
    )
    w = 70.0
    order = [1, 2, 3, 4, 4, 3, 2, 1]
    begins = [(0.6 + k + 0.6 * (k > 3)) * w for k in range(8)]  # the backward pass begins with a gather it waits for
    d.row(100, 76, "compute", [(x, w, f"{'fwd' if k < 4 else 'bwd'} {order[k]}", "a") for k, x in enumerate(begins)])
    gathers = [0.0, *begins[:3], begins[4] - 0.6 * w, *begins[4:7]]  # each beside the computation of the one before
    d.row(100, 40, "gather", [(x, 0.6 * w, f"{order[k]}", "talk") for k, x in enumerate(gathers)])
    d.row(100, 112, "reduce", [(begins[k] + w, 0.6 * w, f"{order[k]}", "b") for k in range(4, 8)])
    d.words(90, 182, "whole\nunits held", "end")
    for k, x in enumerate(begins):
        for level in range(1 if k in (3, 7) else 2):
            d.box(100 + x, 200 - 22 * (level + 1), w, 22, "", "c")
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
            d.box(130 + local * 115, y, 90, 40, f"rank {node * 4 + local}", RANKS[local])
            if local < 3:
                d.arrow((222 + local * 115, y + 20), (243 + local * 115, y + 20), both=True)
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
