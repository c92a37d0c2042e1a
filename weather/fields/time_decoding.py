"""Dates of frames from the `time` of a year: numbers since a date in a calendar of CF, text, or digits.

Numbers in single precision miss their date by seconds or minutes: dates are rounded to the hour, or to the minute,
where all of them are that near.
"""

import re
from typing import Any, Literal

import numpy as np

from utils.errors import UsageError
from weather.fields.packing import check_unpacked
from weather.fields.stored_arrays import StoredArrays, find_names, get_array, shape_of, text_attribute

TIME_NAMES = ("time", "valid_time", "timestamp", "datetime", "date", "dates", "times")
SINCE_1970 = "seconds since 1970-01-01"  # of a `timestamp`, which makani's files write without units too
SECONDS_TO_3000 = 3.3e10  # from 1970
STANDARD_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
LEAPLESS_CALENDARS = ("noleap", "365_day")  # each of their dates is one of the standard calendar too
TOLERANCE = 0.01  # of a step: dates in floating point are rounded
# Of a step: rounding moves no date by more, however coarse its numbers are.
MOST_ROUNDING = 0.1
# NetCDF's default fill value is 9.97e36.
FILL_VALUE = 1e30
# Text of digits: 1979, or 197901010600 for 6 o'clock.
DIGITS = re.compile(r"(\d{4})(\d\d)(\d\d)?(\d\d)?(\d\d)?(\d\d)?")
NANOSECONDS = re.compile(r"(nanoseconds?|nanosecs?|ns)(?=\s+since\s)", re.IGNORECASE)  # of pandas, not of cftime
ROUNDED_TO: tuple[Literal["h", "m"], ...] = ("h", "m")


def find_time(file: StoredArrays) -> str | None:
    """The name of the array that holds the dates of the frames; None where there is none.

    It has a usual name and a value for each frame, or else units like 'hours since 1970-01-01'. An array of another
    shape is named where there is nothing better, so that it is refused.
    """
    frames = file.shape[:1]
    named = find_names(file, TIME_NAMES)
    for name in named:
        if shape_of(file.arrays[name]) == frames:
            return name
    for name, array in file.arrays.items():
        if shape_of(array) == frames and " since " in text_attribute(array, "units"):
            return name
    return named[0] if named else None


def decode_time(
    file: StoredArrays,
    name: str,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates, elapsed) of an array of dates, of text, or of numbers with units.

    dates: (T,) datetime64[s] in UTC. elapsed: (T,) seconds since the first frame in the array's calendar, int64.
    Raises UsageError where the array is none of these. where: file and array, as the start of messages.
    """
    stored = get_array(file, name)
    frames = file.shape[0]
    if stored.shape != (frames,):
        raise UsageError(f"{where} has shape {stored.shape}, the fields have {frames} frames")
    check_unpacked(stored, where)
    values = np.asarray(stored[:])
    if values.dtype.kind in "SOU":
        values = _parse_texts(values.astype(str))
    if values.dtype.kind == "M":
        exact = values.astype("datetime64[us]")
        missing = np.flatnonzero(np.isnat(exact))
        if len(missing):
            raise UsageError(f"{where} holds no date at frame {missing[0]}")
        return _round_dates(exact, _elapsed(exact), 0.0)

    units = _read_units(stored, name, where)
    calendar = text_attribute(stored, "calendar", "standard").lower()
    return decode_numbers(values, units, calendar, where)


def decode_numbers(
    values: np.ndarray,
    units: str,
    calendar: str,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates, elapsed), as decode_time, of numbers (T,) in units such as 'hours since 1900-01-01'.

    calendar: in lower case, of CF. Raises UsageError for numbers that are no times, and errors of cftime for dates that
    it does not have.
    """
    _check_written(values, where)
    if units == SINCE_1970 and np.abs(values).max() > SECONDS_TO_3000:
        raise UsageError(f"{where} is {values[0]} at frame 0, too much for {units}: in nanoseconds? Write seconds")
    if NANOSECONDS.match(units):
        units = NANOSECONDS.sub("microseconds", units)
        values = values / 1000
    exact, elapsed, unit = _dates_of_numbers(values.astype(np.float64), units, calendar, where)
    # Numbers in double precision are exact enough.
    is_single = values.dtype.kind == "f" and values.dtype.itemsize <= 4
    precision = 0.0
    if is_single:
        largest = np.abs(values).max()
        precision = float(np.spacing(largest)) * unit
    return _round_dates(exact, elapsed, precision)


def _read_units(stored: Any, name: str, where: str) -> str:
    """The units of numbers, such as 'hours since 1970-01-01'. Raises UsageError where they have none of this kind."""
    units = text_attribute(stored, "units")
    if not units and name.lower() == "timestamp":
        return SINCE_1970
    example = "such as 'hours since 1970-01-01'"
    if not units:
        raise UsageError(f"{where} has no units: give it the attribute units, {example}")
    if " since " not in units.lower():
        raise UsageError(f"{where} has the units '{units}': write numbers with units {example}, or the dates as text")
    return units


def _parse_texts(texts: np.ndarray) -> np.ndarray:
    """Dates (T,) datetime64[us] of ISO 8601 or of digits. Raises ValueError."""
    dates = []
    for text in texts:
        bare = text.strip(" \0").removesuffix("Z")  # Z is UTC
        match = DIGITS.fullmatch(bare)
        iso = _iso_of_digits(match) if match else bare
        dates.append(np.datetime64(iso, "us"))
    return np.array(dates)


