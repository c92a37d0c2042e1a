"""HDF5 files, which NetCDF 4 files are too: opened without locks, checked to hold what was written, read as sources.

Parallel file systems (Lustre, NFS) may have no locks, and answer with an error. Readers need none, since a file has its
name only when it is whole; and a file that is written has a name of its own.

Of a source only the names, dimensions and the few attributes that give values a meaning are read when it is opened. For
480 files, one for each month, this takes seconds; it takes half a minute if each becomes a whole xarray.Dataset.
"""

import functools
import math
import os
import resource
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
import xarray
from xarray.backends import BackendArray, CachingFileManager, FileManager
from xarray.backends.lru_cache import LRUCache
from xarray.core import indexing

from utils.errors import FULL_DISK, UsageError
from weather.sources.file_formats import BEGINNING_BYTES, describe_file
from weather.sources.source import Selection, Source

WITHOUT_LOCKS = {"locking": False}  # for h5py, and for xarray's driver_kwds
ROOM_BESIDE_VALUES = 2**20  # bytes, for names, attributes and coordinates
SIGNATURE = b"\x89HDF\r\n\x1a\n"
USER_BLOCKS = (0, *(2**power for power in range(9, 17)))  # where HDF5's signature may stand: 0, 512, 1024, ...
OTHER_FIELDS = {  # by the first bytes of a file: fields that a year is not made of, but can be made from
    b"CDF": "it is NetCDF 3, not HDF5: turn it into NetCDF 4 with `nccopy -k nc4 IN OUT`",
    b"GRIB": "it is GRIB: convert it with `python -m weather.prepare_era5`",
}
FILTERS = {  # by their registered numbers: those that hdf5plugin brings
    307: "bzip2",
    32001: "Blosc",
    32004: "LZ4",
    32008: "Bitshuffle",
    32013: "ZFP",
    32015: "Zstandard",
    32017: "SZ",
    32024: "SZ3",
    32026: "Blosc2",
}
MOST_OPEN = 1024  # files
# The attributes that values are decoded or judged by, those that axes are known by, and those that link dimensions to
# variables.
ATTRIBUTES = (
    "units",
    "calendar",
    "standard_name",
    "scale_factor",
    "add_offset",
    "_FillValue",
    "missing_value",
    "_Unsigned",
    "valid_range",
    "valid_min",
    "valid_max",
)


def open_hdf5(path: Path | str, mode: str = "r") -> h5py.File:
    """Open a file of HDF5; make_hdf5 makes one. Raises OSError."""
    return h5py.File(path, mode, **WITHOUT_LOCKS)


def make_hdf5(path: Path | str, size: int) -> h5py.File:
    """Make a file of HDF5 for `size` bytes of values, with their space on the disk. Raises OSError where there is less.

    HDF5 must not meet a full disk later: it then ends the process when it closes the file.
    """
    reserve(path, size + ROOM_BESIDE_VALUES)
    file = open_hdf5(path, "w")
    reserve(path, size)  # HDF5 has emptied it
    return file


