"""The files of a forecast: NetCDF with the CF conventions, one file for each start date.

Each channel is a variable of the same name, with its level or height as a scalar coordinate:
u500(forecast_reference_time, lead_time, latitude, longitude) at p500 = 500 hPa.
CF conventions 1.11: https://cfconventions.org

Another layout is that of WeatherBench 2, whose tools read it as it is: long names, levels as a dimension, dates of the
start. u500 becomes u_component_of_wind(time, prediction_timedelta, level, ...).
Rasp et al. 2024, arXiv:2308.15560; https://weatherbench2.readthedocs.io (init-time convention).
"""

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from xarray.backends import H5NetCDFStore

from utils.errors import UsageError, os_errors_as_usage_errors
from utils.files import whole_file
from weather.channels import ERA5, QUANTITIES, channel_key, channel_of, find_conversion
from weather.grid import HOUR, Grid
from weather.hdf5_file import WITHOUT_LOCKS
from weather.time_axis import show

FULL = {"_FillValue": None}  # encoding: no value is missing
DATE = FULL | {"units": "hours since 1970-01-01 00:00:00", "calendar": "standard", "dtype": "int32"}
SKILL, LAYOUTS = "skill.json", ("cf", "weatherbench2")
LEVEL = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa", "positive": "down"}
ON_SCALE = {"units_metadata": "temperature: on_scale"}  # and no difference of temperatures
KEPT = ("units", "standard_name", "units_metadata")  # attributes that all levels of a variable share
Scalar = tuple[str, tuple[Any, ...]]  # name, (dims, value, attributes, encoding)


def prepare_folder(path: Path | str) -> None:
    """Make the folder for one forecast, and remove the files that an earlier forecast has written there.

    Raises UsageError if the folder cannot be written, or has forecasts of somebody else.
    """
    path = Path(path)
    with os_errors_as_usage_errors():
        path.mkdir(parents=True, exist_ok=True)
        files = sorted(path.glob("forecast-*.nc"))
        if files and not (path / SKILL).exists():
            raise UsageError(f"{files[0]}: was not written by a forecast of this program: choose another --out")
        for file in files:
            file.unlink()
        (path / SKILL).write_text("{}\n")


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


def write_netcdf(folder: Path | str, forecast: xarray.Dataset, layout: str = "cf") -> None:
    """Write a Dataset of forecast_dataset to a file named by its start date. Raises OSError, naming the file."""
    with whole_file(Path(folder) / file_name(forecast["forecast_reference_time"].values[0])) as part:
        data = weatherbench2_dataset(forecast) if layout == "weatherbench2" else forecast
        with closing(H5NetCDFStore.open(part, mode="w", driver_kwds=WITHOUT_LOCKS)) as store:
            data.dump_to_store(store)


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

    start: datetime64. leads: (L,) hours. fields: (L, C, H, W), float32, in physical units. names, units: of the C
    channels. attributes: of the file, besides Conventions.
    """
    reference, hours = np.array([start], "datetime64[s]"), np.asarray(leads, np.int32)
    north, east = {"units": "degrees_north", "axis": "Y"}, {"units": "degrees_east", "axis": "X"}
    dates = ("forecast_reference_time", "lead_time")
    coordinates: dict[str, Any] = {
        "forecast_reference_time": (dates[:1], reference, _described("forecast_reference_time"), DATE),
        "lead_time": (dates[1:], hours, _described("forecast_period") | {"units": "hours"}),
        "latitude": ("latitude", grid.latitude, _described("latitude") | north, FULL),
        "longitude": ("longitude", grid.longitude, _described("longitude") | east, FULL),
        "time": (dates, reference[:, None] + hours * HOUR, _described("time"), DATE),
    }
    variables = {}
    for c, (name, unit) in enumerate(zip(names, units, strict=True)):
        standard_name, scalar = describe_channel(name)
        attrs = {"long_name": channel_of(name).long_name, "units": unit or "1"}
        attrs |= {"standard_name": standard_name} if standard_name else {}
        attrs |= ON_SCALE if unit == "K" else {}
        coordinates |= {scalar[0]: scalar[1]} if scalar else {}
        encoding = FULL | {"coordinates": f"time {scalar[0]}" if scalar else "time"}
        variables[name] = ((*dates, "latitude", "longitude"), fields[None, :, c], attrs, encoding)
    return xarray.Dataset(variables, coordinates, {"Conventions": "CF-1.11", **attributes})


def describe_channel(name: str) -> tuple[str | None, Scalar | None]:
    """CF standard name of a channel, and its scalar coordinate (name, (dims, ...)); each may be None."""
    quantity, level = quantity_of(name)
    standard_name, height = ERA5["cf"].get(quantity, (None, None))
    if height:
        attrs = {"standard_name": "height", "long_name": "height above the ground", "units": "m", "positive": "up"}
        return standard_name, (f"height{height:.0f}", ((), height, attrs, FULL))
    return standard_name, (f"p{level}", ((), float(level), LEVEL, FULL)) if level else None


def _described(standard_name: str) -> dict[str, str]:
    attrs = {"standard_name": standard_name, "long_name": standard_name.replace("_", " ")}
    return attrs | ({"units_metadata": "leap_seconds: none"} if standard_name.endswith("time") else {})


def quantity_of(channel: str) -> tuple[str, int | None]:
    """(quantity of ERA5, level in hPa or None) of a channel: z500 is ("z", 500); ("", None) for any other."""
    quantity, level = channel_key(channel)
    known = quantity in QUANTITIES and (len(quantity) > 1 or level is not None)
    return (quantity, level) if known else ("", None)


def _in_units_of_weatherbench2(field: xarray.DataArray, quantity: str) -> xarray.DataArray:
    """A field in ERA5's units, relative humidity as a fraction; as it is where its own units are not known.

    The levels of one variable share their units.
    """
    conversion = find_conversion(quantity, field.attrs["units"]) if quantity else None
    if conversion is None:
        return field
    units = QUANTITIES[quantity].units
    factor, offset = conversion
    if units == "%":
        factor, units = factor / 100, "1"
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
    data["prediction_timedelta"] = data["prediction_timedelta"].astype("timedelta64[h]").astype("timedelta64[ns]")
    del data["prediction_timedelta"].attrs["units"]  # timedelta64 has its own
    stacks: dict[str, list[xarray.DataArray]] = {}
    for channel, field in data.data_vars.items():
        quantity, level = quantity_of(str(channel))
        field = _in_units_of_weatherbench2(field, quantity)
        variable = QUANTITIES[quantity].names[1] if quantity else str(channel)
        attributes = {key: field.attrs[key] for key in KEPT if key in field.attrs}
        field = field if level is None else field.expand_dims(level=[level], axis=2)
        field.attrs = {"long_name": variable.replace("_", " "), **attributes}
        stacks.setdefault(variable, []).append(field)
    variables = {
        name: xarray.concat(fields, "level").sortby("level") if "level" in fields[0].dims else fields[0]
        for name, fields in stacks.items()
    }
    data = xarray.Dataset(variables, attrs=forecast.attrs)  # gives all the same levels, with NaN where one had none
    data["time"].encoding = forecast["forecast_reference_time"].encoding
    data["prediction_timedelta"].encoding = {"units": "hours", "dtype": "int32"}
    for name in ("latitude", "longitude"):
        data[name].encoding = {"_FillValue": None}
    if "level" in data:
        data["level"].attrs = LEVEL
    return data
