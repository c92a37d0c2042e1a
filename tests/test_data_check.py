"""What was never written, is in other units or in another order is not trained on, and statistics fit their data."""

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from tests.support import programs
from tests.support.refusals import refusal
from training.tasks import build_task
from weather import year_files
from weather.checks import data_check
from weather.checks.data_check import PLACES, DataCheck
from weather.fields.channels import CHANNELS, channel_key, channel_of, value_range
from weather.fields.value_check import ValueCheck
from weather.years import hdf5_year
from weather.years.dataset import FieldDataset

NAMES = [channel.name for channel in CHANNELS]
C = {name: number for number, name in enumerate(NAMES)}
Z_LEVELS = [C["z1000"], C["z850"], C["z500"], C["z50"]]
FRAMES = 20
CPU = torch.device("cpu")
# A third of the usual spread of each channel: visible in a mean, and within every range.
ONE_SIDED = np.array([5, 5, 8, 3e3, 1e3, 8, 5, 5, 1e3, 5, 5, 800, 5, 5, 2e3, 8, 2e3, 15, 15, 10], "f4")


@pytest.fixture
def data(sample_folder, tmp_path):
    """A copy of the sample data that a test may spoil."""
    shutil.copytree(sample_folder, tmp_path / "data")
    return tmp_path / "data"


def spoil(path, change):
    """Change the fields of a year file in place."""
    with h5py.File(path, "r+", locking=False) as file:
        fields = file["fields"][:]
        change(fields)
        file["fields"][:] = fields


def keys_of(folder):
    """The config keys that point to a data set."""
    splits = {"train_data_path": "train", "valid_data_path": "valid", "inf_data_path": "test"}
    statistics = ("global_means", "global_stds", "time_means")
    return {key: str(folder / name) for key, name in splits.items()} | {
        f"{name}_path": str(folder / f"stats/{name}.npy") for name in statistics
    }


def loaders(make_config, folder, **settings):
    task = build_task(make_config(**keys_of(folder) | settings))
    for loader in task.loaders(CPU):
        loader.close()
    return task


def zero_from_the_middle(fields):
    fields[10:] = 0


def zero_in_a_stretch(fields):
    fields[5:8] = 0


def zero_in_one_channel(fields):
    fields[:, C["mslp"]] = 0


def fill_value(fields):
    fields[19, C["u10"], 3, 4] = 9.969209968386869e36


def fill_value_of_cmip(fields):
    fields[0, C["tcwv"], :, 4] = 1e20


def nan(fields):
    fields[19, C["v850"], 2, 1] = np.nan


def constant(fields):
    fields[0, C["sp"]] = 98_000


def celsius(fields):
    fields[:, C["t2m"]] -= 273.15


def hectopascal(fields):
    fields[:, C["mslp"]] /= 100


def heights(fields):
    fields[:, Z_LEVELS] /= 9.80665


def one_height(fields):
    fields[:, C["z500"]] /= 9.80665


def levels_reversed(fields):
    fields[:, Z_LEVELS] = fields[:, Z_LEVELS[::-1]]


def fraction(fields):
    fields[:, C["r850"]] /= 100


def fill_number(fields):
    fields[:, C["z1000"], ::3, ::2] = -9999


def half_zero(fields):
    fields[:, C["u10"], 8:] = 0


def stuck(fields):
    fields[8:] = fields[8]


def other_order(fields):
    fields[:] = fields[:, ::-1]


