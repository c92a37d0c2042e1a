"""A year in a Zarr store, format 2 or 3: the array `fields` [time, channel, lat, lon], or the part of it of one year.

A chunk a frame reads fastest. Any others are read too: for each frame, all chunks that it touches. The chunks are read
by weather/chunk_reader.py; zarr itself reads only what is encoded in an unusual way.
"""

import warnings
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.held_arrays import Frames, HeldArray
from weather.year_data import DATASET, YearFile, file_times
from weather.zarr_store import ZarrStore

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text


class ZarrYear(YearFile):
    """A year in an open store. year: the one to take of several; None: all frames."""

    def __init__(self, path: Path, store: ZarrStore, year: int | None = None):
        self.path = path
        self.arrays = store.arrays
        self.stored = self._checked(self.arrays.get(DATASET))
        self.chunks = store.chunks
        self.first, frames = 0, self.stored.shape[0]
        self.shape = self.stored.shape
        self.fields = self.stored
        if year is not None:
            self._take(year, file_times(self))
            frames = self.shape[0]
        share = frames / self.stored.shape[0]
        size = self.stored.nbytes if store.is_remote else self.stored.nbytes_stored()
        self.size = int(share * size)

    def close(self) -> None:
        """Nothing is held open."""

    def _take(self, year: int, dates: np.ndarray) -> None:
        """Take the frames of one year. Raises UsageError where there are none, or others between them."""
        chosen = np.flatnonzero(dates.astype("datetime64[Y]").astype(int) == year - 1970)
        if len(chosen) == 0:
            raise UsageError(f"{self.path}: no frame of {year}: it has {dates.min()} to {dates.max()}")
        self.first, last = int(chosen[0]), int(chosen[-1])
        if last - self.first + 1 != len(chosen):
            raise UsageError(f"{self.path}: its dates do not increase")
        self.shape = (len(chosen), *self.stored.shape[1:])
        own = dict(self.arrays)
        if "time" in own:
            stored = own["time"]
            own["time"] = HeldArray(stored[self.first : last + 1], dict(stored.attrs))
        own[DATASET] = self.fields = Frames(self)
        self.arrays = own

    def _read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        first = self.first + frame
        selection = (slice(first, first + len(out)), slice(0, out.shape[1]), rows, columns)
        if self.chunks.layout.codecs is None:
            out[:] = self.stored[selection]
        else:
            self.chunks.read(selection, out)
