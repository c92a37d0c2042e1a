"""One source of a user's own data: their variables, on any regular grid, at levels of any kind."""

from collections.abc import Sequence

import numpy as np
import xarray

from utils.errors import UsageError, nearest
from weather.fields.channels import ERA5
from weather.fields.names import conversion, meaning_of, units_of
from weather.fields.own_grid import check_latitudes, order_longitudes
from weather.fields.requests import Request
from weather.sources.axes import Axes, Variables, find_axes, read_numbers
from weather.sources.opening import open_source
from weather.sources.source import Source
from weather.sources.store import Store
from weather.sources.variables import VERSIONS, Field

HORIZONTAL = ("latitude", "longitude")
# Dimensions of forecasts, of which a frame can hold one alone.
LEAD_TIMES = ("step", "lead_time", "leadtime", "prediction_timedelta", "forecast_period")
MEMBERS = ("number", "member", "realization", "ensemble", "ens")


class OwnStore(Store):
    """A source on any regular grid of latitudes and longitudes; fields are found by the names that were asked for.

    requests: what is asked for, of this source or of others. Other arguments and attributes as of Store, but for
    fields, {variable as it is asked for: its Field}, and levels, in hPa only where they are pressures.
    Raises UsageError where a variable that is there cannot be used.
    """

    def __init__(self, address: str, requests: Sequence[Request], opened: Source | None = None):
        # The parent's constructor looks for fields, and asks for these.
        self.requests = {request.variable: request for request in requests}
        super().__init__(address, opened)

    def find(self, quantity: str, level: float | None = None) -> Field | None:
        """The variable that was asked for under a name (at a level), None if there is none."""
        for field in self.fields.get(quantity, []):
            is_on_axis = field.has_levels and level in self.levels
            # A name such as z500 says its level, and the file need not.
            may_be_silent = field.level is None and not self.requests[quantity].is_level_stated
            is_single = not field.has_levels and (level in (None, field.level) or may_be_silent)
            if is_on_axis or is_single:
                return field
        return None

    def explain(self, request: Request) -> str:
        """Why a request is not met here: the end of a message."""
        name = request.variable
        fields = self.fields.get(name, [])
        # The variable itself is not there, or only its level is not.
        if not fields:
            others = [str(each) for each, variable in self.source.variables.items() if variable.ndim >= 2]
            return f"has no variable '{name}'{nearest(name, others)}; it holds {', '.join(others) or 'no fields'}"
        field = fields[0]
        listed = ", ".join(f"{level:g}" for level in self.levels)
        if not field.has_levels:
            at = "no levels" if field.level is None else f"the level {field.level:g} alone"
            return f"{field.name} has {at}: ask for '{name}' without ':{request.level:g}', or for another file's"
        if request.level is None:
            return f"{field.name} has the levels {listed}: ask for some of them, '{name}:{self.levels[0]:g}'"
        return f"{field.name} has no level {request.level:g}: it has {listed}"

    # ---- how it is stored

    def _locate_axes(self) -> Axes:
        variables = self.source.variables
        found = {}
        for request in self.requests.values():
            name = find_name(variables, request)
            if name is not None:
                found[name] = variables[name]
        # The fields may lie in groups of the source.
        if not found:
            self._check_groups()
            held = [name for name, variable in variables.items() if variable.ndim >= 2]
            asked = ", ".join(self.requests)
            hint = "".join(nearest(name, held) for name in self.requests)
            raise UsageError(f"{self.address}: holds none of {asked}{hint}; it has {', '.join(held) or 'no fields'}")
        self._check_one_grid(found)
        axes = dict(find_axes(self.address, variables, list(found.values())))
        if axes["level"] is None:
            axes["level"] = self._find_other_levels(found, axes)
        return axes

    def _check_one_grid(self, found: dict[str, xarray.Variable]) -> None:
        """Raise UsageError where two variables have different rows or columns."""
        # Variables on other rows or columns would be mixed up point by point.
        grids: dict[tuple[str, ...], str] = {}
        for name, variable in found.items():
            known = []
            for axis in HORIZONTAL:
                names, _ = ERA5["dimensions"][axis]
                known += [str(dim) for dim in variable.dims if str(dim).lower() in names]
            if known:
                grids.setdefault(tuple(sorted(known)), name)
        if len(grids) > 1:
            # The reader sees which variables to bring together.
            listed = " and ".join(f"{name} on [{', '.join(dims)}]" for dims, name in grids.items())
            raise UsageError(f"{self.address}: has two grids, {listed}: bring them onto one (cdo remapbil)")

    def _find_other_levels(self, found: dict[str, xarray.Variable], axes: Axes) -> str | None:
        """A dimension of levels that are no pressures, such as a depth: the only other one, with a coordinate."""
        # What is no other axis, and more than one long, may be it.
        known = {*axes.values(), VERSIONS}
        others = {}
        for variable in found.values():
            for dimension, size in variable.sizes.items():
                if dimension not in known and size > 1:
                    others[str(dimension)] = size
        if len(others) != 1:
            return None
        (name,) = others
        if name not in self.source.variables:
            return None
        self._check_states(name)
        return name

    def _check_states(self, name: str) -> None:
        """Raise UsageError for a dimension of forecasts: frames are states, one for each date."""
        is_duration = self.source.variables[name].dtype.kind == "m"
        one = f"and a frame is one state: choose one of them first (xarray: ds.isel({name}=0))"
        if is_duration or name.lower() in LEAD_TIMES:
            raise UsageError(
                f"{self.address}: its dimension '{name}' has lead times of a forecast, {one}, dated time + {name}"
            )
        if name.lower() in MEMBERS:
            raise UsageError(f"{self.address}: its dimension '{name}' has members of an ensemble, {one}")

    def _read_levels(self) -> list[float]:
        name = self.axes["level"]
        if name is None:
            return []
        # Only pressures are converted to hPa; a depth in metres stays as it is.
        units = units_of(self.source.variables[name])
        pressures = {spelling.lower() for spelling in ERA5["units"]["hPa"]}
        names, _ = ERA5["dimensions"]["level"]
        is_pressure = units.lower() in pressures if units else name.lower() in names
        if is_pressure:
            return super()._read_levels()
        return read_numbers(self.address, name, self.source.variables).tolist()

    def _find_fields(self) -> dict[str, list[Field]]:
        fields: dict[str, list[Field]] = {}
        variables = self.source.variables
        for asked, request in self.requests.items():
            name = find_name(variables, request)
            if name is not None:
                fields[asked] = [self._make_field(name)]
        return fields

    def _make_field(self, name: str) -> Field:
        variable = self.source.variables[name]
        needed = {self.axes[axis] for axis in HORIZONTAL}
        # A file of one instant may have no dimension for it.
        if len(self.times) > 1:
            needed.add(self.axes["time"])
        # Orography and masks have no dates.
        lacking = needed - set(variable.dims)
        if lacking:
            listed = ", ".join(map(str, variable.dims))
            lacks = ", ".join(map(str, lacking))
            raise UsageError(f"{self.address}: {name} [{listed}] has no dimension {lacks}: leave it out")
        meaning = meaning_of(name)
        units = units_of(variable)
        if meaning is not None and not units:
            units = meaning.units
        # Levels lie along a dimension, or stand in the name or in a single value.
        if self.axes["level"] in variable.dims:
            return Field(name, variable, units, has_levels=True)
        level: float | None = meaning.level if meaning is not None else None
        if level is None and len(self.levels) == 1:
            level = self.levels[0]  # a file of one level may have it as a single value
        return Field(name, variable, units, has_levels=False, level=level)

    def _conversion(self, quantity: str, field: Field) -> tuple[float, float]:
        request = self.requests[quantity]
        # Nothing is known of the units of other names, nor of units that are not stated: values are looked at.
        if not request.quantity or not field.units:
            return 1, 0
        # Units that do not fit are another quantity, or a slip; both are told.
        known = request.known.units
        try:
            return conversion(f"{self.address}: {field.name} has", field.units, known)
        except UsageError as error:
            other = f"if it is something else, give it a name: --variables NAME={field.name}"
            raise UsageError(f"{error}: convert it, or, {other}") from None

    def _read_grid(self) -> None:
        variables = self.source.variables
        rows = self.axes["latitude"]
        columns = self.axes["longitude"]
        latitude = read_numbers(self.address, rows, variables)
        longitude = read_numbers(self.address, columns, variables)
        assert rows is not None
        check_latitudes(latitude, units_of(variables[rows]), f"{self.address}: its {rows}")
        # Columns are turned so that they run eastward without a jump.
        self.first_column, self.longitude = order_longitudes(longitude, f"{self.address}: its {columns}")
        self.is_south_first = bool(latitude[0] < latitude[-1])
        self.latitude = latitude[::-1] if self.is_south_first else latitude

    def units(self, variable: str) -> str:
        """The units that a variable states, "" where it states none, or where the source has none such."""
        fields = self.fields.get(variable, [])
        stated = str(fields[0].variable.attrs.get("units", "")) if fields else ""
        return stated.strip()


