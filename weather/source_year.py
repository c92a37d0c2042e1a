"""A year of a store in the names, units and grid of others (ARCO-ERA5, WeatherBench 2), read as the converter reads it.

Its frames are our 20 channels at 00, 06, 12 and 18 UTC, rows from the north, columns from Greenwich eastward.
"""

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from utils.errors import UsageError, first_line, reading
from weather.channels import CHANNELS
from weather.era5 import Era5
from weather.era5_store import Store
from weather.grid import HOUR
from weather.held_arrays import Frames, HeldArray
from weather.year_data import YearFile

EPOCH = np.datetime64("1970-01-01", "s")


class OpenedStore(Store):
    """A Store over a dataset that is open already."""

    def __init__(self, address: str, data: xarray.Dataset):
        self.address = address
        with reading(f"{address}: its coordinates"):
            self._place(data)


def open_source(address: str, store: Any = None) -> Store:
    """Open a store with ERA5's variables. store: as zarr reads it, where it is elsewhere. Raises UsageError."""
    if store is None:
        return Store(address)
    try:
        with warnings.catch_warnings(category=RuntimeWarning, action="ignore"):  # metadata not consolidated: slower
            data = xarray.open_zarr(store, chunks=None, use_zarr_fill_value_as_mask=False)
    except ValueError as error:
        raise UsageError(f"{address}: cannot be opened as Zarr: {first_line(error)}") from error
    return OpenedStore(address, data)


class SourceYear(YearFile):
    """A year of a store of sources. year: None takes all that it has."""

    def __init__(self, path: Path, store: Store, year: int | None = None):
        self.path = path
        self.store = store
        self.own = threading.local()  # what the converter keeps of one frame for the next belongs to one thread
        era5 = self._era5()
        self.dates = self._dates(year)
        with reading(str(path)):
            era5.check(self.dates)
        grid = era5.grid
        self.shape = (len(self.dates), len(CHANNELS), len(grid.latitude), len(grid.longitude))
        self.fields = Frames(self)
        self.size = self.fields.nbytes
        hours = (self.dates - EPOCH) / HOUR
        self.arrays = {
            "fields": self.fields,
            "time": HeldArray(hours, {"units": "hours since 1970-01-01"}),
            "channel": HeldArray(np.array([channel.name for channel in CHANNELS])),
            "channel_units": HeldArray(np.array([channel.units for channel in CHANNELS])),
            "latitude": HeldArray(grid.latitude, {"units": "degrees_north"}),
            "longitude": HeldArray(grid.longitude, {"units": "degrees_east"}),
            **_constant_fields(store),
        }

    def close(self) -> None:
        """Nothing is held open."""

    def _era5(self) -> Era5:
        """The store as this thread reads it."""
        if not hasattr(self.own, "era5"):
            self.own.era5 = Era5([self.store])
        return self.own.era5

    def _dates(self, year: int | None) -> np.ndarray:
        """The 6-hourly instants that the stores have, (T,) datetime64[s]. Raises UsageError where there are none."""
        times = np.asarray(self.store.times).astype("datetime64[s]")
        since_midnight = times - times.astype("datetime64[D]")
        dates = times[since_midnight % (6 * HOUR) == 0 * HOUR]
        if year is not None:
            dates = dates[dates.astype("datetime64[Y]").astype(int) == year - 1970]
        if len(dates) == 0:
            raise UsageError(f"{self.path}: no frame at 00, 06, 12 or 18 UTC: its times are {times[0]} to {times[-1]}")
        return dates

    def _read(self, frame: int, out: np.ndarray, rows: slice, columns: slice) -> None:
        frames = self._era5().frames(self.dates[frame : frame + len(out)])  # (T, C, H, W)
        out[:] = frames[:, : out.shape[1], rows, columns]


def _constant_fields(store: Store) -> dict[str, HeldArray]:
    """The fields of latitude and longitude alone, which forcings may be, turned as the frames are."""
    found: dict[str, HeldArray] = {}
    for name, variable in store.data.data_vars.items():
        if set(variable.dims) == {"latitude", "longitude"}:
            values = variable.transpose("latitude", "longitude").values
            found[str(name)] = HeldArray(np.roll(values, -store.first_column, axis=-1))
    return found
