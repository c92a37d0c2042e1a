"""A file of one's own becomes data for training, whatever its variables, region and time step, or is refused."""

import json
import re
import warnings
from contextlib import closing

import h5py
import numpy as np
import pytest
import xarray

from docs.examples.own_region import HEIGHT, NORTH, PACKED, STEP, WIDTH, region
from tests.support import programs
from tests.support.refusals import refusal
from weather.prepare_data import main
from weather.years.dataset import FieldDataset

H, W, FRAMES = HEIGHT, WIDTH, 40
VARIABLES = ("t2m", "u10", "swh")
SMALL = "--embed_dim=16 --depth=1 --num_heads=2 --num_iters=3 --warmup=0 --global_batch_size=4 --device=cpu"


def save(data, folder, name="region.nc", **options):
    data.to_netcdf(folder / name, engine="h5netcdf", **options)
    return str(folder / name)


def prepare(source, folder, *words, variables=VARIABLES):
    sources = [source] if isinstance(source, str) else source
    main([*sources, "--variables", *variables, "--out", str(folder / "data"), *words])
    return folder / "data"


def read(out, split="train", name="fields"):
    (path,) = (out / split).glob("*.h5")
    with h5py.File(path) as file:
        return file[name][:]


# ---- what is read


def test_a_region_becomes_splits_statistics_and_a_config(tmp_path, capsys):
    data = region()
    out = prepare(save(data, tmp_path, encoding={"t2m": PACKED}), tmp_path, "--shares", "50", "25", "25")
    said = capsys.readouterr().out
    assert "24 x 40 points of a region, latitude 55 to 43.5, longitude -10 to 9.5" in said
    assert "names, whose units and range are not known: swh" in said and "--config own" in said
    truth = np.stack([data[name].values for name in VARIABLES], 1)
    for split, first, last in (("train", 0, 20), ("valid", 20, 30), ("test", 30, 40)):
        np.testing.assert_allclose(read(out, split), truth[first:last], atol=1e-4)
    assert read(out, "train", "channel").tolist() == [b"t2m", b"u10", b"swh"]
    assert read(out, "train", "channel_units").tolist() == [b"K", b"m s-1", b"m"]
    climatology = np.load(out / "stats/time_means.npy")
    np.testing.assert_allclose(climatology[0], truth[:20].mean(0), atol=1e-3)
    with closing(FieldDataset(out / "test", 3, [H, W])) as test:
        assert test.step_seconds == 3 * 3600 and not test.description.grid.is_global
        assert test.times[0][0] == np.datetime64("2020-01-02T18")
    prepare(save(data, tmp_path, encoding={"t2m": PACKED}), tmp_path, "--shares", "50", "25", "25")
    assert "nothing to do" in capsys.readouterr().out


def from_the_south(data):
    return data.isel(latitude=slice(None, None, -1))


def from_greenwich(data):
    """Longitudes of 0 to 360, in that order: the region is cut in two."""
    return data.assign_coords(longitude=data.longitude % 360).sortby("longitude")


def in_their_order(data):
    return data.assign_coords(longitude=data.longitude % 360).transpose("longitude", "time", "latitude")


def under_other_names(data):
    return data.rename(latitude="lat", longitude="lon", t2m="2m_temperature", u10="U10M")


def in_celsius(data):
    celsius = data.t2m - 273.15
    return data.assign(t2m=celsius.assign_attrs(units="degC"))


@pytest.mark.parametrize("change", [from_the_south, from_greenwich, in_their_order, under_other_names, in_celsius])
def test_however_a_region_is_written_its_images_are_the_same(tmp_path, change):
    data = region()
    out = prepare(save(change(data), tmp_path), tmp_path)
    truth = np.stack([data[name].values for name in VARIABLES], 1)
    np.testing.assert_allclose(read(out), truth[:32], atol=1e-4)
    np.testing.assert_allclose(read(out, name="latitude"), data.latitude)
    np.testing.assert_allclose(read(out, name="longitude"), data.longitude)


