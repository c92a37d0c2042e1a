"""Means must be right, and the all-reduces those of greedy buckets from the last parameter to the first."""

from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_tensor, factor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `average_gradients`: means, buckets, a parameter without a gradient. Raises Wrong."""
    for _ in range(3):
        shapes = [tuple(draw.integer(1, 6) for _ in range(draw.integer(1, 3))) for _ in range(draw.integer(8, 14))]
        frozen = draw.integer(0, len(shapes) - 2)
        limit = 4 * draw.integer(30, 90)
        shapes[-2] = (limit // 4 + draw.integer(1, 9),)  # larger than a bucket
        frozen = frozen if frozen != len(shapes) - 2 else 0
        grads = [[draw.of(r).of(i).tensor(*shape) for i, shape in enumerate(shapes)] for r in range(size)]
        draw.tensor(1)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for i, p in enumerate(parameters):
            p.grad = None if i == frozen else grads[rank][i].clone()
        with Recorder() as record:
            exercise.average_gradients(parameters, limit)
        expect(parameters[frozen].grad is None, "a parameter without a gradient has got one")
        for i, p in enumerate(parameters):
            if i != frozen:
                compare(p.grad, i, [of_rank[i] for of_rank in grads], rank)
        compare_messages(record, [g for i, g in enumerate(grads[rank]) if i != frozen][::-1], limit, size)


def compare(grad: Tensor | None, i: int, parts: list[Tensor], rank: int) -> None:
    """grad: of parameter i, to be the mean of `parts`, the gradients of all ranks."""
    what, mean = f"the gradient of parameter {i}", torch.stack(parts).mean(0)
    grad = expect_tensor(grad, mean.shape, what)
    if same(grad, mean):
        return
    hint = "another parameter's, or in another order? Cut the bucket as it was put together"
    if same(grad, parts[rank]):
        hint = "this rank's own: was the bucket copied back?"
    elif found := factor(grad, mean, len(parts)):
        taken = "was the mean taken twice?" if "of" in found else "it is the sum: was it divided by the ranks?"
        hint = f"{found} what it should be: {taken}"
    raise Wrong(f"{what} is not the mean over the ranks: {hint}")


def compare_messages(record: Recorder, grads: list[Tensor], limit: int, size: int) -> None:
    """grads: of this rank, from the last parameter to the first."""
    others = sorted(set(record.kinds()) - {"all_reduce"})
    expect(not others, f"{' and '.join(others)} called: one all-reduce per bucket is enough")
    buckets: list[list[Tensor]] = [[]]
    for grad in grads:
        if buckets[-1] and 4 * sum(g.numel() for g in [*buckets[-1], grad]) > limit:
            buckets.append([])
        buckets[-1].append(grad)
    wanted, got = [4 * sum(g.numel() for g in b) for b in buckets], [4 * c.values.numel() for c in record.calls]
    if len(got) == len(grads) > len(buckets):
        raise Wrong(f"{len(got)} all-reduces, one per parameter: buckets of at most {limit} bytes make {len(wanted)}")
    over = [n for n in got if n > limit and n not in wanted]
    expect(not over, f"a bucket of {over and over[0]} bytes, where {limit} is the limit")
    if got != wanted and sorted(got) == sorted(buckets_of(grads[::-1], limit)):
        raise Wrong("the first bucket holds the first layer: the backward pass makes the last layer's gradient first")
    expect(got == wanted, f"buckets of {got} bytes, from the last parameter to the first they are {wanted}")
    for call, bucket in zip(record.calls, buckets, strict=True):
        sent, own = call.values.sort().values, torch.cat([g.flatten() for g in bucket]).sort().values
        expect(
            same(sent, own) or same(sent, own / size),
            "a bucket does not hold the gradients that it should: from the last parameter to the first",
        )


def buckets_of(grads: list[Tensor], limit: int) -> list[int]:
    """Bytes of each bucket, filled in the order of `grads`."""
    sizes = [0]
    for grad in grads:
        if sizes[-1] and sizes[-1] + 4 * grad.numel() > limit:
            sizes.append(0)
        sizes[-1] += 4 * grad.numel()
    return sizes
