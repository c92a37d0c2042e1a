"""The sum must be right on every rank, x unharmed, and the bytes those of a ring."""

from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_tensor, ratio, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `ring_all_reduce`: result, input, messages, bytes. Raises Wrong."""
    for _ in range(3):
        n = size * draw.integer(1, 50)
        parts = [draw.tensor(n) for _ in range(size)]
        x = parts[rank].clone()
        total = torch.stack(parts).sum(0)
        with Recorder() as record:
            out = exercise.ring_all_reduce(x)
        out = expect_tensor(out, (n,), "the result")
        others = sorted(set(record.kinds()) - {"send", "recv"})
        expect(not others, f"{' and '.join(others)} called: here the sum is to be made of sends and receives")
        expect(not same(out, parts[rank]), "the result is this rank's own tensor: nothing was added")
        compare_chunks(out, total, size)
        expect(torch.equal(x, parts[rank]), "the input was changed: work on a copy")

        # A right sum may still have cost too many bytes.
        sent = sum(call.sent for call in record.calls)
        ideal = 2 * (size - 1) * n // size * 4
        hint = "is one chunk passed on in a step, or all of them?" if sent > ideal else "how was the rest learnt?"
        expect(
            sent == ideal,
            f"{sent} bytes sent, a ring sends 2 (n-1)/n of {4 * n}, which is {ideal}: {hint}",
        )


def compare_chunks(out: Tensor, total: Tensor, size: int) -> None:
    """Expect every chunk of the result to be that of the sum, `total`. Raises Wrong with the step that may be wrong."""
    wrong = []
    right = []
    for number, (got, want) in enumerate(zip(out.chunk(size), total.chunk(size), strict=True)):
        if same(got, want):
            right.append(number)
        else:
            wrong.append(number)
    if not wrong:
        return
    scale = ratio(out, total)
    is_mean = scale and abs(scale * size - 1) < 1e-3
    hint = "is what arrives added to the chunk that is sent next?"
    if len(right) == 1:
        hint = f"chunk {right[0]} is, so the reduce-scatter works: do the whole sums go round afterwards?"
    elif is_mean:
        hint = "it is the mean: all-reduce makes the sum"
    raise Wrong(f"chunks {wrong} of {size} are not the sum of the ranks' chunks: {hint}")
