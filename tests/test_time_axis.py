"""The dates of frames are those that the file states, in its calendar; no sample crosses a gap."""

import re
import shutil
import sys
from contextlib import closing

import h5py
import numpy as np
import pytest

from tests.support.refusals import refusal
from tools.forecasting.dated_frames import DatedFrames, parse_date
from training.tasks import build_task
from weather import year_files
from weather.checks.data_record import check_same_kind, make_record
from weather.years.dataset import FieldDataset
from weather.years.year_data import file_times

SHAPE = (2, 4, 8)  # channels, rows, columns
FRAMES = 8


def write(folder, name="1979.h5", frames=FRAMES, **arrays):
    """A year file of random numbers. arrays: {name: values, or (values, attributes)}."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / name, "w") as file:
        file["fields"] = np.random.default_rng(0).standard_normal((frames, *SHAPE), dtype=np.float32)
        for key, given in arrays.items():
            values, attributes = given if isinstance(given, tuple) else (given, {})
            file[key] = values
            file[key].attrs.update(attributes)
    return folder


def dataset(folder, **options):
    return FieldDataset(folder, SHAPE[0], SHAPE[1:], **options)


def dates(first, hours=6, frames=FRAMES):
    return np.datetime64(first, "s") + np.timedelta64(hours, "h") * np.arange(frames)


N = np.arange(FRAMES)
HOURLY = "hours since 1979-01-01"
SECONDS_1979 = np.datetime64("1979-03-05", "s").astype(int)
STATED = {
    "hours since a date": (
        {"time": (6.0 * N, {"units": "hours since 1979-03-05"})}, dates("1979-03-05")),
    "whole numbers since long ago": (
        {"time": (692496 + 6 * N, {"units": "hours since 1900-01-01 00:00:0.0", "calendar": "gregorian"})},
        dates("1979-01-01")),
    "days with noise": (
        {"time": (0.25 * N - 1e-7, {"units": "days since 1979-03-05"})}, dates("1979-03-05")),
    "days in single precision": (
        {"time": ((28917 + 0.25 * N).astype("f4"), {"units": "days since 1900-01-01"})}, dates("1979-03-05")),
    "a zone": (
        {"time": (6 * N, {"units": "hours since 1979-03-05 03:00:00 +03:00"})}, dates("1979-03-05")),
    "a timestamp": (
        {"timestamp": (SECONDS_1979 + 3600 * N, {"units": "seconds since 1970-01-01"})}, dates("1979-03-05", 1)),
    "a timestamp without units": (
        {"timestamp": SECONDS_1979 + 3600 * N}, dates("1979-03-05", 1)),
    "valid_time": (
        {"valid_time": (6 * N, {"units": "hours since 1979-03-05"})}, dates("1979-03-05")),
    "text": (
        {"time": np.datetime_as_string(dates("1979-03-05")).astype("S")}, dates("1979-03-05")),
    "units as bytes": (
        {"time": (6 * N, {"units": np.bytes_("hours since 1979-03-05")})}, dates("1979-03-05")),
    "no leap days": (  # in this calendar 79 years have 79 x 365 days
        {"time": (79 * 365 * 24 + 6 * N, {"units": "hours since 1900-01-01", "calendar": "noleap"})},
        dates("1979-01-01")),
    "a name in capitals": (
        {"Time": (N, {"units": "hours since 1979-03-05"})}, dates("1979-03-05", 1)),
    "datetime": ({"datetime": (N, {"units": "hours since 1979-03-05"})}, dates("1979-03-05", 1)),
    "a name of nobody": (
        {"when": (N, {"units": "hours since 1979-03-05"}), "other": (N, {"units": "1"})}, dates("1979-03-05", 1)),
    "a start of the forecast beside the dates": (
        {"time": (0, {"units": HOURLY}), "valid_time": (N, {"units": "hours since 1979-03-05"})},
        dates("1979-03-05", 1)),
    "digits": ({"time": [f"19790305{hour:02}" for hour in N]}, dates("1979-03-05", 1)),
    "digits of days": ({"date": [f"1979030{1 + day}" for day in N]}, dates("1979-03-01", 24)),
    "digits of minutes": ({"time": [f"19790305{hour:02}00" for hour in N]}, dates("1979-03-05", 1)),
    "text with a zone": ({"time": [f"1979-03-05T{hour:02}:00:00Z" for hour in N]}, dates("1979-03-05", 1)),
    "text before the hour": (
        {"time": [f"1979-03-05T{hour:02}:59:59.999999" for hour in N]}, dates("1979-03-05T01", 1)),
    "hourly days in single precision": (
        {"time": ((3350 + N / 24).astype("f4"), {"units": "days since 1970-01-01"})}, dates("1979-03-05", 1)),
    "hourly seconds in single precision": (
        {"time": ((SECONDS_1979 + 3600 * N).astype("f4"), {"units": "seconds since 1970-01-01"})},
        dates("1979-03-05", 1)),
    "minutes in double precision with noise": (
        {"time": (N / 144 + 1e-7, {"units": "days since 1979-03-05"})},
        np.datetime64("1979-03-05", "s") + 600 * N),
    "half a minute": (
        {"time": (30 * N, {"units": "seconds since 1979-03-05"})}, np.datetime64("1979-03-05", "s") + 30 * N),
    "no time": ({}, dates("1979-01-01")),
}  # fmt: skip


@pytest.mark.parametrize("stated", STATED)
def test_dates_are_those_that_the_file_states(tmp_path, stated):
    arrays, expected = STATED[stated]
    years = dataset(write(tmp_path / "years", **arrays))
    np.testing.assert_array_equal(years.times[0], expected)
    np.testing.assert_array_equal(file_times(years.files[0]), expected)
    np.testing.assert_array_equal(years.dates([0, 3], 1)[:, 0], expected[[0, 3]])
    assert len(years) == FRAMES - 1
    steps = np.diff(expected).astype(np.int64)
    np.testing.assert_array_equal(years.axes[0].steps, steps)


@pytest.mark.parametrize("stated", [name for name in STATED if name != "no leap days"])
def test_dates_of_the_standard_calendar_need_no_cftime(tmp_path, stated, monkeypatch):
    monkeypatch.setitem(sys.modules, "cftime", None)  # to import it fails
    test_dates_are_those_that_the_file_states(tmp_path, stated)


def test_dates_of_another_calendar_need_cftime(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cftime", None)
    arrays, _ = STATED["no leap days"]
    with refusal("its time has the calendar 'noleap', for which cftime is needed: pip install cftime"):
        dataset(write(tmp_path / "years", **arrays))


REFUSED = {
    "no units": ({"time": 6 * N}, "its time has no units: give it the attribute units"),
    "another length": ({"time": (6 * N[:-1], {"units": HOURLY})}, "its time has shape (7,), the fields have 8 frames"),
    "a single time": ({"time": (6, {"units": HOURLY})}, "its time has shape ()"),
    "a date twice": (
        {"time": (6 * np.array([0, 1, 2, 2, 3, 4, 5, 6]), {"units": HOURLY})},
        "its times do not increase: 1979-01-01T12:00 comes twice, at indices 2 and 3: keep one of them",
    ),
    "time that goes back": (
        {"time": (6 * np.array([4, 5, 6, 7, 0, 1, 2, 3]), {"units": HOURLY})},
        "its times do not increase: 1979-01-01T00:00 at index 4 follows 1979-01-02T18:00: sort them",
    ),
    "a calendar with 30 February": (
        {"time": (6 * N, {"units": HOURLY, "calendar": "360_day"})},
        "its time has the calendar '360_day'",
    ),
    "a unit that is none": (
        {"time": (6 * N, {"units": "fortnights since 1979-01-01"})},
        "its time in 'fortnights since 1979-01-01' cannot be read as dates: ",
    ),
    "no number": ({"time": (np.where(N == 3, np.nan, 6 * N), {"units": HOURLY})}, "its time holds nan at frame 3"),
    "time that was never written": ({"time": (0 * N, {"units": HOURLY})}, "its time is 0 in every frame: was"),
    "time of which a half was written": (
        {"time": (np.where(N < 5, 6 * N + 700, 0), {"units": HOURLY})},
        "its time is 0 from frame 5 on: was it written to the end?",
    ),
    "a fill value": (
        {"time": (np.where(N < 5, 6 * N, 9.97e36), {"units": HOURLY})},
        "its time is 9.97e+36 at frame 5: was it written to the end?",
    ),
    "packed time": (
        {"time": (N, {"units": HOURLY, "scale_factor": 6.0})},
        "its time is packed as int64 (scale_factor 6)",
    ),
    "units of another time": (
        {"time": (6 * N, {"units": "hours since 0001-01-01"})},
        "its time is 0001-01-01T00:00 at frame 0, outside the years 1500 to 3000",
    ),
    "a timestamp in nanoseconds": (
        {"timestamp": SECONDS_1979 * 10**9 + N},
        "too much for seconds since 1970-01-01: in nanoseconds?",
    ),
    "digits as numbers": (
        {"time": (1979030500 + N, {"units": "YYYYMMDDHH"})},
        "its time has the units 'YYYYMMDDHH': write numbers with",
    ),
    "text of a year of ten digits": ({"time": np.array([b"19790101061979"] * FRAMES)}, "its time"),
    "text that is empty": ({"time": np.array([b"1979-01-01"] + [b""] * 7)}, "its time holds no date at frame 1"),
    "text that is no date": ({"time": np.array([b"monday"] * FRAMES)}, "its time cannot be read: "),
}


@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.filterwarnings("error")
def test_a_time_that_is_none_is_refused_with_file_and_date(tmp_path, fault):
    arrays, line = REFUSED[fault]
    write(tmp_path / "years", **arrays)
    with refusal(re.escape(line), tmp_path / "years/1979.h5"):
        dataset(tmp_path / "years")


def test_more_frames_than_the_year_has_are_refused(tmp_path):
    write(tmp_path / "years", "1980.h5", frames=1464)
    assert len(dataset(tmp_path / "years")) == 1463  # a leap year
    write(tmp_path / "hourly", "1981.h5", frames=1461)
    with refusal("1981.h5: has 1461 frames and no time, and 1981 has 1460 six-hourly ones: give it a `time`"):
        dataset(tmp_path / "hourly")


def with_gap(folder, frames=FRAMES):
    """Frames 0 to 3, and 5 days later the others."""
    hours = 6 * np.arange(frames) + np.where(np.arange(frames) > 3, 120, 0)
    return write(folder, frames=frames, time=(hours, {"units": HOURLY}))


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({}, [0, 1, 2, 4, 5, 6]),
        ({"dt": 2}, [0, 1, 4, 5]),
        ({"steps": 2}, [0, 1, 4, 5]),
        ({"inputs": 2, "steps": 2}, [0, 4]),
        ({"limit": 4}, [0, 1, 2, 4]),
    ],
)
def test_no_sample_crosses_a_gap(tmp_path, options, starts):
    years = dataset(with_gap(tmp_path / "years"), **options)
    assert len(years) == len(starts)
    with h5py.File(tmp_path / "years/1979.h5", locking=False) as file:
        fields = file["fields"][:]
    for index, start in enumerate(starts):
        sample = np.empty(years.shape, np.float32)
        years.read(index, sample)
        frames = start + years.dt * np.arange(len(sample))
        np.testing.assert_array_equal(sample, fields[frames])
    assert "1979.h5 has a gap of 126 hours after 1979-01-01T18: no sample crosses it" in years.notes()[-1]


def test_a_file_that_is_gaps_alone_is_refused(tmp_path):
    hours = np.array([0, 6, 100, 106, 200, 206, 300, 306])
    write(tmp_path / "years", time=(hours, {"units": HOURLY}))
    with refusal("1979.h5: has 3 gaps, the longest of 94 hours .*, and dt 1 x 3 steps of a rollout needs at least 4"):
        dataset(tmp_path / "years", steps=3)


def test_without_leap_days_1_march_follows_28_february(tmp_path):
    hours = (80 * 365 + 58) * 24 + 6 * N  # 28 and 29 February 1980 in a calendar that has only the first
    calendar = {"units": "hours since 1900-01-01", "calendar": "365_day"}
    years = dataset(write(tmp_path / "years", "1980.h5", time=(hours, calendar)))
    assert len(years) == FRAMES - 1
    assert years.times[0][[3, 4]].tolist() == np.array(["1980-02-28T18", "1980-03-01T00"], "M8[s]").tolist()


def test_the_usual_change_is_not_measured_across_a_gap(tmp_path):
    with_gap(tmp_path / "years")
    with h5py.File(tmp_path / "years/1979.h5", locking=False) as file:
        fields = file["fields"][:].astype(float)
    changes = np.diff(fields, axis=0)[[0, 1, 2, 4, 5, 6]]
    # The channels of these data are random numbers, and not those of their names.
    names = {"channel": ["a", "b"]}
    with h5py.File(tmp_path / "years/1979.h5", "a") as file:
        file.update(names)
    year_files.main([str(tmp_path / "years"), str(tmp_path / "stats")])
    found = np.load(tmp_path / "stats/change_stds.npy")
    np.testing.assert_allclose(found[0, :, 0, 0], np.sqrt(np.square(changes).mean((0, 2, 3))), rtol=1e-6)


def test_the_step_is_the_most_frequent_one(tmp_path):
    """The smaller one of two, and not a step between them that no frames have."""
    hours = np.cumsum([0, 3, 3, 3, 3, 6, 6, 6, 6])
    years = dataset(write(tmp_path / "years", frames=9, time=(hours, {"units": HOURLY})))
    assert years.step_seconds == 3 * 3600 and len(years) == 4


def test_a_file_of_two_frames_has_the_step_of_the_others(tmp_path):
    hourly = {"units": "hours since 1980-01-01"}
    write(tmp_path / "years", "1978.h5", frames=2, time=([0, 12], {"units": "hours since 1978-01-01"}))
    write(tmp_path / "years", "1979.h5", time=(6 * N, {"units": HOURLY}))
    write(tmp_path / "years", "1980.h5", frames=2, time=([0, 6], hourly))
    years = dataset(tmp_path / "years")
    assert years.step_seconds == 6 * 3600
    assert [len(starts) for starts in years.starts] == [0, FRAMES - 1, 1]
    assert any("1978.h5 has a gap of 12 hours" in note for note in years.notes())


def test_test_files_that_overlap_are_named_with_the_date(tmp_path, tiny_config, sample_folder):
    shutil.copytree(sample_folder / "test", tmp_path / "test")
    shutil.copy(tmp_path / "test/1982.h5", tmp_path / "test/member2.h5")
    with h5py.File(tmp_path / "test/member2.h5", "a") as member:  # it is no copy
        member["fields"][0] = member["fields"][1]
    line = "member2.h5: begins at 1982-01-01T00, and .*/test/1982.h5 before it ends at 1982-01-0.*: forecasts need each"
    with refusal(line):
        DatedFrames(tmp_path / "test", tiny_config(), "cpu")


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    for number, name in enumerate(("time", "latitude", "channel", "fields")):
        path = write(tmp_path / str(number)) / "1979.h5"
        with h5py.File(path, "a") as file:
            file.pop(name, None)
            file[name] = h5py.SoftLink("/gone/away")
        with refusal(f"1979.h5: its `{name}` is a link to something that is not there: bring that back"):
            dataset(path.parent)


def test_years_of_another_time_step_are_refused(tmp_path):
    write(tmp_path / "years", "1979.h5", time=(6 * N, {"units": HOURLY}))
    write(tmp_path / "years", "1980.h5", time=(N, {"units": "hours since 1980-01-01"}))
    with refusal("1980.h5: its frames are 1 h apart, those of .*1979.h5 6 h: put data of one time step into a folder"):
        dataset(tmp_path / "years")


def test_validation_of_another_time_step_than_training_is_refused(tmp_path, tiny_config, sample_folder):
    shutil.copytree(sample_folder / "valid", tmp_path / "valid")
    with h5py.File(tmp_path / "valid/1981.h5", "a") as file:
        file["time"][:] = file["time"][0] + np.arange(len(file["time"]))
    task = build_task(tiny_config(valid_data_path=str(tmp_path / "valid")))
    with refusal("valid: its frames are 1 h apart, those of .*train 6 h"):
        task.loaders("cpu")


def test_a_checkpoint_tells_frames_of_another_step_and_other_channels(tmp_path, sample_folder):
    with closing(FieldDataset(sample_folder / "train", 20, (16, 32))) as trained:
        record = make_record(trained)
    assert record["step_seconds"] == 6 * 3600 and record["channels"][0] == "u10"
    assert record["stretches"][0] == ["1979-01-01T00:00:00", "1979-01-05T18:00:00"]
    shutil.copytree(sample_folder / "test", tmp_path / "test")
    with h5py.File(tmp_path / "test/1982.h5", "a") as file:
        file["time"][:] = file["time"][0] + np.arange(len(file["time"]))
    with closing(FieldDataset(tmp_path / "test", 20, (16, 32))) as hourly:
        with refusal("test: its frames are 1 h apart; logs/a was trained on frames 6 h apart"):
            check_same_kind(record, hourly, "logs/a")
    swapped = record | {"channels": ["v10", *record["channels"][1:]]}
    with closing(FieldDataset(sample_folder / "test", 20, (16, 32))) as test:
        check_same_kind(record, test, "logs/a")
        with refusal("test: channel 0 is 'u10'; logs/a was trained with 'v10' in its place"):
            check_same_kind(swapped, test, "logs/a")


def test_forecasts_start_where_no_gap_is(tmp_path, tiny_config, sample_folder):
    shutil.copytree(sample_folder / "test", tmp_path / "test")
    with h5py.File(tmp_path / "test/1982.h5", "a") as file:
        file["time"][10:] += 48
    frames = DatedFrames(tmp_path / "test", tiny_config(), "cpu")
    with closing(frames.dataset):
        starts = frames.starts([6, 12])
    assert frames.interval == 6 and len(starts) == 16
    assert np.datetime64("1982-01-03T00") not in starts and np.datetime64("1982-01-05T12") in starts


@pytest.mark.filterwarnings("error")
def test_a_start_may_be_in_the_time_of_a_zone(tmp_path):
    expected = np.datetime64("1981-01-02T06", "s")
    for text in ("1981-01-02T06", "1981-01-02T06Z", "1981-01-02T08:00+02:00", "1981-01-02T01:00-0500"):
        assert parse_date(text) == expected
    with refusal("start 'noon': write a date"):
        parse_date("noon")