def find_name(variables: Variables, request: Request) -> str | None:
    """The name in a file: as it was asked for, in other capitals, or another name of the same quantity."""
    if request.variable in variables:
        return request.variable
    lowered = [name for name in variables if name.lower() == request.variable.lower()]
    if lowered:
        return lowered[0]
    if request.is_renamed or not request.quantity:
        return None
    # 2m_temperature answers to t2m.
    ranks: dict[str, int] = {}
    for name in variables:
        meaning = meaning_of(name)
        if meaning is None or meaning.quantity != request.quantity:
            continue
        if meaning.level in (None, request.level):
            ranks[name] = meaning.rank
    return min(ranks, key=ranks.__getitem__, default=None)


def open_own_stores(addresses: Sequence[str], requests: Sequence[Request]) -> list[OwnStore]:
    """The sources, opened. Raises UsageError."""
    stores = []
    for address in addresses:
        # An address may hold several sources.
        sources = open_source(address)
        # A GRIB file is a source for each variable, and may hold more than what is asked for.
        wanted = []
        for source in sources:
            if any(find_name(source.variables, request) for request in requests):
                wanted.append(source)
        for source in wanted or sources[:1]:
            stores.append(OwnStore(address, requests, source))
    return stores


def check_same_grid(stores: Sequence[OwnStore]) -> None:
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
