"""Latitudes and longitudes of the points of a year: by their names or attributes, and refused where they are none.

Weights of scores, forcings and forecasts' files rest on them, so a grid of another kind is never taken for a globe.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xarray

from utils.errors import UsageError, reading
from weather.fields.attributes import check_unpacked
from weather.fields.channels import ERA5
from weather.fields.grid import Grid, check_degrees, check_monotonic, check_neighbours, latitudes, longitudes
from weather.fields.stored_arrays import StoredArrays, find_names, text_attribute

SAME_DEGREES = 1e-4  # rounding of coordinates in float32
REGRID = "regrid it to latitudes and longitudes (cdo remapbil, xesmf)"


@dataclass(frozen=True)
class Axis:
    """What tells the coordinate of the rows or of the columns of an image.

    names, mesh_names, units, others: as era5.yaml has them. number: of the dimension in an image. assumed: what is
    taken where there is none.
    """

    name: str
    names: list[str]
    mesh_names: list[str]
    units: list[str]
    others: list[str]
    number: int
    largest: int
    regular: Callable[[int], np.ndarray]
    assumed: str
    place: str


LATITUDE = Axis(
    name="latitude",
    **ERA5["coordinates"]["latitude"],
    number=0,
    largest=90,
    regular=latitudes,
    assumed="rows are taken to run from the north pole to the south pole",
    place="row",
)
LONGITUDE = Axis(
    name="longitude",
    **ERA5["coordinates"]["longitude"],
    number=1,
    largest=360,
    regular=longitudes,
    assumed="columns are taken to run around the globe, eastward from 0",
    place="column",
)


def read_grid(file: StoredArrays) -> tuple[Grid, list[str]]:
    """The coordinates of all points of a year, and what was assumed of them, a line each.

    Raises UsageError for coordinates that are not degrees, one of each row and of each column.
    """
    # Rows come first, as in the image.
    notes = []
    values = []
    for axis in (LATITUDE, LONGITUDE):
        name = _find(file, axis)
        if name is None:
            _check_no_other(file, axis)
            notes.append(f"has no {axis.name}: {axis.assumed}")
            points = file.shape[2 + axis.number]
            values.append(axis.regular(points))
        else:
            degrees = _read(file, name, axis)
            values.append(degrees)
    latitude, longitude = values
    return Grid(latitude, longitude), notes


def _find(file: StoredArrays, axis: Axis) -> str | None:
    """The name of the array of an axis: by name, else by attributes; one of the right shape comes first."""
    # Names are surer than attributes, and arrays of two dimensions come last.
    by_name = find_names(file, axis.names)
    named = by_name or _described(file, axis) or find_names(file, axis.mesh_names)
    points = file.shape[2 + axis.number]
    for name in named:
        if file.arrays[name].shape == (points,):
            return name
    return named[0] if named else None


def _described(file: StoredArrays, axis: Axis) -> list[str]:
    """The names of arrays whose attributes say that they are this coordinate, one value a row first."""
    height, width = file.shape[2:]
    points = file.shape[2 + axis.number]
    found = []
    for shape in ((points,), (height, width)):
        for name, array in file.arrays.items():
            if array.shape != shape:
                continue
            has_units = text_attribute(array, "units").lower() in axis.units
            has_name = text_attribute(array, "standard_name") == axis.name
            # A rotated grid has latitudes in degrees too, of another pole.
            if (has_units or has_name) and not _is_other(name, array, axis):
                found.append(name)
    return found


def _check_no_other(file: StoredArrays, axis: Axis) -> None:
    """Raise UsageError where the file has coordinates of another kind in place of this one."""
    points = file.shape[2 + axis.number]
    for name, array in file.arrays.items():
        if array.shape == (points,) and _is_other(name, array, axis):
            raise UsageError(f"{file.path}: its `{name}` is of a rotated or projected grid, no {axis.name}: {REGRID}")


def _is_other(name: str, array: xarray.Variable, axis: Axis) -> bool:
    return text_attribute(array, "standard_name") in axis.others or name.lower() in axis.others


def _read(file: StoredArrays, name: str, axis: Axis) -> np.ndarray:
    """The degrees of an axis, one for each row or column. Raises UsageError."""
    where = f"{file.path}: '{name}'"
    with reading(where):
        array = file.arrays[name]
        points = file.shape[2 + axis.number]
        is_mesh = array.shape == file.shape[2:]
        if not is_mesh and array.shape != (points,):
            raise UsageError(f"{where} has shape {array.shape}, the fields need ({points},)")
        # Packed integers would be other degrees.
        check_unpacked(array, where)
        stored = np.asarray(array.values, np.float64)
        units = text_attribute(array, "units").lower()
        standard_name = text_attribute(array, "standard_name")
    if standard_name in axis.others:
        raise UsageError(f"{where} is of a rotated or projected grid, no {axis.name}: {REGRID}")
    if not (np.abs(stored) <= axis.largest).all():  # nor NaN
        raise UsageError(f"{where} is not in degrees, -{axis.largest} to {axis.largest}")
    # A mesh has a latitude for each point; a regular one repeats the same values.
    values = _one_of_each(stored, axis, where) if is_mesh else stored
    check_degrees(values, units, axis.name, where)
    if axis is LATITUDE:
        check_monotonic(values, where)
    else:
        _check_distinct(values, where)
    return values


def _one_of_each(mesh: np.ndarray, axis: Axis, where: str) -> np.ndarray:
    """The coordinate of each row, or column, of a mesh (H, W). Raises UsageError where it changes along it."""
    # Rows of the transposed mesh are its columns.
    by_row = mesh if axis is LATITUDE else mesh.T
    values = by_row[:, 0]
    differences = np.abs(by_row - values[:, None])
    if differences.max() > SAME_DEGREES:
        raise UsageError(f"{where} {mesh.shape} is not the same along a {axis.place}: {REGRID}")
    return values


def _check_distinct(longitude: np.ndarray, where: str) -> None:
    """Raise UsageError where two columns have one longitude."""
    check_neighbours(longitude, LONGITUDE.place, where)
    # Columns may begin anywhere, so neighbours in value are looked for.
    order = np.argsort(longitude, stable=True)
    same = np.flatnonzero(np.diff(longitude[order]) == 0)
    if len(same):
        column = order[same[0]]
        other = order[same[0] + 1]
        raise UsageError(f"{where} is {longitude[column]:g} in columns {column} and {other}: keep one of them")


def check_dimensions(names: list[str], where: str) -> None:
    """Raise UsageError where the dimensions of fields, by their names, are not [time, channel, lat, lon].

    names: of the four dimensions, as stored; those that nobody knows pass. where: file and array.
    """
    # Names that say clearly what a dimension is.
    known = dict.fromkeys((*LATITUDE.names, "y", "rlat"), "latitude")
    known |= dict.fromkeys((*LONGITUDE.names, "x", "rlon"), "longitude")
    known |= dict.fromkeys(("time", "valid_time", "times", "timestamp"), "time")
    known |= dict.fromkeys(("channel", "channels"), "channel")
    wanted = ["time", "channel", "latitude", "longitude"]
    for name, place in zip(names, wanted, strict=True):
        meaning = known.get(name.lower(), place)
        if meaning != place:
            raise UsageError(
                f"{where} has the dimensions ({', '.join(names)}): write it as ({', '.join(wanted)}) "
                "(xarray: transpose)"
            )
