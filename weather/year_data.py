"""A year of data, however it is stored: it describes itself and fills buffers with frames.

A year holds `fields` [time, channel, lat, lon] in float32, and may hold `latitude`, `longitude`, `channel` and
`channel_units`. Plain reads of a file release Python's lock, so threads read in parallel straight into the caller's
buffer; compressed and chunked fields are read by the format's library.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UsageError, reading
from weather.channels import CHANNELS
from weather.grid import Grid, frame_times, latitudes, longitudes

DATASET = "fields"


class Description(NamedTuple):
    """Description of the numbers in a year file."""

    names: list[str]  # of the channels
    units: list[str]
    grid: Grid

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

    def _checked(self, fields: Any) -> Any:
        """The array of the fields, as given. Raises UsageError for anything else."""
        if getattr(fields, "ndim", 0) != 4 or fields.dtype.kind != "f":
            actual = f"has {fields.dtype} {fields.shape}" if hasattr(fields, "dtype") else "has none"
            raise UsageError(f"{self.path}: expected '{DATASET}' [time, channel, lat, lon] of floats; it {actual}")
        return fields

    def describe(self, channels: int, img_size: Sequence[int]) -> Description:
        """Of the first channels and of an image of img_size; what the file lacks is as in ERA5. Raises UsageError."""
        height, width = self.shape[2:]
        names = [c.name for c in CHANNELS] + [f"channel{i}" for i in range(len(CHANNELS), channels)]
        units = [c.units for c in CHANNELS] + [""] * max(0, channels - len(CHANNELS))
        return Description(
            self._stored("channel", self.shape[1], _strings, names)[:channels],
            self._stored("channel_units", self.shape[1], _strings, units)[:channels],
            Grid(
                self._degrees("latitude", latitudes(height), 90)[: img_size[0]],
                self._degrees("longitude", longitudes(width), 360)[: img_size[1]],
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

    def _degrees(self, name, otherwise, largest):
        values = self._stored(name, len(otherwise), lambda data: np.asarray(data[:], np.float64), otherwise)
        if not (np.abs(values) <= largest).all():  # nor NaN
            raise UsageError(f"{self.path}: '{name}' is not in degrees, -{largest} to {largest}")
        return values

    def _stored(self, name, length, read, otherwise):
        """The result of `read` for the array of this name and length; `otherwise` if it does not exist."""
        with reading(f"{self.path}: '{name}'"):
            if (array := self.arrays.get(name)) is None:
                return otherwise
            if array.shape != (length,):
                raise UsageError(f"{self.path}: '{name}' has shape {array.shape}, the fields need ({length},)")
            return read(array)


def _strings(array):
    """The texts of an array, as a list. Raises TypeError for one that holds none."""
    values = array.asstr()[:] if hasattr(array, "asstr") else array[:]
    if values.dtype.kind not in "UTOS":
        raise TypeError(f"{values.dtype} is not text")
    return [text.decode() if isinstance(text, bytes) else str(text) for text in values.tolist()]


def file_times(file: YearFile) -> np.ndarray:
    """Dates of the frames of a YearFile, (T,) datetime64[s]: its `time`, or 6-hourly in the year of its name."""
    with reading(f"{file.path}: its time"):
        stored, frames = file.arrays.get("time"), file.shape[0]
        if stored is not None and stored.shape == (frames,) and "units" in stored.attrs:
            attributes = {"units": str(np.asarray(stored.attrs["units"]).astype(str))}
            import xarray  # slow to import

            decoded = xarray.decode_cf(xarray.Dataset({"time": ("time", stored[:], attributes)}))["time"].values
            if decoded.dtype.kind != "M" or np.isnat(decoded).any():
                raise UsageError(f"{file.path}: its time in '{attributes['units']}' is not a date")
            return decoded.astype("datetime64[s]")
    if not (file.path.stem.isdecimal() and len(file.path.stem) == 4):
        raise UsageError(f"{file.path}: has no `time` with units, and its name is not a year: its dates are not known")
    return frame_times(int(file.path.stem), 0, frames)
