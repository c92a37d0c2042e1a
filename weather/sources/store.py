"""One source of data as frames: dates, levels, rows from the north, columns eastward, and the variables asked for."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import xarray

from utils.errors import UsageError, nearest
from weather.fields.attributes import check_packing, check_stated_range
from weather.fields.channels import ERA5, HIGHEST_HPA, QUANTITIES, conversion, units_of
from weather.fields.dates import minute
from weather.fields.grid import Grid, check_global, check_latitudes, order_longitudes
from weather.fields.requests import ERA5_SOUGHT, Request
from weather.sources.opening import open_source
from weather.sources.source import Source, reading_quietly
from weather.sources.variables import (
    HORIZONTAL,
    NAMES,
    VERSIONS,
    Axes,
    Field,
    find_axes,
    find_candidates,
    make_field,
    read_field,
    read_numbers,
    read_times,
)

SHOWN = 12  # names and levels in a message
OF_VARIABLES = ("variable", "variables", "channel", "channels", "feature", "features", "param")  # as a dimension
# Dimensions of forecasts, of which a frame can hold one alone.
LEAD_TIMES = ("step", "lead_time", "leadtime", "prediction_timedelta", "forecast_period")
MEMBERS = ("number", "member", "realization", "ensemble", "ens")


class Store:
    """One source on a regular grid of latitudes and longitudes.

    source: what was opened. requests: what is asked for, of this source or of others. is_era5: it must be as ERA5 is
    published: on the whole globe, at pressure levels, with units of relative humidity. Attributes: address; times (T,)
    datetime64[s]; levels, a list, in hPa where they are pressures; latitude (H,) from the north, longitude (W,)
    eastward, in degrees; fields, {variable as it is asked for: its Fields, the best name first}.
    Raises UsageError where it has no such grid.
    """

    def __init__(self, source: Source, requests: Sequence[Request] = ERA5_SOUGHT, is_era5: bool = True):
        self.source = source
        self.address = source.address
        self.requests = {request.variable: request for request in requests}
        self.is_era5 = is_era5
        with reading_quietly(f"{self.address}: its coordinates"):
            self.axes = self._find_axes()
            self.times = read_times(self.address, self.axes, source.variables)
            self.levels = self._read_levels()
            self._read_grid()
            self.fields = self._find_fields()

    def find(self, variable: str, level: float | None = None) -> Field | None:
        """The Field that was asked for under a name, at a level; None if there is none."""
        for field in self.fields[variable]:
            if field.has_levels:
                is_at_level = level in self.levels
            elif field.level is None:
                # A name such as z500 says its level, and the file need not.
                is_at_level = level is None or not self.requests[variable].is_level_stated
            else:
                # The level of a file of one level need not be asked for.
                is_at_level = level == field.level or (level is None and self.levels == [field.level])
            if is_at_level:
                return field
        return None

    def holds(self, variable: str, level: float | None = None) -> bool:
        """Tell whether it holds a variable at a level. Raises UsageError for other units or dimensions."""
        field = self.find(variable, level)
        if field is None:
            return False
        self._conversion(variable, field)
        # Dimensions of one value, such as the number of a member, say nothing.
        others = self._other_dimensions([field.variable], self.axes)
        if others:
            raise UsageError(f"{self.address}: {field.name} has also the dimensions {others}: select one of each")
        return True

    def explain(self, request: Request) -> str:
        """Why a request is not met here: the end of a message."""
        name = request.variable
        # The variable itself is not there, or only its level is not.
        if not self.fields[name]:
            for candidate in find_candidates(self.source.variables, request):
                dimensions = ", ".join(map(str, self.source.variables[candidate].dims))
                lacks = ", ".join(self._lacking(candidate))
                return f"{candidate} [{dimensions}] has no dimension {lacks}: leave it out"
            others = _names_of_fields(self.source)
            return f"has no variable '{name}'{nearest(name, others)}; it holds {', '.join(others) or 'no fields'}"
        field = self.fields[name][0]
        listed = ", ".join(f"{level:g}" for level in self.levels)
        if not field.has_levels:
            at = "no levels" if field.level is None else f"the level {field.level:g} alone"
            return f"{field.name} has {at}: ask for '{name}' without ':{request.level:g}', or for another file's"
        if request.level is None:
            return f"{field.name} has the levels {listed}: ask for some of them, '{name}:{self.levels[0]:g}'"
        return f"{field.name} has no level {request.level:g}: it has {listed}"

    def units(self, variable: str) -> str:
        """The units that a variable states, "" where it states none, or where the source has none such."""
        fields = self.fields[variable]
        if not fields:
            return ""
        stated = str(fields[0].variable.attrs.get("units", ""))
        return stated.strip()

    def check(self, variable: str, level: float | None, frames: np.ndarray) -> None:
        """Raises UsageError for parts that were never written, or cannot be decompressed, at indices of times."""
        field = self.find(variable, level)
        assert field is not None  # callers ask only for what the store holds
        selection = {self.axes["time"]: frames}
        if level is not None and field.has_levels:
            selection[self.axes["level"]] = np.array([self.levels.index(level)])
        with reading_quietly(f"{self.address}: {field.name}"):
            self.source.check(field.name, selection)

    def chunk_frames(self, variable: str, level: float | None) -> int:
        """Number of frames that a chunk of a variable holds: all are decoded with any of them."""
        field = self.find(variable, level)
        chunks = field.variable.encoding.get("preferred_chunks", {}) if field is not None else {}
        size = chunks.get(self.axes["time"], 1)
        return int(np.max(size))  # a tuple where they are not all of one size

    def read(
        self,
        variable: str,
        levels: Sequence[float | None],
        frames: np.ndarray,
    ) -> np.ndarray:
        """(T, L, H, W) float32 in our units, at levels ([None]: none) and indices of times. Raises UsageError."""
        read = []
        # Levels of one variable are read at once.
        for field, of_field in groupby(levels, lambda level: self.find(variable, level)):
            assert field is not None  # callers ask only for what the store holds
            indices = [self.levels.index(level) for level in of_field if level is not None and field.has_levels]
            factor, offset = self._conversion(variable, field)
            # A number that float32 cannot hold becomes infinite, which is found among the values later.
            with reading_quietly(f"{self.address}: {field.name}"), np.errstate(over="ignore"):
                check_packing(field.variable, self.address, field.name)
                values = read_field(field, self.axes, indices, frames)
                since = minute(self.times[frames[0]])
                check_stated_range(values, field.variable, self.address, field.name, since)
                if (factor, offset) != (1, 0):
                    values = values * float(factor) + offset
                read.append(values.astype(np.float32, copy=False))
        # (T, L, H, W), then turned: rows from the north, columns eastward without a jump.
        values = read[0] if len(read) == 1 else np.concatenate(read, axis=1)
        turned = values[..., ::-1, :] if self.is_south_first else values
        return np.roll(turned, -self.first_column, axis=-1) if self.first_column else turned

    # ---- how it is stored

    def _find_axes(self) -> Axes:
        """The names of the dimensions of time, level, latitude and longitude."""
        variables = self.source.variables
        found = {}
        for request in self.requests.values():
            names = find_candidates(variables, request)
            # Of a user's variables other names are a last resort; they may lie on another grid.
            for name in names if self.is_era5 else names[:1]:
                found[name] = variables[name]
        if not found:
            self._explain_nothing()
        self._check_one_grid(found)
        axes = find_axes(self.address, variables, found.values())
        if not axes["level"] and not self.is_era5:
            axes["level"] = self._find_other_levels(found.values(), axes)
        return axes

    def _explain_nothing(self) -> None:
        """Raise UsageError where nothing of what is asked for is here; the root of a store of groups has no fields."""
        groups = self.source.find_groups()
        if groups:
            names = [group.removeprefix(self.address).strip("/") for group in groups]
            give = " ".join(groups[:SHOWN])
            raise UsageError(f"{self.address}: has the groups {_listed(names)}: give those in its place: {give}")
        if not self.is_era5:
            held = _names_of_fields(self.source)
            hints = [nearest(name, held) for name in self.requests]
            asked = ", ".join(self.requests) + "".join(hints)
            raise UsageError(f"{self.address}: holds none of {asked}; it has {', '.join(held) or 'no fields'}")

    def _check_one_grid(self, found: dict[str, xarray.Variable]) -> None:
        """Raise UsageError where two variables have different rows or columns, which would be mixed up by point."""
        horizontal = {*NAMES["latitude"], *NAMES["longitude"]}
        grids: dict[tuple[str, ...], str] = {}
        for name, variable in found.items():
            dimensions = map(str, variable.dims)
            known = [dimension for dimension in dimensions if dimension.lower() in horizontal]
            if known:
                grids.setdefault(tuple(sorted(known)), name)
        if len(grids) > 1:
            # The reader sees which variables to bring together.
            listed = " and ".join(f"{name} on [{', '.join(dims)}]" for dims, name in grids.items())
            raise UsageError(f"{self.address}: has two grids, {listed}: bring them onto one (cdo remapbil)")

    def _other_dimensions(self, found: Iterable[xarray.Variable], axes: Axes) -> dict[str, int]:
        """{name: size} of the dimensions of variables that are no axis and longer than 1."""
        known = {*axes.values(), VERSIONS}
        others = {}
        for variable in found:
            for name, size in variable.sizes.items():
                if name not in known and size > 1:
                    others[str(name)] = size
        return others

    def _find_other_levels(self, found: Iterable[xarray.Variable], axes: Axes) -> str:
        """A dimension of levels that are no pressures, such as a depth: the only other one, with a coordinate."""
        others = self._other_dimensions(found, axes)
        name = next(iter(others), "")
        if len(others) != 1 or name not in self.source.variables:
            return ""
        # Frames are states, one for each date.
        is_duration = self.source.variables[name].dtype.kind == "m"
        one = f"and a frame is one state: choose one of them first (xarray: ds.isel({name}=0))"
        if is_duration or name.lower() in LEAD_TIMES:
            raise UsageError(
                f"{self.address}: its dimension '{name}' has lead times of a forecast, {one}, dated time + {name}"
            )
        if name.lower() in MEMBERS:
            raise UsageError(f"{self.address}: its dimension '{name}' has members of an ensemble, {one}")
        return name

    def _read_levels(self) -> list[float]:
        """The levels in the order of the source, pressures in hPa; empty if it has none."""
        name = self.axes["level"]
        if not name:
            return []
        values = read_numbers(self.address, name, self.source.variables)
        stated = units_of(self.source.variables[name].attrs)
        # A depth in metres stays as it is.
        pressures = {spelling.lower() for spelling in ERA5["units"]["hPa"]}
        is_pressure = stated.lower() in pressures if stated else name.lower() in NAMES["level"]
        if not is_pressure and not self.is_era5:
            return values.tolist()
        # Without units they are in Pa where the name says so, or hPa holds no such values.
        is_pascal = name.lower().endswith("inpa") or values.max() > HIGHEST_HPA
        units = stated or ("Pa" if is_pascal else "hPa")
        # Levels are compared as numbers, so 85000 Pa must become 850 exactly.
        factor, _ = conversion(f"{self.address}: its pressure levels have", units, "hPa")
        return (factor * values).round(5).tolist()

    def _read_grid(self) -> None:
        """Find rows and columns, as they are promised."""
        rows, columns = (self.axes[axis] for axis in HORIZONTAL)
        latitude = read_numbers(self.address, rows, self.source.variables)
        longitude = read_numbers(self.address, columns, self.source.variables)
        units = units_of(self.source.variables[rows].attrs)
        check_latitudes(latitude, units, f"{self.address}: its {rows}")
        # Columns are turned so that they run eastward without a jump.
        self.first_column, self.longitude = order_longitudes(longitude, f"{self.address}: its {columns}")
        self.is_south_first = bool(latitude[0] < latitude[-1])
        self.latitude = latitude[::-1] if self.is_south_first else latitude
        if self.is_era5:
            check_global(Grid(self.latitude, self.longitude), self.address)

    def _find_fields(self) -> dict[str, list[Field]]:
        """{variable as it is asked for: its Fields, the best name first}."""
        variables = self.source.variables
        fields = {}
        for asked, request in self.requests.items():
            names = find_candidates(variables, request)
            whole = [name for name in names if not self._lacking(name)]
            fields[asked] = [make_field(name, variables[name], self.axes["level"], self.levels) for name in whole]
        return fields

    def _lacking(self, name: str) -> list[str]:
        """The dimensions of a field that a variable lacks: orography and masks have no dates."""
        # A file of one instant may have no dimension for it.
        needed = [*HORIZONTAL, "time"] if len(self.times) > 1 else HORIZONTAL
        dimensions = self.source.variables[name].dims
        return [self.axes[axis] for axis in needed if self.axes[axis] not in dimensions]

    def _conversion(self, variable: str, field: Field) -> tuple[float, float]:
        """(factor, offset) from a field's units to ours. Raises UsageError for unknown units.

        A variable without units is taken to be in ours (regridded WeatherBench2 stores give none), except relative
        humidity of ERA5, which may be a fraction or a percentage. Nothing is known of the units of unknown variables.
        """
        quantity = self.requests[variable].quantity
        may_be_fraction = self.is_era5 and quantity == "r"
        if not quantity or not (field.units or may_be_fraction):
            return 1, 0
        try:
            return conversion(f"{self.address}: {field.name} has", field.units, QUANTITIES[quantity].units)
        except UsageError as error:
            if self.is_era5:
                raise
            # Units that do not fit are another quantity, or a slip; both are told.
            other = f"if it is something else, give it a name: --variables NAME={field.name}"
            raise UsageError(f"{error}: convert it, or, {other}") from None


def open_stores(address: str, requests: Sequence[Request] = ERA5_SOUGHT, is_era5: bool = True) -> list[Store]:
    """The stores at an address: one, or one for each variable of a GRIB file. Other arguments as of Store.

    Raises UsageError.
    """
    sources = open_source(address)
    # A GRIB file may hold more than what is needed, on other grids.
    wanted = []
    for source in sources:
        if any(find_candidates(source.variables, request) for request in requests):
            wanted.append(source)
    return [Store(source, requests, is_era5) for source in wanted or sources[:1]]


def check_same_grid(stores: Sequence[Store]) -> None:
    """Raise UsageError where two sources have different rows or columns."""
    first = stores[0]
    for store in stores[1:]:
        for axis in HORIZONTAL:
            # Coordinates in float32 and in float64 differ in their last digits.
            ours = getattr(first, axis)
            theirs = getattr(store, axis)
            is_same = len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=0, atol=1e-3)
            if not is_same:
                raise UsageError(
                    f"{store.address}: has {len(theirs)} {axis}s, {theirs[0]:g} to {theirs[-1]:g}, {first.address} "
                    f"{len(ours)}, {ours[0]:g} to {ours[-1]:g}: bring them onto one grid (cdo remapbil)"
                )


def describe_stores(stores: Sequence[Store]) -> str:
    """What the stores of one address hold, for a message: variables with dimensions, levels and dates."""
    names: list[str] = []
    dimensions: dict[str, None] = {}  # sets that keep their order
    levels: dict[str, None] = {}
    for store in stores:
        for name in _names_of_fields(store.source):
            names.append(name)
            dimensions |= dict.fromkeys(map(str, store.source.variables[name].dims))
        levels |= dict.fromkeys(f"{level:g}" for level in store.levels)
    fields = f"{_listed(names) or 'no fields'} [{_listed(list(dimensions))}]"
    at_levels = f", levels {_listed(list(levels))} hPa" if levels else ""
    first = min(store.times[0] for store in stores)
    last = max(store.times[-1] for store in stores)
    held = f"{stores[0].address} holds {fields}{at_levels}, {minute(first)} to {minute(last)}"
    for name in dimensions:
        if name.lower() in OF_VARIABLES:
            return f"{held}: make its {name} variables (xarray: to_dataset(dim='{name}'))"
    return held


def _names_of_fields(source: Source) -> list[str]:
    return [name for name, variable in source.variables.items() if variable.ndim >= 2]


def _listed(texts: Sequence[str]) -> str:
    more = ", ..." if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
