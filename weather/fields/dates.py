"""Dates of frames: numbers since a date in a calendar of CF, text, or digits.

Numbers in single precision miss their date by seconds or minutes: dates are rounded to the hour, or to the minute,
where all of them are that near.
"""

import importlib.util
import re
import warnings
from typing import Literal

import numpy as np
import xarray
from xarray.coders import CFDatetimeCoder

from utils.errors import UsageError, first_line

STANDARD_CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
LEAPLESS_CALENDARS = ("noleap", "365_day")  # each of their dates is one of the standard calendar too
SINCE_1970 = "seconds since 1970-01-01"  # of a `timestamp`, which makani's files write without units too
SECONDS_TO_3000 = 3.3e10  # from 1970
# The years of weather: units that are not meant give others.
FIRST_YEAR = 1500
LAST_YEAR = 3000
TOLERANCE = 0.01  # of a step: dates in floating point are rounded
# Of a step: rounding moves no date by more, however coarse its numbers are.
MOST_ROUNDING = 0.1
# NetCDF's default fill value is 9.97e36.
FILL_VALUE = 1e30
# Text of digits: 1979, or 197901010600 for 6 o'clock.
DIGITS = re.compile(r"(\d{4})(\d\d)(\d\d)?(\d\d)?(\d\d)?(\d\d)?")
NANOSECONDS = re.compile(r"(nanoseconds?|nanosecs?|ns)(?=\s+since\s)", re.IGNORECASE)  # of pandas, not of CF
ROUNDED_TO: tuple[Literal["h", "m"], ...] = ("h", "m")
SECOND = np.timedelta64(1, "s")


def decode_dates(
    values: np.ndarray,
    units: str,
    calendar: str,
    address: object,
    name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates, elapsed) of dates, text, or numbers (T,) in units such as 'hours since 1970-01-01'.

    dates: (T,) datetime64[s] in UTC, increasing. elapsed: (T,) seconds since the first frame, counted in the calendar,
    int64. calendar: of CF. address, name: of the file and the array, for messages.
    Raises UsageError, naming the frame, where these are no increasing dates of weather.
    """
    where = f"{address}: its {name}"
    if values.dtype.kind == "O" and len(values) and hasattr(values[0], "isoformat"):  # cftime decoded them
        values = _exact_dates(values)
    if values.dtype.kind in "SOU":
        values = _parse_texts(values.astype(str))
    if values.dtype.kind == "M":
        exact = values.astype("datetime64[us]")
        dates, elapsed = _round_dates(exact, (exact - exact[0]) / SECOND)
    else:
        _check_units(units, where)
        dates, elapsed = decode_numbers(values, units, calendar.lower(), where)
    _check_dates(dates, where)
    _check_increasing(dates, address, name)
    return dates, elapsed


def decode_numbers(
    values: np.ndarray,
    units: str,
    calendar: str,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates, elapsed), as decode_dates, of numbers (T,) in units such as 'hours since 1900-01-01'.

    calendar: in lower case. Raises UsageError for numbers that are no times.
    """
    _check_written(values, where)
    if units == SINCE_1970 and np.abs(values).max() > SECONDS_TO_3000:
        raise UsageError(f"{where} is {values[0]} at frame 0, too much for {units}: in nanoseconds? Write seconds")
    if NANOSECONDS.match(units):
        units = NANOSECONDS.sub("microseconds", units)
        values = values / 1000
    if calendar not in (*STANDARD_CALENDARS, *LEAPLESS_CALENDARS):  # dates such as 30 February are no dates of ours
        raise UsageError(
            f"{where} has the calendar '{calendar}', whose dates are not all days of the standard one: convert it "
            "(xarray: ds.convert_calendar('standard', align_on='year'))"
        )
    if calendar in LEAPLESS_CALENDARS and importlib.util.find_spec("cftime") is None:
        raise UsageError(f"{where} has the calendar '{calendar}', for which cftime is needed: pip install cftime")
    encoded = xarray.Variable("time", values.astype(np.float64), {"units": units, "calendar": calendar})
    try:
        with warnings.catch_warnings(action="ignore"):  # of dates for which cftime stands in
            exact = CFDatetimeCoder().decode(encoded).values
    except Exception as error:  # of xarray, cftime and pandas, for dates that they do not have
        cause = first_line(error)
        raise UsageError(
            f"{where} in '{units}' cannot be read as dates: {cause}; write it in hours since 1900-01-01 "
            "(cdo setreftime)"
        ) from error
    # Dates of cftime are counted in their own calendar.
    elapsed = (exact - exact[0]).astype("timedelta64[us]") / SECOND
    exact = exact.astype("datetime64[us]") if exact.dtype.kind == "M" else _exact_dates(exact)
    # Numbers in double precision are exact enough.
    precision = 0.0
    if values.dtype.kind == "f" and values.dtype.itemsize <= 4:
        unit = np.ptp(elapsed) / (np.ptp(values) or 1)  # in seconds
        precision = float(np.spacing(np.abs(values).max()) * unit)
    return _round_dates(exact, elapsed, precision)


