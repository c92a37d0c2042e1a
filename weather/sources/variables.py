"""The variables of a source: its axes (time, levels, rows and columns), its dates, the fields that hold quantities."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray
from xarray.conventions import decode_cf_variable

from utils.errors import UsageError
from weather.fields.channels import ERA5, ON_LEVELS, meaning_of, units_of
from weather.fields.dates import STANDARD_CALENDARS, decode_dates
from weather.fields.requests import Request

# By our names: theirs in lower case, and the most values that a dimension may have.
DIMENSIONS: dict[str, tuple[list[str], int]] = ERA5["dimensions"]
NAMES = {axis: names for axis, (names, _) in DIMENSIONS.items()}
HORIZONTAL = ("latitude", "longitude")
UNSTRUCTURED = ("values", "cell", "ncells")  # dimensions of grids that are none of rows and columns

Variables = Mapping[str, xarray.Variable]
Axes = dict[str, str]  # {ours: the name of their dimension, or of a single value; "" where there is none}
# A dimension of Copernicus' files: 1 is ERA5, 5 its preliminary version, and each has NaN where the other has values.
VERSIONS = "expver"


def find_axes(address: str, variables: Variables, fields: Iterable[xarray.Variable]) -> Axes:
    """The Axes time, level, latitude and longitude of a source; only a level may be missing.

    fields: the variables that hold quantities. Names are compared in lower case; a variable's standard_name will do
    too. Raises UsageError for fields with two dimensions of one kind, or a dimension that is missing or too long.
    """
    # Dimensions of the fields alone: bounds and attributes of the grid have others.
    sizes: dict[str, int] = {}
    for field in list(fields) or variables.values():
        sizes |= {str(dimension): size for dimension, size in field.sizes.items()}

    axes = {}
    for ours, (names, most) in DIMENSIONS.items():
        # By its own name, or by what its coordinate says it is.
        found = []
        for name in sizes:
            if name.lower() in names or _is_stated(ours, variables.get(name)):
                found.append(name)
        if len(found) > 1:
            listed = [f"{name} ({sizes[name]})" for name in found]
            both = " and ".join(listed)
            raise UsageError(f"{address}: its fields have both dimensions {both}: select one value of one of them")
        for axis in found:
            if not 1 <= sizes[axis] <= most:
                raise UsageError(f"{address}: {axis} has {sizes[axis]} values, not 1 to {most}")
        axes[ours] = found[0] if found else _find_single_value(ours, variables)
        if not axes[ours] and ours != "level":
            lacks = f"has no dimension {' or '.join(names)}: it has {list(sizes)}"
            raise UsageError(f"{address}: {lacks}{_regrid_hint(ours, variables)}")
    return axes


def _is_stated(ours: str, variable: xarray.Variable | None) -> bool:
    standard_name = "air_pressure" if ours == "level" else ours
    return variable is not None and variable.attrs.get("standard_name") == standard_name


def _find_single_value(ours: str, variables: Variables) -> str:
    """The name of a coordinate of one value, as a file of one level or one instant has it; "" if there is none."""
    if ours in HORIZONTAL:
        return ""
    # A coordinate of one value is no dimension of the fields.
    single = {name.lower(): name for name, variable in variables.items() if variable.size == 1}
    for name in NAMES[ours]:
        if name in single:
            return single[name]
    return ""


def _regrid_hint(ours: str, variables: Variables) -> str:
    """What to do if a source is on another kind of grid, at the end of a message."""
    for name, variable in variables.items():
        is_curved = name.lower() in NAMES[ours] and variable.ndim == 2
        is_unstructured = not set(variable.dims).isdisjoint(UNSTRUCTURED)
        if ours != "time" and (is_curved or is_unstructured):
            axes = ", ".join(map(str, variable.dims))
            shape = f"its {name} has the dimensions {axes}"
            return f"; {shape}; a regular grid of latitudes and longitudes is needed: regrid it (cdo remapbil)"
    return ""


def read_times(address: str, axes: Axes, variables: Variables) -> np.ndarray:
    """Dates of the frames, (T,) datetime64[s], increasing.

    Raises UsageError, naming which of them are wrong and what to do.
    """
    name = _name_of_dates(address, axes["time"], variables)
    variable = variables[name]
    values = variable.values.reshape(-1)
    calendar = str(variable.attrs.get("calendar", "standard"))
    if values.dtype.kind == "O":  # dates that cftime decoded for somebody else
        calendar = getattr(values[0], "calendar", calendar)
    if calendar.lower() not in STANDARD_CALENDARS:
        raise UsageError(
            f"{address}: its {name} has the calendar '{calendar}', and the standard one is needed, in which February "
            "has 29 days in leap years: take data on the standard calendar, as ERA5 is published"
        )
    if values.dtype.kind in "iuf":
        # A coordinate may be packed, and have a fill value.
        values = decode_cf_variable(name, variable, decode_times=False).values.reshape(-1)
    units = str(variable.attrs.get("units", ""))
    dates, _ = decode_dates(values, units, calendar, address, name)
    return dates


def _name_of_dates(address: str, axis: str, variables: Variables) -> str:
    """The variable with the dates of a dimension: `time` may be when a forecast began, and valid_time when it holds."""
    if axis not in variables:
        raise UsageError(f"{address}: its dimension {axis} has no dates: give it a coordinate (xarray: assign_coords)")
    for other in NAMES["time"]:
        is_beside_it = other != axis and other in variables
        if is_beside_it and variables[other].dims == (axis,):
            return other
    # GRIB's step is the time from the beginning of a forecast; an analysis has none, or 0.
    step = variables.get("step")
    if step is not None and step.size == 1:
        hours = step.values.reshape(-1)[0]
        if hours and axis.lower() != "valid_time":
            raise UsageError(f"{address}: holds forecasts (step {hours}) and no valid_time for its {axis}")
    return axis


def read_numbers(address: str, name: str, variables: Variables) -> np.ndarray:
    """The values of a coordinate, (N,) float64, rounded. Raises UsageError if the dimension has none."""
    if name not in variables:
        raise UsageError(f"{address}: its dimension {name} has no values: give it a coordinate (xarray: assign_coords)")
    decoded = decode_cf_variable(name, variables[name], decode_times=False)
    return decoded.values.reshape(-1).astype(np.float64).round(5)


@dataclass(frozen=True, eq=False)
class Field:
    """A variable that holds a quantity.

    units: as stated, else those that its name means, else "". has_levels: it has a dimension of all levels of its
    store. level: in hPa, of one without that dimension; None: at the surface.
    """

    name: str
    variable: xarray.Variable  # decoded when it is read
    units: str
    has_levels: bool
    level: float | None = None


def find_candidates(variables: Variables, request: Request) -> list[str]:
    """The names in a file that may be meant by a request, the best first.

    First comes the name as it was asked for, in any capitals, then other names of the same quantity, such as
    2m_temperature for t2m, unless the user said that the variable has this name alone.
    """
    asked = request.variable
    found = [name for name in variables if name.lower() == asked.lower()]
    found.sort(key=asked.__ne__)
    if request.is_renamed or not request.quantity:
        return found
    others: dict[str, int] = {}
    for name in variables:
        meaning = meaning_of(name)
        if meaning is not None and meaning.quantity == request.quantity and name not in found:
            others[name] = meaning.rank
    return found + sorted(others, key=others.__getitem__)


def make_field(name: str, variable: xarray.Variable, level_axis: str, levels: list[float]) -> Field:
    """The Field of a variable. levels: of the source, along its level_axis or the only one, as a single value."""
    meaning = meaning_of(name)
    units = units_of(variable.attrs)
    level: float | None = None
    # What is not known may lie on levels.
    lies_on_levels = True
    if meaning is not None:
        units = units or meaning.units
        level = meaning.level
        lies_on_levels = meaning.quantity in ON_LEVELS and level is None
    # A variable at the surface may have a dimension of one level.
    is_on_several = variable.sizes.get(level_axis, 0) > 1
    if is_on_several or (lies_on_levels and level_axis in variable.dims):
        return Field(name, variable, units, has_levels=True)
    if lies_on_levels and len(levels) == 1:
        level = levels[0]  # a file of one level may have it as a single value
    return Field(name, variable, units, has_levels=False, level=level)


def read_field(field: Field, axes: Axes, levels: list[int], frames: np.ndarray) -> np.ndarray:
    """(T, L, H, W) of a field in its own units, turned as it is stored.

    levels: their indices, [] for a field without that dimension. frames: increasing indices of times. Of several
    versions of a value the first that is not NaN is taken.
    """
    # Fill values become NaN, packed integers numbers; dates are no fields.
    variable = decode_cf_variable(field.name, field.variable, decode_times=False, decode_timedelta=False)
    # What is read along each dimension: one value of those that are no axis, which have a length of 1.
    part: dict[Any, Any] = dict.fromkeys(variable.dims, 0)
    part |= {axes["latitude"]: slice(None), axes["longitude"]: slice(None)}
    part |= {axes["time"]: _as_slice(frames), axes["level"]: levels or 0}
    order = list(axes.values())

    def read(version: int) -> np.ndarray:
        selected = variable.isel(part | {VERSIONS: version}, missing_dims="ignore")
        return selected.transpose(*order, missing_dims="ignore").values

    # The first version has most values.
    values = read(0)
    for version in range(1, variable.sizes.get(VERSIONS, 1)):
        if np.isnan(values).any():
            values = np.where(np.isnan(values), read(version), values)
    # A dimension that it does not have becomes one of length 1.
    height, width = values.shape[-2:]
    return values.reshape(-1, max(1, len(levels)), height, width)


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Increasing indices as a slice if their step is constant: stores read slices faster."""
    steps = np.diff(indices)
    step = int(steps[0]) if len(steps) else 1
    is_even = bool((steps == step).all())
    if not is_even:
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)