FAULTS = {
    zero_from_the_middle: r"frame \d+ \(1980-01-0.T..\): channel 2 \(t2m\) is 0, outside 150 to 350 K: .* written",
    zero_in_a_stretch: r"frame \d \(1980-01-02T..\): channel 2 \(t2m\) is 0, outside 150 to 350 K: was it written to",
    zero_in_one_channel: r"frame \d+ .*: channel 4 \(mslp\) is 0, outside 80000 to 120000 Pa: was it written",
    fill_value: r"channel 0 \(u10\) is 9.96921e\+36, a fill value: was it never written\? \(row 3, column 4\)",
    fill_value_of_cmip: r"frame 0 .*: channel 19 \(tcwv\) is 1e\+20, a fill value",
    nan: r"channel 10 \(v850\) is NaN \(row 2, column 1\)",
    constant: r"frame 0 .*: channel 3 \(sp\) is 98000, and so is every point of this frame",
    celsius: r"channel 2 \(t2m\) is .*, outside 150 to 350 K: in degC\?",
    hectopascal: r"channel 4 \(mslp\) is .*, outside 80000 to 120000 Pa: in hPa\?",
    heights: r"channel 11 \(z850\) is .*, outside 5000 to 23000 m2 s-2: a height in m\?.*; 2 more channels are out of",
    one_height: r"channel 14 \(z500\) is .*, outside 42000 to 67000 m2 s-2: a height in m\? \(row 0, column 0\); if",
    levels_reversed: r"channel 8 \(z1000\) is .*, outside .*: of another level, such as 50 hPa\?",
    fraction: r"channel 18 \(r850\) is .*, and nowhere above .* %: a fraction\?",
    fill_number: r"channel 8 \(z1000\) is -9999, as 19% of this frame are, which looks like a fill value",
    half_zero: r"channel 0 \(u10\) is 0, as 5.% of this frame are: was it written to the end",
    other_order: r"channel .* more channels are out of range: are they in the order of their names\?",
}


