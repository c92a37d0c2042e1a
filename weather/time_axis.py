"""The dates of the frames of a year: its `time` in the calendar that it names, or what the file's name says.

A sample is frames at equal distances in time, so a gap is seen here, and not trained across.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from utils.errors import UsageError, reading
from weather.grid import HOUR, frame_times, year_frames

TIME_NAMES = ("time", "valid_time", "timestamp")
SINCE_1970 = "seconds since 1970-01-01"  # of a `timestamp`, which makani's files write without units too
STANDARD_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
LEAPLESS_CALENDARS = ("noleap", "365_day")  # each of their dates is one of the standard calendar too
TOLERANCE = 0.01  # of a step: dates in floating point are rounded


class DatedFile(Protocol):
    """What is read of a year (weather/year_data.py): its path, its arrays by name, and the shape of its fields."""

    path: Path
    arrays: Mapping[str, Any]
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class TimeAxis:
    """Dates of the frames of a year.

    dates: (T,) datetime64[s] in UTC, increasing. elapsed: (T,) seconds since the first frame, int64, counted in the
    file's own calendar: without leap days, 1 March follows 28 February. assumed: the file has no time, so that the
    dates are those of 6-hourly frames from 1 January of the year in its name.
    """

    dates: np.ndarray
    elapsed: np.ndarray
    assumed: bool = False

    @cached_property
    def steps(self) -> np.ndarray:
        """Seconds from each frame but the last to the next one, (T - 1,) int64."""
        return np.diff(self.elapsed)

    @cached_property
    def step(self) -> int:
        """Seconds from one frame to the next, the most usual ones; 0 for a single frame."""
        return int(np.median(self.steps)) if len(self.steps) else 0

    @cached_property
    def is_regular(self) -> np.ndarray:
        """Whether each frame but the last is followed by one a step later: (T - 1,) bool."""
        return np.abs(self.steps - self.step) <= TOLERANCE * self.step

    def sample_starts(self, span: int) -> np.ndarray:
        """The frames from which `span` further frames follow without a gap, (N,) int."""
        # Gaps before each frame, (T,): as many before the first frame of a sample as before its last.
        gaps_before = np.concatenate([[0], np.cumsum(~self.is_regular)])
        count = len(gaps_before) - span
        has_no_gap = gaps_before[span:] == gaps_before[:count]
        return np.flatnonzero(has_no_gap)

    def stretches(self) -> list[tuple[np.datetime64, np.datetime64]]:
        """The first and last date of each stretch of frames without a gap."""
        gaps = np.flatnonzero(~self.is_regular)
        firsts = [0, *(gaps + 1)]
        lasts = [*gaps, len(self.dates) - 1]
        return [(self.dates[first], self.dates[last]) for first, last in zip(firsts, lasts, strict=True)]

    def describe_gaps(self) -> str:
        """The number of gaps, and where the longest one is, in words; '' where there is none."""
        gaps = np.flatnonzero(~self.is_regular)
        if not len(gaps):
            return ""
        longest = gaps[np.argmax(self.steps[gaps])]
        hours = self.steps[longest] / 3600
        many = f"{len(gaps)} gaps, the longest" if len(gaps) > 1 else "a gap"
        return f"{many} of {hours:g} hours after {show(self.dates[longest])}"


def read_time_axis(file: DatedFile) -> TimeAxis | None:
    """The TimeAxis of a year; None where it has no time, and a name that is no year.

    Raises UsageError where its time is no increasing dates of the standard calendar, one for each frame.
    """
    name = next((name for name in TIME_NAMES if name in file.arrays), None)
    if name is None:
        return _assumed_axis(file)
    stored = file.arrays[name]
    where = f"{file.path}: its {name}"
    frames = file.shape[0]
    with reading(where):
        if stored.shape != (frames,):
            raise UsageError(f"{where} has shape {stored.shape}, the fields have {frames} frames")
        axis = _decode(stored, name, where)
    _check_increasing(axis, where)
    return axis


def known_axis(axis: TimeAxis | None, path: object) -> TimeAxis:
    """The axis of the file at `path`, which the message names. Raises UsageError where there is none."""
    if axis is None:
        raise UsageError(f"{path}: has no `time` with units, and its name is not a year: its dates are not known")
    return axis


def _assumed_axis(file: DatedFile) -> TimeAxis | None:
    """6-hourly frames from 1 January on, of the year that the file is named by. Raises UsageError for too many."""
    stem = file.path.stem
    if not (stem.isdecimal() and len(stem) == 4):
        return None
    year = int(stem)
    frames = file.shape[0]
    most = year_frames(year)
    if frames > most:
        raise UsageError(
            f"{file.path}: has {frames} frames and no time, and {year} has {most} six-hourly ones: "
            "give it a `time` with units, such as 'hours since 1970-01-01'"
        )
    dates = frame_times(year, 0, frames)
    return TimeAxis(dates, _seconds_since_first(dates), assumed=True)


def _decode(stored: Any, name: str, where: str) -> TimeAxis:
    """The axis of an array of dates, of text, or of numbers with units."""
    values = np.asarray(stored[:])
    if values.dtype.kind in "SO":
        values = values.astype(str)
    if values.dtype.kind in "MU":
        dates = values.astype("datetime64[s]")
        return TimeAxis(dates, _seconds_since_first(dates))

    units = _text_attribute(stored, "units", "")
    if not units and name == "timestamp":
        units = SINCE_1970
    if not units:
        raise UsageError(f"{where} has no units: give it the attribute units, such as 'hours since 1970-01-01'")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise UsageError(f"{where} holds {values[bad[0]]} at frame {bad[0]}")
    calendar = _text_attribute(stored, "calendar", "standard").lower()
    return _decode_numbers(values.astype(np.float64), units, calendar, where)


def _text_attribute(array: Any, name: str, otherwise: str) -> str:
    """An attribute as text: it may be bytes, or an array of one string."""
    value = np.asarray(array.attrs.get(name, otherwise))
    return str(value.astype(str).item())


def _decode_numbers(values: np.ndarray, units: str, calendar: str, where: str) -> TimeAxis:
    """The axis of numbers (T,) in units of CF, such as 'hours since 1900-01-01'."""
    import cftime  # data without a time need none

    has_leapless_calendar = calendar in LEAPLESS_CALENDARS
    if not has_leapless_calendar and calendar not in STANDARD_CALENDARS:
        raise UsageError(
            f"{where} has the calendar '{calendar}', whose dates are not all days of the standard one: convert it "
            "(xarray: ds.convert_calendar('standard', align_on='year'))"
        )
    first, one_later = cftime.num2date([values[0], values[0] + 1], units, calendar)
    unit_seconds = (one_later - first).total_seconds()
    seconds = np.round((values - values[0]) * unit_seconds)
    elapsed = seconds.astype(np.int64)
    if has_leapless_calendar:
        dates = np.array([_as_datetime64(date) for date in cftime.num2date(values, units, calendar)])
    else:
        dates = _as_datetime64(first) + elapsed.astype("timedelta64[s]")
    return TimeAxis(dates, elapsed)


def _as_datetime64(date: Any) -> np.datetime64:
    """A date of cftime, rounded to a second: 05:59:59.99 is 06:00."""
    exact = np.datetime64(date.isoformat(), "us")
    half_a_second = np.timedelta64(500_000, "us")
    return (exact + half_a_second).astype("datetime64[s]")


def _seconds_since_first(dates: np.ndarray) -> np.ndarray:
    since = dates - dates[0]
    return since.astype("timedelta64[s]").astype(np.int64)


def _check_increasing(axis: TimeAxis, where: str) -> None:
    """Raise UsageError, naming the frame and the dates, where a frame is not later than the one before."""
    missing = np.flatnonzero(np.isnat(axis.dates))
    if len(missing):
        raise UsageError(f"{where} holds no date at frame {missing[0]}")
    bad = np.flatnonzero(np.diff(axis.elapsed) <= 0)
    if not len(bad):
        return
    frame = int(bad[0])
    date, following = show(axis.dates[frame]), show(axis.dates[frame + 1])
    if date == following:
        raise UsageError(f"{where} holds {date} twice, at frames {frame} and {frame + 1}: keep one of them")
    raise UsageError(f"{where} goes back from {date} to {following} at frame {frame + 1}: sort the frames by time")


def show(time: np.datetime64) -> str:
    """A date as text, to the hour or, if necessary, to the minute."""
    return np.datetime_as_string(time, "h" if time == time.astype("datetime64[h]") else "m")


def show_step(seconds: int) -> str:
    """A distance in time as text: '6 h', '30 min'."""
    hours = np.timedelta64(seconds, "s") / HOUR
    return f"{hours:g} h" if hours >= 1 else f"{seconds / 60:g} min"
