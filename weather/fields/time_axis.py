"""The dates of the frames of a year: its `time` in the calendar that it names, or what the file's name says.

A sample is frames at equal distances in time, so a gap is seen here, and not trained across.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from utils.errors import UsageError, reading
from weather.fields.attributes import check_unpacked
from weather.fields.dates import SINCE_1970, TOLERANCE, decode_dates
from weather.fields.grid import HOUR, frame_times, year_frames
from weather.fields.stored_arrays import StoredArrays, find_names, text_attribute

TIME_NAMES = ("time", "valid_time", "timestamp", "datetime", "date", "dates", "times")
# Fewer frames do not tell their usual distance.
FEW_FRAMES = 3


@dataclass(frozen=True)
class TimeAxis:
    """Dates of the frames of a year.

    dates: (T,) datetime64[s] in UTC, increasing. elapsed: (T,) seconds since the first frame, int64, counted in the
    file's own calendar: without leap days, 1 March follows 28 February. assumed: the file has no time, so that the
    dates are those of 6-hourly frames from 1 January of the year in its name. stated_step: seconds between frames,
    where the file has too few to tell.
    """

    dates: np.ndarray
    elapsed: np.ndarray
    assumed: bool = False
    stated_step: int | None = None

    @cached_property
    def steps(self) -> np.ndarray:
        """Seconds from each frame but the last to the next one, (T - 1,) int64."""
        return np.diff(self.elapsed)

    @cached_property
    def step(self) -> int:
        """Seconds from one frame to the next, the most frequent ones, the fewest of several; 0 for a single frame."""
        if self.stated_step is not None:
            return self.stated_step
        return most_frequent(self.steps) if len(self.steps) else 0

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
        stretches = []
        for first, last in zip(firsts, lasts, strict=True):
            stretches.append((self.dates[first], self.dates[last]))
        return stretches

    def describe_gaps(self) -> str:
        """The number of gaps, and where the longest one is, in words; '' where there is none."""
        gaps = np.flatnonzero(~self.is_regular)
        if not len(gaps):
            return ""
        # One gap stands for all, the longest.
        longest = gaps[np.argmax(self.steps[gaps])]
        hours = self.steps[longest] / 3600
        many = f"{len(gaps)} gaps, the longest" if len(gaps) > 1 else "a gap"
        return f"{many} of {hours:g} hours after {show(self.dates[longest])}"


def most_frequent(steps: np.ndarray) -> int:
    """The step that most others are like, within TOLERANCE; of several the smallest. steps: (T - 1,) seconds."""
    # Steps within the margin of a candidate count for it.
    ordered = np.sort(steps)
    candidates, counts = np.unique(ordered, return_counts=True)
    margin = np.abs(TOLERANCE * candidates)
    lowest = np.searchsorted(ordered, candidates - margin, side="left")
    highest = np.searchsorted(ordered, candidates + margin, side="right")
    alike = highest - lowest
    # Among steps with noise the one that is there most often comes first.
    best = np.lexsort((candidates, -counts, -alike))[0]
    return int(candidates[best])


def read_time_axis(file: StoredArrays) -> TimeAxis | None:
    """The TimeAxis of a year; None where it has no time, and a name that is no year.

    Raises UsageError where its time is no increasing dates of the standard calendar, one for each frame.
    """
    name = find_time(file)
    if name is None:
        return _assumed_axis(file)
    where = f"{file.path}: its {name}"
    with reading(where):
        stored = file.arrays[name]
        frames = file.shape[0]
        if stored.shape != (frames,):
            raise UsageError(f"{where} has shape {stored.shape}, the fields have {frames} frames")
        check_unpacked(stored, where)
        units = text_attribute(stored, "units")
        if not units and name.lower() == "timestamp":
            units = SINCE_1970
        calendar = text_attribute(stored, "calendar", "standard")
        return TimeAxis(*decode_dates(stored.values, units, calendar, file.path, name))


def find_time(file: StoredArrays) -> str | None:
    """The name of the array that holds the dates of the frames; None where there is none.

    It has a usual name and a value for each frame, or else units like 'hours since 1970-01-01'. An array of another
    shape is named where there is nothing better, so that it is refused.
    """
    frames = file.shape[:1]
    named = find_names(file, TIME_NAMES)
    for name in named:
        if file.arrays[name].shape == frames:
            return name
    for name, array in file.arrays.items():
        if array.shape == frames and " since " in text_attribute(array, "units"):
            return name
    return named[0] if named else None


def known_axis(axis: TimeAxis | None, path: object) -> TimeAxis:
    """The axis of the file at `path`, which the message names. Raises UsageError where there is none."""
    if axis is None:
        raise UsageError(f"{path}: has no `time` with units, and its name is not a year: its dates are not known")
    return axis


def _assumed_axis(file: StoredArrays) -> TimeAxis | None:
    """6-hourly frames from 1 January on, of the year that the file is named by. Raises UsageError for too many."""
    # Only a name of four digits, such as 1979.h5, is a year.
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
    elapsed = dates - dates[0]
    return TimeAxis(dates, elapsed.astype(np.int64), assumed=True)


def show(time: np.datetime64) -> str:
    """A date as text, to the hour or, if necessary, to the minute."""
    is_whole_hour = time == time.astype("datetime64[h]")
    return np.datetime_as_string(time, "h" if is_whole_hour else "m")


def show_step(seconds: int) -> str:
    """A distance in time as text: '6 h', '30 min'."""
    hours = np.timedelta64(seconds, "s") / HOUR
    return f"{hours:g} h" if hours >= 1 else f"{seconds / 60:g} min"
