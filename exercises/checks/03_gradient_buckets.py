"""Means must be right, and the all-reduces those of greedy buckets from the last parameter to the first."""

from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_tensor, factor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `average_gradients`: means, buckets, a parameter without a gradient. Raises Wrong."""
    for _ in range(3):
        shapes = []
        number = draw.integer(8, 14)
        for _ in range(number):
            dims = draw.integer(1, 3)
            shapes.append(tuple(draw.integer(1, 6) for _ in range(dims)))
        # One parameter has no gradient, and one gradient is larger than a bucket.
        large = number - 2
        frozen = draw.integer(0, large)
        if frozen == large:
            frozen = 0
        numbers_of_bucket = draw.integer(30, 90)
        limit = 4 * numbers_of_bucket
        shapes[large] = (numbers_of_bucket + draw.integer(1, 9),)
        grads = []  # of each rank, a list of all parameters
        for r in range(size):
            of_rank = draw.of(r)
            grads.append([of_rank.of(i).tensor(*shape) for i, shape in enumerate(shapes)])
        draw.tensor(1)

        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for i, p in enumerate(parameters):
            p.grad = None if i == frozen else grads[rank][i].clone()
        with Recorder() as record:
            exercise.average_gradients(parameters, limit)

        expect(parameters[frozen].grad is None, "a parameter without a gradient has got one")
        trained = [i for i in range(number) if i != frozen]
        for i in trained:
            parts = [of_rank[i] for of_rank in grads]
            compare(parameters[i].grad, i, parts, rank)
        last_to_first = [grads[rank][i] for i in reversed(trained)]
        compare_messages(record, last_to_first, limit, size)


def compare(grad: Tensor | None, i: int, parts: list[Tensor], rank: int) -> None:
    """grad: of parameter i, to be the mean of `parts`, the gradients of all ranks."""
    what = f"the gradient of parameter {i}"
    mean = torch.stack(parts).mean(0)
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
    buckets = fill_buckets(grads, limit)
    wanted = [bytes_of(bucket) for bucket in buckets]
    got = [4 * call.values.numel() for call in record.calls]
    if len(got) == len(grads) > len(buckets):
        raise Wrong(f"{len(got)} all-reduces, one per parameter: buckets of at most {limit} bytes make {len(wanted)}")
    for size_of_bucket in got:
        # A gradient that is larger than a bucket is a bucket by itself.
        is_over = size_of_bucket > limit and size_of_bucket not in wanted
        expect(not is_over, f"a bucket of {size_of_bucket} bytes, where {limit} is the limit")
    first_to_last = [bytes_of(bucket) for bucket in fill_buckets(grads[::-1], limit)]
    if got != wanted and sorted(got) == sorted(first_to_last):
        raise Wrong("the first bucket holds the first layer: the backward pass makes the last layer's gradient first")
    expect(got == wanted, f"buckets of {got} bytes, from the last parameter to the first they are {wanted}")
    for call, bucket in zip(record.calls, buckets, strict=True):
        # Sorted, since the order within a bucket is the learner's choice. So is whether the mean is taken before.
        sent = call.values.sort().values
        own = torch.cat([grad.flatten() for grad in bucket]).sort().values
        expect(
            same(sent, own) or same(sent, own / size),
            "a bucket does not hold the gradients that it should: from the last parameter to the first",
        )


def fill_buckets(grads: list[Tensor], limit: int) -> list[list[Tensor]]:
    """The buckets of at most `limit` bytes, filled in the order of `grads`."""
    buckets: list[list[Tensor]] = [[]]
    for grad in grads:
        if buckets[-1] and bytes_of([*buckets[-1], grad]) > limit:
            buckets.append([])
        buckets[-1].append(grad)
    return buckets


def bytes_of(bucket: list[Tensor]) -> int:
    """Bytes of a bucket, in float32."""
    return 4 * sum(grad.numel() for grad in bucket)
