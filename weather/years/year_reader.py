"""Open years of data: HDF5 files, NetCDF 4 files, which are HDF5 too, and Zarr stores, also of several years."""

import itertools
from pathlib import Path
from typing import cast, overload

from utils.errors import UsageError
from weather.sources.remote_store import RemoteOptions
from weather.years.store_path import SharedStore, StorePath, is_store
from weather.years.year_data import YearFile

SUFFIXES = (".h5", ".hdf5", ".nc", ".nc4", ".zarr")  # in any capitals


@overload
def year_paths(folder: Path) -> list[Path]: ...


@overload
def year_paths(folder: StorePath) -> list[StorePath]: ...


def year_paths(folder: Path | StorePath) -> list[Path] | list[StorePath]:
    """The years in a folder, by name; of a Zarr store those that its path names, or the store as a single one.

    Names that begin with a dot are passed over: macOS leaves ._1979.h5 beside 1979.h5.
    Raises UsageError for a year in two formats.
    """
    if isinstance(folder, StorePath):
        return folder.by_year()
    if is_store(folder):
        return [folder]
    visible = [path for path in folder.glob("*") if not path.name.startswith(".")]
    paths = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    for path, other in itertools.pairwise(paths):
        if path.stem == other.stem:
            raise UsageError(f"{folder}: holds {path.name} and {other.name}: the same year twice? Move one away")
    return paths


def open_year(path: Path | StorePath) -> YearFile:
    """Open a year of data: a file, a store, or one of a store's years. Raises UsageError."""
    if isinstance(path, Path) and not is_store(path):
        from weather.years.hdf5_year import Hdf5Year  # a program that reads no data needs no h5py

        return Hdf5Year(path)
    from weather.years.zarr_year import ZarrYear  # an optional library, and slow to import

    shared = path.store if isinstance(path, StorePath) else SharedStore(str(path), RemoteOptions())
    years = path.years if isinstance(path, StorePath) else ()
    year = years[0] if years else None
    named = cast(Path, path)  # as far as a year needs it: for its name, and for messages
    store = shared.open()
    if store.is_source:
        from weather.years.source_year import SourceYear

        return SourceYear(named, store.era5, year)
    return ZarrYear(named, store, year)
