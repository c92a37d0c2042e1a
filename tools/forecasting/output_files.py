"""The files of a forecast: NetCDF with the CF conventions, one file for each start date.

A file is written lead time by lead time while the forecast is made: a forecast of many members needs the memory of one
lead time, however long it is.

Each channel is a variable of the same name, with its level or height as a scalar coordinate:
u500(forecast_reference_time, lead_time, latitude, longitude) at p500 = 500 hPa.
CF conventions 1.11: https://cfconventions.org

Another layout is that of WeatherBench 2, whose tools read it as it is: long names, levels as a dimension, dates of the
start. u500 becomes u_component_of_wind(time, prediction_timedelta, level, ...).
Rasp et al. 2024, arXiv:2308.15560; https://weatherbench2.readthedocs.io (init-time convention).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends import H5NetCDFStore
from xarray.backends.common import ArrayWriter

from utils.errors import UsageError, first_line
from utils.files import whole_file
from weather.fields.channels import ERA5, QUANTITIES, channel_key, channel_of, find_conversion
from weather.fields.grid import HOUR, Grid
from weather.fields.time_axis import show
from weather.sources.hdf5 import ROOM_BESIDE_VALUES, WITHOUT_LOCKS, reserve

FULL = {"_FillValue": None}  # encoding: no value is missing
DATE = FULL | {
    "units": "hours since 1970-01-01 00:00:00",
    "calendar": "standard",
    "dtype": "int32",
}
SKILL = "skill.json"
LAYOUTS = ("cf", "weatherbench2")
LEVEL = {
    "standard_name": "air_pressure",
    "long_name": "pressure level",
    "units": "hPa",
    "positive": "down",
}
HEIGHT = {
    "standard_name": "height",
    "long_name": "height above the ground",
    "units": "m",
    "positive": "up",
}
ON_SCALE = {"units_metadata": "temperature: on_scale"}  # and no difference of temperatures
KEPT = ("units", "standard_name", "units_metadata")  # attributes that all levels of a variable share
DATES = ("forecast_reference_time", "lead_time")
DIMS = (*DATES, "latitude", "longitude")
Scalar = tuple[str, tuple[Any, ...]]  # name, (dims, value, attributes, encoding)
# Each layout has a name of its own for it.
LEAD_TIME = {"cf": "lead_time", "weatherbench2": "prediction_timedelta"}  # the dimension, by layout
FIELD_AXES = 4  # of a field at least: start date, lead time, latitude, longitude


def prepare_folder(path: Path | str) -> None:
    """Make the folder for one forecast, and remove the files that an earlier forecast has written there.

    Raises UsageError if the folder cannot be written, or has forecasts of somebody else.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        files = sorted(path.glob("forecast-*.nc"))
        if files and not (path / SKILL).exists():
            raise UsageError(f"{files[0]}: was not written by a forecast of this program: choose another --out")
        for file in files:
            file.unlink()
        # From now on the folder counts as ours, even if this forecast is stopped before it writes its skill.
        (path / SKILL).write_text("{}\n")
    except OSError as error:
        why = error.strerror or first_line(error)
        raise UsageError(f"{path}: the forecasts cannot be written there ({why}): choose another --out") from error


