"""The points and times of ERA5: a regular grid and six-hourly frames."""

import calendar
from typing import NamedTuple

import numpy as np

HOUR = np.timedelta64(1, "h")


class Grid(NamedTuple):
    """Coordinates of the points of an image in degrees: rows (H,) north, columns (W,) east."""

    latitude: np.ndarray
    longitude: np.ndarray

    @property
    def is_global(self) -> bool:
        """Tell whether the points are of the whole globe, and not of a region."""
        height = np.ptp(self.latitude)
        return bool(height >= 150 and self.goes_around)

    @property
    def goes_around(self) -> bool:
        """Tell whether the columns go around the globe, so that the first is a neighbour of the last."""
        width = len(self.longitude)
        # From the first column to the last there is one step less than around the globe.
        circle = np.ptp(self.longitude) * width / max(1, width - 1)
        return bool(circle >= 350)


def latitudes(height: int) -> np.ndarray:
    """Latitudes (height,) in degrees, north first: ERA5's grid, without its last row if height is even."""
    steps = height - height % 2  # from pole to pole
    return 90.0 - np.arange(height) * 180.0 / steps


def longitudes(width: int) -> np.ndarray:
    """Longitudes (width,) in degrees east, from 0."""
    return np.arange(width) * 360.0 / width


def year_frames(year: int) -> int:
    """Number of 6-hourly frames in a calendar year: 1460, or 1464 in a leap year."""
    days = 365 + calendar.isleap(year)
    return 4 * days


def frame_times(year: int, first: int, count: int) -> np.ndarray:
    """Dates of 6-hourly frames of a year, counted from 1 January 00 UTC: (count,) datetime64[s]."""
    new_year = np.datetime64(f"{year:04d}-01-01", "s")
    return new_year + 6 * HOUR * np.arange(first, first + count)


def years_of(dates: np.ndarray) -> np.ndarray:
    """The calendar years of dates: (T,) datetime64 -> (T,) int."""
    # numpy counts years from 1970.
    since_1970 = dates.astype("datetime64[Y]").astype(int)
    return since_1970 + 1970