def _check_units(units: str, where: str) -> None:
    """Raise UsageError for units of numbers that are no 'hours since 1970-01-01' or the like."""
    example = "such as 'hours since 1970-01-01'"
    if not units:
        raise UsageError(f"{where} has no units: give it the attribute units, {example}")
    if " since " not in units.lower():
        raise UsageError(f"{where} has the units '{units}': write numbers with units {example}, or the dates as text")


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


def _exact_dates(dates: np.ndarray) -> np.ndarray:
    """Dates (T,) of cftime as datetime64[us]."""
    return np.array([np.datetime64(date.isoformat(), "us") for date in dates])


def _round_dates(
    exact: np.ndarray,
    elapsed: np.ndarray,
    precision: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(dates in s, elapsed) of dates in us, moved to the hour or the minute where all of them are that near.

    precision: seconds between two neighbouring numbers of the array. The seconds that have elapsed, in the calendar of
    the file, move with their dates.
    """
    dates = _nearest(exact, "s")
    if np.isnat(dates).any():  # which is refused by its frame
        return dates, elapsed
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
    moved = (dates - exact) / SECOND
    elapsed_then = np.round(elapsed + moved - moved[0])
    return dates, elapsed_then.astype(np.int64)


def _nearest(
    dates: np.ndarray,
    unit: Literal["h", "m", "s"],
) -> np.ndarray:
    """Each date at the nearest hour, minute or second, as datetime64[s]."""
    half = np.timedelta64(1, unit).astype("timedelta64[us]") // 2
    return (dates + half).astype(f"datetime64[{unit}]").astype("datetime64[s]")


def _check_dates(dates: np.ndarray, where: str) -> None:
    """Raise UsageError, naming the frame, for a date that is none, or that no data of weather has."""
    missing = np.flatnonzero(np.isnat(dates))
    if len(missing):
        raise UsageError(f"{where} holds no date at frame {missing[0]}")
    years = dates.astype("datetime64[Y]").astype(int) + 1970
    strange = np.flatnonzero((years < FIRST_YEAR) | (years >= LAST_YEAR))
    if len(strange):
        frame = int(strange[0])
        raise UsageError(
            f"{where} is {minute(dates[frame])} at frame {frame}, outside the years {FIRST_YEAR} to {LAST_YEAR}: "
            "are its units, or its text, as they are meant?"
        )


def _check_increasing(dates: np.ndarray, address: object, name: str) -> None:
    """Raise UsageError, saying what to do, where dates repeat or go back."""
    steps = np.diff(dates)
    if (steps > 0 * SECOND).all():
        return
    # A date that comes twice is found wherever the second one is.
    order = np.argsort(dates, kind="stable")
    repeats = np.flatnonzero(np.diff(dates[order]) == 0 * SECOND)
    if len(repeats):
        first = order[repeats[0]]
        second = order[repeats[0] + 1]
        others = f" (and {len(repeats) - 1} others)" if len(repeats) > 1 else ""
        raise UsageError(
            f"{address}: its times do not increase: {minute(dates[first])} comes twice, at indices {first} and "
            f"{second}{others}: keep one of them (xarray: drop_duplicates('{name}'))"
        )
    frame = int(np.argmax(steps < 0 * SECOND))
    raise UsageError(
        f"{address}: its times do not increase: {minute(dates[frame + 1])} at index {frame + 1} follows "
        f"{minute(dates[frame])}: sort them (xarray: sortby('{name}'))"
    )


def minute(time: np.datetime64) -> str:
    """A date as text, to the minute."""
    return str(time.astype("datetime64[m]"))
