"""Statistics of the training years, in one pass over their frames."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UsageError, reading
from utils.files import whole_file
from weather.checks.data_check import blocks, build_value_check, describe_problem
from weather.convert.climate_quantiles import FILE, climate_quantiles
from weather.fields.time_axis import TimeAxis, read_time_axis
from weather.years.year_data import YearFile
from weather.years.year_reader import StorePath, open_year

STATS = ("global_means", "global_stds", "time_means", "change_stds")


class StatisticsSums:
    """Float64 sums over frames, given in the order of their dates.

    Values are counted from an origin near their mean: the squares of large numbers would hide a small spread.
    """

    def __init__(self) -> None:
        self.origin: np.ndarray | None = None  # (C, 1, 1)
        self.total: Any = 0.0  # (C, H, W)
        self.squares: Any = 0.0  # (C,)
        self.changes: Any = 0.0  # (C,), squares of the changes from frame to frame
        self.frames = 0
        self.pairs = 0
        self.points = 0
        self.last: np.ndarray | None = None  # the frame before the next one, (1, C, H, W)

    def add(self, frames: np.ndarray, follows: np.ndarray) -> None:
        """Add frames (T, C, H, W). follows: whether each of them is one step after the frame before it, (T,) bool."""
        x = frames.astype(np.float64)
        if self.origin is None or self.last is None:
            self.origin = x[0].mean((1, 2), keepdims=True)
            self.last = x[:1] - self.origin
            self.points = x[0, 0].size
        x -= self.origin
        self.total = self.total + x.sum(0)
        self.squares = self.squares + np.square(x).sum((0, 2, 3))
        self.frames += len(x)

        with_last = np.concatenate([self.last, x])
        changes = np.diff(with_last, axis=0)[follows]  # (T - gaps, C, H, W)
        self.changes = self.changes + np.square(changes).sum((0, 2, 3))
        self.pairs += int(follows.sum())
        self.last = x[-1:]

    def time_means(self) -> np.ndarray:
        """The mean of each point over time, (C, H, W) float64."""
        return self.total / self.frames + self.origin

    def stds(self) -> np.ndarray:
        """The standard deviation of each channel over time and points, (C,) float64; 0 or NaN where it is none."""
        # Sums are of distances from an origin near the values, which loses no precision.
        distances = self.total / self.frames  # of the climatology from the origin, (C, H, W)
        mean_distance = distances.mean((1, 2))
        mean_square = self.squares / (self.frames * self.points)
        return np.sqrt(mean_square - mean_distance**2)

    def change_stds(self) -> np.ndarray:
        """The root of the mean square of the change from one frame to the next, (C,) float64."""
        # A single frame has no change.
        changes = max(1, self.pairs) * self.points
        return np.sqrt(self.changes / changes)


def training_statistics(
    paths: Sequence[Path | StorePath],
    checks_values: bool = True,
) -> list[np.ndarray]:
    """Statistics of the year files `paths`. checks_values: whether frames are held against the ranges of channels.

    Returns float32 global_means and global_stds, each (1, C, 1, 1), time_means (1, C, H, W), and change_stds, the root
    of the mean square of the change from one frame to the next (1, C, 1, 1). Changes across a gap in time are left out.
    Raises UsageError for a frame that is no weather, and for a channel that is the same everywhere.
    """
    sums = StatisticsSums()
    names = list[str]()
    for path in paths:
        with reading(str(path)), closing(open_year(path)) as year:
            description, _ = year.describe(year.shape[1], year.shape[2:])
            names = description.names
            check = build_value_check(year, description)
            axis = read_time_axis(year)
            follows = _follows(year, axis)
            for first, count in blocks(*year.shape):
                frames = year.frames(first, count)
                problem = check.find(frames) if checks_values else None
                if problem is not None:
                    number = first + problem.frame
                    name = names[problem.channel]
                    raise UsageError(describe_problem(path, axis, number, name, problem))
                sums.add(frames, follows[first : first + count])

    time_means = sums.time_means()
    means = time_means.mean((1, 2))
    stds = sums.stds()
    is_constant = ~(stds > 0)  # or NaN
    for channel in map(int, np.flatnonzero(is_constant)):
        raise UsageError(
            f"{paths[0]}: channel {channel} ({names[channel]}) is {means[channel]:g} at every point of every "
            "training frame: leave it out, or get it anew"
        )
    arrays = [
        means[:, None, None],
        stds[:, None, None],
        time_means,
        sums.change_stds()[:, None, None],
    ]
    return [array[None].astype(np.float32) for array in arrays]


def write_statistics(
    years: Sequence[Path | StorePath],
    folder: Path,
    checks_values: bool = True,
) -> list[Path]:
    """Write those statistics of year files that are not in a folder yet; returns their files.

    checks_values: whether frames are held against the ranges of their channels.
    """
    # One pass over the years gives all statistics.
    values = training_statistics(years, checks_values)
    written = []
    for name, value in zip(STATS, values, strict=True):
        path = folder / f"{name}.npy"
        if path.exists():
            continue
        _save(path, value)
        written.append(path)
    path = folder / FILE
    quantiles = None if path.exists() else climate_quantiles(years)
    if quantiles is not None:
        _save(path, quantiles)
        written.append(path)
    return written


def _save(path: Path, values: np.ndarray) -> None:
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, values)


def _follows(year: YearFile, axis: TimeAxis | None) -> np.ndarray:
    """Whether each frame of a year is one step after the frame before it, (T,) bool; the first one is not."""
    # Without dates nothing is known of gaps.
    is_regular = axis.is_regular if axis is not None else np.ones(year.shape[0] - 1, bool)
    return np.concatenate([[False], is_regular])
