"""Open years of data: HDF5 files, NetCDF 4 files, which are HDF5 too, and Zarr stores."""

import itertools
from pathlib import Path

from utils.errors import UsageError
from weather.year_data import YearFile

SUFFIXES = (".h5", ".hdf5", ".nc", ".nc4", ".zarr")  # in any capitals


def year_paths(folder: Path) -> list[Path]:
    """The years in a folder, by name; a Zarr store is the only one. Raises UsageError for a year in two formats.

    Names that begin with a dot are passed over: macOS leaves ._1979.h5 beside 1979.h5.
    """
    if _is_store(folder):
        return [folder]
    visible = [path for path in folder.glob("*") if not path.name.startswith(".")]
    paths = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    for path, other in itertools.pairwise(paths):
        if path.stem == other.stem:
            raise UsageError(f"{folder}: holds {path.name} and {other.name}: the same year twice? Move one away")
    return paths


def _is_store(path: Path) -> bool:
    return path.suffix.lower() == ".zarr"


def open_year(path: Path) -> YearFile:
    """Open a year of data. Raises UsageError."""
    if _is_store(path):
        from weather.zarr_year import ZarrYear  # an optional library, and slow to import

        return ZarrYear(path)
    from weather.hdf5_year import Hdf5Year  # a program that reads no data needs no h5py

    return Hdf5Year(path)
