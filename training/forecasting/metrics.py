"""Forecast skill: latitude-weighted RMSE and ACC of each channel, beside two trivial forecasts.

Definitions of WeatherBench 2 (Rasp et al. 2024, arXiv:2308.15560): points weigh as the area of their cell; RMSE is
the root of the mean over samples and points of the squared error; ACC, the anomaly correlation coefficient against
the climatology, is computed for each sample and averaged. Persistence forecasts the input itself, climatology the
time mean of the training years.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils import comm

HEADLINE = ("u10", "v10", "t2m", "z500")
FORECASTS = {"model": "rmse", "persistence": "persistence_rmse", "climatology": "climatology_rmse"}


def latitude_weights(latitude: np.ndarray) -> np.ndarray:
    """Relative area of the cells of each row of a regular grid, mean 1: (H,) float64.

    latitude: rows' latitudes in degrees, (H,), from either pole. Cell bounds lie halfway between rows, the outer ones
    as far beyond the first and last row, but not past a pole.
    """
    latitude = np.asarray(latitude, dtype=np.float64)
    middle = (latitude[1:] + latitude[:-1]) / 2
    first = 2 * latitude[0] - middle[0]
    last = 2 * latitude[-1] - middle[-1]
    bounds = np.concatenate([[first], middle, [last]])  # (H + 1,)
    # The area between two circles of latitude grows with the difference of their sines.
    sines = np.sin(np.deg2rad(bounds.clip(-90, 90)))
    area = np.abs(np.diff(sines))
    return area / area.mean()


def normalised_climatology(statistics: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """The climatology of some channels as the model sees fields, (C, H, W). statistics: means, stds, time means."""
    means, stds, time_means = map(torch.from_numpy, statistics)
    return ((time_means - means) / stds).to(device)


class FieldMetrics:
    """Collects means over the points of normalised fields, sample by sample, on the device of the fields.

    latitude: (H,) degrees. stds: (C, 1, 1), to give scores in physical units. climatology: (C, H, W), normalised, on
    the device of the forecasts.
    """

    def __init__(self, latitude: np.ndarray, stds: Tensor, climatology: Tensor):
        weights = torch.from_numpy(latitude_weights(latitude)).to(torch.float32)
        points = len(weights) * climatology.shape[-1]
        # The weights of all points add up to 1.
        self.weights = (weights / points)[:, None].to(climatology.device)  # (H, 1)
        self.stds = stds.flatten().double().cpu()  # (C,)
        self.climatology = climatology
        self.means = defaultdict[str, list[Tensor]](list)  # of each batch, (B, C, ...)

    def global_means(self) -> dict[str, Tensor]:
        """The means over all samples of all ranks, which call this together, (C, ...) float64 on the CPU."""
        return {name: comm.global_mean(torch.cat(values)).cpu() for name, values in self.means.items()}

    def mean_of_points(self, values: Tensor) -> Tensor:
        """Mean over the points, by area: (B, C, H, W) -> (B, C)."""
        return (values * self.weights).sum((-2, -1))


class ForecastScores(NamedTuple):
    """Scores of C channels, each (C,) in float64 on the CPU. rmse: in physical units."""

    rmse: Tensor
    acc: Tensor


class ForecastMetrics(FieldMetrics):
    """Collects errors of normalised forecasts; `compute` gives one value a channel. Arguments as of FieldMetrics."""

    @torch.no_grad()
    def update(self, forecast: Tensor, target: Tensor) -> None:
        """Add the errors of a batch. forecast, target: (B, C, H, W), normalised."""
        forecast = forecast.float()
        target = target.float()
        squared_error = self.mean_of_points((forecast - target).square())  # (B, C)
        self.means["square"].append(squared_error)

        # ACC is the correlation of the anomalies, the differences from the climatology.
        forecast = forecast - self.climatology
        target = target - self.climatology
        covariance = self.mean_of_points(forecast * target)  # (B, C)
        variances = self.mean_of_points(forecast.square()) * self.mean_of_points(target.square())
        norm = variances.sqrt()
        # A forecast without anomaly (climatology itself) correlates with nothing: 0.
        tiny = torch.finfo(norm.dtype).tiny
        self.means["correlation"].append(covariance / norm.clamp_min(tiny))

    def compute(self) -> ForecastScores:
        """RMSE and ACC over all samples of all ranks."""
        means = self.global_means()
        return ForecastScores(rmse=means["square"].sqrt() * self.stds, acc=means["correlation"])


def skill_table(summary: dict[str, Any]) -> str:
    """RMSE of the headline channels beside persistence and climatology, as lines of text."""
    scored = summary["rmse"]
    # Without any of the usual channels the first four are shown.
    headline = [name for name in HEADLINE if name in scored]
    columns = "".join(f"{name:>14}" for name in FORECASTS)
    lines = [f"{'RMSE':<18}{columns}"]
    for name in headline or list(scored)[:4]:
        label = f"{name} ({summary['units'][name]})"
        line = f"{label:<18}"
        for kind in FORECASTS.values():
            value = summary.get(kind, {}).get(name)
            text = "-" if value is None else format(value, ".3f")
            line += f"{text:>14}"
        lines.append(line)
    return "\n".join(lines)
