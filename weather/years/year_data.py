"""A year of data, however it is stored: it describes itself and fills buffers with frames.

A year holds `fields` [time, channel, lat, lon] in float32. It may hold `latitude` and `longitude` (coordinates.py knows
other names), `channel` and `channel_units` (stored_channels.py), and `time` (time_axis.py). Plain reads of a file
release Python's lock, so threads read in parallel straight into the caller's buffer; compressed and chunked fields are
read by the format's library.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray

from utils.errors import UsageError, reading
from weather.fields.attributes import check_unpacked
from weather.fields.channels import QUANTITIES, Channel, are_same_units, channel_key
from weather.fields.coordinates import LATITUDE, LONGITUDE, check_dimensions, read_grid
from weather.fields.grid import Grid
from weather.fields.stored_channels import read_channels
from weather.fields.time_axis import TIME_NAMES, known_axis, read_time_axis
from weather.sources.file_formats import describe_point_list

DATASET = "fields"
NAMES = (DATASET, "channel", "channel_units", *TIME_NAMES, *LATITUDE.names, *LONGITUDE.names)  # of what is read


class Description(NamedTuple):
    """Description of the numbers in a year file."""

    names: list[str]  # of the channels
    units: list[str]
    grid: Grid

    def unknown_names(self) -> list[str]:
        """The names by which era5.yaml knows no quantity."""
        return [name for name in self.names if channel_key(name)[0] not in QUANTITIES]

    def difference(self, other: "Description") -> str:
        """In words, the first thing in which another description differs; '' where they agree."""
        for number, (mine, theirs) in enumerate(zip(self.names, other.names, strict=True)):
            if mine != theirs:
                return f"channel {number} is '{mine}' and not '{theirs}'"
        for number, (mine, theirs) in enumerate(zip(self.units, other.units, strict=True)):
            # Units may be spelt differently and mean the same.
            quantity, _ = channel_key(self.names[number])
            if not are_same_units(quantity, mine, theirs):
                return f"the unit of channel {number} is '{mine}' and not '{theirs}'"
        for axis, x, y in zip(Grid._fields, self.grid, other.grid, strict=True):
            if not np.allclose(x, y, rtol=0, atol=1e-3):
                return f"{axis} is {x[0]:g} to {x[-1]:g} and not {y[0]:g} to {y[-1]:g}"
        return ""


class YearFile(ABC):
    """One open year. `read` fills buffers from it.

    path: where it can be opened again. arrays: all that it holds, by name. size: in bytes.
    """

    path: Path
    arrays: Mapping[str, xarray.Variable]
    shape: tuple[int, int, int, int]
    size: int
    reads_parts = False  # a part of a frame is read without the rest of it

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @abstractmethod
    def _read(
        self,
        frame: int,
        out: np.ndarray,
        rows: slice,
        columns: slice,
    ) -> None:
        """Read as `read` does."""

    def read(
        self,
        frame: int,
        out: np.ndarray,
        rows: slice,
        columns: slice,
    ) -> None:
        """Fill `out`, contiguous (T, C, h, w), with T frames from `frame` on: first C channels, a window of points."""
        with reading(f"{self.path}: frame {frame}"):
            self._read(frame, out, rows, columns)

    def frames(self, first: int, count: int) -> np.ndarray:
        """Up to `count` frames from the first of them on, all channels and points: (T, C, H, W) float32."""
        total, channels, height, width = self.shape
        count = min(count, total - first)
        frames = np.empty((count, channels, height, width), np.float32)
        self.read(first, frames, slice(0, height), slice(0, width))
        return frames

    def read_rows(self, frame: int, channels: int, rows: np.ndarray) -> np.ndarray:
        """Read some rows of a frame, increasing, as whole circles: the first channels, (C, R, W)."""
        width = self.shape[3]
        # One read of all rows between is faster, unless the file can skip those that nobody asked for.
        parts = [rows]
        if self.reads_parts:
            is_gap = np.diff(rows) > 1
            parts = np.split(rows, np.flatnonzero(is_gap) + 1)
        bands = []
        for part in parts:
            first, last = part[[0, -1]].tolist()
            height = last - first + 1
            band = np.empty((1, channels, height, width), np.float32)
            self.read(frame, band, slice(first, last + 1), slice(0, width))
            inside = part - first
            bands.append(np.take(band[0], inside, axis=1))
        return np.concatenate(bands, axis=1)

    def _check_fields(self) -> None:
        """Raise UsageError where there is no array of fields, or it is none."""
        where = f"{self.path}: '{DATASET}'"
        fields = self.arrays.get(DATASET)
        if fields is not None:
            check_unpacked(fields, where)
        if fields is None or fields.ndim != 4 or fields.dtype.kind != "f":
            has = f"has {fields.dtype} {fields.shape}" if fields is not None else f"has none{self._list_others()}"
            raise UsageError(f"{self.path}: expected '{DATASET}' [time, channel, lat, lon] of floats; it {has}")
        check_dimensions([str(name) for name in fields.dims], where)

    def _list_others(self) -> str:
        """The arrays that may be the fields under another name, as the end of a message."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        is_else = describe_point_list(shapes)
        if is_else:
            return f": {is_else}"
        found = []
        for name, shape in shapes.items():
            if len(shape) == 4:
                found.append(f"{name} {shape}")
        return f", it holds {', '.join(found)}: rename it to '{DATASET}'" if found else ""

    def describe(self, channels: int, img_size: Sequence[int]) -> tuple[Description, list[str]]:
        """The Description of the first channels of an image of img_size, and what was assumed of them, a line each.

        What the file lacks is as in ERA5. Names of others become ours (u10m is u10), and a channel without units has
        those of its name. Raises UsageError.
        """
        known, of_channels = read_channels(self, channels)
        grid, of_grid = read_grid(self)
        height, width = img_size
        names = [channel.name for channel in known]
        units = [channel.units for channel in known]
        image_grid = Grid(grid.latitude[:height], grid.longitude[:width])
        return Description(names, units, image_grid), of_channels + of_grid

    def constant_field(self, name: str) -> np.ndarray:
        """A field that does not change with time, (H, W) float64. Raises UsageError where the file has none."""
        with reading(f"{self.path}: '{name}'"):
            fields = {}
            for known_name, array in self.arrays.items():
                if array.shape == self.shape[2:]:
                    fields[known_name] = array
            if name in fields and fields[name].dtype.kind in "fiu":
                return np.asarray(fields[name].values, np.float64)
        known = f"it has {', '.join(fields)}" if fields else "it has no such field"
        raise UsageError(f"{self.path}: no field '{name}' [lat, lon] of numbers; {known}")


def describe_axes(dates: np.ndarray, channels: Sequence[Channel], grid: Grid) -> dict[str, tuple[Any, str]]:
    """{name: (values, units)} of what our own years hold for each axis of `fields`. dates: (T,) datetime64[s]."""
    # Hours are whole for most data, and fractions for the others.
    seconds = dates.astype("datetime64[s]").astype(np.int64)
    hours = seconds / 3600
    return {
        "time": (hours, "hours since 1970-01-01"),
        "channel": ([channel.name for channel in channels], ""),
        "latitude": (grid.latitude, "degrees_north"),
        "longitude": (grid.longitude, "degrees_east"),
    }


def file_times(file: YearFile) -> np.ndarray:
    """Dates of the frames of a year, (T,) datetime64[s] in UTC. Raises UsageError where they are not known."""
    return known_axis(read_time_axis(file), file.path).dates
