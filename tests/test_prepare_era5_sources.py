"""Sources in the formats, names and layouts of others become the same year files."""

import fcntl
import os
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.era5_examples import (
    FRAMES,
    LEVELS,
    TRUTH,
    YEARS,
    C,
    H,
    W,
    build,
    convert,
    reference_hours,
    save_grib,
    save_netcdf,
    save_zarr,
    surface_and_levels,
    xarray,
)
from tests.support.refusals import refusal
from weather.fields.grid import frame_times
from weather.fields.humidity import relative_humidity
from weather.prepare_era5 import Era5
from weather.sample.atmosphere import GRAVITY
from weather.sources import data as data_module
from weather.sources import hdf5, store
from weather.sources.source import Source
from weather.sources.store import Store

zarr = pytest.importorskip("zarr")


def check_values(out, tolerance=0.0):
    for year, split in YEARS.items():
        with h5py.File(out / split / f"{year}.h5", locking=False) as file:
            np.testing.assert_allclose(file["fields"][:], TRUTH[year], rtol=tolerance, atol=tolerance)


# ---- names, levels, dates


def height(data, name, units):
    """Geopotential as a height, under its own name."""
    data[name] = data.z / GRAVITY
    data[name].attrs = {"units": units} if units else {}
    return data.drop_vars("z")


def plev(data, units="Pa"):
    data = data.rename(pressure_level="plev").assign_coords(plev=100 * data.pressure_level.values)
    data.plev.attrs = {"units": units} if units else {}
    return data


def as_cfgrib(data):
    data = data.rename(valid_time="time", pressure_level="isobaricInhPa")
    return data.assign_coords(number=0, step=np.timedelta64(0, "ns"), valid_time=("time", data.time.values))


def with_reference_time(data):
    """`time` is when a forecast began, six hours before."""
    data = data.rename(valid_time="time")
    begun = data.time.values - np.timedelta64(6, "h")
    return data.assign_coords(time=begun, valid_time=("time", data.time.values), step=6)


def flat(data):
    """A variable for each level, named by it."""
    surface, upper = surface_and_levels(data)
    for name in upper:
        for level in LEVELS:
            surface[f"{name}{level}" if name != "t" else f"temperature_{level}"] = upper[name].sel(
                pressure_level=level, drop=True
            )
    return surface


