"""Regular grids, of a region or of the globe: rows from the north, columns eastward; and six-hourly frames."""

import calendar
from typing import NamedTuple

import numpy as np

from utils.errors import UsageError

HOUR = np.timedelta64(1, "h")
# From one step of rows to the next, as of a grid of Mercator; a row that is missing doubles it.
MOST_GROWTH = 1.5
# The share of a step that rounding takes or gives.
ROUNDING = 0.02
CIRCLE = 360
# Fewer rows in -1.57 to 1.57 may be a small region at the equator.
FEW_ROWS = 8
REGION = "; python -m weather.prepare_data makes data of a region"


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


def check_degrees(values: np.ndarray, units: str, axis: str, where: str) -> None:
    """Raise UsageError where values are in radians, or look so. axis: latitude or longitude."""
    says_radians = units.startswith("rad")
    # A region of a few rows may lie at the equator; one that states degrees may do so with any number of them.
    are_small = len(values) > FEW_ROWS and np.abs(values).max() <= np.pi / 2
    looks_like_radians = axis == "latitude" and are_small and not units.startswith("deg") and np.ptp(values) > 0
    if says_radians or looks_like_radians:
        # The values in the message let its reader recognise them.
        direction = "north" if axis == "latitude" else "east"
        raise UsageError(
            f"{where} is {values.min():.4g} to {values.max():.4g}: in radians? Write degrees, with the attribute units "
            f"'degrees_{direction}'"
        )


def check_global(grid: Grid, address: str) -> None:
    """Raise UsageError for points, in order, that are not of the whole globe, in equal steps of longitude."""
    latitude, longitude = grid
    # Equal steps once around the globe; the first column is less than a step east of Greenwich.
    width = len(longitude)
    step = CIRCLE / width
    first = longitude[0]
    even = first + step * np.arange(width)
    is_even = np.allclose(longitude, even, atol=1e-3)
    if not is_even or first >= step:
        raise UsageError(f"{address}: its {width} longitudes do not go once around the globe in equal steps{REGION}")
    # Some grids leave the poles out, by at most a step.
    steps = np.abs(np.diff(latitude))
    reach = np.ptp(latitude) + 2 * steps.max()
    if reach < 180:
        raise UsageError(f"{address}: its {len(latitude)} latitudes do not go from pole to pole{REGION}")


def check_monotonic(latitude: np.ndarray, where: str) -> None:
    """Raise UsageError where latitudes neither increase nor decrease from row to row."""
    check_neighbours(latitude, "row", where)
    # Every step goes the way of the first one.
    is_northward = np.diff(latitude) > 0
    turns = np.flatnonzero(is_northward != is_northward[:1])
    if len(turns):
        row = int(turns[0])
        raise UsageError(
            f"{where} turns back from {latitude[row]:g} in row {row} to {latitude[row + 1]:g}: sort the rows, with "
            "their fields, from north to south or from south to north"
        )


def check_neighbours(values: np.ndarray, place: str, where: str) -> None:
    """Raise UsageError where a place, row or column, has the coordinate of the one before."""
    same = np.flatnonzero(np.diff(values) == 0)
    if not len(same):
        return
    first = int(same[0])
    value = values[first]
    # An array that was never written holds one value.
    if np.ptp(values) == 0:
        raise UsageError(f"{where} is {value:g} in every {place}: was it never written?")
    raise UsageError(f"{where} is {value:g} in {place}s {first} and {first + 1}: was it written to the end?")


def check_latitudes(latitude: np.ndarray, units: str, where: str) -> None:
    """Raise UsageError for latitudes (H,), from the north or the south, that are no degrees of neighbouring rows.

    units: as stated, or "". where: begins the message.
    """
    _check_finite(latitude, where)
    if len(latitude) < 2:
        raise UsageError(f"{where} has 1 value: an image needs 2 rows or more")
    check_degrees(latitude, units.lower(), "latitude", where)
    if abs(latitude).max() > 90:
        worst = latitude[abs(latitude).argmax()]
        raise UsageError(f"{where} is {worst:g}: give degrees, -90 to 90")
    check_monotonic(latitude, where)
    # A row that was left out makes one step much longer than its neighbours.
    sizes = np.abs(np.diff(latitude))
    growth = np.maximum(sizes[1:] / sizes[:-1], sizes[:-1] / sizes[1:])
    if len(growth) and growth.max() > MOST_GROWTH:
        row = int(growth.argmax()) + 1
        raise UsageError(
            f"{where} goes from {latitude[row - 1]:g} to {latitude[row]:g} and {latitude[row + 1]:g}: is a row "
            "missing? Regrid it (cdo remapbil)"
        )


def order_longitudes(longitude: np.ndarray, where: str) -> tuple[int, np.ndarray]:
    """(the first column, the longitudes (W,) from it on, increasing) of a region or a circle.

    longitude: (W,), of whatever convention. A circle begins at Greenwich, or just east of it; a region at its western
    end, wherever the file cuts it. Raises UsageError for columns that do not follow each other eastward.
    """
    _check_finite(longitude, where)
    if len(longitude) < 2:
        raise UsageError(f"{where} has 1 value: an image needs 2 columns or more")
    around = longitude % CIRCLE
    # From each column to the next one, and from the last to the first: once around the globe.
    following = np.roll(around, -1)
    steps = (following - around) % CIRCLE
    # Files of 0 to 360 sometimes hold Greenwich twice.
    same = np.flatnonzero((steps < 1e-6) | (steps > CIRCLE - 1e-6))
    if len(same):
        column = int(same[0])
        other = (column + 1) % len(longitude)
        raise UsageError(
            f"{where} is {longitude[column]:g} and {longitude[other]:g}, the same place, in columns {column} and "
            f"{other}: keep one of them (xarray: isel)"
        )
    # Columns that run westward go around many times.
    if abs(steps.sum() - CIRCLE) > 1e-3:
        raise UsageError(f"{where} does not run eastward: sort it (xarray: sortby)")

    step = float(np.median(steps))
    margin = ROUNDING * step + 1e-4
    # What is left out of the circle is the longest step, if anything is.
    gap = int(steps.argmax())
    is_circle = steps[gap] <= step + margin
    first = int(around.argmin()) if is_circle else (gap + 1) % len(longitude)
    # The steps of the image, without the one back to its first column.
    inside = np.roll(steps, -first)[:-1]
    uneven = np.flatnonzero(np.abs(inside - step) > margin)
    ordered = np.roll(around, -first)[0] + np.concatenate([[0], np.cumsum(inside)])
    if len(uneven):
        column = int(uneven[0])
        raise UsageError(
            f"{where} goes from {ordered[column]:g} to {ordered[column + 1]:g}, elsewhere by {step:g}: is a column "
            "missing? Regrid it (cdo remapbil)"
        )
    # A region that crosses Greenwich begins west of it.
    crosses = not is_circle and ordered[-1] >= CIRCLE
    return first, (ordered - CIRCLE if crosses else ordered).round(5)


def _check_finite(values: np.ndarray, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise UsageError(f"{where} is {values[bad[0]]} at index {bad[0]}: write the coordinate of each row and column")
