"""Statistics of the channels over the training years: read from .npy files, and held against one another.

Frames enter the model as (x - mean) / standard deviation, and climatology is what a forecast must beat: statistics of
other data make every score wrong without a word.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UsageError, reported_as_usage_error
from utils.files import check_file
from weather.fields.channels import QUANTITIES, channel_key

ANYWAY = "if they are meant to be so: --check_data off"
# In standard deviations of a channel:
FAR_MEAN = 1.0  # from the mean of frames of the training to that of the climatology
FAR_FROM_OTHERS = 5.0  # the same, of frames of another year, another season or a region
FAR_CLIMATOLOGY = 0.6  # from the mean of the climatology to the mean of the channel
FAR_CHANGE = 2.0  # the change from frame to frame
WORTH_COMPARING = 0.3  # a climatology that is nearer to the frames is in its place
# The standard deviation of frames may be this many times that of the statistics, or as small a part of it.
FAR_SPREAD = 3.0
# A climatology is in the wrong place where it fits that much better in another one.
BETTER_PLACE = 0.5


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


def read_statistics(
    path: Path | str,
    channels: int,
    img_size: Sequence[int] | None = None,
) -> np.ndarray:
    """Statistics of each channel from a .npy file: float32 (C, 1, 1), or (C, H, W) if img_size is given.

    Raises UsageError if the file is missing, has another shape, or holds values that are not finite.
    """
    height, width = img_size or (1, 1)
    (values,) = read_kinds(path, (1, channels, height, width))
    return values


def read_kinds(path: Path | str, shape: tuple[int, ...], remedy: str = "") -> np.ndarray:
    """The first values of a .npy file, float32 of this shape (kinds, C, H, W); the file has all kinds, and no others.

    remedy: the end of messages. Raises UsageError as read_statistics does.
    """
    values = open_array(path)
    fits = values.ndim == 4 and values.shape[0] == shape[0]
    is_small = fits and np.less(values.shape, shape).any()
    if not fits or is_small:
        raise UsageError(f"{path}: expected shape {shape}, found {values.shape}{remedy}")
    _, channels, height, width = shape
    values = np.array(values[:, :channels, :height, :width], np.float32)
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        place = np.unravel_index(is_bad.argmax(), values.shape)
        _, channel, row, column = place
        where = f"channel {channel} has {values[place]} at row {row}, column {column}"
        raise UsageError(f"{path}: holds values that are not finite: {where}{remedy}")
    return values


def positive_statistics(
    path: Path | str,
    channels: int,
    names: Sequence[str] = (),
) -> np.ndarray:
    """As read_statistics, of standard deviations, which must be positive. names: of the channels, for the message."""
    values = read_statistics(path, channels)
    bad = np.flatnonzero(values[:, 0, 0] <= 0)
    if len(bad):
        channel = int(bad[0])
        name = f" ({names[channel]})" if names else ""
        value = values[channel, 0, 0]
        why = (
            "is it the same everywhere in the training years?" if value == 0 else "are means and deviations exchanged?"
        )
        raise UsageError(
            f"{path}: holds standard deviations that are not positive: channel {channel}{name} has {value:g}: {why}"
        )
    return values


def open_array(path: Path | str) -> np.ndarray:
    """The array of floats in a .npy file, which is read where it is used. Raises UsageError for anything else."""
    check_file(path)
    # Whatever is raised: numpy's parser of a header lets much through.
    with reported_as_usage_error(Exception, f"{path}: cannot be read as .npy statistics"):
        values = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may promise more than memory holds
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            raise ValueError("it holds no array of floats")
    return values


def check_climatology(
    paths: Paths,
    statistics: Statistics,
    names: Sequence[str],
    img_size: Sequence[int],
    is_global: bool,
) -> None:
    """Raise UsageError where a climatology is none, on another grid, or not of the channels whose means are given.

    The climatology is looked at whole, also where an image is a part of it. Only channels of known quantities are
    held against their means: others may be the same everywhere, as the day of the year is. img_size: (H, W) of the
    files. is_global: they are of the whole globe; means of the globe may stand beside the climatology of a region.
    """
    time_means = open_array(paths.time_means)[0]  # (C, H, W), of all points of the files
    height, width = time_means.shape[1:]
    is_grid_of_files = (height, width) == tuple(img_size)
    is_grid_of_images = (height, width) == statistics.time_means.shape[1:]
    if not is_grid_of_files and not is_grid_of_images:
        raise UsageError(
            f"{paths.time_means}: has {height} x {width} points, the files have {img_size[0]} x {img_size[1]}: "
            "it is of another grid"
        )
    latitude = np.linspace(-np.pi / 2, np.pi / 2, height)
    area = np.cos(latitude) if height > 2 else np.ones(height)
    far = FAR_CLIMATOLOGY if is_global else FAR_FROM_OTHERS
    for channel in known_channels(names):
        name = names[channel]
        field = np.asarray(time_means[channel], np.float64)
        mean = float(statistics.means[channel, 0, 0])
        std = float(statistics.stds[channel, 0, 0])
        if field.size > 1 and field.min() == field.max():
            raise UsageError(
                f"{paths.time_means}: the climatology of {name} is {field.min():g} at every point; {ANYWAY}"
            )

        # Some compute their means over the sphere, others over the points: the nearer one counts.
        rows = field.mean(1)
        of_points = float(rows.mean())
        of_sphere = float(np.average(rows, weights=area))
        is_points = abs(of_points - mean) < abs(of_sphere - mean)
        nearest = of_points if is_points else of_sphere
        if abs(nearest - mean) > far * std:
            raise UsageError(
                f"{paths.time_means}: the mean of {name} is {nearest:g}, that of {paths.means} is {mean:g} "
                f"(with a standard deviation of {std:g}): they are not of the same data; {ANYWAY}"
            )


def known_channels(names: Sequence[str]) -> list[int]:
    """The numbers of the channels whose names say what they are."""
    return [number for number, name in enumerate(names) if channel_key(name)[0] in QUANTITIES]


def check_changes(
    path: Path | str,
    changes: np.ndarray,
    stds_path: Path | str,
    stds: np.ndarray,
) -> None:
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
        self.rows = rows
        self.frames = 0
        self.total: Any = 0.0  # (C, R, W), sums over the frames
        self.squares: Any = 0.0  # (C, R), sums over frames of means over a row

    def add(self, field: np.ndarray) -> None:
        """Add a frame (C, R, W)."""
        exact = field.astype(np.float64)
        self.total = self.total + exact
        self.squares = self.squares + np.square(exact).mean(-1)
        self.frames += 1

    def check(
        self, statistics: Statistics, names: Sequence[str], paths: Paths, folder: object, is_of_training: bool
    ) -> None:
        """Raise UsageError where statistics are not those of such frames.

        names: of the channels, of which those of known quantities are compared. paths: of the statistics. folder: of
        the frames, for the message. is_of_training: they are of all training years; those of another year or of a
        season may be further off.
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

        far = FAR_MEAN if is_of_training else FAR_FROM_OTHERS
        for channel in known_channels(names):
            name = names[channel]
            std = float(statistics.stds[channel, 0, 0])
            seen = means[channel]
            expected = expected_means[channel]
            if abs(seen - expected) > far * std:
                raise UsageError(
                    f"{paths.time_means}: the climatology of {name} is {expected:g} on average, frames of {folder} "
                    f"have {seen:g}: it is of other data, or of other channels; {ANYWAY}"
                )
            spread = spreads[channel]
            is_far = spread > FAR_SPREAD * std or spread < std / FAR_SPREAD
            if is_of_training and is_far:
                raise UsageError(
                    f"{paths.stds}: the standard deviation of {name} is {std:g}, that of frames of {folder} "
                    f"{spread:g}: it is of other data, or of other channels; {ANYWAY}"
                )
            if is_of_training:
                distance_to = partial(distance, mean_field[channel], std=std)
                self._check_place(distance_to, climatology, channel, names, paths.time_means)

    def _check_place(
        self,
        distance_to: Callable[[np.ndarray], float],
        climatology: np.ndarray,
        channel: int,
        names: Sequence[str],
        path: Path | str,
    ) -> None:
        """Raise UsageError where the climatology of a channel fits better in another place: turned, or another's.

        distance_to: from the frames to a climatology (R, W), in standard deviations. climatology: (C, R, W) of all.
        """
        upright = distance_to(climatology[channel])
        found: dict[str, float] = {}
        mirrored = self.rows[0] + self.rows[-1] - self.rows[::-1]
        if np.array_equal(self.rows, mirrored) and len(self.rows) >= 4:
            found["upside down"] = distance_to(climatology[channel, ::-1])
        half_a_circle = climatology.shape[-1] // 2
        found["turned by half a circle"] = distance_to(np.roll(climatology[channel], half_a_circle, axis=-1))
        quantity, _ = channel_key(names[channel])
        for other in known_channels(names):
            is_alike = other != channel and channel_key(names[other])[0] == quantity
            if is_alike:
                found[f"that of {names[other]}"] = distance_to(climatology[other])

        for what, other_distance in found.items():
            if other_distance < BETTER_PLACE * upright and upright > WORTH_COMPARING:
                raise UsageError(
                    f"{path}: the climatology of {names[channel]} is {what}: it differs from the frames by "
                    f"{upright:.2f} standard deviations, {what} by {other_distance:.2f}; {ANYWAY}"
                )


def distance(mean_field: np.ndarray, climatology: np.ndarray, std: float) -> float:
    """The root of the mean square of the differences of two fields (R, W), in standard deviations."""
    differences = (mean_field - climatology) / std
    return float(np.sqrt(np.square(differences).mean()))