def test_levels_other_names_and_several_sources(tmp_path):
    """Pressures and depths, files of months, a store of Zarr; a rise of water is no specific humidity."""
    pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
    data = region()
    pressure = xarray.concat([data.u10 + 1, data.u10 + 2], xarray.Variable("plev", [50000.0, 85000.0], {"units": "Pa"}))
    depth = xarray.concat([data.swh + 1, data.swh + 2], xarray.Variable("depth", [0.5, 10.0], {"units": "m"}))
    early = xarray.Dataset({"u": pressure.isel(time=slice(0, 20))}), xarray.Dataset({"u": pressure[:, 20:]})
    sources = [save(part, tmp_path, f"{number}.nc") for number, part in enumerate(early)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xarray.Dataset({"salt": depth}).to_zarr(tmp_path / "depth.zarr", zarr_format=2)
        xarray.Dataset({"q": data.swh}).to_zarr(tmp_path / "q.zarr", zarr_format=2)
    sources += [str(tmp_path / "depth.zarr"), str(tmp_path / "q.zarr")]
    words = "--valid_from", "2020-01-02", "--test_from", "2020-01-03"
    out = prepare(sources, tmp_path, *words, variables=("u:850,500", "salt:10", "rise=q"))
    assert read(out, "train", "channel").tolist() == [b"u850", b"u500", b"salt10", b"rise"]
    truth = [data.u10 + 2, data.u10 + 1, data.swh + 2, data.swh]
    np.testing.assert_allclose(read(out, "valid"), np.stack(truth, 1)[24:32], rtol=1e-6)
    assert len(read(out, "test")) == 8


def test_two_channels_of_one_variable_are_both_written(tmp_path):
    data = region()
    out = prepare(save(data, tmp_path), tmp_path, variables=("waves=swh", "t2m", "swell=swh"))
    truth = np.stack([data[name].values for name in ("swh", "t2m", "swh")], 1)
    np.testing.assert_allclose(read(out), truth[:32], atol=1e-4)


def test_levels_may_be_variables_of_their_own(tmp_path):
    data = region().rename(u10="u500", t2m="u_850")
    data.u_850.attrs["units"] = "m s-1"
    out = prepare(save(data, tmp_path), tmp_path, variables=("u:500",))
    np.testing.assert_allclose(read(out)[:, 0], data.u500.values[:32], atol=1e-4)
    with refusal("has the level .*50* alone: ask for 'u' without ':700'"):
        prepare(save(data, tmp_path), tmp_path / "none", variables=("u:700",))


# ---- what is refused


def changed(name, value):
    def change(data):
        values = data[name].copy(deep=True)
        values[:] = value(values)
        return data.assign({name: values})

    return change


def on_two_grids(data):
    other = data.u10.rename(latitude="lat", longitude="lon").assign_coords(lat=data.latitude.values + 0.1)
    return data.drop_vars("u10").assign(u10=other)


def curvilinear(data):
    mesh = np.broadcast_to(data.latitude.values[:, None], (H, W))
    plain = data.drop_vars(["latitude", "longitude"]).rename(latitude="y", longitude="x")
    return plain.assign_coords(lat=(("y", "x"), mesh), lon=(("y", "x"), np.zeros((H, W))))


def in_radians(data):
    return data.assign_coords(latitude=np.deg2rad(data.latitude))


def with_times(*order):
    return lambda data: data.isel(time=[*order, *range(4, FRAMES)])


def at_one_level(data):
    return data.assign(t=data.t2m.expand_dims(level=[500.0, 850.0], axis=1).drop_attrs())


def of_forecasts(dimension, values):
    return lambda data: data.assign(t=data.t2m.expand_dims({dimension: values}, axis=1).drop_attrs())


REFUSALS = {
    "lead times": (
        of_forecasts("step", np.array([0, 6], "timedelta64[h]")),
        ("t",),
        r"its dimension 'step' has lead times of a forecast.*ds.isel\(step=0\)\), dated time \+ step",
    ),
    "members": (of_forecasts("number", [0, 1]), ("t",), "its dimension 'number' has members of an ensemble"),
    "an unknown variable": (None, ("t2m", "uu10"), r"has no variable 'uu10' \(did you mean 'u10'\?\); it holds t2m"),
    "none of them": (None, ("precipitation",), "holds none of precipitation; it has t2m, u10, swh"),
    "a level that is not there": (at_one_level, ("t:250",), "t has no level 250: it has 500, 850"),
    "levels, and none is asked for": (at_one_level, ("t",), "t has the levels 500, 850: ask for some of them, 't:500'"),
    "a level of what has none": (None, ("swh:500",), "swh has no levels: ask for 'swh' without ':500'"),
    "two grids": (on_two_grids, VARIABLES, "two grids, t2m on .* and u10 on .*: bring them onto one"),
    "unsorted times": (with_times(1, 0, 2, 3), VARIABLES, r"2019-12-30T00:00 .* follows .*: sort them"),
    "repeated times": (with_times(0, 1, 1, 3), VARIABLES, r"comes twice, at indices 1 and 2.*: keep one of them"),
    "a channel of NaN": (changed("swh", lambda x: np.nan), VARIABLES, "swh, .*: is NaN at every point.*: fillna"),
    "a point of NaN": (changed("u10", lambda x: x.where(x < 4)), VARIABLES, "u10, .*: row .* is NaN .*fillna"),
    "a curvilinear grid": (curvilinear, VARIABLES, r"its lat has the dimensions y, x; .*: regrid it"),
    "no coordinate": (
        lambda data: data.drop_vars("latitude"),
        VARIABLES,
        "latitude has no values: give .*assign_coords",
    ),
    "no dates": (lambda data: data.drop_vars("time"), VARIABLES, "time has no dates: give it .*assign_coords"),
    "one time step": (lambda data: data.isel(time=[0]), VARIABLES, "train would have 1 of the 1 dates.*more files"),
    "radians": (in_radians, VARIABLES, "latitude is 0.7592 to 0.9599: in radians. Write degrees"),
    "degrees Celsius that are called kelvin": (
        changed("t2m", lambda x: x - 273.15),
        VARIABLES,
        r"t2m, 2019-12-30T00:00: .* outside 150 to 350 K: in degC\? \(write its true units",
    ),
    "units of something else": (
        lambda data: data.assign(q=data.swh.assign_attrs(units="m3 s-1")),
        ("q",),
        "q has unknown units 'm3 s-1'.*: convert it, or, .*--variables NAME=q",
    ),
    "a missing row": (lambda data: data.isel(latitude=[0, 1, *range(3, H)]), VARIABLES, "is a row missing.*remapbil"),
    "a missing column": (lambda data: data.isel(longitude=[0, 1, *range(3, W)]), VARIABLES, "is a column missing"),
    "a repeated column": (
        lambda data: data.assign_coords(longitude=np.linspace(0, 360, W)),
        VARIABLES,
        "is 360 and 0, the same place, in columns 39 and 0: keep one of them",
    ),
    "columns from the east": (
        lambda data: data.sortby("longitude", False),
        VARIABLES,
        "does not run eastward: sort it",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, name):
    """The line names the file, the variable and what to do."""
    change, variables, line = REFUSALS[name]
    source = save(change(region()) if change else region(), tmp_path)
    with refusal(line, "train would" if name == "one time step" else source):
        prepare(source, tmp_path, variables=variables)
    assert not list(tmp_path.glob("data/*/*.h5*"))


@pytest.mark.parametrize(
    "words, line",
    [
        (["t2m", "t2m"], "t2m is asked for twice"),
        (["z:high"], "'high' are no levels: write"),
        (["a=b=c"], "--variables a=b=c: write a variable"),
        (["z500:850"], "z500 is of the level 500: give one"),
        (["q", "rise=q"], "q is to be q and rise"),
    ],
)
def test_words_that_ask_for_no_channels_are_refused(tmp_path, words, line):
    with refusal(line, "--variables"):
        prepare("nowhere.nc", tmp_path, variables=words)


def test_files_that_differ_in_grid_or_units_are_refused(tmp_path):
    data = region()
    sources = [save(data.isel(time=slice(0, 20)), tmp_path, "a.nc")]
    shifted = data.isel(time=slice(20, None)).assign_coords(latitude=data.latitude + 1)
    with refusal("b.nc: has 24 latitudes, 56 to 44.5, .*a.nc 24, 55 to 43.5: bring them onto one grid"):
        prepare([*sources, save(shifted, tmp_path, "b.nc")], tmp_path)
    other = data.isel(time=slice(20, None)).assign(swh=data.swh.assign_attrs(units="%"))
    with refusal("swh has the units 'm' in .*a.nc and '%' in .*c.nc"):
        prepare([*sources, save(other, tmp_path, "c.nc")], tmp_path)


def test_the_dates_of_the_splits_are_checked(tmp_path):
    source = save(region(), tmp_path)
    with refusal("belong together"):
        prepare(source, tmp_path, "--valid_from", "2020-01-02")
    with refusal("valid would have 0 of the 40 dates"):
        prepare(source, tmp_path, "--valid_from", "2021-01-02", "--test_from", "2021-01-03")
    with refusal("date 'May'"):
        prepare(source, tmp_path, "--valid_from", "May")


def test_the_conversion_of_era5_says_who_takes_a_region(tmp_path):
    from weather.prepare_era5 import prepare_era5

    with refusal("do not go .*python -m weather.prepare_data makes data of a region"):
        prepare_era5([save(region(), tmp_path)], tmp_path / "out")


# ---- from the file to a forecast


def scores(folder, run):
    """The losses and scores with which a run has ended."""
    found = json.loads((folder / f"logs/own/{run}/summary.json").read_text())
    return {"train_loss": found["train_loss"], "val_loss": found["val_loss"]} | found["rmse"]


@pytest.mark.slow("trains on one device and on two layouts, and forecasts")
def test_a_region_trains_on_one_device_and_on_two_and_is_forecast(tmp_path):
    out = prepare(save(region(), tmp_path, encoding={"t2m": PACKED}), tmp_path)
    own = [f"--yaml_config={out}/config.yaml", "--config=own", *SMALL.split(), f"--expdir={tmp_path}/logs"]
    one = programs.run(["train.py", *own, "--run_num=one"])
    assert one.returncode == 0, one.stdout + one.stderr
    for script, name, split in (
        ("train.py", "dp2", []),
        ("train_shard.py", "domain2", ["--domain_parallel=2"]),
    ):
        for status, said in programs.run_ranks([script, *own, *split, f"--run_num={name}"]):
            assert status == 0, said
        assert scores(tmp_path, name) == pytest.approx(scores(tmp_path, "one"), rel=1e-4)
    words = ["--lead_hours=6", "--starts=1", "--channel=swh", "--checkpoint=newest"]
    done = programs.run(["forecast.py", f"--run_folder={tmp_path}/logs/own/one", *words])
    assert done.returncode == 0 and re.search(r"1 forecasts? of 6 hours", done.stdout), done.stdout + done.stderr
    (file,) = (tmp_path / "logs/own/one/forecast").glob("*.nc")
    with xarray.open_dataset(file) as forecast:
        assert forecast.swh.shape[-2:] == (H, W) and np.isfinite(forecast.t2m).all()
        np.testing.assert_allclose(forecast.latitude, NORTH - STEP * np.arange(H))
    refused = programs.run(["train.py", *own, "--model=unet", "--run_num=unet"])
    assert refused.returncode == 2 and "columns from -10 to 9.5 degrees do not go around" in refused.stderr
