"""Zonal power spectra by lead time: at which wavelengths a forecast has less power than the truth, so is blurred.

The definition is ZonalEnergySpectrum of WeatherBench 2 (Rasp et al. 2024, arXiv:2308.15560): 2 C |F[k]|^2 at wavenumber
k > 0 of a row. F is the discrete Fourier transform divided by the number of points, C is the length of the row. Here it
is averaged over the rows of middle latitudes and over the start dates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils import comm
from weather.grid import Grid

EARTH_RADIUS = 6367.5  # km, as in WeatherBench 2
MIDDLE = 30.0, 60.0  # degrees, north and south
SHORT = 8  # grid spacings; models resolve waves from about 7 on (Skamarock 2004, doi:10.1175/MWR2830.1)


@dataclass
class Spectra:
    """Mean spectra of all channels."""

    leads: list[int]  # (L,) hours
    wavelengths: np.ndarray  # (K,) km, the mean over the rows
    power: dict[str, np.ndarray]  # {"model" or "truth": (C, L, K)}, squared units of the channel times m
    short: float  # km: waves up to this length count as short

    def of(self, channel: int) -> dict[str, np.ndarray]:
        """The spectra of one channel, given by its index: {"model" or "truth": (L, K)}."""
        return {name: power[channel] for name, power in self.power.items()}

    def ratio(self) -> np.ndarray:
        """Power of the model in short waves, relative to truth: (C, L). Less than 1 is blur, more is noise."""
        short = self.wavelengths <= self.short
        model, truth = (self.power[name][..., short].sum(-1) for name in ("model", "truth"))
        with np.errstate(divide="ignore", invalid="ignore"):
            return model / truth


def spread(count: int, parts: int = 5) -> list[int]:
    """Some of the indices 0 to count - 1: the first, and the last one of each of `parts` equal parts."""
    return sorted({0} | {max(0, round(count * part / parts) - 1) for part in range(1, parts + 1)})


class LeadTimeSpectra:
    """Sums up the power spectra of forecasts and truth on the device, at some of the lead times.

    leads: of all steps, hours. grid: of whole images; its rows need not be whole circles. stds: (C, 1, 1).
    """

    def __init__(
        self,
        leads: Sequence[int],
        grid: Grid,
        stds: Tensor,
        device: torch.device,
    ):
        latitude, width = np.abs(grid.latitude), len(grid.longitude)
        middle = (MIDDLE[0] <= latitude) & (latitude <= MIDDLE[1])
        rows = np.flatnonzero(middle if middle.any() else latitude < 89.9)  # a grid may have none: then all but poles
        spacing = abs(grid.longitude[1] - grid.longitude[0])
        lengths = np.deg2rad(width * spacing) * EARTH_RADIUS * np.cos(np.deg2rad(latitude[rows]))  # km
        self.leads, self.steps = leads, {step: i for i, step in enumerate(spread(len(leads)))}
        self.wavelengths = lengths.mean() / np.arange(1, width // 2 + 1)
        self.short = float(self.wavelengths[-(-width // SHORT) - 1])
        self.rows = torch.from_numpy(rows).to(device)
        # 2 C in metres, and normalised fields back in their units
        self.scale = (2000 * stds.float().square() * torch.from_numpy(lengths).float()[:, None]).to(device)  # (C, h, 1)
        self.sums = torch.zeros(len(self.steps), 2, len(stds), width // 2, device=device)
        self.samples = torch.zeros(len(self.steps), device=device)

    def update(self, step: int, forecast: Tensor, truth: Tensor) -> None:
        """Add a batch at a step of the rollout, counted from 0; most steps are left out.

        forecast, truth: whole images, (B, C, H, W), normalised.
        """
        if step in self.steps and len(forecast):  # a rank may have no start left
            fields = torch.stack([forecast, truth], 1).index_select(-2, self.rows)  # (B, 2, C, h, W)
            waves = torch.fft.rfft(fields.float(), norm="forward")[..., 1:]
            power = (waves.abs().square() * self.scale).mean(-2)
            self.sums[self.steps[step]] += power.sum(0)
            self.samples[self.steps[step]] += len(forecast)

    def compute(self) -> Spectra:
        """The mean over all samples of all ranks. All ranks call this together."""
        mine = torch.cat([self.sums.flatten(1), self.samples[:, None]], 1)
        total = comm.global_mean(mine[None]).cpu()
        mean = (total[:, :-1] / total[:, -1:]).view(self.sums.shape).numpy()
        power = {name: mean[:, i].swapaxes(0, 1) for i, name in enumerate(("model", "truth"))}
        return Spectra([self.leads[step] for step in self.steps], self.wavelengths, power, self.short)
