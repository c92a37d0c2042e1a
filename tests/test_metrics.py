"""Loss and skill scores against independent formulas."""

import numpy as np
import pytest
import torch
import xarray

from tests.support.refusals import refusal
from training.forecasting.losses import loss_weights, relative_l2, weighted_squared_error
from training.forecasting.metrics import ForecastMetrics, latitude_weights


def test_relative_l2_loss_is_the_mean_of_ratios_of_norms():
    a, b = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
    expected = np.mean([np.linalg.norm((a - b)[i].numpy()) / np.linalg.norm(b[i].numpy()) for i in range(3)])
    assert relative_l2(a, b).mean().item() == pytest.approx(expected, rel=1e-6)
    assert relative_l2(a.bfloat16(), b).mean().dtype == torch.float32


@pytest.mark.parametrize(
    "latitude", [90 - 0.25 * np.arange(720), np.linspace(90, -90, 721), np.linspace(-89.5, 89.5, 180)]
)
def test_weights_are_the_areas_of_the_cells(latitude):
    """The weighted mean of 1 is 1, and of sin^2(latitude) over the sphere 1/3."""
    weights = latitude_weights(latitude)
    assert weights.mean() == pytest.approx(1)
    assert (weights > 0).all()
    assert (weights * np.sin(np.deg2rad(latitude)) ** 2).mean() == pytest.approx(1 / 3, abs=2e-3)
    order = np.argsort(np.abs(latitude))
    assert (np.diff(weights[order][:-2]) <= 1e-9).all()  # falls from the equator to the poles


def scores(forecast, target, latitude, stds, climatology, batch):
    metrics = ForecastMetrics(latitude, stds, climatology)
    for start in range(0, len(forecast), batch):
        metrics.update(forecast[start : start + batch], target[start : start + batch])
    return metrics.compute()


def test_rmse_and_acc_are_those_of_the_library_scores_whatever_the_batch():
    """Its cosine of the latitude is proportional to the areas of cells that end before the poles."""
    why = "pip install -r requirements/dev.txt"
    errors = pytest.importorskip("scores.continuous", reason=why)
    mse, rmse = errors.mse, errors.rmse
    create_latitude_weights = pytest.importorskip("scores.functions", reason=why).create_latitude_weights
    names, latitude = ("sample", "channel", "latitude", "longitude"), np.linspace(80, -80, 9)
    fields = torch.randn(3, 4, 2, 9, 16)
    fields[1] += fields[0]
    weights = xarray.DataArray(create_latitude_weights(latitude), dims="latitude")
    np.testing.assert_allclose(latitude_weights(latitude), weights / weights.mean(), rtol=1e-12)
    forecast, target, climatology = (xarray.DataArray(x.double().numpy(), dims=names) for x in fields)
    climatology = climatology[0].drop_vars("sample", errors="ignore")
    expected = rmse(forecast, target, preserve_dims="channel", weights=weights)

    def product(a, b):  # the weighted mean of a b of each sample, by (a + b)^2 - (a - b)^2 = 4 a b
        squares = (mse(a, c, preserve_dims=["sample", "channel"], weights=weights) for c in (-b, b))
        return (next(squares) - next(squares)) / 4

    f, t = forecast - climatology, target - climatology
    acc = product(f, t) / np.sqrt(product(f, f) * product(t, t))
    for batch in (1, 3):
        got_rmse, got_acc = scores(*fields[:2], latitude, torch.tensor([1.0, 50.0]), fields[2, 0], batch)
        np.testing.assert_allclose(got_rmse, expected * [1, 50], rtol=1e-5)
        np.testing.assert_allclose(got_acc, acc.mean("sample"), rtol=1e-5)


def test_a_perfect_forecast_and_climatology_itself():
    target, climatology = torch.randn(2, 3, 6, 8), torch.randn(3, 6, 8)
    args = np.linspace(75, -75, 6), torch.ones(3, 1, 1), climatology
    rmse, acc = scores(target, target, *args, batch=2)
    assert (rmse == 0).all()
    np.testing.assert_allclose(acc, 1, rtol=1e-6)
    assert (scores(climatology.expand(2, 3, 6, 8), target, *args, batch=2)[1] == 0).all()


def test_the_weighted_squared_error_is_the_mean_over_the_sphere_and_the_channels(tiny_config):
    names, latitude = ["u10", "t2m", "z500", "t850", "r500"], np.linspace(80, -80, 16)
    config = tiny_config(
        n_out_channels=5, loss="squared_error", pressure_weights=True, channel_weights={"u10": 0.1, "r500": 0}
    )
    prediction, target = torch.randn(3, 5, 16, 32), torch.randn(3, 5, 16, 32)
    weights = np.array([0.1, 1, 500, 850, 0]) / [1, 1, 1850 / 3, 1850 / 3, 1]
    rows = latitude_weights(latitude)
    errors = ((prediction - target) ** 2).double().numpy()
    expected = (errors.mean(3) @ (rows / rows.sum()) * weights).sum(1) / weights.sum()
    found = weighted_squared_error(prediction, target, loss_weights(config, names, latitude))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    plain = loss_weights(tiny_config(n_out_channels=5, loss="squared_error"), names, latitude)
    np.testing.assert_allclose(plain.sum() * 32, 1, rtol=1e-5)
    assert len(plain.unique()) == 8  # of the rows alone, alike north and south


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ({"z50": 1.0}, "channel_weights: no channel 'z50' .did you mean 'z500'.*: u10, z500"),
        ({"u10": 0.0, "z500": 0.0}, "channel_weights: all channels weigh nothing"),
    ],
)
def test_channel_weights_that_cannot_be_used_are_refused(tiny_config, weights, error):
    config = tiny_config(n_out_channels=2, loss="squared_error", channel_weights=weights)
    with refusal(error):
        loss_weights(config, ["u10", "z500"], np.linspace(80, -80, 16))