@pytest.mark.parametrize("mode", ["sample", "all"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_is_no_weather_is_not_trained_on(data, tiny_config, fault, mode):
    spoil(data / "train/1980.h5", fault)
    with refusal(FAULTS[fault], data / "train/1980.h5: frame "):
        loaders(tiny_config, data, check_data=mode)
    loaders(tiny_config, data, check_data="off")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_statistics_are_not_made_of_what_is_no_weather(data, fault):
    spoil(data / "train/1980.h5", fault)
    shutil.rmtree(data / "stats")
    in_any_frame = re.sub(r"frame .*?:", "frame .*:", FAULTS[fault], count=1)
    with refusal(in_any_frame, data / "train/1980.h5"):
        year_files.main([str(data / "train"), str(data / "stats")])
    assert not (data / "stats").exists()


def test_a_single_frame_that_a_sample_passes_over_is_found_by_all(data, tiny_config):
    def change(fields):
        fields[3, C["t850"], 8] = 0

    spoil(data / "train/1979.h5", change)
    looked_at = {round(place * (FRAMES - 1)) for place in PLACES}
    if 3 not in looked_at:
        loaders(tiny_config, data)
    with refusal(r"1979.h5: frame 3 \(1979-01-01T18\): channel 5 \(t850\) is 0"):
        loaders(tiny_config, data, check_data="all")


def test_training_and_forecast_refuse_in_one_line_with_status_2(data, tiny_options, tmp_path):
    options = tiny_options(**keys_of(data), num_iters=2, warmup=1)
    run = programs.run(["train.py", *options])
    assert run.returncode == 0 and "--check_data sample: looked at 39 frames of 3 years in" in run.stdout, run.stdout
    spoil(data / "test/1982.h5", zero_from_the_middle)
    spoil(data / "train/1979.h5", zero_from_the_middle)
    forecast = ["forecast.py", "--run_folder", str(tmp_path / "logs/quick/00"), "--device=cpu", "--lead_hours=6"]
    for words, split in ((forecast, "test/1982.h5"), (["train.py", *options, "--run_num=b"], "train/1979.h5")):
        refused = programs.run(words)
        assert refused.returncode == 2, refused
        assert refused.stderr.startswith(f"error: {data / split}: frame 19 ") and refused.stderr.count("\n") == 1
    assert programs.run([*forecast, "--check_data=off", "--starts=1"]).returncode == 0


def test_every_rank_refuses_what_one_of_them_saw(data, tiny_options):
    spoil(data / "train/1980.h5", fill_value_of_cmip)  # in one of the frames, which one of the ranks looks at
    ranks = programs.run_ranks(["train.py", *tiny_options(**keys_of(data))])
    assert [status for status, _ in ranks] == [2, 2]
    assert "1980.h5: frame 0 (1980-01-01T00): channel 19 (tcwv) is 1e+20" in "".join(said for _, said in ranks)


def test_a_frame_that_is_written_again_and_again_is_not_weather(data, tiny_config):
    spoil(data / "train/1979.h5", stuck)
    with refusal(r"1979.h5: frames \d+, \d+, \d+ are the same in every channel: was one frame written again"):
        loaders(tiny_config, data)


def test_what_the_file_itself_calls_missing_is_not_weather(data, tiny_config):
    def change(fields):
        fields[:, C["u850"], 3, ::2] = 3.25

    spoil(data / "train/1979.h5", change)
    loaders(tiny_config, data)
    with h5py.File(data / "train/1979.h5", "r+", locking=False) as file:
        file["fields"].attrs["missing_value"] = np.float32(3.25)
    with refusal(r"channel 9 \(u850\) is 3.25, as 3% of this frame are, which looks like a fill value"):
        loaders(tiny_config, data)


def test_what_the_file_calls_missing_is_so_in_a_channel_of_its_own_too():
    fields = np.random.default_rng(1).random((1, 1, 8, 16)).astype(np.float32)
    fields[0, 0, 3, ::2] = -999.0
    own = [("chlorophyll", None)]
    assert ValueCheck(own).find(fields) is None  # which may have such a value
    problem = ValueCheck(own, missing_values=[-999.0]).find(fields)
    assert problem.text.startswith("is -999, as 6% of this frame are, which looks like a fill value")


def test_what_is_outside_of_the_range_that_the_file_states_is_not_weather(data, tiny_config):
    """One point of each frame, which without the attribute might be the noise of a compression."""

    def change(fields):
        fields[:, C["z1000"], 3, 4] = -9000.0

    spoil(data / "train/1979.h5", change)
    loaders(tiny_config, data)
    with h5py.File(data / "train/1979.h5", "r+", locking=False) as file:
        file["fields"].attrs["valid_min"] = np.float32(-8000)
    line = r"channel 8 \(z1000\) is -9000, outside -8000 to inf: by the valid range of fields it is missing"
    with refusal(line):
        loaders(tiny_config, data)
    with refusal(line):
        year_files.main([str(data / "train"), str(data / "new_stats")])


# ---- what is sound


def test_a_channel_of_its_own_may_be_the_same_everywhere_at_a_time(data, tiny_config):
    """Such as the day of the year, or carbon dioxide, in a channel that nobody knows by its name."""
    for path in sorted(data.glob("t*/*.h5")) + [data / "valid/1981.h5"]:
        with h5py.File(path, "r+", locking=False) as file:
            names = [*file["channel"].asstr()]
            names[C["tcwv"]] = "day"
            file["channel"][:] = names
            file["fields"][:, C["tcwv"]] = np.arange(FRAMES, dtype="f4")[:, None, None] + int(path.stem) - 1979
    shutil.rmtree(data / "stats")
    year_files.main([str(data / "train"), str(data / "stats")])
    loaders(tiny_config, data)
    loaders(tiny_config, data, limit_nsamples=8)


def test_another_planet_trains_where_it_is_meant_to_be_so(data, tiny_config):
    for path in data.glob("*/*.h5"):
        spoil(path, hectopascal)
    shutil.rmtree(data / "stats")
    with refusal("in hPa.*; if they are meant to be so: --check_data off"):
        year_files.main([str(data / "train"), str(data / "stats")])
    year_files.main([str(data / "train"), str(data / "stats"), "--check_data=off"])
    loaders(tiny_config, data, check_data="off")


def test_names_and_units_of_others_are_known(data, tiny_config):
    """Makani's names; pressure in hPa, where the file says so; a channel of a name that nobody knows."""
    theirs = {"u10": "u10m", "v10": "v10m", "mslp": "msl", "tcwv": "ozone", "t850": "T_850"}
    for path in data.glob("*/*.h5"):
        with h5py.File(path, "r+", locking=False) as file:
            units = [*file["channel_units"].asstr()]
            units[C["mslp"]] = "hPa"
            del file["channel"], file["channel_units"]
            file["channel"] = [theirs.get(name, name) for name in NAMES]
            file["channel_units"] = units
        spoil(path, hectopascal)
    for name in ("global_means", "global_stds", "time_means"):
        values = np.load(data / f"stats/{name}.npy")
        values[:, C["mslp"]] /= 100
        np.save(data / f"stats/{name}.npy", values)
    task = loaders(tiny_config, data, check_data="all")
    assert f"{data / 'train'}: channels of unknown names, whose units and range are not known: ozone" in task.notes
    with_units = FieldDataset(data / "train", 20, (16, 32)).description
    assert with_units.names == [*NAMES[:-1], "ozone"] and with_units.units[C["mslp"]] == "hPa"


def test_units_are_those_of_the_name_where_the_file_has_none(data):
    for path in (data / "train").glob("*.h5"):
        with h5py.File(path, "r+", locking=False) as file:
            del file["channel"], file["channel_units"]
            file["channel"] = ["z50", "msl", "q500", "chlorine"] + NAMES[4:]
    description = FieldDataset(data / "train", 4, (16, 32)).description
    assert description.names == ["z50", "mslp", "q500", "chlorine"]
    assert description.units == ["m2 s-2", "Pa", "kg kg-1", ""]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("u10m", "u10"), ("10U", "u10"), ("2t", "t2m"), ("msl", "mslp"), ("mslp", "mslp"), ("Z500", "z500"),
     ("temperature_850", "t850"), ("r850hPa", "r850"), ("u100", "u100"), ("u100m", "u100m"), ("100u", "u100m"),
     ("geopotential_50", "z50"), ("wind", "wind"), ("channel20", "channel20")],
)  # fmt: skip
def test_channels_have_one_name(theirs, ours):
    assert channel_of(theirs).name == ours


