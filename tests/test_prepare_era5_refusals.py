"""A source or setting that cannot be used is refused in one line that names what is wrong, before it does harm."""

import gzip
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.era5_examples import H, W, build, convert, reference_hours, save_netcdf, save_zarr, wb2_regridded
from tests.support.full_disk import fill_disk
from tests.support.refusals import refusal
from utils.errors import os_errors_as_usage_errors
from weather.convert import data_set_writer
from weather.sources.remote_store import RemoteOptions
from weather.years.zarr_year import ZarrStore, ZarrYear


def put(data, name, value, **where):
    values = data[name].copy(deep=True)
    values[where] = value
    return data.assign({name: values})


def units(data, name, text):
    data[name].attrs["units"] = text
    return data


def plain(data, **variables):
    """With these variables, without units."""
    data = data.assign(variables)
    for name in variables:
        data[name].attrs.clear()
    return data


def calendar(data, name):
    hours = reference_hours(data)
    return data.assign_coords(
        valid_time=("valid_time", hours, {"units": "hours since 1970-01-01", "calendar": name}),
    )


ANGLES = np.zeros((H, W))
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
        "times do not increase: 1979-01-01T06:00 comes twice, at indices 1 and 2: keep one of them",
    ),
    "times twice, apart": (
        lambda d: d.isel(valid_time=[0, 1, 2, 3, 1, 2]),
        r"1979-01-01T06:00 comes twice, at indices 1 and 4 \(and 1 others\): .*drop_duplicates\('valid_time'\)",
    ),
    "times that go back": (
        lambda d: d.isel(valid_time=[0, 1, 3, 2]),
        r"1979-01-01T12:00 at index 3 follows 1979-01-01T18:00: sort them \(xarray: sortby\('valid_time'\)\)",
    ),
    "a date that is none": (
        lambda d: d.assign_coords(valid_time=[*d.valid_time.values[:31], np.datetime64("NaT")]),
        "its valid_time holds no date at frame 31",
    ),
    "days without leap days": (
        lambda d: calendar(d, "noleap"),
        "its valid_time has the calendar 'noleap', and the standard one is needed, in which February has 29 days",
    ),
    "months of 30 days": (lambda d: calendar(d, "360_day"), "has the calendar '360_day', and the standard one"),
    "dates without units": (
        lambda d: d.assign_coords(valid_time=reference_hours(d)),
        "its valid_time has no units: give it the attribute units, such as 'hours since 1970-01-01'",
    ),
    "dates out of reach": (
        lambda d: d.assign_coords(
            valid_time=("valid_time", 1e30 + reference_hours(d), {"units": "days since 1970-01-01"})
        ),
        "its valid_time in 'days since 1970-01-01' cannot be read as dates",
    ),
    "both names of time": (
        lambda d: d.expand_dims(time=[np.datetime64("1979-01-01", "ns")]),
        r"its fields have both dimensions time \(1\) and valid_time \(32\): select one value of one of them",
    ),
    "forecasts without the dates they hold at": (
        lambda d: d.rename(valid_time="time").assign_coords(step=6),
        "holds forecasts .step 6. and no valid_time for its time",
    ),
    "levels without values": (
        lambda d: d.drop_vars("pressure_level"),
        "its dimension pressure_level has no values",
    ),
    "levels of another kind": (
        lambda d: d.rename(pressure_level="hybrid"),
        r"no source holds t or temperature at 850 hPa: \S+a.zarr holds .*u10.* \[valid_time, latitude, longitude, "
        "hybrid], 1979-01-01T00:00 to 1982-01-02T18:00",
    ),
    "rows that are no dimension": (
        lambda d: d.rename(latitude="y", longitude="x").drop_vars(["y", "x"]).assign_coords(lat=(("y", "x"), ANGLES)),
        "has no dimension latitude or lat: .*a regular grid of latitudes and longitudes is needed: regrid it",
    ),
    "a height without units": (
        lambda d: plain(d, z=d.z / 9.80665),
        "a.zarr: z or geopotential at 850 hPa, 1979-01-01T00:00: row 0 .* outside 5000 to 23000 m2 s-2: a height in m",
    ),
    "a fraction called percent": (
        lambda d: units(d.assign(r=d.r / 100), "r", "%"),
        "r or relative_humidity at 500 hPa, 1979-01-01T00:00: .*nowhere above 0[.].* %: a fraction",
    ),
    "levels upside down": (
        lambda d: d.assign_coords(pressure_level=d.pressure_level.values[::-1]),
        "geopotential at (850|1000) hPa, 1979-01-01T00:00: .*: of another level, such as 50 hPa",
    ),
    "a constant frame": (
        lambda d: put(d, "u", 3.5, valid_time=13, pressure_level=1),
        "u or u_component_of_wind at 500 hPa, 1980-01-02T06:00: .*3.5, and so is every point of this frame",
    ),
    "a frame of zeros": (
        lambda d: put(d, "v10", 0.0, valid_time=13),
        "v10 .*1980-01-02T06:00: .* is 0, and so is every point of this frame: was it written to the end",
    ),
    "an infinite value": (
        lambda d: put(d.astype(np.float64), "sp", 1e300, valid_time=0),
        "sp or surface_pressure, 1979-01-01T00:00.* is inf",
    ),
    "derived humidity that is none": (
        lambda d: plain(d.drop_vars("r"), q=1e-7 * (1 + d.t / 300)),
        "r .*, derived from specific humidity and temperature, 1979-01-01T00:00: .*nowhere above",
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
        "its longitude is 360 and 0, the same place, in columns 16 and 0: keep one of them",
    ),
    "a hemisphere": (lambda d: d.isel(latitude=slice(0, 5)), "5 latitudes do not go from pole to pole"),
    "two members": (lambda d: d.expand_dims(number=2), "has also the dimensions {'number': 2}"),
    "no time": (lambda d: d.rename(valid_time="date"), "has no dimension valid_time or time"),
}


