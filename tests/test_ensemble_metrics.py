"""Scores of ensembles against other packages, and against what they mean."""

import numpy as np
import pytest
import torch
import xarray

from training.forecasting.ensemble_metrics import EnsembleMetrics, quantiles_of_maps
from training.forecasting.metrics import latitude_weights
from weather.convert.climate_quantiles import QUANTILES

WHY = "pip install -r requirements/dev.txt"
LATITUDE = np.linspace(80, -80, 9)
NAMES = ("sample", "member", "channel", "latitude", "longitude")
STDS = torch.tensor([2.0, 0.5])[:, None, None]


def fields(members=5, samples=3):
    """Members (B, M, C, H, W), truth and climatology."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, 2, 9, 16, generator=random)  # noqa: E731
    return draw(samples, members) + 0.3, draw(samples), draw()


def scored(members, target, climatology, batch=2):
    metrics = EnsembleMetrics(LATITUDE, STDS, climatology)
    for start in range(0, len(members), batch):
        metrics.update(members[start : start + batch], target[start : start + batch])
    return metrics.compute()


@pytest.fixture(scope="module")
def arrays():
    members, target, climatology = fields()
    names = [name for name in NAMES if name != "member"]
    weights = xarray.DataArray(latitude_weights(LATITUDE), dims="latitude")
    return (
        xarray.DataArray(members.double().numpy(), dims=NAMES),
        xarray.DataArray(target.double().numpy(), dims=names),
        weights,
        scored(members, target, climatology),
        quantiles_of_maps(climatology),
    )


def test_crps_is_that_of_the_library_scores(arrays):
    probability = pytest.importorskip("scores.probability", reason=WHY)
    members, target, weights, own, _ = arrays
    expected = probability.crps_for_ensemble(
        members, target, "member", method="fair", preserve_dims="channel", weights=weights
    )
    np.testing.assert_allclose(own.crps, expected * STDS.flatten().numpy(), rtol=1e-5)


def test_brier_scores_are_those_of_the_library_scores(arrays):
    probability = pytest.importorskip("scores.probability", reason=WHY)
    members, target, weights, own, thresholds = arrays
    for channel in range(2):
        expected = probability.brier_score_for_ensemble(
            members[:, :, channel],
            target[:, channel],
            "member",
            [float(value) for value in thresholds[channel]],
            weights=weights,
        )
        np.testing.assert_allclose(own.brier[channel], expected, rtol=1e-5)


def test_brier_scores_of_each_points_own_climate_are_those_of_the_library_scores(arrays):
    """There a threshold is one number: what is scored is the distance from the threshold of the point."""
    probability = pytest.importorskip("scores.probability", reason=WHY)
    members, target, weights, *_ = arrays
    limits = torch.randn(len(QUANTILES), 2, 9, 16, generator=torch.Generator().manual_seed(1))
    metrics = EnsembleMetrics(LATITUDE, STDS, fields()[2], limits)
    metrics.update(*fields()[:2])
    own = metrics.compute()
    for number, limit in enumerate(limits.double().numpy()):
        away = xarray.DataArray(limit, dims=NAMES[2:])
        expected = probability.brier_score_for_ensemble(
            members - away, target - away, "member", 0.0, weights=weights, preserve_dims="channel"
        )
        np.testing.assert_allclose(own.brier[:, number], expected.squeeze(), rtol=1e-5)
    assert not torch.allclose(own.brier, arrays[3].brier, rtol=1e-2)


def test_the_rank_histogram_is_that_of_the_library_scores(arrays):
    probability = pytest.importorskip("scores.probability", reason=WHY)
    members, target, weights, own, _ = arrays
    expected = probability.rank_histogram(members, target, "member", preserve_dims="channel", weights=weights)
    np.testing.assert_allclose(own.rank_histogram, expected.transpose("channel", ...), rtol=1e-5)


def test_crps_is_that_of_scoringrules(arrays):
    scoringrules = pytest.importorskip("scoringrules", reason=WHY)
    members, target, weights, own, _ = arrays
    points = scoringrules.crps_ensemble(target.values, members.values, m_axis=1, estimator="fair")
    means = (points * weights.values[:, None]).mean((0, 2, 3)) / weights.values.mean()
    np.testing.assert_allclose(own.crps, means * STDS.flatten().numpy(), rtol=1e-5)


def test_spread_and_error_are_those_of_numpy(arrays):
    members, target, weights, own, _ = arrays
    area = weights / weights.mean()
    variance = (members.var("member", ddof=1) * area).mean(["sample", "latitude", "longitude"])
    square = ((members.mean("member") - target) ** 2 * area).mean(["sample", "latitude", "longitude"])
    stds = STDS.flatten().numpy()
    np.testing.assert_allclose(own.spread, np.sqrt(variance) * stds, rtol=1e-5)
    np.testing.assert_allclose(own.rmse, np.sqrt(square) * stds, rtol=1e-5)
    np.testing.assert_allclose(own.spread_skill, np.sqrt(variance / square * 6 / 5), rtol=1e-5)


def test_members_drawn_as_the_truth_are_as_wide_as_they_are_wrong():
    members, target, climatology = fields(members=4, samples=400)
    own = scored(members - 0.3, target, climatology, batch=50)
    np.testing.assert_allclose(own.spread_skill, 1, atol=0.02)
    np.testing.assert_allclose(own.rank_histogram, 1 / 5, atol=0.01)
    narrow = scored((members - 0.3) / 3, target, climatology, batch=50)
    assert (narrow.spread_skill < 0.5).all() and (narrow.rank_histogram[:, 0] > 0.3).all()


def test_one_forecast_has_its_absolute_error_and_no_spread():
    members, target, climatology = fields(members=1)
    own = scored(members, target, climatology)
    weights = torch.from_numpy(latitude_weights(LATITUDE))[:, None]
    expected = ((members[:, 0] - target).abs().double() * weights).mean((0, 2, 3)) * STDS.flatten()
    torch.testing.assert_close(own.crps, expected, rtol=1e-5, atol=0)
    assert not own.spread.any() and own.rank_histogram.shape == (2, 2)


@pytest.mark.parametrize("lost", ["a member", "the truth"])
def test_of_a_point_that_is_nan_no_score_is_known(lost):
    """NaN is above no threshold and below no truth: a forecast that has broken down would score well."""
    members, target, climatology = fields()
    whole = members if lost == "a member" else target
    whole[0, ..., 0, 3, 5] = torch.nan  # in the first channel
    own = scored(members, target, climatology)
    for name, values in own._asdict().items():
        if lost == "the truth" and name == "spread":
            continue
        assert values[0].isnan().all(), name
        assert not values[1].isnan().any(), name


def test_a_truth_among_equal_members_has_all_their_ranks():
    climatology = torch.zeros(2, 9, 16)
    own = scored(torch.zeros(1, 3, 2, 9, 16), torch.zeros(1, 2, 9, 16), climatology)
    torch.testing.assert_close(own.rank_histogram, torch.full((2, 4), 0.25, dtype=torch.float64))
    assert own.brier.shape == (2, len(QUANTILES)) and not own.brier.any()  # an event at its limit has happened