def test_rows_and_columns_are_those_of_lat_and_lon(data):
    path = data / "train/1979.h5"
    with h5py.File(path, "r+", locking=False) as file:
        south_first, from_the_date_line = file["latitude"][:][::-1], file["longitude"][:] - 180
        for name in ("latitude", "longitude"):
            del file[name]
        file["lat"], file["lon"] = south_first, from_the_date_line
    (data / "train/1980.h5").unlink()
    grid = FieldDataset(data / "train", 20, (16, 32)).description.grid
    np.testing.assert_array_equal(grid.latitude, south_first)
    np.testing.assert_array_equal(grid.longitude, from_the_date_line)


def test_a_few_points_a_little_outside_are_noise_but_not_where_era5_is_converted():
    fields = np.full((1, 1, 10, 10), 270.0, np.float32)
    fields[0, 0, 0] = np.linspace(260, 280, 10)
    fields[0, 0, 1, 1] = 120
    key = [("t2m", None)]
    assert ValueCheck(key).find(fields) is None
    assert ValueCheck(key, strict=True).find(fields).text == "is 120, outside 150 to 350 K"
    fields[0, 0, 1, 1] = -9999
    found = ValueCheck(key).find(fields)
    assert (found.row, found.column, found.text) == (1, 1, "is -9999, outside 150 to 350 K")
    fields[0, 0, 1, 1] = 0  # which noise never is
    assert ValueCheck(key).find(fields).text == "is 0, outside 150 to 350 K"
    fields[0, 0, 1, 1:3] = 120  # nor a number that comes twice
    assert ValueCheck(key).find(fields).text == "is 120, outside 150 to 350 K"
    fields[0, 0, 1] = np.linspace(120, 121, 10)  # nor as much as a tenth
    assert ValueCheck(key).find(fields) is not None


