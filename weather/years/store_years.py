"""Open a year of a Zarr store: of our own layout, or of ERA5's variables in the names of others."""

from pathlib import Path
from typing import cast

from weather.sources.remote_store import RemoteOptions
from weather.years.store_path import SharedStore, StorePath
from weather.years.year_data import YearFile
from weather.years.zarr_year import ZarrYear


def open_store_year(path: Path | StorePath) -> YearFile:
    """Open a store, or one of its years. Raises UsageError."""
    shared = path.store if isinstance(path, StorePath) else SharedStore(str(path), RemoteOptions())
    years = path.years if isinstance(path, StorePath) else ()
    year = years[0] if years else None
    named = cast(Path, path)  # as far as a year needs it: for its name, and for messages
    store = shared.open()
    if store.is_source:
        from weather.years.source_year import SourceYear  # xarray is slow to import

        return SourceYear(named, store.era5, year)
    return ZarrYear(named, store, year)
