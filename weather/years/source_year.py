"""A year of a store in the names, units and grid of others (ARCO-ERA5, WeatherBench 2), read as the converter reads it.

Its frames are our 20 channels at 00, 06, 12 and 18 UTC, rows from the north, columns from Greenwich eastward.
"""

import math
import threading
from pathlib import Path

import numpy as np
import xarray

from utils.errors import UsageError, reading
from weather.fields.channels import CHANNELS
from weather.fields.grid import HOUR, years_of
from weather.sources.data import Era5
from weather.sources.store import Store
from weather.years.year_data import YearFile

EPOCH = np.datetime64("1970-01-01", "s")


class SourceReader:
    """A store as the converter reads it, by several threads, for all of its years."""

    def __init__(self, store: Store):
        self.store = store
        # What the converter keeps of one frame for the next must not be shared by threads.
        self.own = threading.local()
        # Our own year files have these arrays too.
        latitude, longitude = self.era5.grid
        names = np.array([channel.name for channel in CHANNELS])
        units = np.array([channel.units for channel in CHANNELS])
        self.arrays = _constant_fields(store)
        self.arrays |= {
            "channel": xarray.Variable("channel", names),
            "channel_units": xarray.Variable("channel", units),
            "latitude": xarray.Variable("latitude", latitude, {"units": "degrees_north"}),
            "longitude": xarray.Variable("longitude", longitude, {"units": "degrees_east"}),
        }

    @property
    def era5(self) -> Era5:
        """The store as this thread reads it."""
        if not hasattr(self.own, "era5"):
            # Samples come in any order: what lies beside a frame is not wanted next.
            self.own.era5 = Era5([self.store], kept_bytes=0)
        return self.own.era5


class SourceYear(YearFile):
    """A year of a store of sources. year: None takes all that it has."""

    def __init__(self, path: Path, reader: SourceReader, year: int | None = None):
        self.path = path
        self.reader = reader
        self.dates = self._dates(year)
        # Variables, levels and dates that are missing are named now, and not in the middle of a run.
        with reading(str(path)):
            reader.era5.check(self.dates)
        latitude, longitude = reader.era5.grid
        self.shape = (len(self.dates), len(CHANNELS), len(latitude), len(longitude))
        self.size = 4 * math.prod(self.shape)
        hours = (self.dates - EPOCH) / HOUR
        time = xarray.Variable("time", hours, {"units": "hours since 1970-01-01"})
        self.arrays = reader.arrays | {"time": time}

    def close(self) -> None:
        """Nothing is held open."""

    def _dates(self, year: int | None) -> np.ndarray:
        """The 6-hourly instants that the store has, (T,) datetime64[s]. Raises UsageError where there are none."""
        # Hourly stores have more; nothing is averaged over time.
        times = np.asarray(self.reader.store.times).astype("datetime64[s]")
        since_midnight = times - times.astype("datetime64[D]")
        is_wanted = since_midnight % (6 * HOUR) == 0 * HOUR
        if year is not None:
            is_wanted &= years_of(times) == year
        dates = times[is_wanted]
        if len(dates) == 0:
            there = f"its times are {times[0]} to {times[-1]}"
            raise UsageError(f"{self.path}: no frame at 00, 06, 12 or 18 UTC: {there}")
        return dates

    def _read(
        self,
        frame: int,
        out: np.ndarray,
        rows: slice,
        columns: slice,
    ) -> None:
        # The chunks of published stores span the globe: a window costs as much as all of it.
        dates = self.dates[frame : frame + len(out)]
        frames = self.reader.era5.frames(dates)  # (T, 20, H, W)
        channels = out.shape[1]
        out[:] = frames[:, :channels, rows, columns]


def _constant_fields(store: Store) -> dict[str, xarray.Variable]:
    """The fields of latitude and longitude alone, which forcings may be, turned as the frames are."""
    found = {}
    order = [store.axes["latitude"], store.axes["longitude"]]
    rows = slice(None, None, -1 if store.is_south_first else 1)
    columns = np.roll(np.arange(len(store.longitude)), -store.first_column)
    for name, variable in store.source.variables.items():
        if set(variable.dims) == set(order):
            turned = variable.isel(dict(zip(order, (rows, columns), strict=True)))  # not read yet
            found[name] = turned.transpose(*order)
    return found
