"""Merged blocks must be attention to all keys: plain ones, large scores, queries without keys; then in the ring."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Wrong, expect, expect_same, expect_tensor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `merge` alone, and in `ring_attention`. Raises Wrong."""
    heads, n, d = draw.integer(1, 3), draw.integer(3, 6), draw.integer(2, 5)
    q, k, v = (draw.tensor(heads, n * (1 if i == 0 else size), d) for i in range(3))
    everything = torch.ones(n, n * size, dtype=torch.bool)
    compare(exercise, q, k, v, everything, size, "")
    compare(exercise, q * 500, k, v, everything, size, "with scores in the hundreds ")
    some = everything.clone()
    some[0, : n * (size - 1)] = False  # nothing before the last block
    some[1, n:] = False  # nothing after the first
    compare(exercise, q, k, v, some, size, "where a query may attend to nothing in one block ")
    some[2] = False
    compare(exercise, q, k, v, some, size, "where a query may attend to nothing in any block ")

    q, k, v = (draw.tensor(heads, n * size, d) for _ in range(3))
    mask = torch.stack([draw.tensor(n * size) > -0.5 for _ in range(n * size)])
    mine = slice(n * rank, n * (rank + 1))
    out = exercise.ring_attention(q[:, mine], k[:, mine].contiguous(), v[:, mine].contiguous(), mask[mine])
    whole, _ = attend(q, k, v, mask)
    expect(same(out, whole[:, mine]), "in the ring the result is not that of attention to all tokens")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys: its output, (heads, n, d), and the log of its sums of exponentials, (heads, n)."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def compare(exercise: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, parts: int, where: str) -> None:
    """Merge keys in so many blocks, one after the other. where: the case in words, for the message."""
    blocks = [
        attend(q, *block) for block in zip(k.chunk(parts, 1), v.chunk(parts, 1), mask.chunk(parts, 1), strict=True)
    ]
    whole, whole_lse = attend(q, k, v, mask)
    merged, joined = blocks[0], 1
    for block in blocks[1:]:
        before = [t.clone() for t in (*merged, *block)]
        found = exercise.merge(*merged, *block)
        joined += 1
        expect(isinstance(found, tuple) and len(found) == 2, "merge returns two tensors, out and lse")
        for a, b in zip(before, (*merged, *block), strict=True):
            expect(torch.equal(a, b), "merge has changed what it was given")
        out, lse = expect_tensor(found[0], q.shape, "out"), expect_tensor(found[1], q.shape[:2], "lse")
        n = k.shape[1] // parts * joined
        right, right_lse = attend(q, k[:, :n], v[:, :n], mask[:, :n])
        explain(out, lse, right, right_lse, before, where)
        merged = out, lse
    expect(same(merged[0], whole) and same(merged[1], whole_lse), f"{where}merging block by block is not the whole")


def explain(out: Tensor, lse: Tensor, right: Tensor, right_lse: Tensor, before: Sequence[Tensor], where: str) -> None:
    """out, lse: to be `right` and `right_lse`. before: what was merged, (out, lse, block_out, block_lse)."""
    if same(out, right) and same(lse, right_lse):
        return
    empty = right_lse.isinf()
    if out.isnan().any():
        hint = "were scores put into exp as they are? Take off the larger lse first"
        if "nothing" in where:
            hint = "-inf - (-inf) is nan: such a row has weight 0"
        raise Wrong(f"{where}out is nan in {int(out.isnan().any(-1).sum())} of {out[..., 0].numel()} rows: {hint}")
    expect(not lse.isnan().any(), f"{where}lse is nan: -inf - (-inf) is nan, and torch.logaddexp knows that")
    expect(
        not (lse.isinf() & ~empty).any(), f"{where}lse is infinite: exp has overflowed, take off the larger lse first"
    )
    first, first_lse, second, second_lse = before
    hints = {
        "it is the plain mean of the two: a block whose scores are high weighs more": (first + second) / 2,
        "it is the sum of the two: weights that add up to 1 are missing": first + second,
        "the weights belong to the other block": swapped(*before),
    }
    hint = "weigh each block by exp(its lse - lse of both)"
    expect_same(out, right, f"{where}out is not attention to both blocks", hint, hints)
    hint = "log(exp(lse) + exp(block_lse)), and not their " + (
        "maximum" if same(lse, first_lse.max(second_lse)) else "sum"
    )
    raise Wrong(f"{where}lse is not that of both blocks: {hint}")


def swapped(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Two blocks merged with each other's weights."""
    total = torch.logaddexp(first_lse, second_lse)
    total = total.masked_fill(total.isinf(), 0)
    return first * (second_lse - total).exp()[..., None] + second * (first_lse - total).exp()[..., None]
