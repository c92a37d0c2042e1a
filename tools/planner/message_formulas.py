"""Communication of a rank in a training step, by formula: the table of messages in docs/reference/formulas.md."""

import math
from collections import Counter

from tools.instruments.counting import bytes_sent
from tools.instruments.tracker import Message
from tools.planner.memory_formulas import FULL, zero1_shares
from tools.planner.rank_share import RankShare, Stage


def messages_of(share: RankShare) -> tuple[Counter[Message], dict[str, tuple[int, ...]]]:
    """(Counter of Messages, {name of a group: its ranks}) of a RankShare."""
    found = _Messages(share)
    return found.counted, {found.share.group(name)[0]: share.ranks(name) for name in found.used}


class _Messages:
    def __init__(self, share: RankShare):
        self.share = share
        self.counted: Counter[Message] = Counter()
        self.used: dict[str, None] = {}  # dimensions, in the order in which they came
        for stage in share.stages:
            self.tensor_parallel(stage)
            self.attention(stage)
            self.pipeline(stage)
            if stage.last:
                self.loss()
        self.partial_gradients()
        if share.sharded:
            self.fully_sharded()
        elif share.replicated:
            for one in share.stages if share.p > 1 else [None]:
                self.buckets(one)
        if share.positions and share.layout.dp > 1:
            self.add("backward", "all_reduce", "dp", FULL * share.positions)
        splits = share.t > 1 or share.p > 1 or (share.own_positions and share.domain)
        if share.config.amp_mode == "fp16" and splits:  # whether a step has overflowed
            self.add("backward", "all_reduce", "world", FULL)
        if share.config.data_parallel == "zero1" and share.replicas > 1:
            for updated in filter(None, zero1_shares(share)):
                self.add("update", "broadcast", "dp_image", FULL * updated)

    def add(self, phase: str, kind: str, dimension: str, size: float, calls: int = 1) -> None:
        """Count collectives. size: bytes of the tensor that the collective is given."""
        name, ranks = self.share.group(dimension)
        if ranks == 1 or not calls:
            return
        self.counted[Message(phase, kind, name, round(bytes_sent(kind, size, ranks)))] += calls
        self.used[dimension] = None

    def tensor_parallel(self, stage: Stage) -> None:
        share, m = self.share, self.share.passes
        if share.t == 1:
            return
        w, d, b = share.width, share.d, share.samples
        # The repeated forward pass stops before the last product, unless dropout follows it.
        again = 2 if share.config.dropout or share.repeats_steps else 1
        repeated = stage.blocks if share.repeats_steps else stage.repeated
        if share.sequence:
            piece = b * share.slice * d
            for phase in ("forward", "backward"):
                self.add(phase, "all_gather", "tp", w * piece, 2 * stage.blocks * m)
                self.add(phase, "reduce_scatter", "tp", w * piece * share.t, 2 * stage.blocks * m)
            self.add("backward", "all_gather", "tp", w * piece, 2 * repeated * m)
            self.add("backward", "reduce_scatter", "tp", w * piece * share.t, again * repeated * m)
            if stage.last:
                self.add("forward", "all_gather", "tp", (FULL if share.classifies else w) * piece, m)
            if stage.first:
                self.add("backward", "all_gather", "tp", FULL * piece, m)
            return
        for phase in ("forward", "backward"):
            self.add(phase, "all_reduce", "tp", w * share.whole, 2 * stage.blocks * m)
        self.add("backward", "all_reduce", "tp", w * share.whole, again * repeated * m)

    def attention(self, stage: Stage) -> None:
        """Messages of attention between the ranks of an image."""
        share, m = self.share, self.share.passes
        if share.image == 1:
            return
        ranks, shares = share.image, share.shares
        row = share.samples * share.d / share.t  # numbers of a token
        forward: Counter[tuple[str, float]] = Counter()
        if share.method == "gather":
            size = share.width * 2 * row * max(shares)
            forward["all_gather", size] = 1
            backward = Counter({("reduce_scatter", size * ranks): 1})
        elif share.method == "ring":  # a rank sends its own block first, then the block it has received
            blocks = [shares[(share.band - step) % ranks] for step in range(ranks)]
            for tokens in blocks[:-1]:
                forward["all_to_all", share.width * 2 * row * tokens] += 1
            backward = Counter(forward)
            for tokens in blocks[1:]:  # and the gradients of all blocks but its own
                backward["all_to_all", FULL * 2 * row * tokens] += 1
        else:
            own, others = row * share.tokens * (ranks - 1) / ranks, row * (share.all_tokens - share.tokens) / ranks
            forward = Counter({("all_to_all", share.width * 3 * own): 1})
            forward["all_to_all", share.width * others] += 1
            backward = Counter({("all_to_all", share.width * own): 1})
            backward["all_to_all", share.width * 3 * others] += 1
        for phase, calls, table in (
            ("forward", stage.blocks, forward),
            ("backward", stage.blocks, backward),
            ("backward", stage.blocks if share.repeats_steps else stage.repeated, forward),
        ):
            for (kind, size), count in table.items():
                self.add(phase, kind, "image", size, count * calls * m)

    def loss(self) -> None:
        """Sums over the ranks of an image: two norms of each sample, its squared error, or its classes."""
        share = self.share
        size = FULL * (2 if share.config.loss == "relative_l2" else 1)
        if share.classifies:
            size = share.width * share.classes
        self.add("forward", "all_reduce", "image", size * share.samples * share.steps, share.micro_batches)

    def pipeline(self, stage: Stage) -> None:
        share = self.share
        size = FULL * share.stream
        if not stage.last:
            self.add("forward", "send", "pp", size, share.micro_batches)
        if not stage.first:
            self.add("backward", "send", "pp", size, share.micro_batches)

    def partial_gradients(self) -> None:
        """Gradients of norms and shared biases, under sequence parallelism."""
        share = self.share
        if share.sequence:
            self.add("backward", "all_reduce", "tp", FULL * (6 * share.blocks + 2 * share.last) * share.d)

    def fully_sharded(self) -> None:
        share, config = self.share, self.share.config
        blocks, rest = share.shapes
        units = [(rest, 1), (share.block_shapes, len(blocks))]
        if config.wrap_policy == "none":
            units = [([*rest, *(shape for unit in blocks for shape in unit)], 1)]
        group = "dp_shard_image" if config.data_parallel == "hsdp" else "dp_image"
        forward, backward = gathers(share)
        for unit, count in units:
            own = sum(-(-shape[0] // share.shards) * math.prod(shape[1:]) for shape in unit)
            if not own:
                continue
            self.add("forward", "all_gather", group, share.gathered_width * own, forward * count)
            self.add("backward", "all_gather", group, share.gathered_width * own, backward * count)
            self.add("backward", "reduce_scatter", group, FULL * own * share.shards, count)
            if config.data_parallel == "hsdp":
                self.add("backward", "all_reduce", "dp_replicate", FULL * own, count)

    def buckets(self, stage: Stage | None) -> None:
        """Buckets of DistributedDataParallel, in the order of the gradients; of a stage, of its parameters."""
        share = self.share
        blocks = [share.block_shapes] * (share.blocks if stage is None else stage.blocks)
        first, last = share.first_shapes if share.first else [], share.last_shapes if share.last else []
        if stage is None:
            norm1, attention, norm2, mlp = (share.block_shapes[a:b] for a, b in ((0, 2), (2, 6), (6, 8), (8, 12)))
            block = [*reversed(mlp), *norm2, *reversed(attention), *norm1]
            shapes = [*reversed(last[2:]), *last[:2], *(block * len(blocks)), *reversed(first)]
        else:
            first, last = first if stage.first else [], last if stage.last else []
            shapes = [*first, *(shape for block in blocks for shape in block), *last]
        width = 2 if share.config.gradient_compression == "bf16" else FULL
        limit, size = int(share.config.bucket_cap_mb * 2**20), 0
        for number, shape in enumerate(shapes, 1):
            size += FULL * math.prod(shape)
            if size >= limit or number == len(shapes):
                self.add("backward", "all_reduce", "dp_image", size // FULL * width)
                size = 0
        if stage is not None:  # which parameters were used
            self.add("backward", "all_reduce", "dp_image", 4 * len(shapes))


def gathers(share: RankShare) -> tuple[int, int]:
    """How often a step gathers a unit (in forward passes, in backward passes).

    A pipeline keeps the parameters that it gathered for a backward pass until the next forward pass is over.
    """
    m, again = share.micro_batches, share.config.data_parallel != "zero2"
    if share.p == 1:
        # A backward pass lets the parameters go: with zero2 those of the last step are still there.
        return share.passes if again else m, (share.passes if again else share.passes - m)
    forward = backward = 0
    there = [False] * len(share.stages)
    for is_backward, i in share.schedule():
        if i:  # all stages of a rank take turns alike
            continue
        if not there[i]:
            forward, backward = forward + (not is_backward), backward + is_backward
        there[i] = is_backward or not again
    return forward, backward
