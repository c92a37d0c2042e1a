"""Open a source of real data, whatever its format is: Zarr, NetCDF 4 and 3, HDF5, GRIB; or say what it is instead."""

import importlib.util
import logging
from pathlib import Path

import xarray

from utils.errors import UsageError, first_line
from utils.files import check_file
from weather.sources.file_formats import BEGINNING_BYTES, describe_file, has_zarr_metadata
from weather.sources.hdf5 import is_hdf5, open_hdf5_source
from weather.sources.source import Source, reading_quietly

INSTALL = "pip install -r requirements/era5.txt"
NOT_OPENED = "cannot be opened as Zarr or NetCDF"
IN_FOLDERS = (  # endings of what may lie in a folder that is given as a source
    (".nc", ".nc4", ".h5", ".hdf5"),
    (".grib", ".grb", ".grib2", ".grb2", ".grib1", ".grb1"),
    (".zarr",),
)


def open_source(address: str) -> list[Source]:
    """The Sources at an address: one for a store, a file or a group in it (FILE.nc/group); of GRIB one a variable.

    Raises UsageError, saying what the thing is and what to do, if it cannot be opened.
    """
    if "://" in address:
        return [_open_zarr(address)]
    path = Path(address)
    if path.is_dir():
        _check_zarr_folder(path, address)
        return [_open_zarr(address)]

    # What follows the name of a file is a group inside it.
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing == path:
        check_file(path)
    if existing.is_file():
        group = str(path.relative_to(existing)) if existing != path else ""
        with reading_quietly(f"{address}:"):
            return _open_file(address, existing, group)
    is_group = has_zarr_metadata(existing)
    where = f": the store {existing} has no such group" if is_group else ""
    raise UsageError(f"{address}: no such file or folder{where}")


def _open_zarr(address: str) -> Source:
    """Open a Zarr store. What it lacks is said by many libraries, each with errors of its own."""
    if importlib.util.find_spec("zarr") is None:
        raise UsageError(f"{address}: a Zarr store needs the package zarr: {INSTALL}")
    from weather.sources.zarr_source import open_zarr_source  # an optional library, and slow to import

    try:
        with reading_quietly(address):
            return open_zarr_source(address)
    except UsageError as error:
        cause = error.__cause__
        if cause is None:
            raise
        raise UsageError(f"{address}: cannot be opened as Zarr: {first_line(cause)}") from cause


def _check_zarr_folder(folder: Path, address: str) -> None:
    """Raise UsageError for a folder of files or stores in place of a store."""
    if has_zarr_metadata(folder):
        return
    # The kind of file that lies in it, if there is one that we read.
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for endings in IN_FOLDERS:
        inside = [path for path in paths if path.suffix.lower() in endings]
        if inside:
            pattern = f"*{inside[0].suffix}"
            give = folder / pattern
            raise UsageError(f"{address}: is a folder of {len(inside)} {pattern}: give {give} in its place")
    listed = ", ".join(path.name for path in paths[:4]) or "nothing"
    raise UsageError(f"{address}: {NOT_OPENED}: the folder has no zarr.json or .zgroup; it holds {listed}")


def _open_file(address: str, file: Path, group: str) -> list[Source]:
    if is_hdf5(file):
        source = _open_hdf5(address, file, group)
        return [source]
    if group:
        raise UsageError(f"{address}: {file} is not NetCDF 4, and has no groups")
    with open(file, "rb") as opened:
        beginning = opened.read(BEGINNING_BYTES)
    if beginning.startswith(b"GRIB"):
        return _open_grib(address)
    if beginning.startswith((b"CDF\x01", b"CDF\x02")):
        source = _open_netcdf3(address)
        return [source]
    what = describe_file(beginning)
    raise UsageError(f"{address}: {NOT_OPENED}: {what}")


def _open_hdf5(address: str, file: Path, group: str) -> Source:
    try:
        return open_hdf5_source(address, file, group)
    except KeyError:
        groups = open_hdf5_source(str(file), file).find_groups()
        has = f"it has {', '.join(groups)}" if groups else "it has no groups"
        raise UsageError(f"{address}: no such group in {file}: {has}") from None
    except OSError as error:
        what = first_line(error)
        remedy = ": download it again" if "truncated" in what else ""
        raise UsageError(f"{address}: cannot be opened as NetCDF 4: {what}{remedy}") from error


def _open_netcdf3(address: str) -> Source:
    try:
        opened = xarray.open_dataset(address, engine="scipy", chunks=None, decode_cf=False)
    except OSError:
        raise
    except Exception as error:  # whatever numpy says of an array that does not fill its shape
        size = Path(address).stat().st_size
        raise UsageError(f"{address}: is NetCDF 3, cut off after {size} bytes: download it again") from error
    return _as_source(address, opened)


def _open_grib(address: str) -> list[Source]:
    """A Source for each variable of a GRIB file; cfgrib leaves no index beside it."""
    try:
        from cfgrib.xarray_store import open_variable_datasets
    except Exception as error:  # the package is not there, or the library of ecCodes
        raise UsageError(
            f"{address}: is GRIB, which needs the package cfgrib ({first_line(error)}): {INSTALL}"
        ) from None

    logger = logging.getLogger("cfgrib")
    logger.setLevel(logging.CRITICAL)  # what it says there, it raises too
    options = {"indexpath": "", "errors": "raise"}
    try:
        datasets = open_variable_datasets(address, backend_kwargs=options)
    except Exception as error:  # of cfgrib and of ecCodes
        what = first_line(error)
        raise UsageError(f"{address}: cannot be read as GRIB (cut off, or damaged?): {what}") from error
    if not datasets:
        raise UsageError(f"{address}: is GRIB without a complete message: download it again")
    return [_as_source(address, dataset) for dataset in datasets]


def _as_source(address: str, opened: xarray.Dataset) -> Source:
    variables = {str(name): variable for name, variable in opened.variables.items()}
    return Source(address, variables)
