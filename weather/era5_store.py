"""One source of real data, in the names, units and grids of others: weather/era5.yaml has them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray
from xarray.conventions import decode_cf_variable

from utils.errors import UsageError
from weather.channels import BY_NAME, ERA5, ON_LEVELS, QUANTITIES, channel_key
from weather.era5_axes import find_axes, level_units, minute, read_numbers, read_times
from weather.era5_open import open_source
from weather.era5_source import Source, reading_quietly
from weather.grid import HOUR

VERSIONS = "expver"  # a dimension of Copernicus' files: 1 is ERA5, 5 its first version; each has NaN for the other
STEP = 6 * HOUR  # from one frame of ours to the next
SHOWN = 12  # names of variables in a message


def relative_humidity(q: np.ndarray, t: np.ndarray, pressure: float) -> np.ndarray:
    """Relative humidity (%) as ERA5 defines it, from specific humidity (kg kg-1), temperature (K), pressure (Pa).

    The vapour pressure is divided by its saturation value: over water above 0 degrees C, over ice below -23 degrees C,
    and over a mixture between them, which is quadratic in temperature (ECMWF 2016, IFS Documentation CY41R2, Part IV:
    Physical Processes, chapter 7). Saturation follows Tetens' formula with the parameters given there (Buck 1981;
    Alduchov and Eskridge 1996).
    """
    triple, ice_only, ratio = 273.16, 250.16, 287.0597 / 461.5250  # K, K, gas constants of dry air and vapour
    water = 611.21 * np.exp(17.502 * (t - triple) / (t - 32.19))
    ice = 611.21 * np.exp(22.587 * (t - triple) / (t + 0.7))
    part = np.clip((t - ice_only) / (triple - ice_only), 0, 1) ** 2
    vapour = pressure * q / (ratio + (1 - ratio) * q)
    return 100 * vapour / (part * water + (1 - part) * ice)


@dataclass(frozen=True)
class Field:
    """A variable that holds a quantity: at all levels of its store, or at one level (hPa), or at none (None)."""

    name: str
    variable: xarray.Variable  # decoded when it is read
    units: str  # as stated, else those that its name means, else ""
    has_levels: bool
    level: float | None = None


class Store:
    """One source: a global grid, rows from the north, columns from Greenwich eastward.

    address: of a Zarr store, a file, or a group in one. opened: what is there, if somebody opened it already.
    Attributes: address; times (T,) datetime64[s]; levels, a list in hPa; latitude (H,) and longitude (W,) in degrees.
    Raises UsageError if it cannot be opened or has no such grid.
    """

    def __init__(self, address: str, opened: xarray.Dataset | Source | None = None):
        self.address = address
        if opened is None:
            sources = open_source(address)
            if len(sources) > 1:
                raise UsageError(f"{address}: is GRIB, which opens as a store for each variable: use open_stores")
            self.source = sources[0]
        elif isinstance(opened, Source):
            self.source = opened
        else:
            self.source = Source(address, {str(name): variable for name, variable in opened.variables.items()})
        with reading_quietly(f"{address}: its coordinates"):
            self._find_axes()
            self._find_fields()

    def _find_axes(self) -> None:
        """Find dates, levels, rows and columns."""
        variables = self.source.variables
        named = [variable for name, variable in variables.items() if _meanings(name)]
        if not named and self.source.groups:
            groups = " ".join(self.source.groups)
            raise UsageError(f"{self.address}: its fields are in groups: give these in its place: {groups}")
        self.axes = find_axes(self.address, variables, named)
        self.times = read_times(self.address, self.axes, variables)
        self.levels = self._read_levels()

        latitude_name, longitude_name = self.axes["latitude"], self.axes["longitude"]
        assert latitude_name is not None and longitude_name is not None
        latitude = read_numbers(self.address, latitude_name, variables).round(5)
        self.is_south_first = bool(latitude[0] < latitude[-1])
        self.latitude = latitude[::-1] if self.is_south_first else latitude
        longitude = read_numbers(self.address, longitude_name, variables).round(5) % 360
        self.first_column = int(np.argmin(longitude))  # Greenwich, or the first column east of it
        self.longitude = np.roll(longitude, -self.first_column)
        self._check_grid()

    def _read_levels(self) -> list[float]:
        """Pressure levels in hPa, in the order of the source; empty if it has none."""
        name = self.axes["level"]
        if name is None:
            return []
        values = read_numbers(self.address, name, self.source.variables)
        units = level_units(name, units_of(self.source.variables[name]), values)
        factor, _ = self._conversion("its pressure levels have", units, "hPa")
        return [round(factor * level, 5) for level in values.tolist()]

    def _find_fields(self) -> None:
        """Find the variables that hold quantities, by name: {quantity: its Fields, the best name first}."""
        self.fields: dict[str, list[Field]] = {}
        dimensions = {name for variable in self.source.variables.values() for name in variable.dims}
        needed = {self.axes["latitude"], self.axes["longitude"], self.axes["time"]}
        self.needed_dimensions = needed & dimensions  # less the time, if there is one instant alone
        found = []
        for name, variable in self.source.variables.items():
            for rank, quantity, level, default_units in _meanings(name):
                field = self._as_field(name, variable, quantity, level, default_units)
                if field is not None:
                    found.append((rank, quantity, field))
        for _, quantity, field in sorted(found, key=lambda entry: entry[0]):
            self.fields.setdefault(quantity, []).append(field)

    def _as_field(
        self, name: str, variable: xarray.Variable, quantity: str, level: int | None, default_units: str
    ) -> Field | None:
        """The Field of a variable; None for one without the dimensions of a field, such as orography."""
        if not self.needed_dimensions <= set(variable.dims):
            return None
        units = units_of(variable) or default_units
        level_axis = self.axes["level"]
        on_levels = quantity in ON_LEVELS and level is None
        if level_axis in variable.dims and (on_levels or variable.sizes[level_axis] > 1):
            return Field(name, variable, units, has_levels=True)
        if on_levels:
            # A file of one level has it as a coordinate of one value.
            only = self.levels[0] if len(self.levels) == 1 else None
            return Field(name, variable, units, has_levels=False, level=only)
        return Field(name, variable, units, has_levels=False, level=level)

    def find(self, quantity: str, level: float | None = None) -> Field | None:
        """The variable that holds a quantity (at a level in hPa), None if there is none."""
        for field in self.fields.get(quantity, []):
            is_at_level = level in self.levels if field.has_levels else level == field.level
            if is_at_level:
                return field
        return None

    def holds(self, quantity: str, level: float | None = None) -> bool:
        """Tell whether it holds a quantity (at a level in hPa). Raises UsageError for other units or dimensions."""
        field = self.find(quantity, level)
        if field is None:
            return False
        self.conversion(quantity, field)
        known = {*self.axes.values(), VERSIONS}
        others = {name: size for name, size in field.variable.sizes.items() if name not in known and size > 1}
        if others:
            raise UsageError(f"{self.address}: {field.name} has also the dimensions {others}: select one of each")
        return True

    def check(self, quantity: str, levels: Sequence[float | None], frames: np.ndarray) -> None:
        """Raises UsageError for parts that were never written, or cannot be decompressed, at indices of times."""
        for field, indices in self._groups(quantity, levels):
            selection = {}
            for axis, wanted in (("time", frames), ("level", np.array(indices))):
                name = self.axes[axis]
                if name is not None and len(wanted):
                    selection[name] = np.unique(wanted)
            with reading_quietly(f"{self.address}: {field.name}"):
                self.source.check(field.name, selection)

    def chunk_frames(self, quantity: str, level: float | None) -> int:
        """Number of frames that a chunk of the variable holds: all are decoded with any of them."""
        field = self.find(quantity, level)
        chunks = field.variable.encoding.get("preferred_chunks", {}) if field else {}
        size = chunks.get(self.axes["time"], 1)
        return size if isinstance(size, int) else max(size)

    def read(self, quantity: str, levels: Sequence[float | None], frames: np.ndarray) -> np.ndarray:
        """(T, L, H, W) float32 in ERA5's units, at levels ([None]: surface) and indices of times. Raises UsageError."""
        parts = []
        for field, indices in self._groups(quantity, levels):
            factor, offset = self.conversion(quantity, field)
            with reading_quietly(f"{self.address}: {field.name}"), np.errstate(over="ignore"):
                values = self._values(field, indices, frames)
                if (factor, offset) != (1, 0):
                    values = values * float(factor) + offset
                values = values.astype(np.float32, copy=False)
            parts.append(values)
        together = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if self.is_south_first:
            together = together[:, :, ::-1]
        return np.roll(together, -self.first_column, axis=-1) if self.first_column else together

    def _groups(self, quantity: str, levels: Sequence[float | None]) -> list[tuple[Field, list[int]]]:
        """(variable, indices of its levels) to be read for levels, in their order; of no level dimension, []."""
        groups: list[tuple[Field, list[int]]] = []
        for level in levels:
            field = self.find(quantity, level)
            assert field is not None  # callers ask only for what the store holds
            if not field.has_levels:
                groups.append((field, []))
                continue
            index = self.levels.index(level)  # type: ignore[arg-type]
            if groups and groups[-1][0] is field:
                groups[-1][1].append(index)
            else:
                groups.append((field, [index]))
        return groups

    def _values(self, field: Field, indices: list[int], frames: np.ndarray) -> np.ndarray:
        """(T, L, H, W) of a variable, as it is turned; of several versions the first that is not NaN."""
        variable = decode_cf_variable(field.name, field.variable, decode_times=False, decode_timedelta=False)
        time, level = self.axes["time"], self.axes["level"]
        order = [self.axes["latitude"], self.axes["longitude"]]
        part: dict[Any, Any] = {}
        if indices:
            part[level] = indices
            order.insert(0, level)
        if time in variable.dims:
            part[time] = _as_slice(frames)
            order.insert(0, time)
        for name in variable.dims:
            if name not in order and name != VERSIONS:
                part[name] = 0  # of length 1
        versions = variable.sizes.get(VERSIONS, 1)
        values = None
        for version in range(versions):
            chosen = part | ({VERSIONS: version} if VERSIONS in variable.dims else {})
            found = variable.isel(chosen).transpose(*order).values
            values = found if values is None else np.where(np.isnan(values), found, values)
            if version + 1 < versions and not np.isnan(values).any():
                break
        assert values is not None
        with_time = values if time in order else values[None]
        return with_time if indices else with_time[:, None]

    def conversion(self, quantity: str, field: Field) -> tuple[float, float]:
        """(factor, offset) from a variable's units to ERA5's. Raises UsageError for unknown units.

        A variable without units is taken to be in ERA5's (regridded WeatherBench2 stores give none), except relative
        humidity, which may be a fraction or a percentage.
        """
        if not field.units and quantity != "r":
            return 1, 0
        return self._conversion(f"{field.name} has", field.units, QUANTITIES[quantity].units)

    def _conversion(self, subject: str, theirs: str, ours: str) -> tuple[float, float]:
        known = {spelling.lower(): conversion for spelling, conversion in ERA5["units"][ours].items()}
        if theirs.lower() not in known:
            listed = ", ".join(ERA5["units"][ours])
            raise UsageError(f"{self.address}: {subject} unknown units '{theirs}' (known: {listed})")
        return known[theirs.lower()]

    def _check_grid(self) -> None:
        latitude, longitude, width = self.latitude, self.longitude, len(self.longitude)
        whole_circle = np.allclose(longitude, longitude[0] + 360 / width * np.arange(width), atol=1e-3)
        if width < 2 or not whole_circle or longitude[0] >= 360 / width:
            raise UsageError(f"{self.address}: its {width} longitudes do not go once around the globe in equal steps")
        steps = -np.diff(latitude)
        falling = len(steps) > 0 and steps.min() > 0  # nor are they, where one is NaN
        if not (falling and abs(latitude).max() <= 90 and np.ptp(latitude) + 2 * steps.max() >= 180):
            raise UsageError(f"{self.address}: its {len(latitude)} latitudes do not go from pole to pole")

    def describe(self) -> str:
        """What it holds, for a message: variables with dimensions, levels and dates."""
        names = [name for name, variable in self.source.variables.items() if variable.ndim >= 2]
        listed = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        dimensions: list[str] = []
        for name in names:
            dimensions += [str(one) for one in self.source.variables[name].dims if one not in dimensions]
        levels = f", levels {', '.join(f'{level:g}' for level in self.levels[:SHOWN])} hPa" if self.levels else ""
        dates = f"{minute(self.times[0])} to {minute(self.times[-1])}"
        return f"{self.address} holds {listed or 'no fields'} [{', '.join(dimensions)}]{levels}, {dates}"


