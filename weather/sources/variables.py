"""The variables of a source that hold quantities, and their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray
from xarray.conventions import decode_cf_variable

from weather.fields.channels import ON_LEVELS, meaning_of, units_of
from weather.fields.requests import Request
from weather.sources.axes import Axes, Variables

# A dimension of Copernicus' files: 1 is ERA5, 5 its preliminary version, and each has NaN where the other has values.
VERSIONS = "expver"


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


def make_field(name: str, variable: xarray.Variable, level_axis: str | None, levels: list[float]) -> Field:
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
    if level_axis in variable.dims:
        several = variable.sizes[level_axis] > 1
        if lies_on_levels or several:
            return Field(name, variable, units, has_levels=True)
    if lies_on_levels and len(levels) == 1:
        level = levels[0]  # a file of one level may have it as a single value
    return Field(name, variable, units, has_levels=False, level=level)


def read_field(
    field: Field,
    axes: Axes,
    levels: list[int],
    frames: np.ndarray,
) -> np.ndarray:
    """(T, L, H, W) of a field in its own units, turned as it is stored.

    levels: their indices, [] for a field without that dimension. frames: increasing indices of times.
    """
    # Fill values become NaN, packed integers numbers; dates are no fields.
    variable = decode_cf_variable(
        field.name,
        field.variable,
        decode_times=False,
        decode_timedelta=False,
    )
    # What is read along each dimension, and the order of those that are kept.
    order: list[Any] = [axes["latitude"], axes["longitude"]]
    part: dict[Any, Any] = dict.fromkeys(variable.dims, 0)  # what is left at 0 is of length 1
    for name in order:
        part[name] = slice(None)
    if levels:
        part[axes["level"]] = levels
        order.insert(0, axes["level"])
    has_time = axes["time"] in variable.dims
    if has_time:
        part[axes["time"]] = _as_slice(frames)
        order.insert(0, axes["time"])

    values = _first_version(variable, part, order)
    if not has_time:
        values = values[None]
    if not levels:
        values = values[:, None]
    return values


def _first_version(
    variable: xarray.Variable,
    part: Mapping[Any, Any],
    order: list[Any],
) -> np.ndarray:
    """The values of a part, dimensions in an order; of several versions of a value the first that is not NaN."""
    # The part has the first version; most values need no other.
    chosen = variable.isel(part)
    values = chosen.transpose(*order).values
    for version in range(1, variable.sizes.get(VERSIONS, 1)):
        is_missing = np.isnan(values)
        if not is_missing.any():
            break
        other = variable.isel({**part, VERSIONS: version})
        values = np.where(is_missing, other.transpose(*order).values, values)
    return values


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Increasing indices as a slice if their step is constant: stores read slices faster."""
    steps = np.diff(indices)
    step = int(steps[0]) if len(steps) else 1
    is_even = bool((steps == step).all())
    if not is_even:
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)
