"""The continuous ranked probability score of an ensemble, a training loss whose members several ranks may share.

Of M members x_i and the truth y, at a point and in a channel:

    CRPS = 1/M sum_i |x_i - y|  -  s / (2 M (M - 1)) sum_ij |x_i - x_j|

The first term wants members at the truth, the second one keeps them apart. With s = 1 the score is fair: its mean does
not depend on M, and is best for members drawn from the truth's own distribution (Ferro 2014, doi:10.1002/qj.2270). With
s = 1 - (1 - alpha) / M it is almost fair: alpha times the fair score and 1 - alpha times that of the members as they
are, under which no member is free to be anywhere (Lang et al. 2024, AIFS-CRPS, arXiv:2412.15832, alpha 0.95).

Ranks that share the members of a sample exchange points: each rank gets a part of the points, of all members, and
scores them. A rank sends (E - 1)/E of its members once forward, and as much of their gradient backward.
"""

from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.collectives import all_to_all, as_group, at_least_float32
from utils.layout import Sizes, shard_sizes

# Up to so many members their differences are taken pair by pair, beyond they are sorted. For the backward pass pairs
# keep M (M - 1) / 2 numbers of a point, and sorting M indices of twice the size.
MOST_IN_PAIRS = 5


def crps_of_points(members: Tensor, target: Tensor, alpha: float) -> Tensor:
    """The score at each point: members (B, M, P), target (B, P) -> (B, P). Computed in at least float32.

    alpha: 1 for the fair score, less for the almost fair one, 0 for that of the members as they are.
    """
    members = at_least_float32(members)
    target = at_least_float32(target)
    count = members.shape[1]
    error = (members - target[:, None]).abs().mean(1)  # (B, P)
    if count == 1:  # a single forecast has no spread
        return error
    weight = 1 - (1 - alpha) / count
    spread = sum_of_differences(members) / (count * (count - 1))
    return error - weight * spread


def sum_of_differences(members: Tensor) -> Tensor:
    """The sum of |x_i - x_j| over all pairs i < j of members: (B, M, P) -> (B, P)."""
    count = members.shape[1]
    if count <= MOST_IN_PAIRS:
        total = torch.zeros_like(members[:, 0])
        for first, second in combinations(members.unbind(1), 2):
            total = total + (first - second).abs()
        return total
    # Of members in order, the k-th from 0 is larger than k others and smaller than M - 1 - k.
    ordered = members.sort(dim=1).values
    times = torch.arange(1 - count, count, 2, device=members.device, dtype=members.dtype)  # (M,): 1 - M, 3 - M, ...
    return (ordered * times[:, None]).sum(1)


def exchange_points(members: Tensor, counts: Sizes, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's members at all points -> all members at this rank's points: (B, m, P) -> (B, M, p).

    counts: members of each rank of the group. The points of the ranks are shard_sizes(P, ranks), in order.
    """
    ranks = as_group(group)
    if ranks.size == 1:
        return members
    samples, own_count, points = members.shape
    pieces = shard_sizes(points, ranks.size)
    own_points = pieces[ranks.rank]
    # A message of one dimension has room for any number of members of each rank.
    sent = [samples * own_count * piece for piece in pieces]
    received = [samples * count * own_points for count in counts]
    message = torch.cat([part.flatten() for part in members.split(pieces, 2)])
    parts = []
    for part, count in zip(all_to_all(message, sent, received, ranks).split(received), counts, strict=True):
        parts.append(part.view(samples, count, own_points))
    return torch.cat(parts, 1)  # (B, M, p)


def own_points(points: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """What belongs to the points that exchange_points gives this rank: (..., P) -> (..., p)."""
    ranks = as_group(group)
    sizes = shard_sizes(points.shape[-1], ranks.size)
    start = sum(sizes[: ranks.rank])
    return points.narrow(-1, start, sizes[ranks.rank])


def weighted_crps(members: Tensor, target: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Sum over points of weights x score, one value a sample: (B, M, P), (B, P), (P,) -> (B,)."""
    return (crps_of_points(members, target, alpha) * weights).sum(1)