def reserve(path: Path | str, size: int) -> None:
    """Give a file its space on the disk; it is made where it is not there. Raises OSError where there is less.

    Where a system or a file system cannot reserve space, nothing happens.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # a file that is appended to cannot be reserved on NFS
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in FULL_DISK:
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def is_hdf5(path: Path | str) -> bool:
    """Tell whether a file is HDF5, by its signature, which a block of the user may precede. Raises OSError."""
    with open(path, "rb") as file:
        # The signature stands behind a block of the user, whose size is a power of two.
        for position in USER_BLOCKS:
            file.seek(position)
            if file.read(len(SIGNATURE)) == SIGNATURE:
                return True
    return False


def check_format(path: Path) -> None:
    """Raise UsageError, saying what it is, for a file that is not HDF5."""
    if is_hdf5(path):
        return
    with open(path, "rb") as file:
        beginning = file.read(BEGINNING_BYTES)
    for start, what in OTHER_FIELDS.items():
        if beginning.startswith(start):
            raise UsageError(f"{path}: {what}")
    raise UsageError(f"{path}: is not HDF5: {describe_file(beginning)}")


def check_filters(fields: h5py.Dataset, where: str) -> None:
    """Raise UsageError for a compression that this HDF5 lacks. where: the file and the dataset, for the message."""
    properties = fields.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(number)
        if h5py.h5z.filter_avail(code):
            continue
        # Filters that we do not know may tell their own name.
        own_name = name.decode(errors="replace")
        title = FILTERS.get(code, own_name or "unknown")
        package = "hdf5plugin" if code in FILTERS else "hdf5plugin, if it has it"
        raise UsageError(
            f"{where} is compressed with filter {code} ({title}), which this HDF5 lacks: rewrite it without "
            f"(h5repack -f NONE IN OUT), or `pip install {package}` and set HDF5_PLUGIN_PATH to its plugins"
        )


def check_written(
    fields: h5py.Dataset,
    where: str,
    above: tuple[str, ...] = (),
) -> None:
    """Raise UsageError where parts of a dataset were never written: HDF5 would read zeros there, without a word.

    Virtual datasets are followed to the files that they are made of. where: the file and the dataset, for the message.
    above: the files that this one is a source of.
    """
    if fields.is_virtual:
        _check_virtual(fields, where, above)
        return
    if fields.external:
        _check_external(fields, where)
        return
    # A contiguous dataset has all of its space or none.
    if fields.chunks is None:
        status = fields.id.get_space_status()
        if status == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
            raise UsageError(f"{where}: all of it was never written: the file was not finished")
        return
    counts = []  # chunks along each axis, rounded up
    for length, chunk in zip(fields.shape, fields.chunks, strict=True):
        counts.append(-(-length // chunk))
    total = math.prod(counts)
    written = fields.id.get_num_chunks()
    if written < total:
        raise UsageError(f"{where}: {total - written} of {total} chunks were never written: the file was not finished")


def _check_virtual(
    fields: h5py.Dataset,
    where: str,
    above: tuple[str, ...],
) -> None:
    """Look at every source of a virtual dataset: its file, its dataset, its size, and that all of it is mapped."""
    file_name = str(Path(fields.file.filename).resolve())
    if file_name in above:
        raise UsageError(f"{where} is virtual, and its sources lead back to itself")
    # Points of the dataset that some source fills.
    mapped = 0
    for source in fields.virtual_sources():
        # A selection without an end grows with its sources, whose names are a pattern: p%b.h5.
        is_endless = "%" in source.file_name or "%" in source.dset_name
        mapped += math.prod(fields.shape) if is_endless else source.vspace.get_select_npoints()
        if source.file_name == ".":  # the file itself
            continue
        path = _find_source(fields, source.file_name.replace("%b", "0"), where)
        with open_hdf5(path) as file:
            part = file.get(source.dset_name.replace("%b", "0"))
            if not isinstance(part, h5py.Dataset):
                raise UsageError(f"{where} is virtual, and its source {path} has no dataset '{source.dset_name}'")
            if not is_endless:
                _check_size(part, source, f"{where} is virtual, and its source {path}")
            check_written(part, f"{where}, made of {path}", (*above, file_name))
    points = math.prod(fields.shape)
    if mapped < points:
        raise UsageError(
            f"{where} is virtual, and {1 - mapped / points:.0%} of it has no source: HDF5 reads zeros there"
        )


def _find_source(fields: h5py.Dataset, name: str, where: str) -> Path:
    """The file of a source, where HDF5 looks for it: beside the file, past links too, and in the working folder."""
    file = Path(fields.file.filename)
    # HDF5 looks in these folders, in this order.
    folders = [file.parent, file.resolve().parent, Path()]
    bare_name = Path(name).name
    candidates = [folder / name for folder in folders]
    candidates += [folder / bare_name for folder in folders[:2]]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UsageError(f"{where} is virtual, and its source {name} is not there: HDF5 reads zeros in its place")


def _check_size(part: h5py.Dataset, source: Any, where: str) -> None:
    """Raise UsageError where a source is smaller than what is taken of it: it was not finished, or made anew."""
    # A selection beyond the end of a source is read as zeros.
    taken = source.vspace.get_select_npoints()
    is_short = taken > part.size
    if source.src_space.get_select_type() != h5py.h5s.SEL_ALL:
        _, last = source.src_space.get_select_bounds()
        is_short |= any(length <= number for length, number in zip(part.shape, last, strict=False))
    if is_short:
        raise UsageError(f"{where} has shape {part.shape}, and {taken} values are taken of it: was it not finished?")


def _check_external(fields: h5py.Dataset, where: str) -> None:
    """Look at the raw files that hold the values of a dataset. HDF5 looks for them in the working folder."""
    beside = Path(fields.file.filename).parent
    # HDF5 itself reads this variable.
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", str(beside))
    size = 0
    for name, offset, length in fields.external:
        path = Path(prefix, name)
        if not path.is_file():
            is_beside = (beside / name).is_file()
            remedy = "set HDF5_EXTFILE_PREFIX='${ORIGIN}' to have it read from beside this file" if is_beside else ""
            raise UsageError(f"{where} lies in the file {path}, which is not there{remedy and ': '}{remedy}")
        available = max(0, path.stat().st_size - offset)
        size += available if length == h5py.h5f.UNLIMITED else min(length, available)
    if size < fields.nbytes:
        raise UsageError(f"{where} lies in other files, which hold {size} of its {fields.nbytes} bytes")


# ---- as a source


class _Hdf5Array(BackendArray):
    """A dataset of a file that may be closed between two reads."""

    def __init__(self, files: FileManager, dataset: h5py.Dataset):
        self.files = files
        self.path = dataset.name
        self.shape = dataset.shape
        self.dtype = dataset.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.OUTER_1VECTOR
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        return self.files.acquire()[self.path][key]


@functools.cache
def _open_files() -> LRUCache[Any, h5py.File]:
    """The files that are open: those that were read last, and no more than half of what this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(MOST_OPEN, limit // 2) if limit > 0 else MOST_OPEN
    return LRUCache(most, on_evict=lambda _, file: file.close())


def open_hdf5_source(address: str, path: Path, group: str = "") -> Source:
    """The Source of a file, or of a group in it; dimensions of the groups above are its own too.

    Raises OSError for what is no HDF5, KeyError for a group that is not there.
    """
    files = CachingFileManager(open_hdf5, str(path), cache=_open_files())
    file = files.acquire()
    folder = file[group] if group else file
    if not isinstance(folder, h5py.Group):
        raise KeyError(f"'{group}' is not a group")

    folder_path = folder.name
    variables: dict[str, xarray.Variable] = {}
    place = folder
    while True:
        # What lies nearer hides what lies above.
        variables = read_variables(files, place) | variables
        if place.name == "/":
            break
        place = place.parent

    def check(name: str, selection: Selection) -> None:
        # HDF5 knows what was written of the whole dataset, so the selection does not matter.
        path = variables[name].encoding["path"]
        dataset = files.acquire()[path]
        check_filters(dataset, f"{address}: {name}")
        check_written(dataset, f"{address}: {name}")

    def find_groups() -> list[str]:
        found = []

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Group) and read_variables(files, item):
                found.append(f"{address}/{name}")

        files.acquire()[folder_path].visititems(visit)
        return found

    return Source(address, variables, check, find_groups)