def test_the_range_of_geopotential_follows_its_level():
    heights_of_levels = {1000: 110, 925: 760, 850: 1460, 600: 4200, 500: 5570, 250: 10360, 50: 20600, 5: 36000}
    for level, height in heights_of_levels.items():
        lowest, highest = value_range(*channel_key(f"z{level}"))
        assert lowest < 9.80665 * height < highest, level
        if level < 900:
            assert not lowest < height < highest, level


# ---- what it costs


def test_a_sample_is_some_rows_of_some_frames_of_every_year(tmp_path, monkeypatch):
    """At the size of real images: fewer bytes than two frames of each year."""
    shape, frames = (20, 180, 360), 30
    (tmp_path / "train").mkdir()
    for year in (1979, 1980):
        with h5py.File(tmp_path / f"train/{year}.h5", "w") as file:
            file["fields"] = np.random.default_rng(year).standard_normal((frames, *shape), dtype=np.float32)
            file["channel"] = [f"a{number}x" for number in range(20)]
    dataset = FieldDataset(tmp_path / "train", 20, shape[1:])
    read = []
    real = hdf5_year.fill
    monkeypatch.setattr(hdf5_year, "fill", lambda file, at, out: (read.append(out.nbytes), real(file, at, out)))
    check = DataCheck([dataset], "sample")
    monkeypatch.setattr(data_check, "SAMPLE_SECONDS", 1000)
    check.run()
    assert check.looked_at == 2 * len(PLACES) and not check.is_cut_short
    frame_bytes = 4 * np.prod(shape)
    of_a_look = sum(read) / check.looked_at
    assert of_a_look <= 1.01 * data_check.SAMPLE_BYTES and of_a_look < frame_bytes / 2
    rows = data_check.sampled_rows(dataset)
    np.testing.assert_array_equal(rows, 179 - rows[::-1])  # which the look for an upside-down climatology needs
    assert (rows[0], rows[-1]) == (0, 179)


def test_a_sample_ends_when_its_time_is_up_and_says_so(data, monkeypatch):
    monkeypatch.setattr(data_check, "SAMPLE_SECONDS", -1)
    dataset = FieldDataset(data / "train", 20, (16, 32))
    check = DataCheck([dataset], "sample")
    check.run()
    assert check.is_cut_short and check.looked_at == data_check.THREADS
    assert check.describe().startswith(f"--check_data sample: looked at {data_check.THREADS} of 26 chosen frames of 2")


def test_ranks_share_the_frames_and_only_those_that_are_used_count(data):
    dataset = FieldDataset(data / "train", 20, (16, 32), limit=5)
    shares = [DataCheck([dataset], "all", (rank, 3)) for rank in range(3)]
    looks = {look for share in shares for look in share.looks}
    frames = sorted(look.frame + later for look in looks for later in range(look.count) if look.file == 0)
    assert sorted({*frames}) == [0, 1, 2, 3, 4, 5] and {look.file for look in looks} == {0}
    assert len(shares[0].summed) and not shares[1].summed  # one rank sees all seasons


# ---- statistics


def change_statistics(data, name, change):
    path = data / f"stats/{name}.npy"
    np.save(path, change(np.load(path)))
    return path


def swapped(values):
    """Those of two channels in place of one another."""
    order = list(range(20))
    order[C["t2m"]], order[C["sp"]] = C["sp"], C["t2m"]
    return values[:, order]


def add_one_sided_pattern(fields):
    """Add something to the north-west of each channel, so large that it is where it is."""
    fields[:, :, :6, :16] += ONE_SIDED[:, None, None]
    return fields


def one_upside_down(values):
    turned = values.copy()
    turned[:, C["t2m"]] = values[:, C["t2m"], ::-1]
    return turned


def half_a_circle_off(values):
    return np.roll(values, 16, axis=3)


