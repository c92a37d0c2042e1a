"""An open Zarr store, format 2 or 3, here or elsewhere, and a year in it: `fields` [time, channel, lat, lon], or part.

A chunk a frame reads fastest. Any others are read too: for each frame, all chunks that it touches. The chunks are read
by weather.sources.chunk_reader; zarr itself reads only what is encoded in an unusual way.

A year of a store in the names, units and grid of others (ARCO-ERA5, WeatherBench 2) is read as the converter reads it.
Its frames are our 20 channels at 00, 06, 12 and 18 UTC, rows from the north, columns from Greenwich eastward.
"""

import math
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from utils.errors import UsageError, reading, reported_as_usage_error
from weather.fields.channels import BY_NAME, CHANNELS
from weather.fields.grid import HOUR, years_of
from weather.fields.time_axis import find_time
from weather.sources.data import Era5
from weather.sources.remote_store import RemoteObjects, RemoteOptions, is_address
from weather.sources.store import Store
from weather.years.year_data import DATASET, YearFile, describe_axes, file_times

try:
    import zarr

    from weather.sources.chunk_reader import ChunkReader
    from weather.sources.chunk_sources import ChunkSource, LocalChunks
    from weather.sources.remote_zarr import RemoteZarrStore
    from weather.sources.zarr_layout import chunk_layout
    from weather.sources.zarr_source import open_zarr_source
except ImportError as error:
    raise UsageError(f"a Zarr store needs the package zarr ({error}): pip install -r requirements/era5.txt") from None

warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")  # text
# Arrays that a store may have beside its fields: asked for one by one where a server does not list what it has.
COORDINATES = ("time", "channel", "channel_units", "latitude", "longitude", "lat", "lon")
USUAL_NAMES = (*COORDINATES, "orography", "land", "land_sea_mask")


class ZarrStore:
    """A store that is open. Several threads may read from it at a time.

    arrays: all that it holds by name, of our own layout. is_source: its variables are those of ERA5, under the names of
    others. Raises UsageError for what is no store.
    """

    def __init__(self, address: str, options: RemoteOptions):
        self.address = address
        self.is_remote = is_address(address)
        self.source: ChunkSource
        self.store: Any
        if self.is_remote:
            objects = RemoteObjects(address, options)
            self.source = objects
            self.store = RemoteZarrStore(objects)
        else:
            self.source = LocalChunks(Path(address))
            self.store = address
        self.arrays: dict[str, xarray.Variable] = {}
        self.stored: Any = None  # the fields
        self.dates: np.ndarray | None = None  # of all frames, (T,) datetime64[s], once a year was looked for
        try:
            with reading(f"{address}: Zarr"):
                # Metadata in one piece (consolidated) may be older than the store.
                self.group = zarr.open_group(self.store, mode="r", use_consolidated=False)
                self.is_source = self._has_sources()
        except UsageError:
            if self.is_remote and self.store.denied:
                raise UsageError(self.store.denied) from None
            raise

    def _has_sources(self) -> bool:
        """Find the arrays; tell whether they are ERA5's variables, and not ours."""
        # To look at all variables of a large store elsewhere would take a request for each.
        if self.is_remote and DATASET not in self.group:
            return True
        lists = not self.is_remote or self.store.supports_listing
        found: dict[str, Any] = dict(self.group.arrays()) if lists else {}
        known = [name for name in found if name.lower() in BY_NAME]
        if known and DATASET not in found and not self.is_remote:
            return True
        # A server that lists nothing is asked for the usual names.
        if self.is_remote and DATASET not in found:
            names = [DATASET, *(name for name in USUAL_NAMES if name in self.group)]
            found = {name: self.group[name] for name in names}
        self.stored = found.get(DATASET)
        self.arrays = {name: _as_variable(array) for name, array in found.items()}
        return False

    @cached_property
    def size(self) -> int:
        """Bytes of the fields; of a store that is elsewhere as if they were not compressed: to ask takes too long."""
        fields = self.stored
        return fields.nbytes if self.is_remote else fields.nbytes_stored()

    @cached_property
    def chunks(self) -> ChunkReader:
        """The reader of the fields. Raises UsageError where chunks of them were never written."""
        # Once for all years: it looks at the names of all chunks.
        with reading(f"{self.address}: Zarr"):
            reader = ChunkReader(chunk_layout(self.stored), self.source, self.address)
            reader.check_written(f"'{DATASET}'")
        return reader

    @cached_property
    def era5(self) -> Era5:
        """The store as the converter reads it, for all of its years. Raises UsageError."""
        with reported_as_usage_error(ValueError, f"{self.address}: cannot be opened as Zarr"):
            source = open_zarr_source(self.address, self.store if self.is_remote else None)
        return Era5([Store(source)])


def _as_variable(array: Any) -> xarray.Variable:
    """An array of zarr as a variable, whose values are requested once, and not anew for every year of the store."""
    names = getattr(array.metadata, "dimension_names", None)  # format 3
    names = names or array.attrs.get("_ARRAY_DIMENSIONS")  # format 2, by xarray
    if not names or len(names) != array.ndim:
        names = [None] * array.ndim
    dims = [str(name or f"dim{number}") for number, name in enumerate(names)]
    lazy = indexing.LazilyIndexedArray(ZarrArrayWrapper(array))
    return xarray.Variable(dims, indexing.MemoryCachedArray(lazy), dict(array.attrs))


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
        name = find_time(self)
        self.first = int(chosen[0])
        end = int(chosen[-1]) + 1
        if end - self.first != len(chosen):
            raise UsageError(f"{self.path}: frames of other years lie between those of {year}: sort it by time")
        self.shape = (len(chosen), *self.stored.shape[1:])
        # The other arrays do not change with time, and are those of the store.
        if name is not None:
            self.arrays = {**self.arrays, name: self.arrays[name][self.first : end]}

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


class SourceYear(YearFile):
    """A year in an open store of sources. year: None takes all that it has."""

    def __init__(self, path: Path, store: ZarrStore, year: int | None = None):
        self.path = path
        self.era5 = store.era5
        self.dates = self._dates(year)
        # Variables, levels and dates that are missing are named now, and not in the middle of a run.
        with reading(str(path)):
            self.era5.check(self.dates)
        grid = self.era5.grid
        self.shape = (len(self.dates), len(CHANNELS), len(grid.latitude), len(grid.longitude))
        self.size = 4 * math.prod(self.shape)
        # Our own year files have these arrays too.
        self.arrays = _constant_fields(self.era5.stores[0])
        for name, (values, units) in describe_axes(self.dates, CHANNELS, grid).items():
            self.arrays[name] = xarray.Variable(name, values, {"units": units})
        self.arrays["channel_units"] = xarray.Variable("channel", [channel.units for channel in CHANNELS])

    def close(self) -> None:
        """Nothing is held open."""

    def _dates(self, year: int | None) -> np.ndarray:
        """The 6-hourly instants that the store has, (T,) datetime64[s]. Raises UsageError where there are none."""
        # Hourly stores have more; nothing is averaged over time.
        times = self.era5.stores[0].times
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
        frames = self.era5.frames(dates)  # (T, 20, H, W)
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
            turned = variable.isel({order[0]: rows, order[1]: columns})  # not read yet
            found[name] = turned.transpose(*order)
    return found
