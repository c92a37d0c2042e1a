"""Real data becomes the same year files whatever store it comes from; runs can be stopped and repeated."""

import math

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
    cds,
    cds_by_year,
    convert,
    save_zarr,
    three_hourly,
    uneven_steps,
    wb2_hourly,
    wb2_regridded,
)
from tests.test_sample_data import check_year_file
from weather import prepare_era5
from weather.checks.statistics import read_statistics
from weather.fields.humidity import relative_humidity
from weather.prepare_era5 import Era5
from weather.sample.atmosphere import GRAVITY
from weather.sources import data as data_module
from weather.years.dataset import FieldDataset


def read(out, year):
    with h5py.File(out / YEARS[year] / f"{year}.h5") as file:
        return file["fields"][:]


# ---- what is read


@pytest.mark.parametrize("source", [wb2_regridded, wb2_hourly, three_hourly, uneven_steps, cds, cds_by_year])
def test_every_kind_of_store_gives_the_same_year_files(tmp_path, source):
    out = tmp_path / "out"
    assert convert(source(tmp_path), out) == 4
    for year in YEARS:
        assert np.array_equal(read(out, year), TRUTH[year])
    with h5py.File(out / "train" / "1980.h5") as file:
        check_year_file(file, 1980)


@pytest.mark.parametrize(
    "name, units, factor, offset",
    [
        ("sp", "hPa", 100, 0),
        ("msl", "millibars", 100, 0),
        ("t2m", "degC", 1, 273.15),
        ("t", "celsius", 1, 273.15),
        ("z", "m", GRAVITY, 0),
        ("r", "(0 - 1)", 100, 0),
        ("r", "1", 100, 0),
        ("u", "m/s", 1, 0),
    ],
)
def test_units_are_converted(tmp_path, name, units, factor, offset):
    data = build()
    data[name] = (data[name].astype(float) - offset) / factor
    data[name].attrs["units"] = units
    convert([save_zarr(data, tmp_path / "a.zarr")], tmp_path / "out")
    np.testing.assert_allclose(read(tmp_path / "out", 1982), TRUTH[1982], rtol=1e-6, atol=1e-4)


def test_pressure_levels_may_be_in_pascal(tmp_path):
    data = build().assign_coords(pressure_level=100.0 * np.array(LEVELS))
    data["pressure_level"].attrs["units"] = "Pa"
    convert([save_zarr(data, tmp_path / "a.zarr")], tmp_path / "out")
    assert np.array_equal(read(tmp_path / "out", 1982), TRUTH[1982])


def test_packed_integers_are_unpacked(tmp_path):
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 273.0, "_FillValue": -32767}
    build().to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={"t2m": packed})
    convert([tmp_path / "a.nc"], tmp_path / "out")
    error = np.abs(read(tmp_path / "out", 1980) - TRUTH[1980])
    assert error[:, C["t2m"]].max() < 0.0051 and np.delete(error, C["t2m"], 1).max() == 0


def test_the_first_source_is_read_where_several_hold_the_same(tmp_path):
    second = build() * np.float32(1.001)  # which loses the units
    first = build()[["t2m", "t"]].isel(valid_time=slice(FRAMES + 3, None)).sel(pressure_level=[850, 700])
    sources = [save_zarr(first, tmp_path / "1.zarr"), save_zarr(second.assign(r=build().r), tmp_path / "2.zarr")]
    convert(sources, tmp_path / "out")
    found, chosen = read(tmp_path / "out", 1980), [C["t2m"], C["t850"]]
    assert np.array_equal(found[3:, chosen], TRUTH[1980][3:, chosen])
    assert np.array_equal(found[:3, chosen], TRUTH[1980][:3, chosen] * np.float32(1.001))
    assert np.array_equal(found[:, C["t500"]], TRUTH[1980][:, C["t500"]] * np.float32(1.001))


@pytest.mark.parametrize("given", ["not at all", "without units"])
def test_relative_humidity_is_derived_where_it_is_not_given_with_units(tmp_path, given, capsys):
    data = build()
    q = 2e-4 * (1 + np.random.default_rng(0).random(data.t.shape, np.float32))
    data["q"] = data.t.dims, q, {"units": "kg kg**-1"}
    if given == "not at all":
        data = data.drop_vars("r")
    else:
        data["r"].attrs.clear()
    convert([save_zarr(data, tmp_path / "a.zarr")], tmp_path / "out")
    assert "derived" in capsys.readouterr().out
    found = read(tmp_path / "out", 1979)
    for level in (500, 850):
        i = LEVELS.index(level)
        expected = relative_humidity(q[:FRAMES, i], TRUTH[1979][:, C[f"t{level}"]], 100 * level)
        np.testing.assert_allclose(found[:, C[f"r{level}"]], expected, rtol=1e-5)
    others = [i for name, i in C.items() if name[0] != "r"]
    assert np.array_equal(found[:, others], TRUTH[1979][:, others])


