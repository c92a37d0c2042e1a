"""Rows and columns of any regular grid, of a region or of the globe: rows from the north, columns eastward."""

import numpy as np

from utils.errors import UsageError
from weather.fields.coordinates import LATITUDE, check_degrees

# From one step of rows to the next, as of a grid of Mercator; a row that is missing doubles it.
MOST_GROWTH = 1.5
# The share of a step that rounding takes or gives.
ROUNDING = 0.02
CIRCLE = 360


def check_latitudes(latitude: np.ndarray, units: str, where: str) -> None:
    """Raise UsageError for latitudes (H,), from the north or the south, that are no degrees of neighbouring rows.

    units: as stated, or "". where: begins the message.
    """
    _check_finite(latitude, where)
    if len(latitude) < 2:
        raise UsageError(f"{where} has 1 value: an image needs 2 rows or more")
    check_degrees(latitude, units.lower(), LATITUDE, where)
    if abs(latitude).max() > 90:
        worst = latitude[abs(latitude).argmax()]
        raise UsageError(f"{where} is {worst:g}: give degrees, -90 to 90")
    # NaN was refused above, so every step has a sign.
    steps = np.diff(latitude)
    is_monotonic = (steps > 0).all() or (steps < 0).all()
    if not is_monotonic:
        raise UsageError(f"{where} neither increases nor decreases from row to row: sort it (xarray: sortby)")
    # A row that was left out makes one step much longer than its neighbours.
    sizes = np.abs(steps)
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
