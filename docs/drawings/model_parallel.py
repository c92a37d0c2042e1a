"""Drawings of rung 3."""

from docs.drawings.canvas import RANKS, Drawing


def column_row() -> Drawing:
    """A pair of layers, the first split by columns, the second by rows."""
    d = Drawing(800, 290, "A column-parallel and a row-parallel layer: one all-reduce behind the pair")
    d.words(65, 24, "x, whole", "middle")
    d.words(255, 24, "fc1: output features split", "middle")
    d.words(505, 24, "fc2: input features split", "middle")
    d.words(735, 24, "y, whole", "middle")
    # A row for each rank: the grey box is the whole weight, the coloured one its part.
    for k in range(2):
        y = 50 + k * 110
        fill = RANKS[k]
        d.words(24, y + 40, f"{k}", "middle", 15, bold=True)
        d.box(45, y + 10, 40, 60, "x", fill)
        d.arrow((90, y + 40), (196, y + 40))
        d.box(200, y, 110, 80, "", "wait")
        # Columns of fc1 lie side by side, rows of fc2 one below the other.
        d.box(200 + 55 * k, y, 55, 80, f"fc1\n[{k}]", fill)
        d.arrow((314, y + 40), (346, y + 40))
        d.box(350, y + 10, 46, 60, f"h[{k}]", fill)
        d.arrow((400, y + 40), (446, y + 40))
        d.box(450, y, 110, 80, "", "wait")
        d.box(450, y + 40 * k, 110, 40, f"fc2[{k}]", fill)
        d.arrow((564, y + 40), (606, y + 40))
        d.words(585, y + 24, "part", "middle", 12)
        d.box(715, y + 10, 40, 60, "y", fill)
        d.arrow((668, y + 40), (711, y + 40))
    # One all-reduce spans both ranks: their parts are added up.
    d.box(610, 50, 56, 190, "all-\nreduce\n(sum)", "talk")
    d.words(
        395,
        268,
        "gelu(x fc1) fc2 = sum over ranks of gelu(x fc1[r]) fc2[r]: no message between the two layers",
        "middle",
        12,
    )
    return d


def sequence_parallel() -> Drawing:
    """Where tokens are split and where features are, in a block."""
    d = Drawing(
        800, 240, "A block with sequence parallelism: tokens are split outside of the pairs of layers, features inside"
    )
    # Each part is (words, width in points, fill), from left to right.
    parts = [
        ("norm", 80, "a"),
        ("all-\ngather", 62, "talk"),
        ("qkv, attention,\nproj", 118, "c"),
        ("reduce-\nscatter", 66, "talk"),
        ("add, norm", 86, "a"),
        ("all-\ngather", 62, "talk"),
        ("fc1, gelu,\nfc2", 96, "c"),
        ("reduce-\nscatter", 66, "talk"),
        ("add", 56, "a"),
    ]
    x = 30.0
    for words, width, fill in parts:
        d.box(x, 60, width, 70, words, fill, 12)
        x += width + 6
    d.words(400, 28, "one block of the transformer, on each of t ranks", "middle", bold=True)
    split = [
        ("a", "1/t of the tokens, all features"),
        ("c", "all tokens, 1/t of the heads or hidden features"),
    ]
    d.legend(60, 160, split, 270)
    d.legend(60, 186, [("talk", "messages: the same bytes as two all-reduces, which these are the halves of")])
    d.words(60, 218, "Without it, the blue parts hold all tokens on every rank.", size=12)
    return d


