"""Scores of ensembles by lead time, beside those of single forecasts, and what they say in a table and in pictures."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.forecasting.lead_times import metrics_by_lead_time
from tools.forecasting.spectra import spread
from tools.tables import format_table
from training.forecasting.ensemble_metrics import EnsembleMetrics
from weather.convert.climate_quantiles import QUANTILES

Scores = dict[str, dict[str, dict[str, Any]]]  # {score: {forecast: {channel: values by lead time}}}
OF_MODEL = ("spread", "spread_skill", "rank_histogram")


class LeadTimeEnsembles:
    """Scores of the model's members at each lead time, and of persistence and climatology as ensembles of one.

    The CRPS of a single forecast is its mean absolute error, so a deterministic model, persistence and climatology are
    compared with an ensemble in one number. Arguments as of metrics_by_lead_time; quantiles: of each point's climate,
    (Q, C, H, W) in physical units, the thresholds of Brier scores; None: quantiles of the climatology's map.
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
        made = metrics_by_lead_time(new, steps, latitude, statistics, device)
        self.climatology, self.metrics = made

    def update(self, step: int, start: Tensor, members: Tensor, truth: Tensor) -> None:
        """Add a batch at a step of the rollout, counted from 0.

        members: (B, M, C, H, W). start (the initial state), truth: (B, C, H, W). All are whole and normalised.
        """
        # Single forecasts are ensembles of one member.
        ensembles = {
            "model": members,
            "persistence": start[:, None],
            "climatology": self.climatology.expand_as(truth)[:, None],
        }
        for name, ensemble in ensembles.items():
            self.metrics[name][step].update(ensemble, truth)

    def compute(self, names: Sequence[str]) -> Scores:
        """{"crps" and "brier": of each forecast, "spread", "spread_skill", "rank_histogram": of the model}.

        By channel and lead time; brier also by QUANTILES, the ranks by number. Of a model without members the last
        three are left out. names: of the channels. All ranks call this together.
        """
        scores: Scores = {}
        for forecast, metrics in self.metrics.items():
            # The sums of all ranks come together in here.
            by_lead = [each.compute() for each in metrics]
            is_ensemble = metrics[0].members > 1
            for score in ("crps", "brier", *OF_MODEL):
                if score in OF_MODEL and not is_ensemble:
                    continue
                values = torch.stack([getattr(each, score) for each in by_lead], 1).tolist()  # (C, L, ...)
                scores.setdefault(score, {})[forecast] = dict(zip(names, values, strict=True))
        return scores


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
