"""Scores of an ensemble, weighted by latitude, of each channel: is it near the truth, and is it as wide as it is wrong?

Of M members x_i and the truth y:

- CRPS, fair (training/forecasting/crps.py); of one forecast it is the mean absolute error.
- RMSE of the ensemble mean, and spread, the root of the mean variance of the members.
- Spread/skill: sqrt((M + 1) / M) spread / RMSE, 1 where members and truth are drawn alike (Fortin et al. 2014,
  doi:10.1175/JHM-D-14-0008.1). Less: the members are too sure.
- Rank histogram: how often the truth is below all members, between the first and the second, ... It is flat where the
  truth may be any of them (Hamill 2001, doi:10.1175/1520-0493(2001)129<0550:IORHFV>2.0.CO;2).
- Brier score of an event, the channel above a threshold: the square of probability less outcome, fair to M (Ferro 2014,
  doi:10.1002/qj.2270). Thresholds are quantiles of each point's own climate, see weather.convert.climate_quantiles.
  Without them they are quantiles of the climatology's map, the same at all points.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.forecasting.crps import crps_of_points
from training.forecasting.metrics import FieldMetrics
from weather.convert.climate_quantiles import QUANTILES


class EnsembleScores(NamedTuple):
    """Scores of C channels, in float64 on the CPU.

    crps, rmse (of the mean), spread: (C,), in physical units. spread_skill: (C,). rank_histogram: (C, M + 1), adds up
    to 1. brier: (C, quantiles).
    """

    crps: Tensor
    rmse: Tensor
    spread: Tensor
    spread_skill: Tensor
    rank_histogram: Tensor
    brier: Tensor


class EnsembleMetrics(FieldMetrics):
    """Collects the scores of normalised ensembles; `compute` gives their means.

    Arguments as of FieldMetrics. thresholds: of events, the QUANTILES of each point's climate, (Q, C, H, W), in the
    form and on the device of the forecasts; None: those of the climatology's map.
    """

    def __init__(self, latitude: np.ndarray, stds: Tensor, climatology: Tensor, thresholds: Tensor | None = None):
        super().__init__(latitude, stds, climatology)
        if thresholds is None:
            of_maps = quantiles_of_maps(climatology)  # (C, Q)
            thresholds = of_maps.T[:, :, None, None]
        self.thresholds = thresholds  # (Q, C, H, W), or (Q, C, 1, 1)
        self.members = 1

    @torch.no_grad()
    def update(self, members: Tensor, target: Tensor) -> None:
        """Add a batch. members: (B, M, C, H, W), target: (B, C, H, W), normalised."""
        members = members.float()
        target = target.float()
        self.members = members.shape[1]
        crps = crps_of_points(members.flatten(2), target.flatten(1), alpha=1).view_as(target)
        self.means["crps"].append(self.mean_of_points(crps))  # (B, C)
        error = members.mean(1) - target
        self.means["square"].append(self.mean_of_points(error.square()))
        variance = members.var(1) if self.members > 1 else torch.zeros_like(target)
        self.means["variance"].append(self.mean_of_points(variance))
        # Nothing is known of a point that is NaN, but a comparison with NaN is false, as if an event had not happened.
        unknown = members.isnan().any(1) | target.isnan()  # (B, C, H, W)
        self.means["ranks"].append(self._ranks(members, target, unknown))
        self.means["brier"].append(self._brier(members, target, unknown))

    def compute(self) -> EnsembleScores:
        """The means over all samples of all ranks, which call this together."""
        means = self.global_means()
        rmse = means["square"].sqrt()
        spread = means["variance"].sqrt()
        widened = spread * ((self.members + 1) / self.members) ** 0.5
        return EnsembleScores(
            crps=means["crps"] * self.stds,
            rmse=rmse * self.stds,
            spread=spread * self.stds,
            spread_skill=widened / rmse,
            rank_histogram=means["ranks"],
            brier=means["brier"],
        )

    def _ranks(self, members: Tensor, target: Tensor, unknown: Tensor) -> Tensor:
        """The share of the area with each rank of the truth among the members, (B, C, M + 1).

        Where members equal the truth, it has each of the ranks that it may have, in equal parts. With an `unknown`
        point the shares are NaN.
        """
        below = (members < target[:, None]).sum(1)  # (B, C, H, W)
        equal = (members == target[:, None]).sum(1)
        part = 1 / (equal + 1)
        part = part.masked_fill(unknown, torch.nan)
        shares = []
        for rank in range(self.members + 1):
            is_possible = (below <= rank) & (rank <= below + equal)
            shares.append(self.mean_of_points(is_possible * part))
        return torch.stack(shares, -1)

    def _brier(self, members: Tensor, target: Tensor, unknown: Tensor) -> Tensor:
        """The score of each event, (B, C, quantiles), NaN with an `unknown` point."""
        count = self.members
        scores = []
        for limit in self.thresholds:  # (C, H, W), or (C, 1, 1)
            hits = (members >= limit).sum(1).float()  # members with the event
            happened = (target >= limit).float()
            score = (hits / count - happened).square()
            if count > 1:
                # A share of few members is apart from the probability by chance alone.
                score = score - hits * (count - hits) / (count**2 * (count - 1))
            score = score.masked_fill(unknown, torch.nan)
            scores.append(self.mean_of_points(score))
        return torch.stack(scores, -1)


def quantiles_of_maps(climatology: Tensor) -> Tensor:
    """The QUANTILES of each channel over the points of its map: (C, H, W) -> (C, quantiles)."""
    maps = climatology.flatten(1).double().cpu().numpy()
    quantiles = np.quantile(maps, QUANTILES, axis=1).T  # (C, quantiles)
    return torch.from_numpy(quantiles).to(climatology.device, torch.float32)
