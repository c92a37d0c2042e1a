"""Open a source of real data, whatever its format is: Zarr, NetCDF 4 and 3, HDF5, GRIB; or say what it is instead."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import xarray

from utils.errors import UsageError, first_line
from utils.files import check_file
from weather.era5_hdf5 import open_hdf5_source
from weather.era5_source import Source, reading_quietly
from weather.hdf5_file import is_hdf5

INSTALL = "pip install -r requirements-era5.txt"
ARCHIVE = "unpack it and give the files inside"
NO_DATA = "it is no data but the answer of a server: look at it, and download again"
OTHER_FORMATS = {  # by the first bytes of a file
    b"PK\x03\x04": f"it is a zip archive: {ARCHIVE}",
    b"\x1f\x8b": f"it is compressed with gzip: {ARCHIVE}",
    b"BZh": f"it is compressed with bzip2: {ARCHIVE}",
    b"\xfd7zXZ": f"it is compressed with xz: {ARCHIVE}",
    b"\x28\xb5\x2f\xfd": f"it is compressed with zstd: {ARCHIVE}",
    b"7z\xbc\xaf": f"it is a 7z archive: {ARCHIVE}",
    b"Rar!": f"it is a rar archive: {ARCHIVE}",
    b"\x0e\x03\x13\x01": "it is HDF4: convert it to NetCDF 4",
    b"CDF\x05": "it is NetCDF 3 of 64-bit data (CDF-5): convert it with nccopy -k nc4 IN OUT",
    b"PAR1": "it is Parquet: give Zarr, NetCDF or GRIB",
    b"%PDF": "it is a PDF",
}
TAR_PLACE = 257  # of the word "ustar" in a tar archive
GRIB_ENDS = (".grib", ".grb", ".grib2", ".grb2", ".grib1", ".grb1")
ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zmetadata", ".zattrs")


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
    file = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    if not file.is_file():
        if path.exists():
            check_file(path)
        raise UsageError(f"{address}: no such file or folder{_nearest_group(file, address)}")
    group = "" if file == path else str(path.relative_to(file))
    with reading_quietly(f"{address}:"):
        return _open_file(address, file, group)


def _open_zarr(address: str) -> Source:
    """Open a Zarr store. What it lacks is said by many libraries, each with errors of its own."""
    if importlib.util.find_spec("zarr") is None:
        raise UsageError(f"{address}: a Zarr store needs the package zarr: {INSTALL}")
    from weather.era5_zarr import open_zarr_source  # an optional library, and slow to import

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
    if any((folder / name).exists() for name in ZARR_METADATA):
        return
    for ends in ((".nc", ".nc4", ".h5", ".hdf5"), GRIB_ENDS, (".zarr",)):
        inside = sorted(path for path in folder.iterdir() if path.suffix.lower() in ends)
        if inside:
            suffix = inside[0].suffix
            raise UsageError(f"{address}: is a folder of {len(inside)} *{suffix}: give {address.rstrip('/')}/*{suffix}")
    names = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    raise UsageError(f"{address}: cannot be opened as Zarr or NetCDF: the folder has no {ZARR_METADATA[0]} or {ZARR_METADATA[1]}"
                     f"; it holds {listed or 'nothing'}")


def _nearest_group(folder: Path, address: str) -> str:
    """What to say of a missing folder inside a Zarr store, at the end of a message."""
    is_store = any((folder / name).exists() for name in ZARR_METADATA)
    return f": {folder} has no such group" if is_store else ""


def _open_file(address: str, file: Path, group: str) -> list[Source]:
    check_file(file)
    with open(file, "rb") as opened:
        beginning = opened.read(512)
    if is_hdf5(file):
        return [_open_hdf5(address, file, group)]
    if group:
        raise UsageError(f"{address}: {file} is not NetCDF 4, and has no groups")
    if beginning.startswith(b"GRIB") or file.suffix.lower() in GRIB_ENDS:
        return _open_grib(address)
    if beginning.startswith((b"CDF\x01", b"CDF\x02")):
        return [_open_netcdf3(address)]
    raise UsageError(f"{address}: cannot be opened as Zarr or NetCDF: {describe_other(beginning)}")


def describe_other(beginning: bytes) -> str:
    """What a file is that is no source, by its first bytes, as the end of a message."""
    if not beginning:
        return "it is empty: download it again"
    for start, what in OTHER_FORMATS.items():
        if beginning.startswith(start):
            return what
    if beginning[TAR_PLACE:].startswith(b"ustar"):
        return f"it is a tar archive: {ARCHIVE}"
    if not beginning.strip(b"\0"):
        return "it begins with zeros: it was not written or downloaded to the end"
    text = beginning[:60].decode(errors="replace")
    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    is_answer = text.lstrip().lower().startswith(("{", "[", "<"))
    return f"{NO_DATA + '; ' if is_answer else ''}it begins with {shown}"


def _open_hdf5(address: str, file: Path, group: str) -> Source:
    try:
        return open_hdf5_source(address, file, group)
    except KeyError:
        groups = open_hdf5_source(str(file), file).groups
        has = f"it has {', '.join(groups)}" if groups else "it has no groups"
        raise UsageError(f"{address}: no such group in {file}: {has}") from None
    except OSError as error:
        what = first_line(error)
        again = ": download it again" if "truncated" in what else ""
        raise UsageError(f"{address}: cannot be opened as NetCDF 4: {what}{again}") from error


def _open_netcdf3(address: str) -> Source:
    try:
        opened = xarray.open_dataset(address, engine="scipy", chunks=None, decode_cf=False)
    except OSError:
        raise
    except Exception as error:  # whatever numpy says of an array that does not fill its shape
        raise UsageError(
            f"{address}: is NetCDF 3, and cut off ({Path(address).stat().st_size} bytes): download it again"
        ) from error
    return Source(address, {str(name): variable for name, variable in opened.variables.items()})


def _open_grib(address: str) -> list[Source]:
    """A Source for each variable of a GRIB file; cfgrib leaves no index beside it."""
    try:
        import cfgrib
    except Exception as error:  # the package is not there, or the library of ecCodes
        raise UsageError(f"{address}: is GRIB, which needs the package cfgrib ({first_line(error)}): {INSTALL}") from None

    logging.getLogger("cfgrib").setLevel(logging.CRITICAL)  # what it says there, it raises too
    options: dict[str, Any] = {"indexpath": "", "errors": "raise"}
    try:
        datasets = cfgrib.open_variable_datasets(address, backend_kwargs=options)
    except Exception as error:  # of cfgrib and of ecCodes
        what = first_line(error)
        raise UsageError(f"{address}: cannot be read as GRIB (cut off, or damaged?): {what}") from error
    if not datasets:
        raise UsageError(f"{address}: holds no complete GRIB message: download it again")
    sources = []
    for dataset in datasets:
        sources.append(Source(address, {str(name): variable for name, variable in dataset.variables.items()}))
    return sources
