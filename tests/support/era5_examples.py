"""The same few frames of an atmosphere in every kind of store that `weather.prepare_era5` reads."""

import os
import warnings

import numpy as np
import pytest

from weather import prepare_era5
from weather.fields.channels import CHANNELS, QUANTITIES, channel_key
from weather.sample.atmosphere import Atmosphere

if os.environ.get("CI"):
    import xarray
else:
    xarray = pytest.importorskip("xarray", reason="pip install -r requirements/era5.txt")
    pytest.importorskip("zarr")
    pytest.importorskip("h5netcdf")

H, W, DAYS = 9, 16, 2
FRAMES = 4 * DAYS
YEARS = {1979: "train", 1980: "train", 1981: "valid", 1982: "test"}
SETTINGS = {"train_years": (1979, 1980), "valid_years": (1981,), "test_years": (1982,), "days": DAYS}
LEVELS = (50, 500, 700, 850, 1000)
C = {channel.name: i for i, channel in enumerate(CHANNELS)}
ZARR = {"v2": {"zarr_format": 2, "consolidated": True}, "v3": {"zarr_format": 3, "consolidated": False}}
MODEL = Atmosphere((H, W), seed=2)  # both poles are rows of it
TRUTH = {year: MODEL.frames(year, 0, FRAMES) for year in YEARS}  # what the year files must hold: (8, 20, 9, 16) each


def build(wb2=False, years=YEARS, hours=6):
    """An xarray.Dataset of the frames with Copernicus' names (or WeatherBench2's), north first, from Greenwich."""
    x = np.concatenate([TRUTH[year] for year in years])
    starts = [np.datetime64(f"{year}-01-01", "ns") for year in years]
    step, between = np.timedelta64(hours, "h"), 6 // hours
    times = np.concatenate([start + step * np.arange(FRAMES * between) for start in starts])
    x = np.repeat(x, between, axis=0)
    x[np.arange(len(x)) % between > 0] *= np.float32(1.01)  # what is between must not be taken, nor averaged in
    time, level = ("time", "level") if wb2 else ("valid_time", "pressure_level")
    data = xarray.Dataset(coords={time: times, level: np.array(LEVELS, float)})
    data = data.assign_coords(latitude=90 - 22.5 * np.arange(H), longitude=22.5 * np.arange(W))
    data[level].attrs["units"] = "hPa"
    spelling = {"m s-1": "m s**-1", "m2 s-2": "m**2 s**-2", "kg m-2": "kg m**-2"}
    for key, quantity in QUANTITIES.items():
        channels = {lev: i for i, (name, lev) in enumerate(map(channel_key, C)) if name == key}
        if not channels:
            continue
        attributes = {"units": spelling.get(quantity.units, quantity.units)}
        if None in channels:
            variable = (time, "latitude", "longitude"), x[:, channels[None]], attributes
        else:
            at_levels = [x[:, channels.get(lev, max(channels.values()))] for lev in LEVELS]
            variable = (time, level, "latitude", "longitude"), np.stack(at_levels, 1), attributes
        data[quantity.names[wb2]] = variable
    return data


def save_zarr(data, path, version="v2"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.to_zarr(path, **ZARR[version])
    return str(path)


def save_netcdf(data, path, engine="h5netcdf"):
    data.to_netcdf(path, engine=engine)
    return str(path)


def surface_and_levels(data):
    """The variables at the surface, and those on pressure levels, of a Dataset as `build` makes it."""
    single = [name for name in data if "pressure_level" not in data[name].dims]
    return data[single], data.drop_vars(single)


def reference_hours(data):
    """Hours since 1970 of its frames."""
    return (data.valid_time.values - np.datetime64("1970-01-01")) / np.timedelta64(1, "h")


def save_grib(data, path):
    """Write GRIB 2, a message for each field, with 24 bits a value."""
    eccodes = pytest.importorskip("eccodes", reason="pip install -r requirements/era5.txt")
    short_names = {"u10": "10u", "v10": "10v", "t2m": "2t"}
    grid = {"Ni": W, "Nj": H, "iDirectionIncrementInDegrees": 360 / W, "jDirectionIncrementInDegrees": 180 / (H - 1)}
    grid |= {"latitudeOfFirstGridPointInDegrees": 90.0, "latitudeOfLastGridPointInDegrees": -90.0}
    grid |= {"longitudeOfFirstGridPointInDegrees": 0.0, "longitudeOfLastGridPointInDegrees": 360 - 360 / W}

    def write(file, name, date, level, values):
        message = eccodes.codes_grib_new_from_samples(f"regular_ll_{'pl' if level else 'sfc'}_grib2")
        day, hour = str(date.astype("datetime64[h]")).replace("-", "").split("T")
        keys = {"dataDate": int(day), "dataTime": 100 * int(hour), "shortName": short_names.get(name, name)}
        for key, value in (grid | keys | ({"level": level} if level else {}) | {"bitsPerValue": 24}).items():
            eccodes.codes_set(message, key, value)
        eccodes.codes_set_values(message, values.astype(float).ravel())
        eccodes.codes_write(message, file)
        eccodes.codes_release(message)

    with open(path, "wb") as file:
        for name, variable in data.items():
            for date, fields in zip(data.valid_time.values, variable.values, strict=True):
                if fields.ndim == 2:
                    write(file, name, date, 0, fields)
                    continue
                for level, field in zip(LEVELS, fields, strict=True):
                    write(file, name, date, level, field)
    return str(path)


def wb2_regridded(folder):
    """As WeatherBench2's coarse stores: longitude before latitude, south first, no units; chunks across the years."""
    data = build(wb2=True).transpose("time", "level", "longitude", "latitude").isel(latitude=slice(None, None, -1))
    for name in set(data) - {"relative_humidity"}:
        data[name].attrs.clear()
    return [save_zarr(data, folder / "wb2.zarr")]


def wb2_hourly(folder):
    return [save_zarr(build(wb2=True, hours=1), folder / "hourly.zarr", "v3")]


def three_hourly(folder):
    return [save_zarr(build(hours=3), folder / "three.zarr", "v3")]


def uneven_steps(folder):
    """Hourly, then 6-hourly, in every year."""
    data = build(hours=1)
    frames = [i for i in range(data.sizes["valid_time"]) if i % (6 * FRAMES) < 12 or i % 6 == 0]
    return [save_zarr(data.isel(valid_time=frames), folder / "uneven.zarr")]


def cds(folder):
    """As Copernicus serves it: single levels and pressure levels apart, members and versions as extra coordinates."""
    data = build().assign_coords(number=0)
    data = data.assign_coords(expver=("valid_time", np.array(["0001"] * data.sizes["valid_time"], object)))
    surface, upper = surface_and_levels(data)
    encoding = {name: {"zlib": True, "shuffle": True} for name in upper.data_vars}
    upper.isel(pressure_level=slice(None, None, -1)).to_netcdf(folder / "p.nc", engine="h5netcdf", encoding=encoding)
    return [save_netcdf(surface, folder / "s.nc"), str(folder / "p.nc")]


def cds_by_year(folder):
    """The same in one NetCDF 3 file a year, longitudes from -180."""
    paths = []
    for year in YEARS:
        data = build(years=[year]).roll(longitude=W // 2, roll_coords=True)
        data["longitude"] = (data.longitude + 180) % 360 - 180
        paths.append(save_netcdf(data, folder / f"{year}.nc", "scipy"))
    return paths


def convert(sources, out, **settings):
    return prepare_era5.prepare_era5(sources, out, **SETTINGS | settings)
