"""The axes of a source by name: its dimensions, dates, pressure levels, rows and columns."""

from collections.abc import Mapping

import numpy as np
import xarray
from xarray.coders import CFDatetimeCoder
from xarray.conventions import decode_cf_variable

from utils.errors import UsageError, first_line
from weather.channels import ERA5

DIMENSIONS: dict[str, tuple[list[str], int]] = ERA5["dimensions"]  # {ours: (theirs, most values)}
STANDARD_NAMES = {"time": "time", "level": "air_pressure", "latitude": "latitude", "longitude": "longitude"}
STANDARD_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
HIGHEST_PRESSURE = 1100  # hPa; what is above is in Pa
SECOND = np.timedelta64(1, "s")
Variables = Mapping[str, xarray.Variable]


def find_axes(address: str, variables: Variables, fields: list[xarray.Variable]) -> dict[str, str | None]:
    """{ours: the name of their dimension, or of a single value, or None} for time, level, latitude and longitude.

    fields: the variables that hold quantities. Names are compared in lower case; a variable's standard_name will do
    too. Raises UsageError for fields with two dimensions of one kind, or a dimension that is missing or too long.
    """
    sizes: dict[str, int] = {}
    for field in fields or list(variables.values()):
        sizes |= {str(dimension): size for dimension, size in field.sizes.items()}
    axes = {}
    for ours, (names, most) in DIMENSIONS.items():
        known = [dimension for dimension in sizes if _is_axis(ours, names, dimension, variables)]
        if len(known) > 1:
            listed = " and ".join(f"{dimension} ({sizes[dimension]})" for dimension in known)
            raise UsageError(f"{address}: its fields have both dimensions {listed}: select one value of one of them")
        if known and not 1 <= sizes[known[0]] <= most:
            raise UsageError(f"{address}: {known[0]} has {sizes[known[0]]} values, not 1 to {most}")
        axes[ours] = known[0] if known else _single_value(ours, names, variables)
    for ours in ("time", "latitude", "longitude"):
        if axes[ours] is None:
            names = DIMENSIONS[ours][0]
            what = f"has no dimension {' or '.join(names)}: it has {list(sizes)}"
            raise UsageError(f"{address}: {what}{_hint(ours, variables)}")
    return axes


def _is_axis(ours: str, names: list[str], dimension: str, variables: Variables) -> bool:
    if dimension.lower() in names:
        return True
    variable = variables.get(dimension)
    return variable is not None and variable.attrs.get("standard_name") == STANDARD_NAMES[ours]


def _single_value(ours: str, names: list[str], variables: Variables) -> str | None:
    """The name of a coordinate of one value, as a file of one level or one instant has it; None if there is none."""
    if ours not in ("time", "level"):
        return None
    by_lower = {name.lower(): name for name, variable in variables.items() if variable.size == 1}
    return next((by_lower[name] for name in names if name in by_lower), None)


def _hint(ours: str, variables: Variables) -> str:
    two_dimensional = [name for name in variables if name.lower() in DIMENSIONS[ours][0] and variables[name].ndim == 2]
    is_unstructured = {"values", "cell", "ncells"} & {dim for variable in variables.values() for dim in variable.dims}
    if ours != "time" and (two_dimensional or is_unstructured):
        return "; a regular grid of latitudes and longitudes is needed: regrid it (cdo remapbil, or grid in the request)"
    return ""


def read_times(address: str, axes: Mapping[str, str | None], variables: Variables) -> np.ndarray:
    """Dates of the frames, (T,) datetime64[s], increasing. Raises UsageError, naming what is wrong with which of them."""
    name = axes["time"]
    assert name is not None
    # `time` may be when a forecast began: then `valid_time` beside it says when it holds.
    for other in DIMENSIONS["time"][0]:
        if other in variables and other != name and variables[other].dims == (name,):
            name = other
            break
    if name not in variables:
        raise UsageError(f"{address}: its dimension {name} has no dates")
    step = variables.get("step")
    is_forecast = step is not None and step.size == 1 and bool(step.values.reshape(-1)[0])
    if is_forecast and name.lower() != "valid_time":
        raise UsageError(f"{address}: holds forecasts (step {step.values}), and no valid_time for its {name}")
    variable = variables[name]
    dates = _decode_times(f"{address}: its {name}", name, variable)
    if np.isnat(dates).any():
        raise UsageError(f"{address}: its {name} holds no date at index {int(np.argmax(np.isnat(dates)))}")
    steps = np.diff(dates)
    if len(steps) and steps.min() <= 0 * SECOND:
        raise UsageError(f"{address}: its times do not increase: {_disorder(dates, name)}")
    return dates


