"""Exercise 9, rung 4: a mean over uneven shards, as a rule for ShardTensor.

A ShardTensor looks up each torch function in a registry, and the rule found there computes with the local parts. The
rule below is for torch.nanmean, the mean of all elements that are not nan (a field with gaps: sea surface temperature
has none on land). It averages the ranks' means, as if each of them stood for the same number of elements. But the
shards are uneven, one of them may be empty, and who knows where the gaps are. Mend it.

What adds up over ranks are sums and counts, never means; both can go in one message.

Done for real in distributed/shard/ops: reductions.py (mean), moments.py (moments).
Chapter: docs/reference/domain_parallel.md, "How to add a rule".
"""

from collections.abc import Callable

import torch
from torch import Tensor

from distributed.collectives import reduce_from_region
from distributed.shard_tensor import ShardTensor, local, rule, wrap


@rule(torch.nanmean)
def nanmean(func: Callable[..., Tensor], input: ShardTensor) -> ShardTensor:
    """The mean of all elements that are not nan, the same number on every rank.

    input: ShardTensor that is split over all ranks; func: torch.nanmean, of plain tensors. Differentiable:
    reduce_from_region adds up over the ranks, and hands each of them the gradient of the sum.
    """
    part, everyone = local(input), input.spec.mesh.joint  # plain tensor; the group of all ranks
    # TODO: weigh
    mean = reduce_from_region(func(part), everyone) / everyone.size
    # END
    return wrap(mean, input.spec.with_dims((), ()))  # a number: no dimensions, and no longer a partial sum
