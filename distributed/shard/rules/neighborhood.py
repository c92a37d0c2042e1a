"""Neighborhood attention over a split grid: each rank fetches the keys and values in its windows."""

# mypy: allow-redefinition
# (q, k and v are ShardTensors, then their local parts)

from collections.abc import Callable

import torch

from distributed.halo import Fetch, bounds
from distributed.shard.operands import reduced
from distributed.shard.rules.windows import no_outputs
from distributed.shard.tensor import ShardTensor, local, no_rule, rule, wrap
from networks.neighborhood import attend_windows, neighborhood_attention, per_axis, window_starts
from networks.vit import PerAxis


@rule(neighborhood_attention)
def attend(
    func: Callable, q: ShardTensor, k: ShardTensor, v: ShardTensor, kernel_size: PerAxis, dilation: PerAxis = 1,
    scale: float | None = None,
) -> ShardTensor:  # fmt: skip
    """Attention of q, k, v (B, heads, *spatial, d), which split samples, heads and spatial axes in the same way."""
    if not all(isinstance(x, ShardTensor) for x in (q, k, v)):
        raise no_rule(func, (q, k, v), {}, "q, k and v must be ShardTensors")
    q, k, v = reduced(q), reduced(k), reduced(v)
    spec, count = q.spec, len(q.spec.dims) - 3
    if k.spec != spec or v.spec.dims[:-1] != spec.dims[:-1] or spec.is_split(-1) or v.spec.is_split(-1):
        raise no_rule(func, (q, k, v), {}, "they must be split in the same way, and not along features")
    q, keys = local(q), torch.cat([local(k), local(v)], -1)  # one exchange for both
    starts = []
    for dim, kernel, step in zip(
        range(2, 2 + count), per_axis(kernel_size, count), per_axis(dilation, count), strict=True
    ):
        first = window_starts(spec.shape[dim], kernel, step)
        if (split := spec.split(dim)) is not None:
            sizes, group = split
            own, intervals = bounds(sizes)[group.rank], []
            for low, high in bounds(sizes):
                windows = first[low:high]
                intervals.append((min(windows), max(windows) + (kernel - 1) * step + 1) if windows else (0, 0))
            keys = Fetch(keys, dim, sizes, intervals, group, fill=None).rows()
            first = [start - intervals[group.rank][0] for start in first[slice(*own)]]
        starts.append(first)
    out = v.spec
    if not all(starts):
        return wrap(no_outputs(keys, out.local_shape, q), out)
    k, v = keys.split([q.shape[-1], keys.shape[-1] - q.shape[-1]], -1)
    return wrap(attend_windows(q, k, v, kernel_size, starts, dilation, scale), out)