SEEN_IN_READING = (
    "a NaN",
    "a fill value",
    "celsius called kelvin",
    "a height without units",
    "a fraction called percent",
    "levels upside down",
    "a constant frame",
    "a frame of zeros",
    "an infinite value",
    "derived humidity that is none",
)


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
    monkeypatch.setattr(
        data_set_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=33 * 20 * H * W * 4 - 1)
    )
    with refusal("GB free"):
        convert(wb2_regridded(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_is_one_line_and_what_is_whole_stays(tmp_path, monkeypatch):
    fill_disk(monkeypatch, files=1)
    line = r"1980\.h5.*: No space left on device: free some space, or write to another folder"
    with refusal(line), os_errors_as_usage_errors():
        convert(wb2_regridded(tmp_path), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.h5*")] == ["1979.h5"]


def test_sources_on_different_grids_are_refused(tmp_path):
    a, b = build(), build().isel(latitude=slice(0, H - 1))
    with refusal("b.zarr: has 8 latitudes, 90 to -67.5, .*a.zarr 9, 90 to -90: bring them onto one grid"):
        convert([save_zarr(a, tmp_path / "a.zarr"), save_zarr(b, tmp_path / "b.zarr")], tmp_path / "out")


def test_humidity_without_units_is_refused_beside_humidity_with_units(tmp_path):
    with_units, without = build(), build()
    without["r"].attrs.clear()
    sources = [save_zarr(with_units, tmp_path / "a.zarr"), save_zarr(without, tmp_path / "b.zarr")]
    with refusal(r"b.zarr: r has unknown units '' \(known: %,"):
        convert(sources, tmp_path / "out")


OTHERS = {  # files that are no sources: their bytes, and what is said of them
    "text.nc": (b"not data", "cannot be opened as Zarr or NetCDF: it begins with not data"),
    "zipped.nc": (b"PK\x03\x04and more", "cannot be opened as Zarr or NetCDF: it is a zip archive: unpack it"),
    "gzipped.nc": (gzip.compress(b"data"), "it is compressed with gzip: unpack it and give the files inside"),
    "tar.nc": (bytes(257) + b"ustar" + bytes(250), "it is a tar archive: unpack it and give the files inside"),
    "empty.nc": (b"", "it is empty: it was not written, or not downloaded to the end"),
    "zeros.nc": (bytes(9999), "it begins with zeros: it was not written, or not downloaded to the end"),
    "json.nc": (
        b'{"type":"permission denied"}',
        'the answer of a server.*; it begins with {"type":"permission denied"}',
    ),
    "page.nc": (b"\n<!DOCTYPE html>\n<html>", "the answer of a server.*; it begins with <!DOCTYPE html> <html>"),
    "cdf5.nc": (b"CDF\x05" + bytes(99), "NetCDF 3 with 64-bit data .CDF-5.: convert it .nccopy -k nc4 IN OUT."),
    "grib.nc": (b"GRIB and more", "cannot be read as GRIB"),
    "._a.nc": (b"\x00\x05\x16\x07", "it is a file that macOS left beside another one: leave it out"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_no_source_is_refused_with_what_it_is(tmp_path, name):
    content, message = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    if name == "grib.nc":
        pytest.importorskip("cfgrib")
    with refusal(f"{name}: .*{message}"):
        convert([tmp_path / name], tmp_path / "out")


@pytest.mark.parametrize("engine, message", [("scipy", "is NetCDF 3, cut off after"), ("h5netcdf", "truncated file")])
@pytest.mark.parametrize("part", [0.02, 0.7])
def test_a_file_that_is_cut_off_is_to_be_downloaded_again(tmp_path, engine, message, part):
    path = Path(save_netcdf(build(), tmp_path / "a.nc", engine))
    os.truncate(path, int(part * path.stat().st_size))
    with refusal(f"a.nc: .*{message}.*: download it again"):
        convert([path], tmp_path / "out")


def test_a_folder_of_files_is_refused_with_the_pattern_to_give(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "none").mkdir()
    save_netcdf(build(), tmp_path / "raw" / "a.nc")
    with refusal(r"raw: is a folder of 1 \*.nc: give \S+raw/\*.nc in its place"):
        convert([tmp_path / "raw"], tmp_path / "out")
    with refusal("none: cannot be opened as Zarr or NetCDF: the folder has no zarr.json or .zgroup; it holds nothing"):
        convert([tmp_path / "none"], tmp_path / "out")
    with refusal("no.nc: no such file or folder"):
        convert([tmp_path / "no.nc"], tmp_path / "out")


def test_of_several_sources_the_one_with_the_value_is_named(tmp_path):
    data = build()
    first, second = (
        data.isel(valid_time=slice(0, 16)),
        put(data.isel(valid_time=slice(16, None)), "sp", 5.0, valid_time=0),
    )
    sources = [save_netcdf(first, tmp_path / "a.nc"), save_netcdf(second, tmp_path / "b.nc")]
    with refusal("b.nc: sp or surface_pressure, 1981-01-01T00:00: row 0 from the north, column 0 is 5, outside"):
        convert(sources, tmp_path / "out")


def test_humidity_without_units_is_named_where_it_cannot_be_derived(tmp_path):
    data = build()
    data["r"].attrs.clear()
    with refusal(r"no source holds q .*relative humidity is derived, as that of \S+a.zarr has no units \(%, or 1\)"):
        convert([save_zarr(data, tmp_path / "a.zarr")], tmp_path / "out")


def test_of_many_sources_a_few_are_described(tmp_path):
    data = build().drop_vars("tcwv")
    sources = [save_netcdf(data.isel(valid_time=[i]), tmp_path / f"{i}.nc") for i in range(9)]
    with refusal(r"no source holds tcwv or total_column_water_vapour: \S+0.nc holds u10, .*; and 8 more sources"):
        convert(sources, tmp_path / "out")


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_of_points_is_refused_with_what_it_is(tmp_path, version):
    zarr = pytest.importorskip("zarr")
    store = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    for name, shape in {"data": (8, 20, 1, 512), "latitudes": (512,), "longitudes": (512,), "dates": (8,)}.items():
        store.create_array(name, shape=shape, dtype="f4")
    what = r"store of anemoi-datasets: one array, data \[8, 20, 1, 512\].* list of 512 points, not on a grid: give"
    with refusal(what):
        convert([str(tmp_path / "a.zarr")], tmp_path / "out")
    with refusal(what):
        ZarrYear(tmp_path / "a.zarr", ZarrStore(str(tmp_path / "a.zarr"), RemoteOptions()))


def test_a_dimension_of_variables_is_named_with_what_to_do(tmp_path):
    data = build()["t2m"].expand_dims(variable=["t2m"], axis=1).rename("data").to_dataset()
    with refusal(r"holds data .*: make its variable variables \(xarray: to_dataset\(dim='variable'\)\)"):
        convert([save_zarr(data, tmp_path / "a.zarr")], tmp_path / "out")
