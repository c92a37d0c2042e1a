"""NetCDF 4 and HDF5 files as sources: opened without locks, and fast, as there may be a file for every month.

Only the names, dimensions and the few attributes that give values a meaning are read when a file is opened. For 480
files this takes seconds; it takes half a minute if each becomes a whole xarray.Dataset.
"""

import functools
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np
import xarray
from xarray.backends import BackendArray, CachingFileManager
from xarray.backends.lru_cache import LRUCache
from xarray.core import indexing

from weather.sources.hdf5_file import check_filters, check_written, open_hdf5
from weather.sources.source import Selection, Source

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


class _Hdf5Array(BackendArray):
    """A dataset of a file that may be closed between two reads."""

    def __init__(self, files: CachingFileManager, dataset: h5py.Dataset):
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
        for name, dataset in _datasets(place):
            # What lies nearer hides what lies above.
            if name not in variables:
                variables[name] = _variable(files, name, dataset)
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
        return _groups(files.acquire()[folder_path], address)

    return Source(address, variables, check, find_groups)


def _datasets(folder: h5py.Group) -> Iterator[tuple[str, h5py.Dataset]]:
    """The arrays of numbers in a group, less the placeholders that NetCDF writes for dimensions without values."""
    for name, dataset in folder.items():
        is_array = isinstance(dataset, h5py.Dataset) and dataset.shape is not None
        if not is_array:
            continue
        # NetCDF marks a dimension without a variable by this name.
        note = _text(dataset.attrs.get("NAME", ""))
        if not note.startswith("This is a netCDF dimension but not a netCDF variable"):
            yield name, dataset


def _variable(files: CachingFileManager, name: str, dataset: h5py.Dataset) -> xarray.Variable:
    dimensions = _dimension_names(name, dataset)
    # Reading all attributes would take longer than all else.
    attributes = {}
    for key in ATTRIBUTES:
        if key in dataset.attrs:
            attributes[key] = _plain(dataset.attrs[key])
    # A chunk is decompressed as a whole, so readers want to know its size.
    chunks = dict(zip(dimensions, dataset.chunks or (), strict=False))
    array = indexing.LazilyIndexedArray(_Hdf5Array(files, dataset))
    return xarray.Variable(dimensions, array, attributes, {"preferred_chunks": chunks, "path": dataset.name})


def _dimension_names(name: str, dataset: h5py.Dataset) -> list[str]:
    """The name of each dimension: of the scale that is attached to it, else `name` of its own, else 'dim0', 'dim1'."""
    # A coordinate is a dimension scale, which has the name of its dimension.
    is_scale = dataset.attrs.get("CLASS", b"") == b"DIMENSION_SCALE"
    if is_scale and dataset.ndim == 1:
        return [name]
    names = []
    for number in range(dataset.ndim):
        scales = dataset.dims[number]
        # The scale may lie in a group above: its own name is the last part of its path.
        if len(scales):
            path = PurePosixPath(scales[0].name)
            names.append(path.name)
        else:
            names.append(f"dim{number}")
    return names


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


def _groups(folder: h5py.Group, address: str) -> list[str]:
    """Addresses of the groups below this one that hold arrays."""
    found = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and list(_datasets(item)):
            found.append(f"{address}/{name}")

    folder.visititems(visit)
    return found