STATISTICS = {
    "a climatology of zeros": ("time_means", np.zeros_like, "the climatology of u10 is 0 at every point"),
    "a climatology upside down": ("time_means", lambda x: x[:, :, ::-1], "the climatology of .* is upside down: it"),
    "one channel upside down": ("time_means", one_upside_down, "the climatology of t2m is upside down: it differs"),
    "half a circle off": ("time_means", half_a_circle_off, "the climatology of .* is turned by half a circle: it"),
    "a finer grid": ("time_means", lambda x: x.repeat(2, 2).repeat(2, 3), "has 32 x 64 points, the files have 16 x 32"),
    "a climatology of other channels": ("time_means", swapped, "the mean of t2m is .*, that of .*global_means.npy is"),
    "means of other channels": ("global_means", swapped, "the mean of t2m is .*, that of .*global_means.npy is"),
    "deviations of other channels": ("global_stds", swapped, "the standard deviation of t2m is .*, that of frames of"),
    "a deviation of zero": (
        "global_stds",
        lambda x: np.where(np.arange(20)[:, None, None] == 4, 0, x).astype("f4"),
        r"deviations that are not positive: channel 4 \(mslp\) has 0: is it the same everywhere",
    ),
}


@pytest.mark.parametrize("fault", STATISTICS)
def test_statistics_of_other_data_are_refused_with_both_numbers(data, tiny_config, fault):
    name, change, line = STATISTICS[fault]
    if "upside" in fault or "half" in fault:  # the sample data are the same in both hemispheres, and all around
        for path in data.glob("*/*.h5"):
            spoil(path, add_one_sided_pattern)
        change_statistics(data, name, lambda x: add_one_sided_pattern(x.copy()))
        loaders(tiny_config, data)
    path = change_statistics(data, name, change)
    about = data / "stats/time_means.npy" if "means of other" in fault else path
    with refusal(line, about):
        loaders(tiny_config, data)
    if "zero" not in fault:
        loaders(tiny_config, data, check_data="off")


def test_statistics_that_agree_with_one_another_but_not_with_the_frames_are_refused(data, tiny_config):
    for name in ("global_means", "global_stds", "time_means"):
        change_statistics(data, name, swapped)
    with refusal("time_means.npy: the climatology of t2m is .* on average, frames of .*train have"):
        loaders(tiny_config, data)


def test_changes_of_other_channels_are_refused(data, tiny_config):
    path = change_statistics(data, "change_stds", swapped)
    with refusal(
        "the change of channel 2 from frame to frame is .*, its standard deviation in .*global_stds.npy is", path
    ):
        loaders(tiny_config, data, predict="change")
    loaders(tiny_config, data, predict="change", check_data="off")


def test_means_over_the_sphere_are_no_contradiction(data, tiny_config):
    """Some weigh the rows by their area, others do not."""
    climatology = np.load(data / "stats/time_means.npy")
    with h5py.File(data / "train/1979.h5", locking=False) as file:
        area = np.cos(np.deg2rad(file["latitude"][:]))
    means = np.average(climatology.mean(3), axis=2, weights=area)
    np.save(data / "stats/global_means.npy", means[:, :, None, None].astype("f4"))
    loaders(tiny_config, data)


def test_a_channel_that_never_changes_has_no_statistics(tmp_path):
    with h5py.File(tmp_path / "1979.h5", "w") as file:
        file["fields"] = np.random.default_rng(0).standard_normal((4, 3, 4, 8), dtype=np.float32)
        file["fields"][:, 1] = 101_325
        file["channel"] = ["a", "b", "c"]
    with refusal(r"channel 1 \(b\) is 101325 at every point of every training frame", tmp_path / "1979.h5"):
        year_files.main([str(tmp_path), str(tmp_path / "stats")])


# ---- one year in two places