@pytest.mark.parametrize("t", [220.0, 250.16, 260.0, 273.16, 300.0])
def test_the_humidity_of_saturated_air_is_100_percent(t):
    def tetens(a, b):
        return 611.21 * math.exp(a * (t - 273.16) / (t - b))

    water, ice = tetens(17.502, 32.19), tetens(22.587, -0.7)
    part = 0 if t < 250.16 else 1 if t > 273.16 else ((t - 250.16) / 23) ** 2
    saturation = part * water + (1 - part) * ice
    mixing = 0.621981 * saturation / (85000 - saturation)  # kg of vapour by kg of dry air
    q = mixing / (1 + mixing)
    assert relative_humidity(q, t, 85000) == pytest.approx(100, rel=1e-5)
    assert relative_humidity(0.0, t, 85000) == 0


def test_blocks_of_points_are_averaged_with_their_coordinates(tmp_path):
    assert convert(wb2_regridded(tmp_path), tmp_path / "out", coarsen=2) == 4
    found, x = read(tmp_path / "out", 1981), TRUTH[1981][:, :, :8].astype(np.float64)  # less the south pole
    expected = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4)
    with h5py.File(tmp_path / "out" / "valid" / "1981.h5") as file:
        assert file["latitude"][:].tolist() == [78.75, 33.75, -11.25, -56.25]
        assert file["longitude"][:2].tolist() == [11.25, 56.25]


# ---- what is written


def test_the_trainer_reads_the_result(tmp_path):
    convert(cds(tmp_path), tmp_path / "out")
    dataset = FieldDataset(tmp_path / "out" / "train", channels=20, img_size=(8, W))
    assert len(dataset) == 2 * (FRAMES - 1) and dataset.description.names == list(C)
    assert dataset.description.grid.latitude.tolist() == [90 - 22.5 * i for i in range(8)]
    sample = np.empty(dataset.shape, np.float32)
    dataset.read(FRAMES, sample)  # the second pair of 1980
    assert np.array_equal(sample, TRUTH[1980][1:3, :, :8])
    dataset.close()
    assert read_statistics(tmp_path / "out" / "stats" / "time_means.npy", 20, (8, W)).shape == (20, 8, W)


def test_no_more_frames_are_held_than_fit_in_memory(tmp_path, monkeypatch):
    counts, real = [], Era5.frames
    for bound in ("BLOCK_BYTES", "KEPT_BYTES"):  # of frames, and of those that lie in a chunk
        monkeypatch.setattr(data_module, bound, 3 * 20 * H * W * 4)  # 3 frames, of 8 a file
    monkeypatch.setattr(Era5, "frames", lambda self, times: counts.append(len(times)) or real(self, times))
    convert(wb2_regridded(tmp_path), tmp_path / "out")
    assert counts == [3, 3, 2] * 4
    for year in YEARS:
        assert np.array_equal(read(tmp_path / "out", year), TRUTH[year])


def test_an_interrupted_run_leaves_no_half_file_and_continues(tmp_path, monkeypatch, capsys):
    sources, out, real, asked = cds(tmp_path), tmp_path / "out", Era5.frames, []

    def stop_in_1980(self, times):
        if times[0] >= np.datetime64("1980"):
            raise KeyboardInterrupt
        return real(self, times)

    monkeypatch.setattr(Era5, "frames", stop_in_1980)
    with pytest.raises(KeyboardInterrupt):
        convert(sources, out)
    assert [path.name for path in out.rglob("*.*")] == ["1979.h5"]

    monkeypatch.setattr(Era5, "frames", lambda self, times: asked.append(times[0]) or real(self, times))
    assert convert(sources, out) == 3 and min(asked) == np.datetime64("1980-01-01")
    assert convert(sources, out) == 0 and len(asked) == 3
    assert "nothing to do" in capsys.readouterr().out
    for year in YEARS:
        assert np.array_equal(read(out, year), TRUTH[year])


def test_a_further_year_needs_only_its_own_source(tmp_path):
    paths = cds_by_year(tmp_path)
    convert(paths[:2], tmp_path / "out", valid_years=(), test_years=())
    assert convert(paths[2:], tmp_path / "out") == 2
    assert np.array_equal(read(tmp_path / "out", 1982), TRUTH[1982])


def test_the_command_line_converts(tmp_path):
    source, out = save_zarr(build(), tmp_path / "a.zarr"), tmp_path / "out"
    years = ["--train_years=1979-1980", "--valid_years=1981", "--test_years=1982", "--days=2"]
    prepare_era5.main([source, "--out", str(out), *years, "--coarsen=2"])
    assert read(out, 1982).shape == (FRAMES, 20, 4, 8)