def _decode_times(where: str, name: str, variable: xarray.Variable) -> np.ndarray:
    """(T,) datetime64[s], rounded: 05:59:59.99 is 06:00."""
    calendar = str(variable.attrs.get("calendar", "standard")).lower()
    values = np.atleast_1d(np.squeeze(variable.values))
    if values.dtype.kind == "O":  # dates of cftime, decoded by somebody else
        calendar = str(getattr(values.flat[0], "calendar", calendar)).lower()
    if calendar not in STANDARD_CALENDARS:
        raise UsageError(
            f"{where} has the calendar '{calendar}', and the standard one is needed, in which February has 29 days in "
            "leap years: take data on the standard calendar, as ERA5 is published"
        )
    if values.dtype.kind != "M":
        units = str(variable.attrs.get("units", ""))
        if " since " not in units:
            has = f"has the units '{units}'" if units else "has no units"
            raise UsageError(
                f"{where} is not in dates of the standard calendar: it {has}, needed are such as "
                "'hours since 1970-01-01'"
            )
        coder = CFDatetimeCoder(use_cftime=False, time_unit="ns" if values.dtype.kind == "f" else "s")
        try:
            values = np.atleast_1d(np.squeeze(decode_cf_variable(name, variable, decode_times=coder).values))
        except Exception as error:  # of pandas and numpy, for dates that they do not have
            raise UsageError(f"{where} in '{units}' cannot be read as dates: {_without_advice(error)}") from error
    exact = values.astype("datetime64[ms]")
    return (exact + SECOND // 2).astype("datetime64[s]")


def _without_advice(error: BaseException) -> str:
    """The first sentence of a message, without the options of a library that the reader does not call."""
    return first_line(error).partition(". ")[0].partition(" Try ")[0]


def _disorder(dates: np.ndarray, name: str) -> str:
    """Where dates repeat or go back, and what to do."""
    order = np.argsort(dates, kind="stable")
    same = np.flatnonzero(np.diff(dates[order]) == 0 * SECOND)
    if len(same):
        first, second = order[same[0]], order[same[0] + 1]
        return (
            f"{minute(dates[first])} comes twice, at indices {first} and {second} (in all {len(same)} repeat): "
            f"keep one of each (xarray: drop_duplicates('{name}'))"
        )
    back = int(np.flatnonzero(np.diff(dates) < 0 * SECOND)[0])
    return (
        f"{minute(dates[back + 1])} at index {back + 1} follows {minute(dates[back])}: "
        f"sort them (xarray: sortby('{name}'))"
    )


def minute(time: np.datetime64) -> str:
    """A date as text, to the minute."""
    return str(time.astype("datetime64[m]"))


def read_numbers(address: str, name: str, variables: Variables) -> np.ndarray:
    """The values of a coordinate, (N,) float64. Raises UsageError if the dimension has none."""
    if name not in variables:
        raise UsageError(f"{address}: its dimension {name} has no values")
    decoded = decode_cf_variable(name, variables[name], decode_times=False)
    return np.atleast_1d(decoded.values).astype(np.float64)


def level_units(name: str, stated: str, values: np.ndarray) -> str:
    """The units of pressure levels: as stated; else Pa where the name says so, or hPa holds no such values."""
    is_pascal = name.lower().endswith("inpa") or values.max() > HIGHEST_PRESSURE
    return stated or ("Pa" if is_pascal else "hPa")
