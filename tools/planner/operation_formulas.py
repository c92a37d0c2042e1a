"""Operations of a rank in a training step, by formula: the table of operations in docs/reference/formulas.md."""

from collections import Counter

import torch

from tools.instruments.tracker import ATTENTION, Operation
from tools.planner.memory_formulas import FULL, numbers
from tools.planner.rank_share import RankShare
from training.step import AMP_DTYPES

Term = tuple[float, int]  # bytes that an operation reads and writes, how many such operations


class Operations:
    """counted: those of a RankShare. Methods count a part each. es, e: numbers of the residual stream, of a layer."""

    def __init__(self, share: RankShare):
        self.share, self.calls = share, share.passes
        self.counted: Counter[Operation] = Counter()
        self.low = AMP_DTYPES.get(share.config.amp_mode, torch.float32)
        self.rows = share.samples * share.tokens
        self.w, self.e, self.es = share.width, share.whole, share.stream
        self.hidden = self.rows * share.hidden / share.t
        self.own, self.everything = self.e / share.t, share.samples * share.all_tokens * share.d / share.t
        self.uneven = min(share.shares) < max(share.shares)
        self.weights: list[Term] = []  # copies in low precision
        if share.copies:
            shapes = share.block_shapes[2:6] + share.block_shapes[8:]
            self.weights = [((FULL + self.w) * numbers([shape]), 1) for shape in shapes]
        for stage in share.stages:
            for repeated in (False, True):
                self.calls = share.passes * (stage.repeated if repeated else stage.blocks - stage.repeated)
                self.block("forward")
                if repeated or share.repeats_steps:
                    self.block("backward", again=repeated)
                self.block_backward()
            self.calls = share.passes
            if stage.first:
                self.embed()
            if stage.last:
                self.finish()
        self.calls = 1
        self.parameters()

    def moves(self, phase: str, kind: str, *terms: Term) -> None:
        """Count operations that only move data. kind: copy or pointwise."""
        for moved, calls in terms:
            if moved and calls and self.calls:
                self.counted[Operation(phase, kind, 0, moved, torch.float32)] += calls * self.calls

    def computes(self, phase: str, kind: str, flops: int, moved: int, calls: int = 1) -> None:
        """Count operations with arithmetic. kind: matmul or attention."""
        if self.calls:
            self.counted[Operation(phase, kind, flops, moved, self.low)] += calls * self.calls

    def matmul(self, phase: str, rows: int, inner: int, columns: int, calls: int = 1) -> None:
        """Count products of matrices, rows x inner and inner x columns."""
        moved = self.w * (rows * inner + inner * columns + rows * columns)
        self.computes(phase, "matmul", 2 * rows * inner * columns, moved, calls)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inner, columns) of qkv, proj, fc1, fc2."""
        d, t, hidden = self.share.d, self.share.t, self.share.hidden
        return (d, 3 * d // t), (d // t, d), (d, hidden // t), (hidden // t, d)

    def dropout(self) -> list[Term]:
        """Of the masks of a block."""
        size = 2 * self.w + 1
        return [(size * self.es, 2), (size * self.hidden, 1)] if self.share.config.dropout else []

    def block(self, phase: str, again: bool = False) -> None:
        """The forward pass of a block. again: repeated in the backward pass, up to the last product."""
        share, w, es, once = self.share, self.w, self.es, 1 if again else 2
        kept = again and share.config.activation_checkpointing == "selective"  # products are not made again
        for inner, columns in self.products[3 * kept : 4 - again]:
            self.matmul(phase, self.rows, inner, columns)
        if not kept:
            self.attention(phase)
        norms, casts, slices = (2 * FULL * es, 2), ((FULL + w) * es, 2 * share.low), (2 * w * self.e, 2 + once)
        self.moves(phase, "copy", norms, casts, *self.weights, *([slices] if share.sequence else []), *self.dropout())
        residuals, gelu = ((2 * FULL + w) * es, once), (2 * w * self.hidden, 1)
        self.moves(phase, "pointwise", residuals, gelu, (2 * w * es, once * (share.t > 1)))  # biases behind reductions

    def attended(self) -> list[tuple[float, float, int]]:
        """[(numbers of the queries, numbers of the keys, tokens of the keys)] of each call of attention in a block."""
        share, ranks, own, everything = self.share, self.share.image, self.own, self.everything
        if ranks > 1 and share.method == "ring":
            return [(own, share.samples * tokens * share.d / share.t, tokens) for tokens in share.shares]
        if ranks > 1 and share.method == "all_to_all":
            return [(everything / ranks, everything / ranks, share.all_tokens)]
        return [(own, everything, share.all_tokens)]

    def attention(self, phase: str) -> None:
        """Attention, and what it copies to exchange tokens."""
        share, w, own, ranks = self.share, self.w, self.own, self.share.image
        for queries, keys, tokens in self.attended():
            self.computes(phase, ATTENTION, round(4 * queries * tokens), round(2 * w * (queries + keys)))
        if ranks > 1 and share.method == "gather":
            self.moves(phase, "copy", (4 * w * own, 1), (4 * w * self.everything, int(self.uneven)))
        elif ranks > 1 and share.method == "all_to_all":
            self.moves(phase, "copy", (6 * w * own, 2), (2 * w * own, 1))
        elif ranks > 1:
            self.moves(phase, "copy", (4 * w * own, 1), ((FULL + w) * own, share.low * (ranks + 1)))
            sums = FULL * self.rows * share.heads / share.t
            merged = (2 * FULL * own, 2 * (ranks - 1)), (3 * FULL * own, ranks - 1), (2 * sums, 7 * (ranks - 1))
            self.moves(phase, "pointwise", *merged)

    def block_backward(self) -> None:
        """The backward pass of a block: two products for each one."""
        share, w, es, phase = self.share, self.w, self.es, "backward"
        for inner, columns in self.products:
            self.matmul(phase, self.rows, columns, inner)
            self.matmul(phase, inner, self.rows, columns)
            self.moves(phase, "copy", (w * self.rows * columns, 1))  # of the bias
        self.attention_backward()
        norms, casts, qkv = (3 * FULL * es, 2), ((FULL + w) * es, 4 * share.low), (6 * w * self.own, 2)
        slices = [(2 * w * self.e, 4)] if share.sequence else []
        self.moves(phase, "copy", norms, casts, qkv, *self.weights, *slices, *self.dropout())
        self.moves(phase, "pointwise", (3 * FULL * es, 2), (3 * w * self.hidden, 1))  # residuals, GELU

    def attention_backward(self) -> None:
        """2.5 times the arithmetic of attention, and its exchanges."""
        share, w, own, ranks, phase = self.share, self.w, self.own, self.share.image, "backward"
        for queries, keys, tokens in self.attended():
            self.computes(phase, ATTENTION, round(10 * queries * tokens), round(w * 4 * (queries + keys)))
        if ranks > 1 and share.method == "gather":
            self.moves(phase, "copy", (4 * w * self.everything, 2 + self.uneven))
        elif ranks > 1 and share.method == "all_to_all":
            self.moves(phase, "copy", (6 * w * own, 3), (2 * w * own, 1))
        elif ranks > 1:
            zeros, casts = (2 * FULL * own, ranks), (2 * (FULL + w) * own, ranks * share.low)
            self.moves(phase, "copy", (4 * w * own, ranks + 1), zeros, casts)
            # gradients of the queries, and those of a block on its way
            self.moves(phase, "pointwise", ((2 * FULL + w) * own, ranks), (6 * FULL * own, ranks - 1))

    def embed(self) -> None:
        """The patch embedding and the positions; a classifier's norm and ReLU."""
        share, w, e = self.share, self.w, self.e
        weight = numbers(share.first_shapes[:1])
        for phase in ("forward", "backward", *["backward"] * share.repeats_steps):
            self.computes(phase, "matmul", 2 * self.rows * weight, w * (share.inputs + weight + e))
        once, self.calls = self.calls, share.passes - share.micro_batches  # gradients of states that were forecast
        self.computes("backward", "matmul", 2 * self.rows * weight, w * (share.inputs + weight + e))
        self.calls = once
        if share.low:
            self.moves("forward", "copy", ((FULL + w) * share.inputs, 1), ((FULL + w) * weight, 1))
            self.moves("backward", "copy", ((FULL + w) * e, 1))
        self.moves("forward", "pointwise", ((w + FULL) * e, 1))
        self.moves("backward", "copy", (FULL * e, 1), (2 * FULL * share.tokens * share.d, 1))
        if share.classifies:
            for kind in ("copy", "pointwise"):
                self.moves("forward", kind, (2 * FULL * e, 1))
                self.moves("backward", kind, (3 * FULL * e, 1))

    def finish(self) -> None:
        """The last norm, the head and the loss."""
        share, w, es = self.share, self.w, self.es
        self.moves("forward", "copy", (2 * FULL * es, 1))
        self.moves("backward", "copy", (3 * FULL * es, 1))
        if share.classifies:
            self.moves("forward", "copy", (FULL * self.e, 1))
            self.moves("backward", "pointwise", (FULL * self.e, 1))
            self.matmul("forward", share.samples, share.d, share.classes)
            self.matmul("backward", share.samples, share.d, share.classes, 2)
            return
        columns, images = share.outputs // self.rows, FULL * share.outputs
        for phase in ("forward", "backward") if share.low else ():
            self.moves(phase, "copy", *(((FULL + w) * size, 1) for size in (es, share.d * columns, share.outputs)))
        self.matmul("forward", self.rows, share.d, columns)
        self.matmul("backward", self.rows, columns, share.d)
        self.matmul("backward", share.d, self.rows, columns)
        self.moves("forward", "copy", (2 * w * share.outputs, 1), (images, 2))  # patches to image, norms of the loss
        self.moves("backward", "copy", (2 * w * share.outputs, 1), (w * share.outputs, 1))
        self.moves("forward", "pointwise", (3 * images, 1))
        self.moves("backward", "pointwise", (2 * images, 2), (images, 1))

    def parameters(self) -> None:
        """Copies and updates of gradients and parameters."""
        share, m = self.share, self.share.micro_batches
        of_blocks, rest = share.shapes
        units = [*of_blocks, rest]
        total, tensors = sum(map(numbers, units)), sum(map(len, units))
        own, mean, each = total / share.shards + share.positions, total / tensors, total / len(units)
        self.moves("backward", "pointwise", (3 * FULL * mean, tensors * (m - 1)))
        if share.replicated:
            self.moves("backward", "copy", (2 * FULL * mean, tensors))
        if share.sharded:  # out of the buffer in which they arrive
            arrives = 2 * share.gathered_width * each, len(units) * share.passes
            again = share.config.data_parallel != "zero2"
            self.moves("forward", "copy", arrives)
            self.moves("backward", "copy", *([arrives] if again else []), (2 * FULL * each, len(units)))
        passes = (4,) if share.config.enable_fused else (2, 1, 2, 2, 1, 1, 3)
        self.moves("update", "copy", *((moved * FULL * own, 1) for moved in passes))