def read_variables(files: FileManager, folder: h5py.Group) -> dict[str, xarray.Variable]:
    """The arrays of numbers and texts in a group. files: opens its file again."""
    variables = {}
    for name, dataset in folder.items():
        is_array = isinstance(dataset, h5py.Dataset) and dataset.shape is not None
        # NetCDF writes placeholders for dimensions without values.
        if is_array and not _text(dataset.attrs.get("NAME", "")).startswith("This is a netCDF dimension"):
            variables[name] = _variable(files, name, dataset)
    return variables


def _variable(files: FileManager, name: str, dataset: h5py.Dataset) -> xarray.Variable:
    dimensions = _dimension_names(name, dataset)
    # Reading all attributes would take longer than all else.
    attributes = {}
    for key in ATTRIBUTES:
        value = dataset.attrs[key] if key in dataset.attrs else h5py.Empty("f4")  # get() is slow for what is not there
        if not isinstance(value, h5py.Empty):
            attributes[key] = _plain(value)
    # A chunk is decompressed as a whole, so readers want to know its size.
    chunks = dict(zip(dimensions, dataset.chunks or (), strict=False))
    array = indexing.LazilyIndexedArray(_Hdf5Array(files, dataset))
    return xarray.Variable(dimensions, array, attributes, {"preferred_chunks": chunks, "path": dataset.name})


def _dimension_names(name: str, dataset: h5py.Dataset) -> list[str]:
    """The name of each dimension: `name` of a scale, else that of its scale, else its label, else 'dim0', 'dim1'."""
    # A coordinate is a dimension scale, which has the name of its dimension.
    is_scale = dataset.attrs.get("CLASS", b"") == b"DIMENSION_SCALE"
    if is_scale and dataset.ndim == 1:
        return [name]
    return [_dimension_name(dimension) or f"dim{number}" for number, dimension in enumerate(dataset.dims)]


def _dimension_name(dimension: Any) -> str:
    """The name of the scale that is attached to it, else its label; "" where there is none."""
    try:
        scale = dimension[0] if len(dimension) else None
    except (RuntimeError, ValueError):  # a reference that leads nowhere
        scale = None
    # Where a scale was deleted, the reference may lead to a newer array in its place.
    if scale is None or not scale.is_scale:
        return str(dimension.label)
    # The scale may lie in a group above: its own name is the last part of its path.
    return PurePosixPath(scale.name or "").name


def _plain(value: Any) -> Any:
    """An attribute as xarray decodes it: text as str, also where it is bytes or an array of one, and scalars."""
    # h5py gives numbers as arrays of one, and text of fixed length as bytes.
    array = np.asarray(value)
    if array.size != 1:
        return value
    only = array.reshape(-1)[0]
    return _text(only) if isinstance(only, (bytes, str)) else only


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
