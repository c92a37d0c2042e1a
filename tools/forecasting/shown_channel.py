"""What pictures need of a forecast: one channel after one start, in the memory of a few images a lead time."""

from dataclasses import dataclass

import numpy as np

MOST_POINTS = 8192  # of those at which members are kept: 64 x 128


@dataclass
class Plume:
    """The members at the point where they differ most at the last lead time, and the map of that difference."""

    members: np.ndarray  # (L, M)
    point: tuple[int, int]  # row and column
    spread: np.ndarray  # (H, W), standard deviation of the members


class ShownChannel:
    """Collects truth and forecast of a channel, lead time by lead time, in physical units.

    Of an ensemble that is the mean of its members. They themselves are kept at MOST_POINTS points or fewer.
    """

    def __init__(self) -> None:
        self.truths: list[np.ndarray] = []  # (H, W) of each lead time
        self.forecasts: list[np.ndarray] = []
        self.thinned: list[np.ndarray] = []  # (M, h, w) of each lead time
        self.every = 1  # of rows and columns so many is kept
        self.spread = np.empty(0)

    def add(self, members: np.ndarray, truth: np.ndarray) -> None:
        """Add a lead time. members: (M, H, W), one of them without an ensemble. truth: (H, W)."""
        self.truths.append(truth)
        self.forecasts.append(members.mean(0))
        if len(members) > 1:
            while truth[:: self.every, :: self.every].size > MOST_POINTS:
                self.every += 1
            self.thinned.append(members[:, :: self.every, :: self.every].copy())
            self.spread = members.std(0, ddof=1)

    def truth(self) -> np.ndarray:
        """(L, H, W); empty where nothing was added."""
        return np.array(self.truths)

    def forecast(self) -> np.ndarray:
        """(L, H, W); empty where nothing was added."""
        return np.array(self.forecasts)

    def plume(self) -> Plume | None:
        """The members where they differ most; None without an ensemble."""
        if not self.thinned:
            return None
        kept = self.spread[:: self.every, :: self.every]
        row, column = np.unravel_index(kept.argmax(), kept.shape)
        members = np.stack([each[:, row, column] for each in self.thinned])  # (L, M)
        point = (int(row) * self.every, int(column) * self.every)
        return Plume(members, point, self.spread)