def _iso_of_digits(match: re.Match[str]) -> str:
    """'1979010106' as '1979-01-01T06:00:00'."""
    year, month, day, hour, minute, second = match.groups()
    return f"{year}-{month}-{day or '01'}T{hour or '00'}:{minute or '00'}:{second or '00'}"


def _check_written(values: np.ndarray, where: str) -> None:
    """Raise UsageError where numbers are no times, or were not written to the end."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise UsageError(f"{where} holds {values[bad[0]]} at frame {bad[0]}")
    filled = np.flatnonzero(np.abs(values) > FILL_VALUE)
    if len(filled):
        raise UsageError(f"{where} is {values[filled[0]]:g} at frame {filled[0]}: was it written to the end?")
    nonzero = np.flatnonzero(values)
    if not len(nonzero) and len(values) > 1:
        raise UsageError(f"{where} is 0 in every frame: was it never written?")
    first = int(nonzero[-1]) + 1 if len(nonzero) else 0
    # A single 0 at the end may be meant.
    if len(values) - first > 1:
        raise UsageError(f"{where} is 0 from frame {first} on: was it written to the end?")


def _dates_of_numbers(
    values: np.ndarray,
    units: str,
    calendar: str,
    where: str,
) -> tuple[np.ndarray, np.ndarray, float]:
    """(dates in us, elapsed seconds, seconds in a unit) of numbers (T,) in units such as 'hours since 1900-01-01'."""
    # Dates of other calendars, such as 30 February, are no dates of ours.
    has_leapless_calendar = calendar in LEAPLESS_CALENDARS
    if not has_leapless_calendar and calendar not in STANDARD_CALENDARS:
        raise UsageError(
            f"{where} has the calendar '{calendar}', whose dates are not all days of the standard one: convert it "
            "(xarray: ds.convert_calendar('standard', align_on='year'))"
        )
    of_a_unit = np.array([values[0], values[0] + 1])
    first, one_later = _dates_by_cf(of_a_unit, units, calendar, where)
    # From the first date on seconds are counted, which loses no precision far from the origin of the units.
    unit = (one_later - first) / np.timedelta64(1, "s")
    elapsed = (values - values[0]) * unit
    if has_leapless_calendar:
        dates = _dates_by_cf(values, units, calendar, where)
    else:
        later = np.round(elapsed * 1e6).astype("timedelta64[us]")
        dates = first + later
    return dates, elapsed, unit


def _dates_by_cf(
    numbers: np.ndarray,
    units: str,
    calendar: str,
    where: str,
) -> np.ndarray:
    """The dates, (T,) datetime64[us], of numbers (T,) in units of the CF conventions.

    cftime knows all calendars; without it xarray reads dates of the standard one. Raises ValueError for units that are
    none.
    """
    try:
        import cftime  # data without a time need none
    except ImportError:
        if calendar in LEAPLESS_CALENDARS:
            raise UsageError(
                f"{where} has the calendar '{calendar}', for which cftime is needed: pip install cftime"
            ) from None
        return _standard_dates(numbers, units)
    dates = cftime.num2date(numbers, units, calendar)
    return np.array([np.datetime64(date.isoformat(), "us") for date in dates])


def _standard_dates(numbers: np.ndarray, units: str) -> np.ndarray:
    """As _dates_by_cf, by xarray."""
    import xarray  # slow to import

    attributes = {"units": units, "calendar": "proleptic_gregorian"}
    encoded = xarray.Dataset({"time": ("time", numbers, attributes)})
    return xarray.decode_cf(encoded)["time"].values.astype("datetime64[us]")


def _elapsed(dates: np.ndarray) -> np.ndarray:
    """Seconds since the first of the dates, (T,) float64."""
    return (dates - dates[0]) / np.timedelta64(1, "s")


def _round_dates(
    exact: np.ndarray,
    elapsed: np.ndarray,
    precision: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates in s, elapsed) of dates in us, moved to the hour or the minute where all of them are that near.

    precision: seconds between two neighbouring numbers of the array. The seconds that have elapsed, in the calendar of
    the file, move with their dates.
    """
    dates = _nearest(exact, "s")
    usual_step = 0.0
    if len(elapsed) > 1:
        steps = np.abs(np.diff(elapsed))
        usual_step = float(np.median(steps))
    nearness = min(max(TOLERANCE * usual_step, precision), MOST_ROUNDING * usual_step)
    tolerance = np.timedelta64(round(nearness * 1e6), "us")
    # The coarsest unit that fits all dates is the one that was meant.
    for unit in ROUNDED_TO:
        rounded = _nearest(exact, unit)
        if (np.abs(rounded - exact) <= tolerance).all():
            dates = rounded
            break
    moved = (dates - exact) / np.timedelta64(1, "s")
    elapsed_then = np.round(elapsed + moved - moved[0])
    return dates, elapsed_then.astype(np.int64)


def _nearest(
    dates: np.ndarray,
    unit: Literal["h", "m", "s"],
) -> np.ndarray:
    """Each date at the nearest hour, minute or second, as datetime64[s]."""
    half = np.timedelta64(1, unit).astype("timedelta64[us]") // 2
    return (dates + half).astype(f"datetime64[{unit}]").astype("datetime64[s]")
