"""One source of real data as we have it: dates, levels in hPa, rows from the north, columns from Greenwich eastward."""

from collections.abc import Sequence

import numpy as np
import xarray

from utils.errors import UsageError
from weather.fields.channels import QUANTITIES
from weather.fields.names import conversion, meaning_of, units_of
from weather.sources.attributes import check_packing, check_stated_range
from weather.sources.axes import Axes, find_axes, level_units, minute, read_numbers, read_times
from weather.sources.opening import open_source
from weather.sources.source import Source, reading_quietly
from weather.sources.variables import VERSIONS, Field, find_fields, read_field

SHOWN = 12  # names and levels in a message
REGION = "; python -m weather.prepare_data makes data of a region"
Part = tuple[Field, list[int]]  # a variable, and the indices of the levels that are wanted of it
OF_VARIABLES = ("variable", "variables", "channel", "channels", "feature", "features", "param")  # as a dimension


class Store:
    """One source on a global grid.

    address: of a Zarr store, a file, or a group in one. opened: what is there, if somebody opened it already.
    Attributes: address; times (T,) datetime64[s]; levels, a list in hPa; latitude (H,) and longitude (W,) in degrees,
    from the north and from Greenwich; fields, {quantity: its Fields, the best name first}.
    Raises UsageError if it cannot be opened or has no such grid.
    """

    def __init__(self, address: str, opened: xarray.Dataset | Source | None = None):
        self.address = address
        self.source = _as_source(address, opened)
        with reading_quietly(f"{address}: its coordinates"):
            self._find_axes()
            self.fields = self._find_fields()

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
        self._conversion(quantity, field)
        # Dimensions of one value, such as the number of a member, say nothing.
        known = {*self.axes.values(), VERSIONS}
        others = {}
        for name, size in field.variable.sizes.items():
            if name not in known and size > 1:
                others[name] = size
        if others:
            raise UsageError(f"{self.address}: {field.name} has also the dimensions {others}: select one of each")
        return True

    def check(self, quantity: str, level: float | None, frames: np.ndarray) -> None:
        """Raises UsageError for parts that were never written, or cannot be decompressed, at indices of times."""
        [(field, indices)] = self._parts(quantity, [level])
        selection = {}
        time_axis = self.axes["time"]
        level_axis = self.axes["level"]
        if time_axis is not None:
            selection[time_axis] = np.unique(frames)
        if level_axis is not None and indices:
            selection[level_axis] = np.array(indices)
        with reading_quietly(f"{self.address}: {field.name}"):
            self.source.check(field.name, selection)

    def chunk_frames(self, quantity: str, level: float | None) -> int:
        """Number of frames that a chunk of the variable holds: all are decoded with any of them."""
        field = self.find(quantity, level)
        if field is None:
            return 1
        chunks = field.variable.encoding.get("preferred_chunks", {})
        size = chunks.get(self.axes["time"], 1)
        return int(np.max(size))  # a tuple where they are not all of one size

    def read(
        self,
        quantity: str,
        levels: Sequence[float | None],
        frames: np.ndarray,
    ) -> np.ndarray:
        """(T, L, H, W) float32 in ERA5's units, at levels ([None]: surface) and indices of times. Raises UsageError."""
        read = []
        for field, indices in self._parts(quantity, levels):
            factor, offset = self._conversion(quantity, field)
            # A number that float32 cannot hold becomes infinite, which is found among the values later.
            with reading_quietly(f"{self.address}: {field.name}"), np.errstate(over="ignore"):
                check_packing(field.variable, self.address, field.name)
                values = read_field(field, self.axes, indices, frames)
                since = minute(self.times[frames[0]])
                check_stated_range(values, field.variable, self.address, field.name, since)
                if (factor, offset) != (1, 0):
                    values = values * float(factor) + offset
                read.append(values.astype(np.float32, copy=False))
        # (T, L, H, W), then turned: rows from the north, columns from Greenwich.
        together = read[0] if len(read) == 1 else np.concatenate(read, axis=1)
        return self.turn(together)

    def turn(self, values: np.ndarray | xarray.Variable) -> np.ndarray:
        """Values (..., H, W) as they are stored, with rows from the north and columns from Greenwich."""
        turned = np.asarray(values)
        if self.is_south_first:
            turned = turned[..., ::-1, :]
        if self.first_column:
            turned = np.roll(turned, -self.first_column, axis=-1)
        return turned

    # ---- how it is stored

    def _find_axes(self) -> None:
        """Find dates, levels, rows and columns."""
        self.axes = self._locate_axes()
        self.times = read_times(self.address, self.axes, self.source.variables)
        self.levels = self._read_levels()
        self._read_grid()

    def _locate_axes(self) -> Axes:
        """The names of the dimensions of time, level, latitude and longitude."""
        variables = self.source.variables
        named = [variable for name, variable in variables.items() if meaning_of(name)]
        # The root of a store of groups has no fields, and often no dimensions.
        if not named:
            self._check_groups()
        return find_axes(self.address, variables, named)

    def _find_fields(self) -> dict[str, list[Field]]:
        """{quantity: its Fields, the best name first}."""
        return find_fields(self.source.variables, self.axes, self.levels)

    def _read_grid(self) -> None:
        """Find rows and columns, as they are promised."""
        variables = self.source.variables
        latitude = read_numbers(self.address, self.axes["latitude"], variables)
        self.is_south_first = bool(latitude[0] < latitude[-1])
        self.latitude = latitude[::-1] if self.is_south_first else latitude
        longitude = read_numbers(self.address, self.axes["longitude"], variables) % 360
        self.first_column = int(np.argmin(longitude))  # Greenwich, or the first column east of it
        self.longitude = np.roll(longitude, -self.first_column)
        self._check_grid()

    def _check_groups(self) -> None:
        """Raise UsageError, naming them, if what is looked for may be in groups of the source."""
        groups = self.source.find_groups()
        if groups:
            names = [group.removeprefix(self.address).strip("/") for group in groups]
            give = " ".join(groups[:SHOWN])
            raise UsageError(f"{self.address}: has the groups {_listed(names)}: give those in its place: {give}")

    def _read_levels(self) -> list[float]:
        """Pressure levels in hPa, in the order of the source; empty if it has none."""
        name = self.axes["level"]
        if name is None:
            return []
        values = read_numbers(self.address, name, self.source.variables)
        # Levels are compared as numbers, so 85000 Pa must become 850 exactly.
        stated = units_of(self.source.variables[name])
        units = level_units(name, stated, values)
        factor, _ = conversion(f"{self.address}: its pressure levels have", units, "hPa")
        return [round(factor * level, 5) for level in values.tolist()]

    def _parts(self, quantity: str, levels: Sequence[float | None]) -> list[Part]:
        """What is read for levels, in their order; of a variable without levels, no indices."""
        parts: list[Part] = []
        for level in levels:
            field = self.find(quantity, level)
            assert field is not None  # callers ask only for what the store holds
            indices = []
            if field.has_levels and level is not None:
                indices = [self.levels.index(level)]
            # Levels of one variable are read at once.
            is_continued = bool(parts) and parts[-1][0] is field
            if is_continued:
                parts[-1][1].extend(indices)
            else:
                parts.append((field, indices))
        return parts

    def _conversion(self, quantity: str, field: Field) -> tuple[float, float]:
        """(factor, offset) from a variable's units to ERA5's. Raises UsageError for unknown units.

        A variable without units is taken to be in ERA5's (regridded WeatherBench2 stores give none), except relative
        humidity, which may be a fraction or a percentage.
        """
        if not field.units and quantity != "r":
            return 1, 0
        return conversion(f"{self.address}: {field.name} has", field.units, QUANTITIES[quantity].units)

    def _check_grid(self) -> None:
        longitude = self.longitude
        width = len(longitude)
        # Equal steps once around the globe; the first column is less than a step east of Greenwich.
        even = longitude[0] + 360 / width * np.arange(width)
        is_whole_circle = np.allclose(longitude, even, atol=1e-3) and longitude[0] < 360 / width
        if width < 2 or not is_whole_circle:
            raise UsageError(
                f"{self.address}: its {width} longitudes do not go once around the globe in equal steps{REGION}"
            )
        # Some grids leave the poles out, by at most a step.
        steps = -np.diff(self.latitude)
        is_falling = len(steps) > 0 and steps.min() > 0  # nor is it, where one is NaN
        is_from_pole_to_pole = is_falling and np.ptp(self.latitude) + 2 * steps.max() >= 180
        if not is_from_pole_to_pole or abs(self.latitude).max() > 90:
            raise UsageError(f"{self.address}: its {len(self.latitude)} latitudes do not go from pole to pole{REGION}")


