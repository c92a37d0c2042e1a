"""Scores by lead time, of the model and of the forecasts that it must beat, and those of ensembles in a table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.forecasting.spectra import spread
from tools.tables import format_table
from training.forecasting.ensemble_metrics import EnsembleMetrics
from training.forecasting.metrics import FORECASTS, ForecastMetrics, normalised_climatology
from weather.convert.climate_quantiles import QUANTILES

Scores = dict[str, dict[str, dict[str, Any]]]  # {score: {forecast: {channel: values by lead time}}}
OF_MODEL = ("spread", "spread_skill", "rank_histogram")


class LeadTimeScores:
    """Scores of the model, of persistence and of climatology at each lead time, over all starts of all ranks.

    new: makes metrics of latitude, standard deviations and climatology, as ForecastMetrics. steps: number of lead
    times. latitude: (H,) degrees. statistics: of the output channels.
    """

    def __init__(
        self,
        new: Callable[[np.ndarray, Tensor, Tensor], Any],
        steps: int,
        latitude: np.ndarray,
        statistics: Sequence[np.ndarray],
        device: torch.device,
    ):
        self.climatology = normalised_climatology(statistics, device)
        stds = torch.from_numpy(statistics[1])
        # Each lead time is scored by itself: errors grow with it.
        self.metrics = {}
        for name in FORECASTS:
            self.metrics[name] = [new(latitude, stds, self.climatology) for _ in range(steps)]

    def update(self, step: int, start: Tensor, forecast: Tensor, truth: Tensor) -> None:
        """Add the errors of a batch at a step of the rollout, counted from 0.

        start (the initial state), forecast, truth: whole images, (B, C, H, W), normalised.
        """
        # Each has the same truth, so that the scores compare.
        forecasts = {
            "model": forecast,
            "persistence": start,
            "climatology": self.climatology.expand_as(start),
        }
        for name, field in forecasts.items():
            self.metrics[name][step].update(field, truth)

    def compute(self, names: Sequence[str]) -> Scores:
        """{score: {forecast: {channel: values by lead time}}}. names: of the channels. All ranks call this together."""
        scores: Scores = {}
        for forecast, metrics in self.metrics.items():
            # The sums of all ranks come together in here.
            by_lead = [each.compute() for each in metrics]
            for score in self._scores_of(forecast):
                values = torch.stack([getattr(each, score) for each in by_lead], 1).tolist()  # (C, L, ...)
                scores.setdefault(score, {})[forecast] = dict(zip(names, values, strict=True))
        return scores

    def _scores_of(self, forecast: str) -> Sequence[str]:
        """Names of the scores that a forecast has."""
        raise NotImplementedError


class LeadTimeSkill(LeadTimeScores):
    """RMSE, in physical units, and ACC. Arguments as of LeadTimeScores."""

    def __init__(self, *where: Any):
        super().__init__(ForecastMetrics, *where)

    def _scores_of(self, forecast: str) -> Sequence[str]:
        return ("rmse",) if forecast == "climatology" else ("rmse", "acc")  # climatology has no anomaly


class LeadTimeEnsembles(LeadTimeScores):
    """Scores of the model's members at each lead time, and of persistence and climatology as ensembles of one.

    The CRPS of a single forecast is its mean absolute error, so a deterministic model, persistence and climatology are
    compared with an ensemble in one number. Brier scores are by QUANTILES too, the ranks by number; spread and ranks
    are left out of a model without members.
    Arguments as of LeadTimeScores; quantiles: of each point's climate, (Q, C, H, W) in physical units, the thresholds
    of Brier scores; None: quantiles of the climatology's map.
    """

    def __init__(
        self,
        steps: int,
        latitude: np.ndarray,
        statistics: Sequence[np.ndarray],
        device: torch.device,
        quantiles: np.ndarray | None = None,
    ):
        thresholds = None
        if quantiles is not None:
            means, stds, _ = statistics
            # Scores are of normalised fields.
            thresholds = torch.from_numpy((quantiles - means) / stds).to(device)
        new = partial(EnsembleMetrics, thresholds=thresholds)
        super().__init__(new, steps, latitude, statistics, device)

    def update(self, step: int, start: Tensor, forecast: Tensor, truth: Tensor) -> None:
        """Add a batch at a step of the rollout, counted from 0.

        forecast: its members, (B, M, C, H, W). start (the initial state), truth: (B, C, H, W). All are whole and
        normalised.
        """
        # Single forecasts are ensembles of one member.
        super().update(step, start[:, None], forecast, truth)

    def _scores_of(self, forecast: str) -> Sequence[str]:
        is_ensemble = self.metrics[forecast][0].members > 1
        return ("crps", "brier", *OF_MODEL) if is_ensemble else ("crps", "brier")


def ensemble_table(
    scores: Scores,
    channels: Sequence[str],
    units: dict[str, str],
    leads: Sequence[int],
    others: Mapping[str, Mapping[str, Any]],
) -> str:
    """CRPS of each forecast, spread, spread over skill and Brier scores of the model by lead time, as text.

    others: content of skill.json by run, whose CRPS are shown too: of a single forecast the mean absolute error.
    """
    # A table has room for some of the lead times.
    shown = spread(len(leads))
    rows: list[list[Any]] = []
    for name in channels:
        label = f"{name} ({units[name]})"
        lines = {f"CRPS {forecast}": values[name] for forecast, values in scores["crps"].items()}
        for run, record in others.items():
            # The record may be of a version that had no such score.
            of_run = record.get("crps", {}).get("model", {})
            if name in of_run:
                lines[f"CRPS {run}"] = of_run[name]
        lines["spread"] = scores["spread"]["model"][name]
        lines["spread / skill"] = scores["spread_skill"]["model"][name]
        for number, quantile in enumerate(QUANTILES):
            of_leads = scores["brier"]["model"][name]  # (L, quantiles)
            lines[f"Brier, over quantile {quantile}"] = [scores_of_lead[number] for scores_of_lead in of_leads]
        for score, values in lines.items():
            rows.append([label, score, *(values[i] for i in shown)])
    columns = {"members": "", "score": ""}
    for i in shown:
        columns[f"{leads[i]} h"] = ".3f"
    return format_table(columns, rows)
