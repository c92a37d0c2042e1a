"""The layout weatherbench2: its files open as the loader of WeatherBench 2 opens them.

The loader (weatherbench2/evaluation.py and schema.py, github.com/google-research/weatherbench2) is in no package index.
"""

import warnings

import numpy as np
import pytest
import xarray

from tools.forecasting.output_files import FileKind, file_name, forecast_dataset
from weather.fields.channels import CHANNELS
from weather.fields.grid import Grid, latitudes, longitudes

NAMES, UNITS = [channel.name for channel in CHANNELS], [channel.units for channel in CHANNELS]
GRID, LEADS = Grid(latitudes(8), longitudes(16)), [6, 12, 18]
STARTS = [np.datetime64("1982-01-02T06"), np.datetime64("1982-01-05T12")]
SURFACE = {
    "u10": "10m_u_component_of_wind", "v10": "10m_v_component_of_wind", "t2m": "2m_temperature",
    "sp": "surface_pressure", "mslp": "mean_sea_level_pressure", "tcwv": "total_column_water_vapour",
}  # fmt: skip
UPPER = {
    "u": "u_component_of_wind", "v": "v_component_of_wind", "z": "geopotential", "t": "temperature",
    "r": "relative_humidity", "q": "specific_humidity",
}  # fmt: skip


def written(folder, names=NAMES, units=UNITS):
    """Write two forecasts: their fields, (start, L, C, H, W)."""
    fields = np.random.default_rng(0).standard_normal((2, len(LEADS), len(names), 8, 16)).astype("f4")
    kind = FileKind(LEADS, names, units, GRID, {}, "weatherbench2")
    with kind.opened(folder, np.array(STARTS), 0) as files:
        for step in range(len(LEADS)):
            for file, values in zip(files, fields, strict=True):
                file.write(step, values[step])
    return fields


def as_weatherbench2_opens(store):
    """open_source_files with init times, apply_time_conventions."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = xarray.open_zarr(store, chunks=None)
    assert (np.diff(forecast.latitude.values) < 0).all()
    forecast = forecast.sel(latitude=forecast.latitude.values[::-1])  # make_latitude_increasing
    assert "prediction_timedelta" in forecast.coords
    forecast = forecast.rename(prediction_timedelta="lead_time").rename(time="init_time")
    forecast.coords["valid_time"] = forecast.init_time + forecast.lead_time
    assert not hasattr(forecast, "time")
    return forecast


def test_a_store_opens_as_weatherbench2_opens_it(tmp_path):
    pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
    fields = written(tmp_path)
    files = [xarray.open_dataset(tmp_path / file_name(start), engine="h5netcdf") for start in STARTS]
    xarray.concat(files, "time").drop_encoding().to_zarr(tmp_path / "forecast.zarr", zarr_format=2)
    data = as_weatherbench2_opens(tmp_path / "forecast.zarr")
    assert data.lead_time.dtype == "timedelta64[ns]" and data.level.dtype.kind == "i"
    assert list(data.init_time.values) == STARTS and list(data.level.values) == [50, 500, 850, 1000]
    assert (data.lead_time.values == np.array(LEADS, "timedelta64[h]")).all()
    assert data.valid_time.values[1, 2] == STARTS[1] + np.timedelta64(18, "h")
    chosen = data.sel(init_time=slice("1982-01-03", "1982-01-31"), level=[500, 850])  # _impose_data_selection
    assert chosen.sizes["init_time"] == 1 and chosen.sizes["level"] == 2
    for c, name in enumerate(NAMES):
        found = data[SURFACE[name]] if name in SURFACE else data[UPPER[name[0]]].sel(level=int(name[1:]))
        found = found.transpose("init_time", "lead_time", "latitude", "longitude").values
        scale = 100 if name.startswith("r") else 1  # % is a fraction there
        np.testing.assert_allclose(found[:, :, ::-1] * scale, fields[:, :, c], rtol=1e-6)
    assert set(data.data_vars) == {*SURFACE.values(), *UPPER.values()} - {"specific_humidity"}
    assert data.temperature.sel(level=50).isnull().all()  # no channel t50
    assert data.relative_humidity.attrs["units"] == "1"
    assert data.geopotential.attrs["standard_name"] == data.geopotential.attrs["long_name"] == "geopotential"


def test_a_channel_without_such_a_name_keeps_its_own(tmp_path):
    names = ["sst", "z", "k500", "q700", "r850", "zz50"]
    fields = written(tmp_path, names, ["K"] * 4 + ["1", ""])
    data = xarray.load_dataset(tmp_path / file_name(STARTS[0]), engine="h5netcdf")
    assert set(data.data_vars) == {*names} - {"q700", "r850"} | {"specific_humidity", "relative_humidity"}
    np.testing.assert_array_equal(data.zz50[0], fields[0][:, names.index("zz50")])
    np.testing.assert_array_equal(data.relative_humidity.sel(level=850)[0], fields[0][:, names.index("r850")])
    assert "level" not in data.sst.dims and data.specific_humidity.attrs["standard_name"] == "specific_humidity"
    written(tmp_path, ["sst"], ["K"])  # without any level
    assert "level" not in xarray.load_dataset(tmp_path / file_name(STARTS[0]), engine="h5netcdf").dims


def test_values_in_other_units_are_converted_before_their_levels_are_stacked(tmp_path):
    names = ["t2m", "sp", "z500", "z850", "r500", "r850", "mslp"]
    fields = written(tmp_path, names, ["degC", "hPa", "gpm", "m2 s-2", "1", "%", "mmHg"])[0]
    data = xarray.load_dataset(tmp_path / file_name(STARTS[0]), engine="h5netcdf")

    def assert_is(found, channel, factor, offset=0.0):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[0], fields[:, channel] * factor + offset, rtol=1e-5)

    assert_is(data["2m_temperature"], 0, 1, 273.15)
    assert_is(data.surface_pressure, 1, 100)
    assert_is(data.geopotential.sel(level=500), 2, 9.80665)
    assert_is(data.geopotential.sel(level=850), 3, 1)
    assert_is(data.relative_humidity.sel(level=500), 4, 1)
    assert_is(data.relative_humidity.sel(level=850), 5, 0.01)
    assert_is(data.mean_sea_level_pressure, 6, 1)  # nobody knows how
    units = {name: variable.attrs["units"] for name, variable in data.data_vars.items()}
    assert units == {
        "2m_temperature": "K", "surface_pressure": "Pa", "geopotential": "m2 s-2", "relative_humidity": "1",
        "mean_sea_level_pressure": "mmHg",
    }  # fmt: skip


def test_every_known_channel_has_its_long_name_in_a_forecast():
    names = ["q500", "u250", "ozone"]
    fields = np.zeros((len(LEADS), len(names), 8, 16), "f4")
    data = forecast_dataset(STARTS[0], LEADS, fields, names, ["kg kg-1", "m s-1", ""], GRID, {})
    long_names = [data[name].attrs["long_name"] for name in names]
    assert long_names == ["specific humidity at 500 hPa", "eastward wind at 250 hPa", "ozone"]
