"""The files of a forecast: NetCDF with the CF conventions, one file for each start date, or one Zarr store for all.

Each channel is a variable of the same name, with its level or height as a scalar coordinate:
u500(forecast_reference_time, lead_time, latitude, longitude) at p500 = 500 hPa.
CF conventions 1.11: https://cfconventions.org
"""

import importlib.util
import re
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from tools.forecasting.dated_frames import HOUR, show
from utils.errors import UsageError
from utils.files import read_json, whole_file, write_json
from weather.channels import CHANNELS
from weather.grid import Grid

STANDARD_NAMES = {
    "u": "eastward_wind", "v": "northward_wind", "t": "air_temperature", "z": "geopotential",
    "r": "relative_humidity", "sp": "surface_air_pressure", "mslp": "air_pressure_at_mean_sea_level",
    "tcwv": "atmosphere_mass_content_of_water_vapor",
}  # fmt: skip
HEIGHTS = {"u10": 10.0, "v10": 10.0, "t2m": 2.0}  # m above the ground; in other names the number is the level in hPa
LONG_NAMES = {channel.name: channel.long_name for channel in CHANNELS}
EPOCH = "hours since 1970-01-01 00:00:00"
ENCODING = {"coordinates", "_FillValue", "units", "calendar", "dtype"}
SKILL, STORE = "skill.json", "forecast.zarr"
Scalar = tuple[str, tuple[tuple[()], float, dict[str, str]]]  # name, (dims, value, attributes)


def prepare_folder(path: Path | str) -> None:
    """Make the folder for one forecast, and remove the files that an earlier forecast has written there.

    One rank calls this. Raises UsageError if the folder cannot be written.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / SKILL).exists():
            for name in read_json(path / SKILL)["files"]:
                (path / Path(name).name).unlink(missing_ok=True)
            shutil.rmtree(path / STORE, ignore_errors=True)
        with whole_file(path / SKILL) as part:
            part.write_text('{"files": []}\n')
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    except (KeyError, TypeError):
        raise UsageError(f"{path / SKILL}: was not written by a forecast: choose another --out") from None


def attributes(checkpoint: Path, marker: dict[str, Any], split: str) -> dict[str, str]:
    """The origin of a forecast, as attributes of its files."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "title": "Forecast of a vision transformer",
        "source": f"{checkpoint}, {marker['iteration']} iterations of training",
        "comment": f"Started from the {split} data; each step is computed from the one before.",
        "history": f"{now} forecast.py",
    }


def write_skill(folder: Path | str, record: dict[str, Any]) -> None:
    """Write the record of a forecast as JSON. record["files"]: names of its files."""
    write_json(Path(folder) / SKILL, record)


def file_name(start: np.datetime64) -> str:
    """Name of the NetCDF file of a start date: forecast-2018-01-05T06.nc."""
    return f"forecast-{show(start).replace(':', '')}.nc"


def write_netcdf(folder: Path | str, forecast: xarray.Dataset) -> None:
    """Write a Dataset of forecast_dataset to a file named by its start date. Raises OSError, naming the file."""
    with whole_file(Path(folder) / file_name(forecast["forecast_reference_time"].values[0])) as part:
        forecast.to_netcdf(part, engine="h5netcdf")


def write_zarr(folder: Path | str, starts: Iterable[np.datetime64]) -> None:
    """Join the NetCDF files of these start dates in one Zarr store. Needs the package zarr: see zarr_missing."""
    store = Path(folder) / STORE
    for number, start in enumerate(starts):
        with xarray.open_dataset(Path(folder) / file_name(start), engine="h5netcdf") as forecast:
            for variable in forecast.variables.values():  # options of NetCDF mean nothing to Zarr
                variable.encoding = {key: value for key, value in variable.encoding.items() if key in ENCODING}
            along: dict[str, Any] = {"append_dim": "forecast_reference_time"} if number else {"mode": "w"}
            forecast.load().to_zarr(store, consolidated=False, **along)


def zarr_missing() -> str | None:
    """What to do if the Zarr package is not installed; None if it is."""
    return None if importlib.util.find_spec("zarr") else "no Zarr store: pip install -r requirements-era5.txt"


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
    coordinates: dict[str, Any] = {
        "forecast_reference_time": ("forecast_reference_time", reference, _described("forecast_reference_time")),
        "lead_time": ("lead_time", hours, {**_described("forecast_period"), "units": "hours"}),
        "latitude": ("latitude", grid.latitude, {**_described("latitude"), "units": "degrees_north", "axis": "Y"}),
        "longitude": ("longitude", grid.longitude, {**_described("longitude"), "units": "degrees_east", "axis": "X"}),
        "time": (("forecast_reference_time", "lead_time"), reference[:, None] + hours * HOUR, _described("time")),
    }
    variables = {}
    for c, (name, unit) in enumerate(zip(names, units, strict=True)):
        standard_name, scalar = describe_channel(name)
        attrs = {"long_name": LONG_NAMES.get(name, name), "units": unit or "1"}
        attrs |= {"standard_name": standard_name} if standard_name else {}
        attrs |= {"units_metadata": "temperature: on_scale"} if unit == "K" else {}
        variables[name] = (("forecast_reference_time", "lead_time", "latitude", "longitude"), fields[None, :, c], attrs)
        coordinates |= {scalar[0]: scalar[1]} if scalar else {}
    data = xarray.Dataset(variables, coordinates, {"Conventions": "CF-1.11", **attributes})
    for key, variable in data.variables.items():
        name = str(key)
        variable.encoding["_FillValue"] = None  # no value is missing
        if variable.dtype.kind == "M":
            variable.encoding |= {"units": EPOCH, "calendar": "standard", "dtype": "int32"}
        if name in names:
            scalar = describe_channel(name)[1]
            variable.encoding["coordinates"] = f"time {scalar[0]}" if scalar else "time"
    return data


def describe_channel(name: str) -> tuple[str | None, Scalar | None]:
    """CF standard name of a channel, and its scalar coordinate (name, (dims, value, attributes)); each may be None."""
    if name in HEIGHTS:
        value = HEIGHTS[name]
        attrs = {"standard_name": "height", "long_name": "height above the ground", "units": "m", "positive": "up"}
        return STANDARD_NAMES[name[0]], (f"height{value:.0f}", ((), value, attrs))
    level = re.fullmatch(r"([uvtzr])(\d+)", name)
    if not level:
        return STANDARD_NAMES.get(name) if len(name) > 1 else None, None
    attrs = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa", "positive": "down"}
    return STANDARD_NAMES[level[1]], (f"p{level[2]}", ((), float(level[2]), attrs))


def _described(standard_name: str) -> dict[str, str]:
    attrs = {"standard_name": standard_name, "long_name": standard_name.replace("_", " ")}
    return attrs | ({"units_metadata": "leap_seconds: none"} if standard_name.endswith("time") else {})
