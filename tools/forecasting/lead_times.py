"""Scores by lead time, of the model and of the forecasts that it must beat: RMSE and ACC."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from training.forecasting.metrics import FORECASTS, ForecastMetrics, normalised_climatology

Metrics = TypeVar("Metrics")
Skill = dict[str, dict[str, dict[str, list[float]]]]  # {score: {forecast: {channel: value at each lead time}}}


def metrics_by_lead_time(
    new: Callable[[np.ndarray, Tensor, Tensor], Metrics],
    steps: int,
    latitude: np.ndarray,
    statistics: Sequence[np.ndarray],
    device: torch.device,
) -> tuple[Tensor, dict[str, list[Metrics]]]:
    """The climatology (C, H, W), normalised, and {each of FORECASTS: metrics of each of `steps` lead times}.

    new: makes metrics of latitude, standard deviations and climatology, as ForecastMetrics. latitude: (H,) degrees.
    statistics: of the output channels.
    """
    climatology = normalised_climatology(statistics, device)
    stds = torch.from_numpy(statistics[1])
    # Each lead time is scored by itself: errors grow with it.
    metrics = {}
    for name in FORECASTS:
        metrics[name] = [new(latitude, stds, climatology) for _ in range(steps)]
    return climatology, metrics


class LeadTimeSkill:
    """RMSE and ACC of the model, of persistence and of climatology at each lead time, over all starts of all ranks.

    Arguments as of metrics_by_lead_time.
    """

    def __init__(
        self,
        steps: int,
        latitude: np.ndarray,
        statistics: Sequence[np.ndarray],
        device: torch.device,
    ):
        made = metrics_by_lead_time(ForecastMetrics, steps, latitude, statistics, device)
        self.climatology, self.metrics = made

    def update(self, step: int, start: Tensor, forecast: Tensor, truth: Tensor) -> None:
        """Add the errors of a batch at a step of the rollout, counted from 0.

        start (the initial state), forecast, truth: whole images, (B, C, H, W), normalised.
        """
        # Each has the same truth, so that the scores compare.
        forecasts = {
            "model": forecast,
            "persistence": start,
            "climatology": self.climatology.expand_as(truth),
        }
        for name, field in forecasts.items():
            self.metrics[name][step].update(field, truth)

    def compute(self, names: Sequence[str]) -> Skill:
        """{"rmse": {forecast: {channel: value at each lead time}}, "acc": the same without climatology}.

        RMSE is in physical units. names: of the channels. All ranks call this together.
        """
        scores: Skill = {"rmse": {}, "acc": {}}
        for forecast, metrics in self.metrics.items():
            # The sums of all ranks come together in here.
            by_lead = [m.compute() for m in metrics]
            for score, values in zip(scores, zip(*by_lead, strict=True), strict=True):
                by_channel = torch.stack(values, dim=1).tolist()
                scores[score][forecast] = dict(zip(names, by_channel, strict=True))
        del scores["acc"]["climatology"]  # climatology has no anomaly
        return scores