CAPITALS = {"valid_time": "Time", "latitude": "LAT", "longitude": "LON", "pressure_level": "LEV", "t": "T", "u": "U"}
CAPITALS |= {"v": "V", "z": "Z", "r": "R", "t2m": "T2M", "u10": "VAR_10U", "sp": "SP"}
SPELLINGS = {
    "capitals": lambda d: d.rename(CAPITALS),
    "GRIB's short names": lambda d: d.rename(u10="10u", v10="10v", t2m="2t"),
    "CMIP's names": lambda d: d.rename(
        u10="uas", v10="vas", t2m="tas", sp="ps", msl="psl", tcwv="prw", u="ua", v="va", t="ta", r="hur"
    ),
    "geopotential height in gpm": lambda d: height(d, "gh", "gpm"),
    "geopotential height without units": lambda d: height(d, "HGT", ""),
    "levels in Pa": plev,
    "levels in Pa without units": lambda d: plev(d, ""),
    "as cfgrib names them": as_cfgrib,
    "a time of reference": with_reference_time,
    "a variable for each level": flat,
    "axes by their standard names": lambda d: d.rename(latitude="y", longitude="x").assign_coords(
        y=("y", d.latitude.values, {"standard_name": "latitude"}),
        x=("x", d.longitude.values, {"standard_name": "longitude"}),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("save", [save_netcdf, save_zarr])
def test_names_and_axes_of_others_are_read(tmp_path, spelling, save):
    convert([save(SPELLINGS[spelling](build()), tmp_path / "source")], tmp_path / "out")
    check_values(tmp_path / "out", tolerance=1e-6)


def test_a_file_for_each_level_has_its_level_as_a_single_value(tmp_path):
    surface, upper = surface_and_levels(build())
    sources = [save_netcdf(surface, tmp_path / "surface.nc")]
    for level in LEVELS:
        sources.append(save_netcdf(upper.sel(pressure_level=level), tmp_path / f"{level}.nc"))
    convert(sources, tmp_path / "out")
    check_values(tmp_path / "out")


def test_a_file_for_each_instant_has_its_date_as_a_single_value(tmp_path):
    data = build()
    count = data.sizes["valid_time"]
    sources = [save_netcdf(data.isel(valid_time=i), tmp_path / f"{i:02d}.nc") for i in range(count)]
    convert(sources, tmp_path / "out")
    check_values(tmp_path / "out")


def test_no_library_warns(tmp_path):
    source = save_netcdf(as_cfgrib(build()), tmp_path / "a.nc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert([source], tmp_path / "out")


# ---- several versions of a value


def halves(data):
    """The first frames, and the others, each with NaN where the other has values."""
    is_late = data.valid_time >= np.datetime64("1980-01-02")
    early, late = data.where(~is_late), data.where(is_late)
    for name in data:
        early[name].attrs = late[name].attrs = data[name].attrs
    return early, late


def test_of_two_versions_along_expver_the_one_that_is_not_nan_is_read(tmp_path):
    data = build()
    both = xarray.concat(halves(data), xarray.IndexVariable("expver", [1, 5]))
    for name in data:
        both[name].attrs = data[name].attrs
    convert([save_netcdf(both, tmp_path / "a.nc")], tmp_path / "out")
    check_values(tmp_path / "out")


def test_where_the_first_source_has_nan_the_next_one_is_read(tmp_path):
    early, late = halves(build())
    convert([save_netcdf(early, tmp_path / "1.nc"), save_netcdf(late, tmp_path / "5.nc")], tmp_path / "out")
    check_values(tmp_path / "out")


def test_nan_in_every_source_is_refused_with_the_first_of_them(tmp_path):
    early, _ = halves(build())
    sources = [save_netcdf(early, tmp_path / name) for name in ("1.nc", "5.nc")]
    with refusal("1.nc: u10 or 10m_u_component_of_wind, 1980-01-02T00:00: row 0 from the north, column 0 is NaN"):
        convert(sources, tmp_path / "out")


# ---- Zarr


def test_zeros_of_zarr_2_are_zeros_though_they_are_its_fill_value(tmp_path):
    data = build()
    data["u10"][:, 0] = 0  # calm at the pole
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    for name, variable in data.variables.items():
        values, attributes = variable.values, dict(variable.attrs)
        if name == "valid_time":
            values, attributes = reference_hours(data).astype("i8"), {"units": "hours since 1970-01-01"}
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=values.shape)
        array[:] = values
        array.attrs.update({"_ARRAY_DIMENSIONS": list(variable.dims), **attributes})
        assert array.fill_value == 0
    convert([tmp_path / "a.zarr"], tmp_path / "out")
    with h5py.File(tmp_path / "out" / "test" / "1982.h5") as file:
        found = file["fields"][:]
    assert (found[:, C["u10"], 0] == 0).all()
    assert np.array_equal(found[:, C["u10"] + 1 :], TRUTH[1982][:, C["u10"] + 1 :])


def test_the_fill_value_of_packed_zarr_2_is_missing_though_it_is_zero(tmp_path):
    data = build()
    data["t2m"][5, 3, 7] = np.nan
    packed = {"dtype": "u2", "scale_factor": 0.005, "add_offset": 150.0, "_FillValue": 0}
    data.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding={"t2m": packed})
    with refusal("t2m or 2m_temperature, 1979-01-02T06:00: row 3 from the north, column 7 is NaN"):
        convert([tmp_path / "a.zarr"], tmp_path / "out")


def test_frames_newer_than_the_consolidated_metadata_are_read(tmp_path):
    data = build()
    data.isel(valid_time=slice(0, 2 * FRAMES)).to_zarr(tmp_path / "a.zarr", zarr_format=2, consolidated=True)
    rest = data.isel(valid_time=slice(2 * FRAMES, None))
    rest.to_zarr(tmp_path / "a.zarr", append_dim="valid_time", consolidated=False)
    convert([tmp_path / "a.zarr"], tmp_path / "out")
    check_values(tmp_path / "out")


def test_a_store_that_somebody_opened_is_read(tmp_path):
    path = save_zarr(build(), tmp_path / "a.zarr")
    opened = xarray.open_zarr(path, chunks=None)
    era5 = Era5([Store(Source("theirs", opened.variables))])
    times = frame_times(1980, 0, FRAMES)
    era5.check(times)
    assert np.array_equal(era5.frames(times), TRUTH[1980])


# ---- groups


def test_groups_of_a_file_are_read_as_files(tmp_path):
    surface, upper = surface_and_levels(build())
    surface.to_netcdf(tmp_path / "a.nc", group="single", engine="h5netcdf")
    upper.to_netcdf(tmp_path / "a.nc", group="pressure/spatial", mode="a", engine="h5netcdf")
    with refusal(r"a.nc: has the groups pressure/spatial, single: give those in its place: \S+a.nc/pressure/spatial"):
        convert([tmp_path / "a.nc"], tmp_path / "out")
    with refusal(r"a.nc/singel: no such group in \S+a.nc: it has \S+a.nc/pressure/spatial, \S+a.nc/single"):
        convert([tmp_path / "a.nc/singel"], tmp_path / "out")
    convert([tmp_path / "a.nc/single", tmp_path / "a.nc/pressure/spatial"], tmp_path / "out")
    check_values(tmp_path / "out")


def test_groups_of_a_store_are_named_and_read(tmp_path):
    surface, upper = surface_and_levels(build())
    surface.to_zarr(tmp_path / "a.zarr", group="single", zarr_format=3, consolidated=False)
    upper.to_zarr(tmp_path / "a.zarr", group="pressure", zarr_format=3, consolidated=False, mode="a")
    with refusal(r"a.zarr: has the groups pressure, single: give those in its place: \S+a.zarr/pressure \S+a.zarr/sin"):
        convert([tmp_path / "a.zarr"], tmp_path / "out")
    convert([tmp_path / "a.zarr/single", tmp_path / "a.zarr/pressure"], tmp_path / "out")
    check_values(tmp_path / "out")


# ---- GRIB


@pytest.mark.slow("GRIB, whose library takes long to start")
def test_grib_is_read_and_nothing_is_left_beside_it(tmp_path):
    surface, upper = surface_and_levels(build())
    folder = tmp_path / "raw"
    folder.mkdir()
    sources = [save_grib(surface, folder / "surface.grib"), save_grib(upper, folder / "levels.nc")]
    convert(sources, tmp_path / "out")
    check_values(tmp_path / "out", tolerance=1e-3)
    assert sorted(path.name for path in folder.iterdir()) == ["levels.nc", "surface.grib"]


def test_humidity_is_derived_from_a_file_that_opens_as_a_source_for_each_variable(tmp_path, monkeypatch):
    """As GRIB does."""
    data = build()
    q = 2e-4 * (1 + np.random.default_rng(0).random(data.t.shape, np.float32))
    data = data.drop_vars("r").assign(q=(data.t.dims, q, {"units": "kg kg**-1"}), other=data.t2m)
    sources = [Source("a.grib", data[[name]].variables) for name in data]
    monkeypatch.setattr(store, "open_source", lambda address: sources)
    era5 = Era5(["a.grib"])
    assert era5.derived and len(era5.stores) == len(data.data_vars) - 1  # nobody asked for the other one
    times = frame_times(1980, 0, FRAMES)
    era5.check(times)
    frames = era5.frames(times)
    expected = relative_humidity(q[FRAMES : 2 * FRAMES, LEVELS.index(500)], TRUTH[1980][:, C["t500"]], 500 * 100)
    np.testing.assert_allclose(frames[:, C["r500"]], expected, rtol=1e-5)


def test_grib_that_is_cut_off_is_refused(tmp_path):
    path = save_grib(build(years=[1979]), tmp_path / "a.grib")
    os.truncate(path, Path(path).stat().st_size - 100)
    with refusal(r"a.grib: cannot be read as GRIB \(cut off, or damaged\?\)"):
        convert([path], tmp_path / "out")


def test_what_a_grib_file_holds_is_said_as_of_one_file(tmp_path):
    path = save_grib(build(years=[1979])[["u10", "t", "u"]], tmp_path / "a.grib")
    with refusal(
        r"no source holds v10 .*: \S+a.grib holds t, u, u10 \[.*, levels 1000, 850, 700, 500, 50 hPa, 1979-01-01"
    ):
        convert([path], tmp_path / "out")


def test_without_cfgrib_its_installation_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cfgrib.xarray_store", None)
    (tmp_path / "a.grib").write_bytes(b"GRIB and more")
    with refusal("a.grib: is GRIB, which needs the package cfgrib .*: pip install -r requirements/era5.txt"):
        convert([tmp_path / "a.grib"], tmp_path / "out")


# ---- file systems without locks


@contextmanager
def locked(paths):
    """Nobody else gets a lock on these files."""
    files = [open(path, "rb") for path in paths]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
    for file in files:
        file.close()


def test_nothing_is_locked_in_reading_nor_in_writing(tmp_path):
    source = save_netcdf(build(), tmp_path / "a.nc")
    part = tmp_path / "out" / "train" / "1979.h5.part"
    part.parent.mkdir(parents=True)
    part.touch()
    with locked([source, part]):
        convert([source], tmp_path / "out")
    check_values(tmp_path / "out")
    with locked(tmp_path.glob("out/*/*.h5")):
        assert convert([source], tmp_path / "out") == 0


# ---- many files, and chunks of many frames


def test_a_frame_asks_only_the_sources_that_hold_it(tmp_path, monkeypatch):
    data = build()
    days = [data.isel(valid_time=slice(i, i + 4)) for i in range(0, data.sizes["valid_time"], 4)]
    era5 = Era5([save_netcdf(day, tmp_path / f"{i}.nc") for i, day in enumerate(days)])
    times = frame_times(1980, 0, FRAMES)
    era5.check(times)
    asked, real = [], Store.read
    monkeypatch.setattr(Store, "holds", lambda *_: pytest.fail("searched for each frame"))
    monkeypatch.setattr(Store, "read", lambda self, *args: asked.append(self.address) or real(self, *args))
    for i, time in enumerate(times):
        assert np.array_equal(era5.frames(time[None])[0], TRUTH[1980][i])
    assert {Path(address).name for address in asked} == {"2.nc", "3.nc"}
    assert len(asked) == FRAMES * len(era5.groups)


def open_files():
    return len([*Path("/proc/self/fd").iterdir()])


def test_no_more_files_are_open_than_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "MOST_OPEN", 4)
    hdf5._open_files.cache_clear()
    data = build()
    count = data.sizes["valid_time"]
    sources = [save_netcdf(data.isel(valid_time=[i]), tmp_path / f"{i:02d}.nc") for i in range(count)]
    before = open_files()
    era5 = Era5(sources)
    era5.check(frame_times(1980, 0, FRAMES))
    assert np.array_equal(era5.frames(frame_times(1980, 0, FRAMES)), TRUTH[1980])
    assert open_files() <= before + 4
    hdf5._open_files.cache_clear()


