"""Uneven and empty shards with gaps must give the mean of the whole, its gradient, in one message."""

from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from distributed.shard_tensor import ShardTensor
from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_same, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check torch.nanmean of ShardTensors with gaps and empty parts. Raises Wrong."""
    mesh = init_device_mesh("cpu", (size,))
    for gaps, empty in ((False, False), (True, False), (True, True)):
        heights = [draw.integer(1, 4) for _ in range(size)]
        heights[0] += 3
        if empty:
            heights[draw.integer(0, size - 1)] = 0
        # Each row has another mean, so that no mean of means is right by chance.
        height = sum(heights)
        means_of_rows = torch.arange(float(height))[:, None]  # (height, 1)
        whole = draw.tensor(height, draw.integer(3, 5)) + means_of_rows
        if gaps:
            holes = draw.tensor(*whole.shape) > 0.3
            holes[0, 0] = False
            whole[holes] = torch.nan
        whole.requires_grad_()
        wanted = whole.nanmean()
        (grad,) = torch.autograd.grad(wanted * 3, whole)
        parts = whole.detach().split(heights)
        part = parts[rank].clone().requires_grad_()
        x = ShardTensor.from_local(part, mesh, [Shard(0)], {0: tuple(heights)})
        with Recorder() as record:
            mean = torch.nanmean(x)
        if not isinstance(mean, ShardTensor) or mean.spec.partial:
            raise Wrong("the result is no whole number of all ranks")
        mean = mean.to_local()
        compare(mean.detach(), wanted.detach(), parts, rank, gaps, empty)
        others = [kind for kind in record.kinds() if kind != "all_reduce"]
        expect(not others, f"{others} called: sums and counts are all that has to travel")
        expect(len(record.calls) <= 1, f"{len(record.calls)} messages: sum and count fit into one")
        (mean * 3).backward()
        own_grad = grad.split(heights)[rank]
        expect(
            part.grad is not None and same(part.grad, own_grad),
            "the gradient is not that of the whole: that of the mean, over the number of all elements that count",
        )


def compare(mean: Tensor, wanted: Tensor, parts: tuple[Tensor, ...], rank: int, gaps: bool, empty: bool) -> None:
    """mean: to be `wanted`, the mean of all `parts`, which have gaps or of which one is empty."""
    means = torch.stack([part.nanmean() for part in parts])
    count = sum(part.numel() for part in parts)
    hint = f"it is {mean.tolist()}, not {wanted.item():.4f}"
    if mean.isnan().all() and (empty or gaps):
        hint = "it is nan: leave the gaps out of the sum"
        if empty:
            hint = "it is nan, and one rank has no elements: the mean of nothing is nan, its sum is 0"
    with_gaps = torch.cat(parts).nansum() / count
    hints = {
        "it is the mean of the ranks' means: a rank with more elements counts for more": means.mean(),
        "it is the mean of this rank's part alone": means[rank],
        "the gaps were counted as elements: count what is not nan": with_gaps,
    }
    shapes = [tuple(part.shape) for part in parts]
    expect_same(mean, wanted, f"nanmean of parts of {shapes} is not that of the whole", hint, hints)
