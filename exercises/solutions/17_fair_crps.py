"""Exercise 17, rung 1: the fair score of an ensemble, and why the members are counted as they are.

An ensemble says what may happen by M members x_i. Its score at a point, where y came true, is

    CRPS = mean_i |x_i - y|  -  (sum over pairs i < j of |x_i - x_j|) / (M (M - 1))

The first term pulls members to the truth, the second one keeps them apart. It is fair: with members drawn from the
truth's own distribution, its mean is the same for every M (Ferro 2014, doi:10.1002/qj.2270). Divided by M M instead,
few members would be told to huddle together. Pairs cost M (M - 1) / 2 differences. Sorted, a sum is enough: the k-th of
M members, from 0, is larger than k others and smaller than M - 1 - k.

Done for real in training/forecasting/crps.py. Chapter: docs/ensembles.md, "The idea".
"""

from torch import Tensor


def fair_crps(members: Tensor, truth: Tensor) -> Tensor:
    """The score at each point, pair by pair: members (M, points), M at least 2, truth (points,) -> (points,)."""
    # TODO: below, members are only pulled to the truth, and would all become alike
    count = len(members)
    error = (members - truth).abs().mean(0)  # (points,)
    apart = members[:, None] - members[None]  # (M, M, points), each pair twice
    return error - apart.abs().sum((0, 1)) / (2 * count * (count - 1))
    # END


def sum_of_differences(members: Tensor) -> Tensor:
    """The sum of |x_i - x_j| over all pairs i < j, from the sorted members alone: (M, points) -> (points,)."""
    # TODO: how often is the k-th member added, and how often taken away?
    count = len(members)
    ordered = members.sort(dim=0).values
    times = members.new_tensor(range(1 - count, count, 2))  # k - (M - 1 - k), of each k
    return (ordered * times[:, None]).sum(0)
    # END


def mean_of_members(members: Tensor) -> Tensor:
    """The single forecast with the smallest mean squared error, of M equally likely members: (M, points) -> (points,).

    It is what a network that is trained by a squared error learns to say.
    """
    # TODO
    return members.mean(0)
    # END
