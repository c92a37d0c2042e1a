"""The continuous ranked probability score: by its definition, by another package, and its gradient."""

import pytest
import torch

from training.forecasting.crps import MOST_IN_PAIRS, crps_of_points, exchange_points, sum_of_differences, weighted_crps


def by_definition(members, truth, alpha):
    """The score of one point by two loops. members: numbers."""
    count = len(members)
    error = sum(abs(member - truth) for member in members) / count
    pairs = sum(abs(first - second) for first in members for second in members)
    fair = error - pairs / (2 * count * (count - 1))
    plain = error - pairs / (2 * count**2)
    return alpha * fair + (1 - alpha) * plain


@pytest.mark.parametrize("count", [2, 3, MOST_IN_PAIRS, MOST_IN_PAIRS + 1, 12])
@pytest.mark.parametrize("alpha", [0, 0.95, 1])
def test_the_score_is_that_of_its_definition(count, alpha):
    members = torch.randn(2, count, 3, dtype=torch.float64)
    truth = torch.randn(2, 3, dtype=torch.float64)
    scores = crps_of_points(members, truth, alpha)
    for sample in range(2):
        for point in range(3):
            expected = by_definition(members[sample, :, point].tolist(), truth[sample, point].item(), alpha)
            assert scores[sample, point].item() == pytest.approx(expected, abs=1e-12)


def test_three_members_by_hand():
    # Members 1, 2, 4 and truth 3: errors 2, 1, 1; differences 1, 3, 2.
    members = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    truth = torch.tensor([[3.0]])
    assert crps_of_points(members, truth, alpha=1).item() == pytest.approx(4 / 3 - 6 / 6)
    assert crps_of_points(members, truth, alpha=0).item() == pytest.approx(4 / 3 - 6 / 9)


def test_pairs_and_sorting_have_the_same_gradient(monkeypatch):
    members = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    (in_pairs,) = torch.autograd.grad(sum_of_differences(members).square().sum(), members)
    monkeypatch.setattr("training.forecasting.crps.MOST_IN_PAIRS", 1)
    (sorted_,) = torch.autograd.grad(sum_of_differences(members).square().sum(), members)
    torch.testing.assert_close(in_pairs, sorted_)


def test_the_gradient_is_that_of_finite_differences():
    members = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)
    truth = torch.randn(1, 3, dtype=torch.float64)
    weights = torch.rand(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: weighted_crps(x, truth, weights, 0.95), members)


def test_the_fair_score_does_not_reward_fewer_members():
    torch.manual_seed(0)
    truth = torch.randn(1, 200_000)
    means = {}
    for count in (2, 16):
        members = torch.randn(1, count, truth.shape[1])
        means[count] = [crps_of_points(members, truth, alpha).mean().item() for alpha in (1, 0)]
    assert means[2][0] == pytest.approx(means[16][0], abs=0.006)
    assert means[2][1] - means[16][1] > 0.2  # the score of the members as they are: 1/M - 1/M' of their mean distance


def test_half_precision_is_scored_in_single():
    members = torch.randn(1, 4, 9).bfloat16()
    truth = torch.randn(1, 9)
    scores = crps_of_points(members, truth, 0.95)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, crps_of_points(members.float(), truth, 0.95))


def test_one_rank_exchanges_nothing():
    members = torch.randn(1, 4, 9)
    assert exchange_points(members, (4,), None) is members


@pytest.mark.parametrize(("alpha", "estimator"), [(1, "fair"), (0, "nrg")])
def test_the_score_is_that_of_scoringrules(alpha, estimator):
    scoringrules = pytest.importorskip("scoringrules", reason="requirements/dev.txt has it")
    members = torch.randn(2, 7, 5, dtype=torch.float64)
    truth = torch.randn(2, 5, dtype=torch.float64)
    expected = scoringrules.crps_ensemble(truth.numpy(), members.numpy(), m_axis=1, estimator=estimator)
    torch.testing.assert_close(crps_of_points(members, truth, alpha), torch.from_numpy(expected))
