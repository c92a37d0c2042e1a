"""Merged blocks must be attention to all keys: plain ones, large scores, queries without keys; then in the ring."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Wrong, expect, expect_same, expect_tensor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `merge` alone, and in `ring_attention`. Raises Wrong."""
    heads = draw.integer(1, 3)
    n = draw.integer(3, 6)
    d = draw.integer(2, 5)
    q = draw.tensor(heads, n, d)
    k = draw.tensor(heads, n * size, d)
    v = draw.tensor(heads, n * size, d)
    everything = torch.ones(n, n * size, dtype=torch.bool)
    compare(exercise, q, k, v, everything, size, "")
    compare(exercise, q * 500, k, v, everything, size, "with scores in the hundreds ")
    some = everything.clone()
    some[0, : n * (size - 1)] = False  # nothing before the last block
    some[1, n:] = False  # nothing after the first
    compare(exercise, q, k, v, some, size, "where a query may attend to nothing in one block ")
    some[2] = False
    compare(exercise, q, k, v, some, size, "where a query may attend to nothing in any block ")

    # In the ring, all tokens are queries, and each rank has a part of them.
    q = draw.tensor(heads, n * size, d)
    k = draw.tensor(heads, n * size, d)
    v = draw.tensor(heads, n * size, d)
    mask = torch.stack([draw.tensor(n * size) > -0.5 for _ in range(n * size)])
    mine = slice(n * rank, n * (rank + 1))
    own_k = k[:, mine].contiguous()
    own_v = v[:, mine].contiguous()
    out = exercise.ring_attention(q[:, mine], own_k, own_v, mask[mine])
    whole, _ = attend(q, k, v, mask)
    expect(same(out, whole[:, mine]), "in the ring the result is not that of attention to all tokens")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys: its output, (heads, n, d), and the log of its sums of exponentials, (heads, n)."""
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)  # (heads, n, N)
    weights = scores.softmax(-1).nan_to_num()  # a query without keys has nan
    return weights @ v, scores.logsumexp(-1)


def compare(exercise: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, parts: int, where: str) -> None:
    """Merge keys in so many blocks, one after the other. where: the case in words, for the message."""
    blocks = []
    tensors = (k.chunk(parts, 1), v.chunk(parts, 1), mask.chunk(parts, 1))
    for k_part, v_part, mask_part in zip(*tensors, strict=True):
        blocks.append(attend(q, k_part, v_part, mask_part))
    out, lse = blocks[0]
    for number, (block_out, block_lse) in enumerate(blocks[1:], 2):
        given = (out, lse, block_out, block_lse)
        before = [tensor.clone() for tensor in given]
        found = exercise.merge(*given)
        expect(isinstance(found, tuple) and len(found) == 2, "merge returns two tensors, out and lse")
        for old, new in zip(before, given, strict=True):
            expect(torch.equal(old, new), "merge has changed what it was given")
        out = expect_tensor(found[0], q.shape, "out")
        lse = expect_tensor(found[1], q.shape[:2], "lse")
        # So far it is attention to the keys of the first `number` blocks.
        n = k.shape[1] // parts * number
        right, right_lse = attend(q, k[:, :n], v[:, :n], mask[:, :n])
        explain(out, lse, right, right_lse, before, where)
    whole, whole_lse = attend(q, k, v, mask)
    is_whole = same(out, whole) and same(lse, whole_lse)
    expect(is_whole, f"{where}merging block by block is not the whole")


def explain(out: Tensor, lse: Tensor, right: Tensor, right_lse: Tensor, before: Sequence[Tensor], where: str) -> None:
    """out, lse: to be `right` and `right_lse`. before: what was merged, (out, lse, block_out, block_lse)."""
    if same(out, right) and same(lse, right_lse):
        return
    empty = right_lse.isinf()
    if out.isnan().any():
        hint = "were scores put into exp as they are? Take off the larger lse first"
        if "nothing" in where:
            hint = "-inf - (-inf) is nan: such a row has weight 0"
        broken = out.isnan().any(-1)  # (heads, n)
        raise Wrong(f"{where}out is nan in {int(broken.sum())} of {broken.numel()} rows: {hint}")
    expect(not lse.isnan().any(), f"{where}lse is nan: -inf - (-inf) is nan, and torch.logaddexp knows that")
    has_overflowed = (lse.isinf() & ~empty).any()
    expect(not has_overflowed, f"{where}lse is infinite: exp has overflowed, take off the larger lse first")
    first, first_lse, second, second_lse = before
    hints = {
        "it is the plain mean of the two: a block whose scores are high weighs more": (first + second) / 2,
        "it is the sum of the two: weights that add up to 1 are missing": first + second,
        "the weights belong to the other block": swapped(*before),
    }
    hint = "weigh each block by exp(its lse - lse of both)"
    expect_same(out, right, f"{where}out is not attention to both blocks", hint, hints)
    taken = "maximum" if same(lse, first_lse.max(second_lse)) else "sum"
    hint = f"log(exp(lse) + exp(block_lse)), and not their {taken}"
    raise Wrong(f"{where}lse is not that of both blocks: {hint}")


def swapped(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Two blocks merged with each other's weights."""
    total = torch.logaddexp(first_lse, second_lse)
    total = total.masked_fill(total.isinf(), 0)
    first_weight = (second_lse - total).exp()[..., None]  # (heads, n, 1)
    second_weight = (first_lse - total).exp()[..., None]
    return first * first_weight + second * second_weight