def open_stores(address: str) -> list[Store]:
    """The stores at an address: one, or one for each variable of a GRIB file that is known. Raises UsageError."""
    sources = open_source(address)
    known = [source for source in sources if any(_meanings(name) for name in source.variables)]
    return [Store(address, source) for source in known or sources[:1]]


def _meanings(name: str) -> list[tuple[int, str, int | None, str]]:
    """(rank, quantity, level in hPa or None, units if none are stated) that the name of a variable may mean.

    T2M and VAR_2T are t2m, z500 is z at 500 hPa, and gh is z as a height. The rank puts a quantity's first name first.
    """
    lowered = name.lower().removeprefix("var_")
    if lowered in ERA5["also"]:
        quantity, units = ERA5["also"][lowered]
        return [(len(QUANTITIES[quantity].names), quantity, None, units)]
    if lowered in BY_NAME:
        quantity = BY_NAME[lowered]
        names = [*QUANTITIES[quantity].names, quantity]
        return [(names.index(lowered), quantity, None, "")]
    quantity, level = channel_key(lowered)
    if quantity in ON_LEVELS and level is not None:
        return [(math.inf, quantity, level, "")]  # type: ignore[list-item]
    return []


def units_of(variable: xarray.Variable) -> str:
    """The units that a variable states, powers without ** and ^ ('m s-1'); '' if it states none."""
    return str(variable.attrs.get("units", "")).replace("**", "").replace("^", "").strip()


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Increasing indices as a slice if their step is constant: stores read slices faster."""
    step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
    return slice(int(indices[0]), int(indices[-1]) + 1, step) if np.all(np.diff(indices) == step) else indices