def chunked(data, path, frames):
    encoding = {name: {"chunks": (frames, *data[name].shape[1:])} for name in data.data_vars}
    data.to_zarr(path, zarr_format=3, consolidated=False, encoding=encoding)
    return str(path)


@pytest.mark.parametrize("save", ["zarr", "netcdf"])
def test_a_chunk_of_many_frames_is_decoded_once(tmp_path, monkeypatch, capsys, save):
    data = build(hours=1)  # 48 hours a year, of which every sixth is a frame
    if save == "zarr":
        source = chunked(data, tmp_path / "a.zarr", 24)
    else:
        encoding = {name: {"chunksizes": (24, *data[name].shape[1:]), "zlib": True} for name in data.data_vars}
        data.to_netcdf(source := str(tmp_path / "a.nc"), engine="h5netcdf", encoding=encoding)
    era5 = Era5([source])
    counts, real = [], Store.read
    monkeypatch.setattr(Store, "read", lambda self, *args: counts.append(len(args[2])) or real(self, *args))
    monkeypatch.setattr(data_module, "BLOCK_BYTES", 1)  # else all of these small chunks are read at once
    frames = np.concatenate([era5.frames(part) for part in era5.blocks(frame_times(1980, 0, FRAMES))])
    assert np.array_equal(frames, TRUTH[1980])
    assert counts == [4] * 2 * len(era5.groups)  # two chunks of each quantity, four frames of each
    convert([source], tmp_path / "out")
    assert "keeps up to" in capsys.readouterr().out
    check_values(tmp_path / "out")