def test_a_year_in_two_splits_is_refused(data, tiny_config):
    shutil.copy(data / "train/1980.h5", data / "valid")
    with refusal(
        "valid/1980.h5: 1980-01-01T00 and 19 more of its dates are in .*train/1980.h5 too: its scores would tell"
    ):
        loaders(tiny_config, data)
    loaders(tiny_config, data, check_data="off")
    (data / "valid/1980.h5").unlink()
    (data / "test/1983.h5").symlink_to(data / "train/1979.h5")
    with refusal("test/1983.h5: is the same file as .*train/1979.h5: its scores would tell nothing"):
        loaders(tiny_config, data)
    (data / "test/1983.h5").unlink()
    shutil.copy(data / "train/1979.h5", data / "test/1983.h5")
    with refusal("test/1983.h5: 1979-01-01T00 and 19 more of its dates are in .*train/1979.h5 too"):
        loaders(tiny_config, data)


def test_what_is_meant_to_be_the_same_or_shares_one_frame_is_noted(data, tiny_config, tmp_path):
    task = loaders(tiny_config, data, valid_data_path=str(data / "train"))
    assert f"{data / 'train'}: is the folder of the training too: its scores say nothing of other data" in task.notes
    with h5py.File(data / "valid/1981.h5", "r+", locking=False) as file:  # from the last frame of 1980 on
        hours = (np.datetime64("1980-01-05T18") - np.datetime64("1970-01-01T00")).astype(int)
        file["time"][:] = hours + 6 * np.arange(len(file["time"]))
    task = loaders(tiny_config, data)
    assert any("valid/1981.h5: 1980-01-05T18 is in " in note for note in task.notes)
    shutil.copytree(data / "train", tmp_path / "elsewhere/test")  # such as the path in a config that nobody changed
    task = loaders(tiny_config, data, inf_data_path=str(tmp_path / "elsewhere/test"))
    assert any(note.startswith("forecasts on inf_data_path will be refused: ") for note in task.notes)


def test_test_years_that_are_not_there_yet_stop_no_training(data, tiny_config):
    shutil.rmtree(data / "test")
    loaders(tiny_config, data)
    Path(data / "test").mkdir()
    (data / "test/1982.h5").write_bytes(b"half of a file")
    loaders(tiny_config, data)


@pytest.mark.slow("a run and a forecast of its own dates")
def test_a_forecast_is_not_scored_on_dates_of_the_training(data, tiny_options, tmp_path):
    assert programs.run(["train.py", *tiny_options(**keys_of(data), num_iters=2, warmup=1)]).returncode == 0
    forecast = ["forecast.py", "--run_folder", str(tmp_path / "logs/quick/00"), "--device=cpu", "--lead_hours=6"]
    forecast += ["--skill_only", "--starts=1"]
    moved = shutil.move(data / "train", tmp_path / "elsewhere")
    refused = programs.run([*forecast, f"--inf_data_path={moved}"])
    assert refused.returncode == 2
    assert "1979.h5: 1979-01-01T00 is a date that " in refused.stderr and "was trained on" in refused.stderr
    assert programs.run([*forecast, f"--inf_data_path={moved}", "--check_data=off"]).returncode == 0
    assert programs.run([*forecast, "--split=train", f"--train_data_path={moved}"]).returncode == 0


def test_a_run_is_not_resumed_with_data_of_another_step(data, tiny_options):
    options = tiny_options(**keys_of(data), num_iters=4, warmup=1, checkpoint_every=2)
    assert programs.run(["train.py", *options]).returncode == 0
    for path in data.glob("t*/*.h5"):
        with h5py.File(path, "r+", locking=False) as file:
            file["time"][:] = file["time"][0] + np.arange(len(file["time"]))
    with h5py.File(data / "valid/1981.h5", "r+", locking=False) as file:
        file["time"][:] = file["time"][0] + np.arange(len(file["time"]))
    run_folder = data.parent / "logs/quick/00"
    (run_folder / "summary.json").unlink()
    shutil.rmtree(run_folder / "checkpoints/iter-00000004")
    refused = programs.run(["train.py", *options])
    assert refused.returncode == 2, refused
    assert "its frames are 1 h apart; " in refused.stderr and "was trained on frames 6 h apart" in refused.stderr
