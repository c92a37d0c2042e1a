"""The score must be that of training, by pairs and by sorted members; few and many members must be scored alike."""

from itertools import combinations
from types import ModuleType

import torch
from torch import Tensor

from exercises.checks.common import Draw, Wrong, expect, expect_same, expect_tensor, same
from training.forecasting.crps import crps_of_points

WORLD_SIZES = (1,)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check the three functions. Raises Wrong."""
    count = draw.integer(3, 6)
    points = draw.integer(4, 8)
    members = draw.tensor(count, points).double()
    truth = draw.tensor(points).double()
    check_score(exercise, members, truth)
    check_two_members(exercise, draw)
    check_sum(exercise, members)
    check_mean(exercise, members)


def check_score(exercise: ModuleType, members: Tensor, truth: Tensor) -> None:
    """Compare `fair_crps` with the score that training uses."""
    count, points = members.shape
    given = members.clone()
    found = expect_tensor(exercise.fair_crps(given, truth), (points,), "the score")
    expect(torch.equal(given, members), "fair_crps has changed the members that it was given")
    right = crps_of_points(members[None], truth[None], 1)[0]
    error = (members - truth).abs().mean(0)
    spread = differences(members)  # of each pair once
    hints = {
        "nothing keeps the members apart: the second term is missing": error,
        "that is the score of the members as they are: divide by M (M - 1), not by M M": error - spread / count**2,
        "each pair counts twice": error - 2 * spread / (count * (count - 1)),
        "the second term is added, and must be taken off": error + spread / (count * (count - 1)),
        "the mean over pairs is twice what is taken off": error - spread / (count * (count - 1) / 2),
        "that is the error of the mean of the members, not the mean of their errors": (members.mean(0) - truth).abs(),
    }
    expect_same(found, right, "the score is not fair_crps", "take it term by term from the formula", hints)


def check_two_members(exercise: ModuleType, draw: Draw) -> None:
    """Of many pairs of members drawn as the truth is, the mean score must be that of one large ensemble."""
    members = draw.tensor(2, 20000).double()
    truth = draw.tensor(20000).double()
    score = exercise.fair_crps(members, truth).mean().item()
    expected = 0.5642  # 1 / sqrt(pi): the score of a normal distribution of standard deviation 1 that is right
    is_fair = abs(score - expected) < 0.03
    expect(
        is_fair, f"two members that are drawn as the truth is score {score:.3f}, and should {expected:.3f}: not fair"
    )


def check_sum(exercise: ModuleType, members: Tensor) -> None:
    """Compare the sum over sorted members with that over pairs."""
    points = members.shape[1]
    found = expect_tensor(exercise.sum_of_differences(members.clone()), (points,), "the sum of differences")
    right = differences(members)
    if same(found, right):
        return
    if same(found, 2 * right):
        raise Wrong("sum_of_differences: each pair counts once, i < j")
    if same(found, -right):
        raise Wrong("sum_of_differences: the sign is turned round: the largest member is added, M - 1 times")
    if same(found, members.amax(0) - members.amin(0)):
        raise Wrong("sum_of_differences: that is the largest difference alone; members between them count too")
    raise Wrong("sum_of_differences: the k-th member, from 0, is added k times, and taken off M - 1 - k times")


def check_mean(exercise: ModuleType, members: Tensor) -> None:
    """The forecast of the smallest mean squared error."""
    points = members.shape[1]
    found = expect_tensor(exercise.mean_of_members(members.clone()), (points,), "the single forecast")
    hints = {
        "the median has the smallest absolute error, not the smallest squared one": members.median(0).values,
        "one member is as far from the others as they are from one another": members[0],
    }
    expect_same(found, members.mean(0), "the single forecast", "where is the derivative of the mean error 0?", hints)


def differences(members: Tensor) -> Tensor:
    """The sum of |x_i - x_j| over pairs i < j: (M, points) -> (points,)."""
    total = torch.zeros_like(members[0])
    for first, second in combinations(members, 2):
        total = total + (first - second).abs()
    return total