def test_the_memory_of_decoded_chunks_is_bounded(tmp_path, monkeypatch, capsys):
    three_frames = 3 * 20 * 4 * H * W  # bytes
    era5 = Era5([chunked(build(), tmp_path / "a.zarr", FRAMES)])
    monkeypatch.setattr(data_module, "BLOCK_BYTES", 1)
    monkeypatch.setattr(data_module, "KEPT_BYTES", three_frames)
    most = 0
    for year in YEARS:
        blocks = [era5.frames(part) for part in era5.blocks(frame_times(year, 0, FRAMES))]
        assert np.array_equal(np.concatenate(blocks), TRUTH[year])
        most = max(most, *(block.nbytes for block in blocks))
    era5.announce()
    assert most == three_frames and f"keeps up to {three_frames / 1e6:.1f} MB" in capsys.readouterr().out


def test_small_chunks_are_read_together(tmp_path, monkeypatch):
    """As many whole ones as fit; a block never ends within a chunk that it could hold."""
    era5 = Era5([chunked(build(), tmp_path / "a.zarr", 3)])
    times = np.concatenate([frame_times(year, 0, FRAMES) for year in YEARS])
    for most, lengths in (10**9, [32]), (era5._frame_bytes * 7, [6, 6, 6, 6, 6, 2]):
        monkeypatch.setattr(data_module, "BLOCK_BYTES", most)
        assert [len(part) for part in era5.blocks(times)] == lengths
