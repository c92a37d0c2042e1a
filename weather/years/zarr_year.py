"""A year in a Zarr store, format 2 or 3: the array `fields` [time, channel, lat, lon], or the part of it of one year.

A chunk a frame reads fastest. Any others are read too: for each frame, all chunks that it touches. The chunks are read
by weather.sources.chunk_reader; zarr itself reads only what is encoded in an unusual way.
"""

import warnings
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.fields.grid import years_of
from weather.years.year_data import YearFile, file_times
from weather.years.zarr_store import ZarrStore

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text


class ZarrYear(YearFile):
    """A year in an open store. year: the one to take of several; None: all frames."""

    def __init__(self, path: Path, store: ZarrStore, year: int | None = None):
        self.path = path
        self.arrays = store.arrays
        self._check_fields()
        self.stored = store.stored
        self.chunks = store.chunks
        self.shape = self.stored.shape
        self.first = 0  # of the frames of the store
        if year is not None:
            if store.dates is None:  # the same for every year
                store.dates = file_times(self)
            self._take(year, store.dates)
        share = self.shape[0] / self.stored.shape[0]
        self.size = int(share * store.size)

    def close(self) -> None:
        """Nothing is held open."""

    def _take(self, year: int, dates: np.ndarray) -> None:
        """Take the frames of one year. Raises UsageError where there are none, or others between them."""
        chosen = np.flatnonzero(years_of(dates) == year)
        if len(chosen) == 0:
            raise UsageError(f"{self.path}: no frame of {year}: it has {dates.min()} to {dates.max()}")
        self.first = int(chosen[0])
        end = int(chosen[-1]) + 1
        if end - self.first != len(chosen):
            raise UsageError(f"{self.path}: frames of other years lie between those of {year}: sort it by time")
        self.shape = (len(chosen), *self.stored.shape[1:])
        # The other arrays do not change with time, and are those of the store.
        if "time" in self.arrays:
            self.arrays = {**self.arrays, "time": self.arrays["time"][self.first : end]}

    def _read(
        self,
        frame: int,
        out: np.ndarray,
        rows: slice,
        columns: slice,
    ) -> None:
        frames, channels = out.shape[:2]
        first = self.first + frame
        selection = (slice(first, first + frames), slice(0, channels), rows, columns)
        is_known = self.chunks.layout.codecs is not None
        if is_known:
            self.chunks.read(selection, out)
        else:
            out[:] = self.stored[selection]
