"""The arrays of a year file: found by name in any capitals, with their attributes and dimensions, HDF5 or Zarr."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np

from utils.errors import UsageError


class StoredArrays(Protocol):
    """What is read of a year: its path, its arrays by name, and the shape of its fields."""

    path: Path
    arrays: Mapping[str, Any]
    shape: tuple[int, int, int, int]


def find_names(file: StoredArrays, names: Sequence[str]) -> list[str]:
    """The names in the file that are one of `names`, capitals aside, in the order of `names`."""
    found = []
    for name in names:
        # The spelling asked for comes before others, where a file has both.
        spellings = sorted(file.arrays, key=name.__ne__)
        found += [spelling for spelling in spellings if spelling.lower() == name]
    return found


def get_array(file: StoredArrays, name: str) -> Any:
    """An array by its name in the file. Raises UsageError where the name is a link that leads nowhere."""
    array = file.arrays[name]
    if array is None:
        raise UsageError(
            f"{file.path}: its `{name}` is a link to something that is not there: "
            "bring that back to its place, or copy it into the file"
        )
    return array


def shape_of(array: Any) -> tuple[int, ...] | None:
    """The shape of an array; None for a group, or a link that leads nowhere."""
    return getattr(array, "shape", None)


def text_attribute(array: Any, name: str, otherwise: str = "") -> str:
    """An attribute as text, without blanks around it: it may be bytes, or an array of one string."""
    stated = array.attrs.get(name, otherwise)
    value = np.asarray(stated)
    if value.size != 1 or isinstance(stated, h5py.Empty):
        return otherwise
    return str(value.astype(str).item()).strip()


def dimension_names(array: Any) -> list[str]:
    """The names of the dimensions of an array, "" for each that has none."""
    if hasattr(array, "dims"):  # HDF5
        return [_hdf5_dimension(dimension) for dimension in array.dims]
    metadata = getattr(array, "metadata", None)
    names = getattr(metadata, "dimension_names", None)  # Zarr 3
    names = names or array.attrs.get("_ARRAY_DIMENSIONS")  # Zarr 2, by xarray
    if not names or len(names) != array.ndim:
        return [""] * array.ndim
    return [str(name or "") for name in names]


def _hdf5_dimension(dimension: Any) -> str:
    """Its label, or the name of the scale that is attached to it."""
    if dimension.label:
        return str(dimension.label)
    try:
        scale = dimension[0] if len(dimension) else None
    except (RuntimeError, ValueError):  # a reference that leads nowhere
        scale = None
    # Where a scale was deleted, the reference may lead to a newer array in its place.
    is_scale = scale is not None and scale.is_scale
    path = scale.name if is_scale and scale is not None else ""
    return str(path or "").rpartition("/")[2]
