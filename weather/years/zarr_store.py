"""An open Zarr store, here or elsewhere: in our own layout, or with the variables of ERA5 in the names of others."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends.zarr import ZarrArrayWrapper
from xarray.core import indexing

from utils.errors import UsageError, reading, reported_as_usage_error
from weather.fields.channels import BY_NAME
from weather.sources.remote_store import RemoteObjects, RemoteOptions, is_address
from weather.sources.store import Store
from weather.years.source_year import SourceReader
from weather.years.year_data import DATASET

try:
    import zarr

    from weather.sources.chunk_reader import ChunkReader
    from weather.sources.chunk_sources import ChunkSource, LocalChunks
    from weather.sources.remote_zarr import RemoteZarrStore
    from weather.sources.zarr_layout import chunk_layout
    from weather.sources.zarr_source import open_zarr_source
except ImportError as error:
    raise UsageError(f"a Zarr store needs the package zarr ({error}): pip install -r requirements/era5.txt") from None

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
    def era5(self) -> SourceReader:
        """The store as the converter reads it. Raises UsageError."""
        with reported_as_usage_error(ValueError, f"{self.address}: cannot be opened as Zarr"):
            source = open_zarr_source(self.address, self.store if self.is_remote else None)
        return SourceReader(Store(source))


def _as_variable(array: Any) -> xarray.Variable:
    """An array of zarr as a variable, whose values are requested once, and not anew for every year of the store."""
    names = getattr(array.metadata, "dimension_names", None)  # format 3
    names = names or array.attrs.get("_ARRAY_DIMENSIONS")  # format 2, by xarray
    if not names or len(names) != array.ndim:
        names = [None] * array.ndim
    dims = [str(name or f"dim{number}") for number, name in enumerate(names)]
    lazy = indexing.LazilyIndexedArray(ZarrArrayWrapper(array))
    return xarray.Variable(dims, indexing.MemoryCachedArray(lazy), dict(array.attrs))
