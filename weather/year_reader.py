"""Open years of data: HDF5 files, NetCDF 4 files, which are HDF5 too, and Zarr stores."""

import itertools
from pathlib import Path

from utils.errors import UsageError
from weather.year_data import YearFile

SUFFIXES = (".h5", ".nc", ".zarr")
STORE_FILES = ("zarr.json", ".zgroup")  # one of them makes a folder a Zarr store


def year_paths(folder: Path) -> list[Path]:
    """The years in a folder, by name; a Zarr store is the only one. Raises UsageError for a year in two formats."""
    if is_store(folder):
        return [folder]
    paths = sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)
    for path, other in itertools.pairwise(paths):
        if path.stem == other.stem:
            raise UsageError(f"{folder}: holds {path.name} and {other.name}: the same year twice? Move one away")
    return paths


def is_store(path: Path) -> bool:
    """Tell whether a path is a Zarr store."""
    return path.suffix == ".zarr" or any((path / name).exists() for name in STORE_FILES)


def open_year(path: Path) -> YearFile:
    """Open a year of data. Raises UsageError."""
    if is_store(path):
        from weather.zarr_year import ZarrYear  # an optional library, and slow to import

        return ZarrYear(path)
    from weather.hdf5_year import Hdf5Year  # a program that reads no data needs no h5py

    return Hdf5Year(path)
