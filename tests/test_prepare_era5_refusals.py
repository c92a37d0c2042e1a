"""A source or setting that cannot be used is refused in one line that names what is wrong, before it does harm."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.era5_examples import H, W, build, convert, save_zarr, wb2_regridded
from tests.support.refusals import refusal
from weather import year_files


def put(data, name, value, **where):
    values = data[name].copy(deep=True)
    values[where] = value
    return data.assign({name: values})


def units(data, name, text):
    data[name].attrs["units"] = text
    return data


REFUSALS = {
    "a missing variable": (lambda d: d.drop_vars("tcwv"), "no source holds tcwv or total_column_water_vapour"),
    "a missing level": (
        lambda d: d.sel(pressure_level=[50, 500, 1000]),
        "no source holds t or temperature at 850 hPa",
    ),
    "no humidity": (lambda d: d.drop_vars("r"), "no source holds q or specific_humidity at 500 hPa"),
    "a missing time": (lambda d: d.isel(valid_time=[*range(5), *range(6, 32)]), "u10 .*: 1979-01-02T06:00 is missing"),
    "a missing year": (lambda d: d.isel(valid_time=slice(8, None)), "1979-01-01T00:00 is missing"),
    "12-hourly": (
        lambda d: d.isel(valid_time=slice(0, None, 2)),
        "1979-01-01T06:00 is missing",
    ),
    "shifted hours": (
        lambda d: d.assign_coords(valid_time=d.valid_time + np.timedelta64(3, "h")),
        "1979-01-01T00:00 is missing",
    ),
    "times that decrease": (
        lambda d: d.isel(valid_time=slice(None, None, -1)),
        "times do not increase",
    ),
    "a time twice": (
        lambda d: d.isel(valid_time=[0, 1, 1, 2]),
        "times do not increase",
    ),
    "no times": (lambda d: d.isel(valid_time=slice(0)), "valid_time has 0 values, not 1 to"),
    "a NaN": (
        lambda d: put(d, "z", np.nan, valid_time=13, pressure_level=1, latitude=3, longitude=7),
        "z or geopotential at 500 hPa, 1980-01-02T06:00: row 3 from the north, column 7 is NaN",
    ),
    "a fill value": (lambda d: put(d, "sp", 9.97e36, valid_time=0), "sp or surface_pressure, 1979-01-01T00:00.*97e"),
    "unknown units": (lambda d: units(d, "sp", "inHg"), r"sp has unknown units 'inHg' \(known: Pa, hPa"),
    "units of another quantity": (lambda d: units(d, "t", "m s**-1"), "t has unknown units 'm s-1'"),
    "celsius called kelvin": (lambda d: d.assign(t2m=d.t2m - 273.15), "2m_temperature.*outside 150 to 350 K"),
    "unknown units of levels": (lambda d: units(d, "pressure_level", "sigma"), "levels have unknown units 'sigma'"),
    "half a globe": (lambda d: d.isel(longitude=slice(0, 8)), "8 longitudes do not go once around"),
    "a longitude twice": (
        lambda d: d.isel(longitude=[*range(W), 0]).assign_coords(longitude=np.linspace(0, 360, W + 1)),
        "17 longitudes do not",
    ),
    "a hemisphere": (lambda d: d.isel(latitude=slice(0, 5)), "5 latitudes do not go from pole to pole"),
    "two members": (lambda d: d.expand_dims(number=2), "has also the dimensions {'number': 2}"),
    "no time": (lambda d: d.rename(valid_time="date"), "has no dimension valid_time or time"),
}


SEEN_IN_READING = ("a NaN", "a fill value", "celsius called kelvin")


@pytest.mark.parametrize("case", REFUSALS)
def test_a_source_that_cannot_be_used_is_refused(tmp_path, case):
    spoil, message = REFUSALS[case]
    source = save_zarr(spoil(build()), tmp_path / "a.zarr")
    with refusal(message):
        convert([source], tmp_path / "out")
    if case in SEEN_IN_READING:
        assert not [path for path in (tmp_path / "out").rglob("*.*") if path.name != "1979.h5"]
    else:
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"coarsen": 3}, "coarsen 3: must divide the 16 longitudes"),
        ({"coarsen": 0}, "coarsen 0"),
        ({"test_years": (2018,)}, "2018-01-01T00:00 is missing"),
        ({"days": 3}, "1979-01-03T00:00 is missing"),
    ],
)
def test_bad_settings_write_nothing(tmp_path, change, message):
    with refusal(message):
        convert(wb2_regridded(tmp_path), tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(year_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=33 * 20 * H * W * 4 - 1))
    with refusal("GB free"):
        convert(wb2_regridded(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_on_different_grids_are_refused(tmp_path):
    a, b = build(), build().isel(latitude=slice(0, H - 1))
    with refusal("b.zarr: its grid is not that of .*a.zarr"):
        convert([save_zarr(a, tmp_path / "a.zarr"), save_zarr(b, tmp_path / "b.zarr")], tmp_path / "out")


def test_humidity_without_units_is_refused_beside_humidity_with_units(tmp_path):
    with_units, without = build(), build()
    without["r"].attrs.clear()
    sources = [save_zarr(with_units, tmp_path / "a.zarr"), save_zarr(without, tmp_path / "b.zarr")]
    with refusal(r"b.zarr: r has unknown units '' \(known: %,"):
        convert(sources, tmp_path / "out")


def test_sources_that_are_none_are_refused(tmp_path):
    (tmp_path / "text.nc").write_text("not data")
    (tmp_path / "empty.zarr").mkdir()
    (tmp_path / "zipped.nc").write_bytes(b"PK\x03\x04and more")
    (tmp_path / "grib.nc").write_bytes(b"GRIB and more")
    for name, message in (
        ("text.nc", "cannot be opened"),
        ("empty.zarr", "cannot be opened"),
        ("no.nc", "no such file"),
        ("zipped.nc", "cannot be opened as Zarr or NetCDF: it is a zip archive: unpack it"),
        ("grib.nc", "cannot be read as GRIB"),
    ):
        with refusal(f"{name}: {message}"):
            convert([tmp_path / name], tmp_path / "out")