def attributes(
    checkpoint: Path,
    marker: dict[str, Any],
    split: str,
) -> dict[str, str]:
    """The origin of a forecast, as attributes of its files."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "title": "Forecast of a vision transformer",
        "source": f"{checkpoint}, {marker['iteration']} iterations of training",
        "comment": f"Started from the {split} data; each step is computed from the one before.",
        "history": f"{now} forecast.py",
    }


def file_name(start: np.datetime64) -> str:
    """Name of the NetCDF file of a start date: forecast-2018-01-05T06.nc."""
    return f"forecast-{show(start).replace(':', '')}.nc"


def forecast_dataset(
    start: np.datetime64,
    leads: Sequence[int],
    fields: np.ndarray,
    names: Sequence[str],
    units: Sequence[str],
    grid: Grid,
    attributes: dict[str, str],
) -> xarray.Dataset:
    """One forecast as an xarray.Dataset whose NetCDF file follows the CF conventions.

    start: datetime64. leads: (L,) hours. fields: (L, C, H, W), float32, in physical units, or (L, M, C, H, W) of the
    members of an ensemble, which have a dimension `number`, as in WeatherBench 2. names, units: of the C
    channels. attributes: of the file, besides Conventions.
    """
    # The dimension of start dates has one date here. Tools then join the files of several dates along it.
    coordinates = _coordinates(np.array([start], "datetime64[s]"), np.asarray(leads, np.int32), grid)
    dims: tuple[str, ...] = DIMS
    is_ensemble = fields.ndim == 5
    if is_ensemble:
        numbers = np.arange(fields.shape[1], dtype=np.int32)
        coordinates["number"] = ("number", numbers, {"standard_name": "realization", "long_name": "ensemble member"})
        dims = (*DATES, "number", *DIMS[-2:])
    variables = {}
    for c, (name, unit) in enumerate(zip(names, units, strict=True)):
        attrs = {"long_name": channel_of(name).long_name, "units": unit or "1"}
        standard_name, scalar = describe_channel(name)
        if standard_name:
            attrs["standard_name"] = standard_name
        if unit == "K":
            attrs |= ON_SCALE
        # Coordinates that are no dimensions of a variable are named in its attributes (CF 5).
        auxiliary = "time"
        if scalar:
            level_name, level = scalar
            coordinates[level_name] = level
            auxiliary = f"time {level_name}"
        field = fields[None, ..., c, :, :]  # (1, L, H, W), or (1, L, M, H, W)
        variables[name] = (dims, field, attrs, FULL | {"coordinates": auxiliary})
    return xarray.Dataset(variables, coordinates, {"Conventions": "CF-1.11", **attributes})


def _coordinates(reference: np.ndarray, hours: np.ndarray, grid: Grid) -> dict[str, Any]:
    """{name: (dims, values, attributes[, encoding])}. reference: (1,) dates. hours: (L,) lead times."""
    valid = reference[:, None] + hours * HOUR  # (1, L)
    period = _described("forecast_period") | {"units": "hours"}
    north = _described("latitude") | {"units": "degrees_north", "axis": "Y"}
    east = _described("longitude") | {"units": "degrees_east", "axis": "X"}
    return {
        DATES[0]: (DATES[:1], reference, _described(DATES[0]), DATE),
        DATES[1]: (DATES[1:], hours, period),
        "latitude": ("latitude", grid.latitude, north, FULL),
        "longitude": ("longitude", grid.longitude, east, FULL),
        "time": (DATES, valid, _described("time"), DATE),
    }


def describe_channel(name: str) -> tuple[str | None, Scalar | None]:
    """CF standard name of a channel, and its scalar coordinate (name, (dims, ...)); each may be None."""
    quantity, level = quantity_of(name)
    standard_name, height = ERA5["cf"].get(quantity, (None, None))
    if height:
        return standard_name, (f"height{height:.0f}", ((), height, HEIGHT, FULL))
    if level:
        return standard_name, (f"p{level}", ((), float(level), LEVEL, FULL))
    return standard_name, None


def _described(standard_name: str) -> dict[str, str]:
    attrs = {"standard_name": standard_name, "long_name": standard_name.replace("_", " ")}
    if standard_name.endswith("time"):
        attrs["units_metadata"] = "leap_seconds: none"
    return attrs


def quantity_of(channel: str) -> tuple[str, int | None]:
    """(quantity of ERA5, level in hPa or None) of a channel: z500 is ("z", 500); ("", None) for any other."""
    quantity, level = channel_key(channel)
    # A single letter, such as z, names a quantity at a level. Without one it is somebody else's channel.
    is_known = quantity in QUANTITIES and (len(quantity) > 1 or level is not None)
    return (quantity, level) if is_known else ("", None)


def _in_units_of_weatherbench2(field: xarray.DataArray, quantity: str) -> xarray.DataArray:
    """A field in ERA5's units, relative humidity as a fraction; as it is where its own units are not known.

    The levels of one variable share their units.
    """
    conversion = find_conversion(field.attrs["units"], QUANTITIES[quantity].units) if quantity else None
    if conversion is None:
        return field
    units = QUANTITIES[quantity].units
    factor, offset = conversion
    if units == "%":
        factor = factor / 100
        units = "1"
    is_same = (factor, offset) == (1, 0)
    converted = field if is_same else field * factor + offset
    on_scale = ON_SCALE if units == "K" else {}
    return converted.assign_attrs({**field.attrs, **on_scale, "units": units})


def weatherbench2_dataset(forecast: xarray.Dataset) -> xarray.Dataset:
    """A Dataset of output_files.forecast_dataset in the layout of WeatherBench 2.

    Variables are (time, prediction_timedelta, [level,] latitude, longitude). Levels (hPa) increase; a variable that has
    no channel at a level of another one is NaN there. Values are in ERA5's units, unless theirs are not known; relative
    humidity is a fraction, as WeatherBench 2 derives it.
    """
    data = forecast.reset_coords(drop=True).drop_encoding()
    data = data.rename(forecast_reference_time="time", lead_time="prediction_timedelta")
    hours = data["prediction_timedelta"].astype("timedelta64[h]")
    data["prediction_timedelta"] = hours.astype("timedelta64[ns]")
    del data["prediction_timedelta"].attrs["units"]  # timedelta64 has its own

    # The channels of one quantity become the levels of one variable.
    stacks: dict[str, list[xarray.DataArray]] = {}
    for channel, field in data.data_vars.items():
        quantity, level = quantity_of(str(channel))
        field = _in_units_of_weatherbench2(field, quantity)
        variable = QUANTITIES[quantity].names[1] if quantity else str(channel)
        attributes = {key: field.attrs[key] for key in KEPT if key in field.attrs}
        if level is not None:
            field = field.expand_dims(level=[level], axis=2)
        field.attrs = {"long_name": variable.replace("_", " "), **attributes}
        stacks.setdefault(variable, []).append(field)
    variables = {}
    for name, fields in stacks.items():
        variables[name] = fields[0]
        if "level" in fields[0].dims:
            variables[name] = xarray.concat(fields, "level").sortby("level")

    # A Dataset gives all variables the same levels, with NaN where one has none.
    data = xarray.Dataset(variables, attrs=forecast.attrs)
    data["time"].encoding = forecast["forecast_reference_time"].encoding
    data["prediction_timedelta"].encoding = {"units": "hours", "dtype": "int32"}
    for name in ("latitude", "longitude"):
        data[name].encoding = {"_FillValue": None}
    if "level" in data:
        data["level"].attrs = LEVEL
    return data


class FileKind:
    """What the files of several forecasts have in common.

    leads: (L,) hours. names, units: of the C channels. attributes: of every file. layout: of output_files.LAYOUTS.
    """

    def __init__(
        self,
        leads: Sequence[int],
        names: Sequence[str],
        units: Sequence[str],
        grid: Grid,
        attributes: dict[str, str],
        layout: str,
    ):
        self.leads = leads
        self.names = names
        self.units = units
        self.grid = grid
        self.attributes = attributes
        self.layout = layout

    def dataset(
        self,
        start: np.datetime64,
        leads: Sequence[int],
        fields: np.ndarray,
        grid: Grid,
    ) -> xarray.Dataset:
        """The forecast from a date at some lead times, in the layout of the files. fields: as of forecast_dataset."""
        # The other layout is made of this one, so that both hold the same numbers.
        forecast = forecast_dataset(start, leads, fields, self.names, self.units, grid, self.attributes)
        return weatherbench2_dataset(forecast) if self.layout == "weatherbench2" else forecast

    def blank(self, start: np.datetime64, members: int) -> xarray.Dataset:
        """A forecast from a date at all lead times, of zeros that take the memory of one lead time.

        members: 0 for a single forecast, without the dimension `number`.
        """
        channels = (members, len(self.names)) if members else (len(self.names),)
        image = [len(axis) for axis in self.grid]
        one_lead_time = np.zeros((1, *channels, *image), np.float32)
        # At a single lead time there is everything else: coordinates, attributes, storage.
        one = self.dataset(start, self.leads[:1], one_lead_time, self.grid)
        # At a single point there are the coordinates of all lead times.
        point = Grid(self.grid.latitude[:1], self.grid.longitude[:1])
        one_point = np.zeros((len(self.leads), *channels, 1, 1), np.float32)
        timed = self.dataset(start, self.leads, one_point, point)

        lead = LEAD_TIME[self.layout]
        # The whole is put together of both; a field of zeros is repeated, not stored.
        variables = {}
        for name, variable in one.variables.items():
            variables[name] = variable
            if lead in variable.dims and name in one.coords:
                variables[name] = timed.variables[name]
            elif lead in variable.dims:
                sizes = {**variable.sizes, lead: len(self.leads)}
                values = np.broadcast_to(variable.values, tuple(sizes.values()))
                variables[name] = xarray.Variable(variable.dims, values, variable.attrs, variable.encoding)
        return xarray.Dataset(variables, attrs=one.attrs).set_coords(list(one.coords))

    @contextmanager
    def opened(self, folder: Path | str, starts: np.ndarray, members: int) -> Iterator[list["ForecastFile"]]:
        """The files of forecasts from some dates, named by them. They get their names when the block ends well.

        Raises OSError, naming the file.
        """
        with ExitStack() as stack:
            files = []
            for start in starts:
                # A forecast that is interrupted leaves no file that looks complete.
                part = stack.enter_context(whole_file(Path(folder) / file_name(start)))
                blank = self.blank(start, members)
                reserve(part, blank.nbytes + ROOM_BESIDE_VALUES)
                store = stack.enter_context(closing(H5NetCDFStore.open(part, mode="w", driver_kwds=WITHOUT_LOCKS)))
                reserve(part, blank.nbytes)  # HDF5 has emptied it
                blank.dump_to_store(store, writer=WithoutFields())
                files.append(ForecastFile(self, start, store))
            yield files


class WithoutFields(ArrayWriter):
    """Writes coordinates, and leaves the space of fields as it is."""

    __slots__ = ()

    def add(self, source: Any, target: Any, region: Any = None) -> None:
        """Write what is no field."""
        if source.ndim < FIELD_AXES:
            super().add(source, target, region)


class ForecastFile:
    """A file that is open, with room for the fields of all lead times."""

    def __init__(self, kind: FileKind, start: np.datetime64, store: H5NetCDFStore):
        self.kind = kind
        self.start = start
        self.store = store

    def write(self, step: int, fields: np.ndarray) -> None:
        """Write the fields of a step of the forecast, counted from 0: (C, H, W), or (M, C, H, W) of members."""
        kind = self.kind
        # The same way as the blank was made, so that units and order of dimensions agree.
        one = kind.dataset(self.start, [kind.leads[step]], fields[None], kind.grid)
        for name, field in one.data_vars.items():
            # The first axes are start date and lead time.
            self.store.ds[name][:, step : step + 1] = field.values
        # Nothing of this lead time stays in memory.
        self.store.sync()
