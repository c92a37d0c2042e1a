"""A year of data, however it is stored: it describes itself and fills buffers with frames.

A year holds `fields` [time, channel, lat, lon] in float32, and may hold `latitude`, `longitude` (or `lat`, `lon`),
`channel` and `channel_units`. Plain reads of a file release Python's lock, so threads read in parallel straight into
the caller's buffer; compressed and chunked fields are read by the format's library.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UsageError, reading
from weather.channels import CHANNELS, QUANTITIES, channel_key, channel_of
from weather.grid import Grid, latitudes, longitudes
from weather.time_axis import known_axis, read_time_axis

DATASET = "fields"
NEUTRAL_PACKING = {"scale_factor": 1.0, "add_offset": 0.0}  # of the CF conventions
UNPACK = "write its values (ncpdq -U IN OUT; xarray: open_dataset(IN).drop_encoding().to_netcdf(OUT))"


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
        texts = {"channel": (self.names, other.names), "the unit of channel": (self.units, other.units)}
        for what, both in texts.items():
            for number, (mine, theirs) in enumerate(zip(*both, strict=True)):
                if mine != theirs:
                    return f"{what} {number} is '{mine}' and not '{theirs}'"
        for axis, x, y in zip(Grid._fields, self.grid, other.grid, strict=True):
            if not np.allclose(x, y, rtol=0, atol=1e-3):
                return f"{axis} is {x[0]:g} to {x[-1]:g} and not {y[0]:g} to {y[-1]:g}"
        return ""


class YearFile(ABC):
    """One open year. `read` fills buffers from it.

    path: where it can be opened again. fields: an array (T, C, H, W) that slices.
    arrays: all that it holds, by name; each has a shape, a dtype and attrs, and slices. size: in bytes.
    """

    path: Path
    fields: Any
    arrays: Mapping[str, Any]
    shape: tuple[int, int, int, int]
    size: int
    reads_parts = False  # a part of a frame is read without the rest of it

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @abstractmethod
    def _read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        """Read as `read` does."""

    def read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        """Fill `out`, contiguous (T, C, h, w), with T frames from `frame` on: first C channels, a window of points."""
        with reading(f"{self.path}: frame {frame}"):
            self._read(frame, out, rows, columns)

    def read_rows(self, frame: int, channels: int, rows: np.ndarray) -> np.ndarray:
        """Read some rows of a frame, increasing, as whole circles: the first channels, (C, R, W)."""
        width = self.shape[3]
        first, last = int(rows.min()), int(rows.max())
        is_band = len(rows) == last - first + 1
        if is_band or not self.reads_parts:
            band = np.empty((1, channels, last - first + 1, width), np.float32)
            self.read(frame, band, slice(first, last + 1), slice(0, width))
            return band[0] if is_band else band[0][:, rows - first]
        out = np.empty((channels, len(rows), width), np.float32)
        circle = np.empty((1, channels, 1, width), np.float32)
        for number, row in enumerate(rows):
            self.read(frame, circle, slice(row, row + 1), slice(0, width))
            out[:, number] = circle[0, :, 0]
        return out

    def _checked(self, fields: Any) -> Any:
        """The array of the fields, as given. Raises UsageError for anything else."""
        if hasattr(fields, "dtype"):
            packing = _read_packing(fields)
            if packing:
                told = ", ".join(f"{name} {value:g}" for name, value in packing.items())
                raise UsageError(f"{self.path}: '{DATASET}' is packed as {fields.dtype} ({told}): {UNPACK}")
        if getattr(fields, "ndim", 0) != 4 or fields.dtype.kind != "f":
            actual = f"has {fields.dtype} {fields.shape}" if hasattr(fields, "dtype") else "has none"
            raise UsageError(f"{self.path}: expected '{DATASET}' [time, channel, lat, lon] of floats; it {actual}")
        return fields

    def describe(self, channels: int, img_size: Sequence[int]) -> Description:
        """Of the first channels and of an image of img_size; what the file lacks is as in ERA5. Raises UsageError.

        Names of others become ours (u10m is u10), and a channel without units has those of its name.
        """
        _, all_channels, height, width = self.shape
        by_position = [c.name for c in CHANNELS] + [f"channel{i}" for i in range(len(CHANNELS), all_channels)]
        stored_names = self._stored(("channel",), all_channels, _strings, by_position[:all_channels])
        known = [channel_of(name) for name in stored_names[:channels]]
        units = self._stored(("channel_units",), all_channels, _strings, None)
        return Description(
            [channel.name for channel in known],
            units[:channels] if units is not None else [channel.units for channel in known],
            Grid(
                self._degrees(("latitude", "lat"), latitudes(height), 90)[: img_size[0]],
                self._degrees(("longitude", "lon"), longitudes(width), 360)[: img_size[1]],
            ),
        )

    def constant_field(self, name: str) -> np.ndarray:
        """A field that does not change with time, (H, W) float64. Raises UsageError where the file has none."""
        with reading(f"{self.path}: '{name}'"):
            fields = {k: a for k, a in self.arrays.items() if getattr(a, "shape", None) == self.shape[2:]}
            if name in fields and fields[name].dtype.kind in "fiu":
                return np.asarray(fields[name][:], np.float64)
        known = f"it has {', '.join(fields)}" if fields else "it has no such field"
        raise UsageError(f"{self.path}: no field '{name}' [lat, lon] of numbers; {known}")

    def _degrees(self, names: Sequence[str], otherwise: np.ndarray, largest: float) -> np.ndarray:
        values = self._stored(names, len(otherwise), lambda data: np.asarray(data[:], np.float64), otherwise)
        if not (np.abs(values) <= largest).all():  # nor NaN
            raise UsageError(f"{self.path}: '{names[0]}' is not in degrees, -{largest} to {largest}")
        return values

    def _stored(self, names: Sequence[str], length: int, read: Callable[[Any], Any], otherwise: Any) -> Any:
        """The result of `read` for the array of the first of these names; `otherwise` where there is none."""
        name = next((name for name in names if name in self.arrays), None)
        if name is None:
            return otherwise
        with reading(f"{self.path}: '{name}'"):
            array = self.arrays[name]
            if array.shape != (length,):
                raise UsageError(f"{self.path}: '{name}' has shape {array.shape}, the fields need ({length},)")
            return read(array)


def _read_packing(fields: Any) -> dict[str, float]:
    """{attribute: value} of what turns the stored numbers into values; a neutral factor or offset is none."""
    found = {}
    for name, neutral in NEUTRAL_PACKING.items():
        value = float(np.asarray(fields.attrs.get(name, neutral)).item())
        if value != neutral:
            found[name] = value
    return found


def _strings(array):
    """The texts of an array, as a list. Raises TypeError for one that holds none."""
    values = array.asstr()[:] if hasattr(array, "asstr") else array[:]
    if values.dtype.kind not in "UTOS":
        raise TypeError(f"{values.dtype} is not text")
    return [text.decode() if isinstance(text, bytes) else str(text) for text in values.tolist()]


def file_times(file: YearFile) -> np.ndarray:
    """Dates of the frames of a year, (T,) datetime64[s] in UTC. Raises UsageError where they are not known."""
    return known_axis(read_time_axis(file), file.path).dates
