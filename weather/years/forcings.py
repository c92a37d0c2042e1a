"""Forcings: what a model is told beside the state of the atmosphere, because it is known for any date and any place.

They are the sun's time (of the day and of the year), the latitude, and fields that never change and that a year file
may hold, such as `orography` or `land`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from utils.device import to_device
from utils.errors import UsageError
from utils.schema import TIMED_FORCINGS, count_forcings
from weather.years.dataset import FieldDataset
from weather.years.year_data import YearFile

YEAR = 365.25  # days


class Forcings:
    """The forcings of the points that a dataset reads, on the device: forcings(dates).

    names: `hour`, `day`, `latitude`, or names of fields of the first file, which are normalised over the whole image.
    Raises UsageError for a field that the file lacks.
    """

    def __init__(self, names: Sequence[str], dataset: FieldDataset, device: torch.device):
        self.names = names
        self.device = device
        grid = dataset.description.grid
        file = dataset.files[0]
        window = dataset.rows, dataset.columns

        # Forcings that stay the same, cut to the part of the image that this rank reads.
        img_size = len(grid.latitude), len(grid.longitude)
        sine = np.sin(np.deg2rad(grid.latitude))
        latitude = np.broadcast_to(sine[:, None], img_size)  # (H, W)
        self.shape = latitude[window].shape
        parts = []
        for name in names:
            if name in TIMED_FORCINGS:
                continue
            field = latitude if name == "latitude" else _normalised(file, name, img_size)
            parts.append(field[window])
        # A shape is given, since there may be none.
        stacked = np.array(parts, np.float32).reshape(-1, *self.shape)
        self.fixed = torch.from_numpy(stacked).to(device)  # (F, h, w)

        turns_east = grid.longitude[dataset.columns] / 360
        self.east = torch.from_numpy(turns_east).float().to(device)  # (w,)

    def channels(self, steps: int) -> int:
        """Count the channels for so many steps of a forecast: F + k T."""
        # Forcings that change come once for each step.
        fixed, timed = count_forcings(self.names)
        return fixed + steps * timed

    def __call__(self, dates: np.ndarray) -> Tensor:
        """(B, F + k T, h, w): the F channels that stay, then the T that change, for one date after the other.

        dates: k for each sample, (B, k) datetime64[s], in UTC.
        """
        parts = [self.fixed.expand(len(dates), -1, -1, -1)]
        fractions = torch.from_numpy(time_fractions(dates))
        day, year = to_device(fractions, self.device).split(1, -1)  # (B, k, 1) each

        # The hour is local, and so differs by column; the day of the year is the same everywhere.
        angles = []
        if "hour" in self.names:
            angles.append(day + self.east)  # (B, k, w)
        if "day" in self.names:
            angles.append(year.expand(-1, -1, len(self.east)))
        if angles:
            angle = 2 * math.pi * torch.stack(angles, 2)  # (B, k, T / 2, w)
            timed = torch.cat([angle.cos(), angle.sin()], 2).flatten(1, 2)  # (B, k T, w)
            timed = timed[:, :, None].expand(-1, -1, self.shape[0], -1)  # (B, k T, h, w)
            parts.append(timed)
        return torch.cat(parts, 1)


def _normalised(file: YearFile, name: str, img_size: Sequence[int]) -> np.ndarray:
    field = file.constant_field(name)[: img_size[0], : img_size[1]]
    # A field that is the same everywhere tells the model nothing.
    spread = field.std()
    if not np.isfinite(spread) or spread == 0:
        raise UsageError(f"{file.path}: forcing '{name}' is the same everywhere, or not finite")
    return (field - field.mean()) / spread


def time_fractions(dates: np.ndarray) -> np.ndarray:
    """How much of the day and how much of the year is over at these dates (UTC), 0 to 1: (...) -> (..., 2) float32."""
    one_day = np.timedelta64(1, "D")
    midnight = dates.astype("datetime64[D]")
    new_year = dates.astype("datetime64[Y]")
    day = (dates - midnight) / one_day
    year = (dates - new_year) / one_day / YEAR
    return np.stack([day, year], -1).astype(np.float32)
