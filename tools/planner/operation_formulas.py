"""What a rank computes in a training step, by arithmetic alone: the table of operations in closed_form.py."""

from collections import Counter

import torch

from tools.planner.memory_formulas import FULL, numbers
from tools.planner.rank_share import Part
from tools.planner.tracker import ATTENTION, Operation
from training.step import AMP_DTYPES


def operations_of(part: Part) -> Counter[Operation]:
    """Counter of Operations of a Part."""
    return _Operations(part).counted


class _Operations:
    def __init__(self, part: Part):
        self.part, self.calls = part, part.micro_batches
        self.counted: Counter[Operation] = Counter()
        self.low = AMP_DTYPES.get(part.config.amp_mode, torch.float32)
        self.rows = part.samples * part.tokens
        for stage in part.stages:
            self.calls = part.micro_batches * (stage.blocks - stage.repeated)
            self.block("forward")
            self.block_backward()
            self.calls = part.micro_batches * stage.repeated
            self.block("forward")
            self.block("backward", again=True)
            self.block_backward()
            self.calls = part.micro_batches
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
        moved = self.part.width * (rows * inner + inner * columns + rows * columns)
        self.add(phase, "matmul", moved, 2 * rows * inner * columns, calls)

    def block(self, phase, again=False):
        part, w, e, es = self.part, self.part.width, self.part.whole, self.part.stream
        d, t, hidden = part.d, part.t, part.hidden
        h = self.rows * hidden / t
        self.copy(phase, 2 * FULL * es, 2)  # norms
        if part.low:
            self.copy(phase, (FULL + w) * es, 2)
        kept = again and part.config.activation_checkpointing == "selective"  # products are not made again
        for inner, columns in () if kept else ((d, 3 * d // t), (d // t, d), (d, hidden // t)):
            self.matmul(phase, self.rows, inner, columns)
        if not again:
            self.matmul(phase, self.rows, hidden // t, d)
        if part.copies:
            for shape in part.block_shapes[2:6] + part.block_shapes[8:]:
                self.copy(phase, (FULL + w) * numbers([shape]))
        if not kept:
            self.attention(phase)
        self.pointwise(phase, (2 * FULL + w) * es, 1 if again else 2)  # residuals
        self.pointwise(phase, 2 * w * h, dtype=self.low)  # GELU
        if t > 1:
            self.pointwise(phase, 2 * w * es, 1 if again else 2, dtype=self.low)  # biases behind reductions
        if part.sequence:
            self.copy(phase, 2 * w * e, 3 if again else 4, dtype=self.low)
        if part.config.dropout:
            self.copy(phase, (2 * w + 1) * es, 2, dtype=self.low)
            self.copy(phase, (2 * w + 1) * h, dtype=self.low)

    def attention(self, phase):
        part, w, t, ranks = self.part, self.part.width, self.part.t, self.part.image
        own, everything = part.whole / t, part.samples * part.all_tokens * part.d / t
        if ranks == 1 or part.method == "gather":
            self.attend(phase, own, everything, part.all_tokens)
        elif part.method == "all_to_all":
            self.attend(phase, everything / ranks, everything / ranks, part.all_tokens)
        else:
            for tokens in part.shares:
                self.attend(phase, own, part.samples * tokens * part.d / t, tokens)
        if ranks == 1:
            return
        low = self.low
        if part.method == "gather":
            self.copy(phase, 4 * w * own, dtype=low)
            if min(part.shares) < max(part.shares):
                self.copy(phase, 4 * w * everything, dtype=low)
        elif part.method == "all_to_all":
            self.copy(phase, 6 * w * own, 2, dtype=low)
            self.copy(phase, 2 * w * own, dtype=low)
        else:
            self.copy(phase, 4 * w * own, dtype=low)
            if part.low:
                self.copy(phase, (FULL + w) * own, ranks + 1, dtype=low)
            self.pointwise(phase, 2 * FULL * own, 2 * (ranks - 1))  # merging
            self.pointwise(phase, 3 * FULL * own, ranks - 1)
            sums = FULL * self.rows * part.heads / t
            self.pointwise(phase, 2 * sums, 7 * (ranks - 1))

    def attend(self, phase, queries, keys, tokens):
        """queries, keys: numbers; tokens: keys of an image."""
        moved = 2 * self.part.width * (queries + keys)
        self.add(phase, ATTENTION, round(moved), round(4 * queries * tokens))

    def block_backward(self):
        part, w, e, es, phase = self.part, self.part.width, self.part.whole, self.part.stream, "backward"
        d, t, hidden = part.d, part.t, part.hidden
        h = self.rows * hidden / t
        for inner, columns in ((d, 3 * d // t), (d // t, d), (d, hidden // t), (hidden // t, d)):
            self.matmul(phase, self.rows, columns, inner)
            self.matmul(phase, inner, self.rows, columns)
            self.copy(phase, w * self.rows * columns, dtype=self.low)  # of the bias
        if part.copies:
            for shape in part.block_shapes[2:6] + part.block_shapes[8:]:
                self.copy(phase, (FULL + w) * numbers([shape]), dtype=self.low)
        self.attention_backward()
        self.copy(phase, 3 * FULL * es, 2)  # norms
        if part.low:
            self.copy(phase, (FULL + w) * es, 4)
        self.pointwise(phase, 3 * FULL * es, 2)  # residuals
        self.pointwise(phase, 3 * w * h, dtype=self.low)  # GELU
        self.copy(phase, 6 * w * e / t, 2, dtype=self.low)  # gradients of q, k, v side by side
        if part.sequence:
            self.copy(phase, 2 * w * e, 4, dtype=self.low)
        if part.config.dropout:
            self.copy(phase, (2 * w + 1) * es, 2, dtype=self.low)
            self.copy(phase, (2 * w + 1) * h, dtype=self.low)

    def attention_backward(self):
        part, w, t, ranks, phase = self.part, self.part.width, self.part.t, self.part.image, "backward"
        own, everything = part.whole / t, part.samples * part.all_tokens * part.d / t
        ring = ranks > 1 and part.method == "ring"
        if ring:
            steps = [(own, part.samples * tokens * part.d / t, tokens) for tokens in part.shares]
        elif ranks > 1 and part.method == "all_to_all":
            steps = [(everything / ranks, everything / ranks, part.all_tokens)]
        else:
            steps = [(own, everything, part.all_tokens)]
        for queries, keys, tokens in steps:
            self.add(phase, ATTENTION, round(w * 4 * (queries + keys)), round(10 * queries * tokens))
        if ranks == 1:
            return
        low = self.low
        if part.method == "gather":
            self.copy(phase, 4 * w * everything, 3 if min(part.shares) < max(part.shares) else 2, dtype=low)
        elif part.method == "all_to_all":
            self.copy(phase, 6 * w * own, 3, dtype=low)
            self.copy(phase, 2 * w * own, dtype=low)
        else:
            self.pointwise(phase, (2 * FULL + w) * own, ranks)  # gradients of the queries
            self.copy(phase, 4 * w * own, ranks + 1, dtype=low)
            self.copy(phase, 2 * FULL * own, ranks)  # zeros
            if part.low:
                self.copy(phase, 2 * (FULL + w) * own, ranks, dtype=low)
            self.pointwise(phase, 6 * FULL * own, ranks - 1)  # of a block, on its way

    def embed(self):
        part, w = self.part, self.part.width
        weight = numbers(part.first_shapes[:1])
        flops = 2 * self.rows * weight
        if part.low:
            self.copy("forward", (FULL + w) * part.inputs)
            self.copy("forward", (FULL + w) * weight)
        moved = w * (part.inputs + weight + part.whole)
        self.add("forward", "matmul", moved, flops)
        self.add("backward", "matmul", moved, flops)
        self.pointwise("forward", (w + FULL) * part.whole)  # positions
        self.copy("backward", FULL * part.whole)
        self.copy("backward", 2 * FULL * part.tokens * part.d)
        if part.low:
            self.copy("backward", (FULL + w) * part.whole)
        if part.classifies:
            self.copy("forward", 2 * FULL * part.whole)
            self.pointwise("forward", 2 * FULL * part.whole)
            self.copy("backward", 3 * FULL * part.whole)
            self.pointwise("backward", 3 * FULL * part.whole)

    def finish(self):
        part, w, es = self.part, self.part.width, self.part.stream
        self.copy("forward", 2 * FULL * es)
        self.copy("backward", 3 * FULL * es)
        if part.classifies:
            self.copy("forward", FULL * part.whole)
            self.pointwise("backward", FULL * part.whole)
            self.matmul("forward", part.samples, part.d, part.classes)
            self.matmul("backward", part.samples, part.d, part.classes, 2)
            return
        columns = part.outputs // self.rows
        if part.low:
            for phase in ("forward", "backward"):
                self.copy(phase, (FULL + w) * es)
                self.copy(phase, (FULL + w) * part.d * columns)
                self.copy(phase, (FULL + w) * part.outputs)
        self.matmul("forward", self.rows, part.d, columns)
        self.matmul("backward", self.rows, columns, part.d)
        self.matmul("backward", part.d, self.rows, columns)
        images = FULL * part.outputs
        self.copy("forward", 2 * w * part.outputs, dtype=self.low)  # patches to image
        self.copy("backward", 2 * w * part.outputs, dtype=self.low)
        self.copy("backward", w * part.outputs, dtype=self.low)  # of the bias
        self.pointwise("forward", 3 * images)
        self.copy("forward", images, 2)  # norms
        self.pointwise("backward", 2 * images)
        self.pointwise("backward", images)
        self.pointwise("backward", 2 * images)

    def parameters(self):
        """What is done with gradients and parameters, apart from products."""
        part = self.part
        of_blocks, rest = part.shapes
        units, m = [*of_blocks, rest], part.micro_batches
        total = sum(numbers(unit) for unit in units)
        own = total / part.shards + part.positions
        tensors = sum(map(len, units))
        self.calls = 1
        if m > 1:
            self.pointwise("backward", 3 * FULL * total / tensors, tensors * (m - 1))
        if part.replicated:
            self.copy("backward", 2 * FULL * total / tensors, tensors)
        if part.sharded:
            width, each = part.gathered_width, total / len(units)
            times = len(units) * m
            self.copy("forward", 2 * width * each, times)  # out of the buffer in which they arrive
            if part.config.data_parallel != "zero2":
                self.copy("backward", 2 * width * each, times)
            self.copy("backward", 2 * FULL * each, len(units))
        if part.config.enable_fused:
            self.copy("update", 4 * FULL * own)
        else:
            for moved in (2, 1, 2, 2, 1, 1, 3):
                self.copy("update", moved * FULL * own)
