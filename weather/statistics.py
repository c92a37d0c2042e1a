"""Statistics of the channels over the training years: read from .npy files, and held against one another.

Frames enter the model as (x - mean) / standard deviation, and climatology is what a forecast must beat: statistics of
other data make every score wrong without a word.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UsageError, reported_as_usage_error
from utils.files import check_file

ANYWAY = "if they are meant to be so: --check_data off"
FAR_MEAN = 1.0  # standard deviations from the mean of the frames to that of the statistics
FAR_SPREAD = 3.0  # times the standard deviation of the frames, or a third of it
FAR_CHANGE = 2.0  # standard deviations that a channel changes from frame to frame
FAR_CLIMATOLOGY = 0.6  # standard deviations from the mean of the climatology to the mean of the channel


class Statistics(NamedTuple):
    """Statistics of each channel over the training years, in physical units, float32."""

    means: np.ndarray  # (C, 1, 1)
    stds: np.ndarray  # (C, 1, 1)
    time_means: np.ndarray  # (C, H, W), the climatology


class Paths(NamedTuple):
    """The files of the statistics."""

    means: Path | str
    stds: Path | str
    time_means: Path | str


def read_statistics(path: Path | str, channels: int, img_size: Sequence[int] | None = None) -> np.ndarray:
    """Statistics of each channel from a .npy file: float32 (C, 1, 1), or (C, H, W) if img_size is given.

    Raises UsageError if the file is missing, has another shape, or holds values that are not finite.
    """
    height, width = img_size or (1, 1)
    values = _open_array(path)
    enough = values.ndim == 4 and values.shape[0] == 1 and values.shape[1] >= channels
    if not enough or values.shape[2] < height or values.shape[3] < width:
        raise UsageError(f"{path}: expected shape (1, {channels}, {height}, {width}), found {values.shape}")
    values = np.array(values[0, :channels, :height, :width], np.float32)
    if not np.isfinite(values).all():
        raise UsageError(f"{path}: holds values that are not finite")
    return values


def positive_statistics(path: Path | str, channels: int, names: Sequence[str] = ()) -> np.ndarray:
    """As read_statistics, of standard deviations, which must be positive. names: of the channels, for the message."""
    values = read_statistics(path, channels)
    bad = np.flatnonzero(values[:, 0, 0] <= 0)
    if len(bad):
        channel = int(bad[0])
        name = f" ({names[channel]})" if names else ""
        value = values[channel, 0, 0]
        why = "is it the same everywhere in the training years?" if value == 0 else "no spread is negative"
        raise UsageError(
            f"{path}: holds standard deviations that are not positive: channel {channel}{name} has {value:g}: {why}"
        )
    return values


def _open_array(path: Path | str) -> np.ndarray:
    check_file(path)
    # Whatever is raised: numpy's parser of a header lets much through.
    with reported_as_usage_error(Exception, f"{path}: cannot be read as .npy statistics"):
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may promise more than memory holds
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            raise ValueError("it holds no array of floats")
    return values


def check_climatology(path: Path | str, means_path: Path | str, statistics: Statistics, names: Sequence[str]) -> None:
    """Raise UsageError where a climatology is none, or not of the channels whose means are given.

    path: of the climatology, which is looked at whole, also where an image is a part of it. means_path: of the means.
    """
    time_means = _open_array(path)[0]  # (C, H, W), of all points of the files
    height = time_means.shape[1]
    latitude = np.linspace(-np.pi / 2, np.pi / 2, height)
    area = np.cos(latitude) if height > 2 else np.ones(height)
    for channel, name in enumerate(names):
        field = np.asarray(time_means[channel], np.float64)
        mean = float(statistics.means[channel, 0, 0])
        std = float(statistics.stds[channel, 0, 0])
        if field.size > 1 and field.min() == field.max():
            raise UsageError(f"{path}: the climatology of {name} is {field.min():g} at every point; {ANYWAY}")

        # Some compute their means over the sphere, others over the points: the nearer one counts.
        rows = field.mean(1)
        of_points = float(rows.mean())
        of_sphere = float(np.average(rows, weights=area))
        is_points = abs(of_points - mean) < abs(of_sphere - mean)
        nearest = of_points if is_points else of_sphere
        if abs(nearest - mean) > FAR_CLIMATOLOGY * std:
            raise UsageError(
                f"{path}: the mean of {name} is {nearest:g}, that of {means_path} is {mean:g} "
                f"(with a standard deviation of {std:g}): they are not of the same data; {ANYWAY}"
            )


def check_changes(path: Path | str, changes: np.ndarray, stds_path: Path | str, stds: np.ndarray) -> None:
    """Raise UsageError where channels change more than they can: sizes of the change (C, 1, 1), deviations (C, 1, 1).

    Frames that had nothing to do with one another would differ by 1.41 standard deviations.
    """
    ratios = (changes / stds)[:, 0, 0]
    for channel in np.flatnonzero(ratios > FAR_CHANGE):
        raise UsageError(
            f"{path}: the change of channel {channel} from frame to frame is {changes[channel, 0, 0]:g}, its standard "
            f"deviation in {stds_path} is {stds[channel, 0, 0]:g}: they are not of the same data; {ANYWAY}"
        )


class FrameSums:
    """Sums over some rows of some frames, to be compared with the statistics of the same channels.

    rows: the numbers of these rows, increasing, in the images of the statistics.
    """

    def __init__(self, rows: np.ndarray):
        self.rows, self.frames = rows, 0
        self.total: Any = 0.0  # (C, R, W), sums over the frames
        self.squares: Any = 0.0  # (C, R), sums over frames of means over a row

    def add(self, field: np.ndarray) -> None:
        """Add a frame (C, R, W)."""
        exact = field.astype(np.float64)
        self.total = self.total + exact
        self.squares = self.squares + np.square(exact).mean(-1)
        self.frames += 1

    def check(self, statistics: Statistics, names: Sequence[str], paths: Paths, folder: object) -> None:
        """Raise UsageError where statistics are not those of such frames.

        names: of the channels. paths: of the statistics. folder: of the frames, for the message.
        """
        if not self.frames:
            return
        mean_field = self.total / self.frames  # (C, R, W)
        means = mean_field.mean((1, 2))  # (C,)
        mean_squares = (self.squares / self.frames).mean(1)
        spreads = np.sqrt(np.maximum(mean_squares - means**2, 0))
        # Of the same rows, so that nothing depends on how rows are weighed.
        climatology = statistics.time_means[:, self.rows].astype(np.float64)  # (C, R, W)
        expected_means = climatology.mean((1, 2))

        for channel, name in enumerate(names):
            std = float(statistics.stds[channel, 0, 0])
            seen, expected = means[channel], expected_means[channel]
            if abs(seen - expected) > FAR_MEAN * std:
                raise UsageError(
                    f"{paths.time_means}: the climatology of {name} is {expected:g} on average, frames of {folder} "
                    f"have {seen:g}: it is of other data, or of other channels; {ANYWAY}"
                )
            spread = spreads[channel]
            is_far = spread > FAR_SPREAD * std or spread < std / FAR_SPREAD
            if is_far:
                raise UsageError(
                    f"{paths.stds}: the standard deviation of {name} is {std:g}, that of frames of {folder} "
                    f"{spread:g}: it is of other data, or of other channels; {ANYWAY}"
                )
        self._check_orientation(mean_field, climatology, statistics.stds, paths.time_means)

    def _check_orientation(
        self, mean_field: np.ndarray, climatology: np.ndarray, stds: np.ndarray, path: Path | str
    ) -> None:
        """Raise UsageError where the climatology fits the frames better when it is turned upside down."""
        mirrored = self.rows[0] + self.rows[-1] - self.rows[::-1]
        is_symmetric = np.array_equal(self.rows, mirrored)
        if not is_symmetric or len(self.rows) < 4:
            return
        turned_climatology = climatology[:, ::-1]
        upright = np.sqrt(np.square((mean_field - climatology) / stds).mean())
        turned = np.sqrt(np.square((mean_field - turned_climatology) / stds).mean())
        if turned < 0.7 * upright:
            raise UsageError(
                f"{path}: is upside down: its rows differ from the frames' by {upright:.2f} standard deviations, "
                f"in reverse order by {turned:.2f}; {ANYWAY}"
            )
