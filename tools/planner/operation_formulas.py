"""Operations of a rank in a training step, by formula: the table of operations in tools/planner/formulas.py."""

from collections import Counter

import torch

from tools.instruments.tracker import ATTENTION, Operation
from tools.planner.memory_formulas import FULL, numbers
from tools.planner.rank_share import RankShare
from training.step import AMP_DTYPES


def operations_of(share: RankShare) -> Counter[Operation]:
    """Counter of Operations of a RankShare."""
    return _Operations(share).counted


class _Operations:
    def __init__(self, share: RankShare):
        self.share, self.calls = share, share.micro_batches
        self.counted: Counter[Operation] = Counter()
        self.low = AMP_DTYPES.get(share.config.amp_mode, torch.float32)
        self.rows = share.samples * share.tokens
        for stage in share.stages:
            self.calls = share.micro_batches * (stage.blocks - stage.repeated)
            self.block("forward")
            self.block_backward()
            self.calls = share.micro_batches * stage.repeated
            self.block("forward")
            self.block("backward", again=True)
            self.block_backward()
            self.calls = share.micro_batches
            if stage.first:
                self.embed()
            if stage.last:
                self.finish()
        self.parameters()

    def add(self, phase, kind, moved, flops=0, calls=1, dtype=None):
        if self.calls and moved:
            operation = Operation(phase, kind, flops, moved, dtype or self.low)
            self.counted[operation] += calls * self.calls

    def pointwise(self, phase, moved, calls=1, dtype=torch.float32):
        self.add(phase, "pointwise", moved, 0, calls, dtype)

    def copy(self, phase, moved, calls=1, dtype=torch.float32):
        self.add(phase, "copy", moved, 0, calls, dtype)

    def matmul(self, phase, rows, inner, columns, calls=1):
        moved = self.share.width * (rows * inner + inner * columns + rows * columns)
        self.add(phase, "matmul", moved, 2 * rows * inner * columns, calls)

    def block(self, phase, again=False):
        share, w, e, es = self.share, self.share.width, self.share.whole, self.share.stream
        d, t, hidden = share.d, share.t, share.hidden
        h = self.rows * hidden / t
        self.copy(phase, 2 * FULL * es, 2)  # norms
        if share.low:
            self.copy(phase, (FULL + w) * es, 2)
        kept = again and share.config.activation_checkpointing == "selective"  # products are not made again
        for inner, columns in () if kept else ((d, 3 * d // t), (d // t, d), (d, hidden // t)):
            self.matmul(phase, self.rows, inner, columns)
        if not again:
            self.matmul(phase, self.rows, hidden // t, d)
        if share.copies:
            for shape in share.block_shapes[2:6] + share.block_shapes[8:]:
                self.copy(phase, (FULL + w) * numbers([shape]))
        if not kept:
            self.attention(phase)
        self.pointwise(phase, (2 * FULL + w) * es, 1 if again else 2)  # residuals
        self.pointwise(phase, 2 * w * h, dtype=self.low)  # GELU
        if t > 1:
            self.pointwise(phase, 2 * w * es, 1 if again else 2, dtype=self.low)  # biases behind reductions
        if share.sequence:
            self.copy(phase, 2 * w * e, 3 if again else 4, dtype=self.low)
        if share.config.dropout:
            self.copy(phase, (2 * w + 1) * es, 2, dtype=self.low)
            self.copy(phase, (2 * w + 1) * h, dtype=self.low)

    def attended(self):
        """[(numbers of the queries, numbers of the keys, tokens of the keys)] of each call of attention in a block."""
        share, ranks = self.share, self.share.image
        own, everything = share.whole / share.t, share.samples * share.all_tokens * share.d / share.t
        if ranks > 1 and share.method == "ring":
            return [(own, share.samples * tokens * share.d / share.t, tokens) for tokens in share.shares]
        if ranks > 1 and share.method == "all_to_all":
            return [(everything / ranks, everything / ranks, share.all_tokens)]
        return [(own, everything, share.all_tokens)]

    def attention(self, phase):
        share, w, t, ranks, low = self.share, self.share.width, self.share.t, self.share.image, self.low
        own, everything = share.whole / t, share.samples * share.all_tokens * share.d / t
        for queries, keys, tokens in self.attended():
            self.add(phase, ATTENTION, round(2 * w * (queries + keys)), round(4 * queries * tokens))
        if ranks == 1:
            return
        if share.method == "gather":
            self.copy(phase, 4 * w * own, dtype=low)
            if min(share.shares) < max(share.shares):
                self.copy(phase, 4 * w * everything, dtype=low)
        elif share.method == "all_to_all":
            self.copy(phase, 6 * w * own, 2, dtype=low)
            self.copy(phase, 2 * w * own, dtype=low)
        else:
            self.copy(phase, 4 * w * own, dtype=low)
            if share.low:
                self.copy(phase, (FULL + w) * own, ranks + 1, dtype=low)
            self.pointwise(phase, 2 * FULL * own, 2 * (ranks - 1))  # merging
            self.pointwise(phase, 3 * FULL * own, ranks - 1)
            sums = FULL * self.rows * share.heads / t
            self.pointwise(phase, 2 * sums, 7 * (ranks - 1))

    def block_backward(self):
        share, w, e, es, phase = self.share, self.share.width, self.share.whole, self.share.stream, "backward"
        d, t, hidden = share.d, share.t, share.hidden
        h = self.rows * hidden / t
        for inner, columns in ((d, 3 * d // t), (d // t, d), (d, hidden // t), (hidden // t, d)):
            self.matmul(phase, self.rows, columns, inner)
            self.matmul(phase, inner, self.rows, columns)
            self.copy(phase, w * self.rows * columns, dtype=self.low)  # of the bias
        if share.copies:
            for shape in share.block_shapes[2:6] + share.block_shapes[8:]:
                self.copy(phase, (FULL + w) * numbers([shape]), dtype=self.low)
        self.attention_backward()
        self.copy(phase, 3 * FULL * es, 2)  # norms
        if share.low:
            self.copy(phase, (FULL + w) * es, 4)
        self.pointwise(phase, 3 * FULL * es, 2)  # residuals
        self.pointwise(phase, 3 * w * h, dtype=self.low)  # GELU
        self.copy(phase, 6 * w * e / t, 2, dtype=self.low)  # gradients of q, k, v side by side
        if share.sequence:
            self.copy(phase, 2 * w * e, 4, dtype=self.low)
        if share.config.dropout:
            self.copy(phase, (2 * w + 1) * es, 2, dtype=self.low)
            self.copy(phase, (2 * w + 1) * h, dtype=self.low)

    def attention_backward(self):
        share, w, t, ranks, low = self.share, self.share.width, self.share.t, self.share.image, self.low
        phase = "backward"
        own, everything = share.whole / t, share.samples * share.all_tokens * share.d / t
        for queries, keys, tokens in self.attended():
            self.add(phase, ATTENTION, round(w * 4 * (queries + keys)), round(10 * queries * tokens))
        if ranks == 1:
            return
        if share.method == "gather":
            self.copy(phase, 4 * w * everything, 3 if min(share.shares) < max(share.shares) else 2, dtype=low)
        elif share.method == "all_to_all":
            self.copy(phase, 6 * w * own, 3, dtype=low)
            self.copy(phase, 2 * w * own, dtype=low)
        else:
            self.pointwise(phase, (2 * FULL + w) * own, ranks)  # gradients of the queries
            self.copy(phase, 4 * w * own, ranks + 1, dtype=low)
            self.copy(phase, 2 * FULL * own, ranks)  # zeros
            if share.low:
                self.copy(phase, 2 * (FULL + w) * own, ranks, dtype=low)
            self.pointwise(phase, 6 * FULL * own, ranks - 1)  # of a block, on its way

    def embed(self):
        share, w = self.share, self.share.width
        weight = numbers(share.first_shapes[:1])
        flops = 2 * self.rows * weight
        if share.low:
            self.copy("forward", (FULL + w) * share.inputs)
            self.copy("forward", (FULL + w) * weight)
        moved = w * (share.inputs + weight + share.whole)
        self.add("forward", "matmul", moved, flops)
        self.add("backward", "matmul", moved, flops)
        self.pointwise("forward", (w + FULL) * share.whole)  # positions
        self.copy("backward", FULL * share.whole)
        self.copy("backward", 2 * FULL * share.tokens * share.d)
        if share.low:
            self.copy("backward", (FULL + w) * share.whole)
        if share.classifies:
            self.copy("forward", 2 * FULL * share.whole)
            self.pointwise("forward", 2 * FULL * share.whole)
            self.copy("backward", 3 * FULL * share.whole)
            self.pointwise("backward", 3 * FULL * share.whole)

    def finish(self):
        share, w, es = self.share, self.share.width, self.share.stream
        self.copy("forward", 2 * FULL * es)
        self.copy("backward", 3 * FULL * es)
        if share.classifies:
            self.copy("forward", FULL * share.whole)
            self.pointwise("backward", FULL * share.whole)
            self.matmul("forward", share.samples, share.d, share.classes)
            self.matmul("backward", share.samples, share.d, share.classes, 2)
            return
        columns = share.outputs // self.rows
        if share.low:
            for phase in ("forward", "backward"):
                self.copy(phase, (FULL + w) * es)
                self.copy(phase, (FULL + w) * share.d * columns)
                self.copy(phase, (FULL + w) * share.outputs)
        self.matmul("forward", self.rows, share.d, columns)
        self.matmul("backward", self.rows, columns, share.d)
        self.matmul("backward", share.d, self.rows, columns)
        images = FULL * share.outputs
        self.copy("forward", 2 * w * share.outputs, dtype=self.low)  # patches to image
        self.copy("backward", 2 * w * share.outputs, dtype=self.low)
        self.copy("backward", w * share.outputs, dtype=self.low)  # of the bias
        self.pointwise("forward", 3 * images)
        self.copy("forward", images, 2)  # norms
        self.pointwise("backward", 2 * images)
        self.pointwise("backward", images)
        self.pointwise("backward", 2 * images)

    def parameters(self):
        """Copies and updates of gradients and parameters."""
        share = self.share
        of_blocks, rest = share.shapes
        units, m = [*of_blocks, rest], share.micro_batches
        total = sum(numbers(unit) for unit in units)
        own = total / share.shards + share.positions
        tensors = sum(map(len, units))
        self.calls = 1
        if m > 1:
            self.pointwise("backward", 3 * FULL * total / tensors, tensors * (m - 1))
        if share.replicated:
            self.copy("backward", 2 * FULL * total / tensors, tensors)
        if share.sharded:
            width, each = share.gathered_width, total / len(units)
            times = len(units) * m
            self.copy("forward", 2 * width * each, times)  # out of the buffer in which they arrive
            if share.config.data_parallel != "zero2":
                self.copy("backward", 2 * width * each, times)
            self.copy("backward", 2 * FULL * each, len(units))
        if share.config.enable_fused:
            self.copy("update", 4 * FULL * own)
        else:
            for moved in (2, 1, 2, 2, 1, 1, 3):
                self.copy("update", moved * FULL * own)
