"""The layout of WeatherBench 2, whose tools read it as it is: long names, levels as a dimension, dates of the start.

u500(forecast_reference_time, lead_time, ...) becomes u_component_of_wind(time, prediction_timedelta, level, ...).
Rasp et al. 2024, arXiv:2308.15560; https://weatherbench2.readthedocs.io (init-time convention).
"""

import re

import xarray

from weather.era5_store import QUANTITIES

LEVEL = {"standard_name": "air_pressure", "long_name": "pressure level", "units": "hPa", "positive": "down"}
KEPT = ("units", "standard_name", "units_metadata")  # attributes that all levels of a variable share


def weatherbench2_name(channel: str) -> tuple[str, int | None]:
    """(variable, level in hPa or None) of a channel: z500 is ("geopotential", 500); what is unknown keeps its name."""
    if channel in QUANTITIES and len(channel) > 1:
        return QUANTITIES[channel].names[1], None
    found = re.fullmatch(r"([a-z])([1-9]\d{0,3})", channel)
    return (QUANTITIES[found[1]].names[1], int(found[2])) if found and found[1] in QUANTITIES else (channel, None)


def weatherbench2_dataset(forecast: xarray.Dataset) -> xarray.Dataset:
    """A Dataset of output_files.forecast_dataset in the layout of WeatherBench 2.

    Variables are (time, prediction_timedelta, [level,] latitude, longitude). Levels (hPa) increase; a variable that has
    no channel at a level of another one is NaN there. Relative humidity is a fraction, as WeatherBench 2 derives it.
    """
    data = forecast.reset_coords(drop=True).drop_encoding()
    data = data.rename(forecast_reference_time="time", lead_time="prediction_timedelta")
    data["prediction_timedelta"] = data["prediction_timedelta"].astype("timedelta64[h]").astype("timedelta64[ns]")
    del data["prediction_timedelta"].attrs["units"]  # timedelta64 has its own
    stacks: dict[str, list[xarray.DataArray]] = {}
    for channel, field in data.data_vars.items():
        variable, level = weatherbench2_name(str(channel))
        if variable in data:  # another channel has that name
            variable, level = str(channel), None
        attributes = {key: field.attrs[key] for key in KEPT if key in field.attrs}
        if variable == "relative_humidity" and attributes["units"] == "%":
            field, attributes["units"] = field / 100, "1"
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
