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
from weather.fields.grid import Grid

EARTH_RADIUS = 6367.5  # km, as in WeatherBench 2
MIDDLE = 30.0, 60.0  # degrees, north and south
SHORT = 8  # grid spacings; models resolve waves from about 7 on (Skamarock 2004, doi:10.1175/MWR2830.1)


@dataclass
class Spectra:
    """Mean spectra of all channels."""

    leads: list[int]  # (L,) hours
    wavelengths: np.ndarray  # (K,) km, the mean over the rows
    power: dict[str, np.ndarray]  # {"model", "truth", ..: (C, L, K)}, squared units of the channel times m
    short: float  # km: waves up to this length count as short

    def of(self, channel: int) -> dict[str, np.ndarray]:
        """The spectra of one channel, given by its index: {"model", "truth", ..: (L, K)}."""
        return {name: power[channel] for name, power in self.power.items()}

    def ratio(self) -> np.ndarray:
        """Power of the model in short waves, relative to truth: (C, L). Less than 1 is blur, more is noise."""
        is_short = self.wavelengths <= self.short  # (K,)
        model = self.power["model"][..., is_short].sum(-1)  # (C, L)
        truth = self.power["truth"][..., is_short].sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return model / truth


def spread(count: int, parts: int = 5) -> list[int]:
    """Some of the indices 0 to count - 1: the first, and the last one of each of `parts` equal parts."""
    indices = {0}
    for part in range(1, parts + 1):
        end = round(count * part / parts)
        indices.add(max(0, end - 1))
    return sorted(indices)


class LeadTimeSpectra:
    """Sums up the power spectra of forecasts and truth on the device, at some of the lead times.

    leads: of all steps, hours. grid: of whole images; its rows need not be whole circles. stds: (C, 1, 1). names: of
    the images that `update` takes.
    """

    def __init__(
        self,
        leads: Sequence[int],
        grid: Grid,
        stds: Tensor,
        device: torch.device,
        names: Sequence[str] = ("model", "truth"),
    ):
        self.leads = leads
        self.names = names
        self.steps = {step: place for place, step in enumerate(spread(len(leads)))}  # place: in the sums

        # A grid may have no rows of middle latitudes. Then all rows count but the poles, which have no length.
        latitude = np.abs(grid.latitude)
        is_middle = (MIDDLE[0] <= latitude) & (latitude <= MIDDLE[1])
        counts = is_middle if is_middle.any() else latitude < 89.9
        rows = np.flatnonzero(counts)  # (h,)

        width = len(grid.longitude)
        waves = width // 2
        spacing = abs(grid.longitude[1] - grid.longitude[0])
        angle = np.deg2rad(width * spacing)
        lengths = angle * EARTH_RADIUS * np.cos(np.deg2rad(latitude[rows]))  # (h,) km
        self.wavelengths = lengths.mean() / np.arange(1, waves + 1)
        longest_short = -(-width // SHORT) - 1  # index of the wave that is SHORT grid spacings long, or just less
        self.short = float(self.wavelengths[longest_short])

        self.rows = torch.from_numpy(rows).to(device)
        # This is 2 C in metres. The variances bring normalised fields back to their units.
        variances = stds.float().square()  # (C, 1, 1)
        row_lengths = torch.from_numpy(lengths).float()[:, None]  # (h, 1)
        self.scale = (2000 * variances * row_lengths).to(device)  # (C, h, 1)
        self.sums = torch.zeros(len(self.steps), len(names), len(stds), waves, device=device)
        self.samples = torch.zeros(len(self.steps), device=device)

    def update(self, step: int, *fields_of_names: Tensor) -> None:
        """Add a batch at a step of the rollout, counted from 0; most steps are left out.

        fields_of_names: of each of `names` whole images, (B, C, H, W), normalised.
        """
        is_empty = len(fields_of_names[0]) == 0  # a rank may have no start left
        if step not in self.steps or is_empty:
            return
        images = torch.stack(fields_of_names, 1)  # (B, n, C, H, W)
        fields = images.index_select(-2, self.rows)  # (B, n, C, h, W)
        amplitudes = torch.fft.rfft(fields.float(), norm="forward")
        waves = amplitudes[..., 1:]  # (B, n, C, h, W / 2), without the mean of a row
        power = (waves.abs().square() * self.scale).mean(-2)  # (B, n, C, W / 2)
        place = self.steps[step]
        self.sums[place] += power.sum(0)
        self.samples[place] += len(images)

    def compute(self) -> Spectra:
        """The mean over all samples of all ranks. All ranks call this together."""
        # Sums and their counts travel in one message. Both come back divided by the ranks, which their ratio undoes.
        packed = torch.cat([self.sums.flatten(1), self.samples[:, None]], 1)
        total = comm.global_mean(packed[None]).cpu()
        sums = total[:, :-1]
        samples = total[:, -1:]
        mean = (sums / samples).view(self.sums.shape).numpy()  # (L, n, C, K)
        power = {}
        for number, name in enumerate(self.names):
            power[name] = mean[:, number].swapaxes(0, 1)  # (C, L, K)
        leads = [self.leads[step] for step in self.steps]
        return Spectra(leads, self.wavelengths, power, self.short)