def open_stores(address: str) -> list[Store]:
    """The stores at an address: one, or one for each known variable of a GRIB file. Raises UsageError."""
    sources = open_source(address)
    # A GRIB file may hold more than what is needed, on other grids.
    known = []
    for source in sources:
        if any(meaning_of(name) for name in source.variables):
            known.append(source)
    return [Store(address, source) for source in known or sources[:1]]


def describe_stores(stores: Sequence[Store]) -> str:
    """What the stores of one address hold, for a message: variables with dimensions, levels and dates."""
    names: list[str] = []
    dimensions: list[str] = []
    levels: list[str] = []
    for store in stores:
        for name, variable in store.source.variables.items():
            if variable.ndim >= 2:
                names.append(name)
                dimensions.extend(str(one) for one in variable.dims)
        levels.extend(f"{level:g}" for level in store.levels)
    listed = _listed(names) or "no fields"
    axes = _listed(list(dict.fromkeys(dimensions)))
    heights = _listed(list(dict.fromkeys(levels)))
    at_levels = f", levels {heights} hPa" if levels else ""
    of_variables = [one for one in dict.fromkeys(dimensions) if one.lower() in OF_VARIABLES]
    remedy = (
        f": make its {of_variables[0]} variables (xarray: to_dataset(dim='{of_variables[0]}'))" if of_variables else ""
    )
    first = min(store.times[0] for store in stores)
    last = max(store.times[-1] for store in stores)
    held = f"{stores[0].address} holds {listed} [{axes}]{at_levels}, {minute(first)} to {minute(last)}"
    return held + remedy


def _as_source(address: str, opened: xarray.Dataset | Source | None) -> Source:
    if isinstance(opened, Source):
        return opened
    if opened is not None:
        return Source(address, {str(name): variable for name, variable in opened.variables.items()})
    sources = open_source(address)
    if len(sources) > 1:
        raise UsageError(f"{address}: is GRIB, which opens as a store for each variable: use open_stores")
    return sources[0]


def _listed(texts: Sequence[str]) -> str:
    more = ", ..." if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