def ring_attention() -> Drawing:
    """Keys and values travel, queries stay."""
    d = Drawing(800, 300, "Ring attention over four ranks: queries stay, keys and values travel to the next rank")
    # The ranks stand clockwise, so that each sends to the next one.
    places = [(70, 60), (290, 60), (290, 190), (70, 190)]
    for k, (x, y) in enumerate(places):
        d.box(x, y, 120, 56, f"rank {k}\nq{k}   k{k} v{k}", RANKS[k])
    d.arrow((192, 88), (286, 88), words="k v")
    d.arrow((350, 118), (350, 186))
    d.arrow((286, 218), (194, 218), words="k v")
    d.arrow((130, 186), (130, 120))
    d.words(240, 24, "the ring", "middle", bold=True)
    d.words(625, 24, "keys that each rank's queries meet", "middle", bold=True)
    for step in range(4):
        d.words(540 + step * 65, 56, f"step {step}", "middle", 12)
    for rank in range(4):
        d.words(495, 88 + rank * 40, f"q{rank}", "end", 13)
        for step in range(4):
            # Keys move one rank on in each step, so those of the rank before arrive next.
            block = (rank - step) % 4
            x = 510 + step * 65
            d.box(x, 72 + rank * 40, 60, 32, f"k{block}", RANKS[block])
    d.words(635, 252, "exchange under compute; parts are merged by\ntheir log-sum-exp: exact attention", "middle", 12)
    return d


def _order(stage: int, stages: int, batches: int, one_forward_one_backward: bool) -> list[tuple[str, int]]:
    """What a stage does, one thing after another: ("F" or "B", micro-batch)."""
    # 1f1b makes only as many forward passes ahead as later stages need to be busy.
    ahead = min(stages - stage, batches) if one_forward_one_backward else batches
    order = [("F", batch) for batch in range(ahead)]
    for batch in range(batches):
        order.append(("B", batch))
        if ahead + batch < batches:
            order.append(("F", ahead + batch))
    return order


def _schedule(stages: int, batches: int, one_forward_one_backward: bool) -> list[list[tuple[int, str, int]]]:
    """Slots of each stage: (time, "F" or "B", micro-batch). A forward takes one slot, a backward two."""
    orders = [_order(stage, stages, batches, one_forward_one_backward) for stage in range(stages)]
    slots: list[list[tuple[int, str, int]]] = [[] for _ in range(stages)]
    done: dict[tuple[str, int, int], int] = {}  # when a stage has done this
    free = [0] * stages  # when each stage has done all that it has begun
    while any(orders):
        for stage, order in enumerate(orders):
            # A stage goes on until it needs what its neighbour has not done yet.
            while order:
                kind, batch = order[0]
                if kind == "F":
                    begins = stage == 0
                    needed = (kind, stage - 1, batch)
                    length = 1
                else:
                    begins = stage == stages - 1
                    needed = (kind, stage + 1, batch)
                    length = 2
                if not begins and needed not in done:
                    break
                start = free[stage] if begins else max(free[stage], done[needed])
                end = start + length
                slots[stage].append((start, kind, batch))
                done[kind, stage, batch] = end
                free[stage] = end
                order.pop(0)
    return slots


def pipeline() -> Drawing:
    """Two schedules of four micro-batches over three stages."""
    d = Drawing(800, 330, "Two pipeline schedules of four micro-batches over three stages")
    width = 34  # points of a slot
    names = ("gpipe: all forward, then all backward", "1f1b: one forward, one backward")
    for k, name in enumerate(names):
        top = 44 + k * 142
        d.words(90, top - 18, name, bold=True)
        schedule = _schedule(3, 4, one_forward_one_backward=k == 1)
        for stage, slots in enumerate(schedule):
            # Grey lies behind the whole row, so that what no span covers is the bubble.
            y = top + stage * 32
            d.box(90, y, 18 * width, 28, "", "wait")
            spans = []
            for time, kind, batch in slots:
                words = f"{batch + 1}"
                if kind == "F":
                    spans.append((time * width, width, words, "a"))
                else:
                    spans.append((time * width, 2 * width, words, "c"))
            d.row(90, y, f"stage {stage}", spans, 28)
    d.legend(90, 306, [("a", "forward"), ("c", "backward, twice as long"), ("wait", "waits: the bubble")], 190)
    d.words(790, 313, "1f1b keeps fewer activations", "end", 12)
    return d
