"""The dates of frames."""

import numpy as np

from utils.errors import UsageError, reading
from weather.year_data import YearFile

HOUR = np.timedelta64(1, "h")
YEAR = 365.25  # days


def file_times(file: YearFile) -> np.ndarray:
    """Dates of the frames of a YearFile, (T,) datetime64[s]: its `time`, or 6-hourly in the year of its name."""
    with reading(f"{file.path}: its time"):
        stored, frames = file.arrays.get("time"), file.shape[0]
        if stored is not None and stored.shape == (frames,) and "units" in stored.attrs:
            attributes = {"units": str(np.asarray(stored.attrs["units"]).astype(str))}
            import xarray  # slow to import

            decoded = xarray.decode_cf(xarray.Dataset({"time": ("time", stored[:], attributes)}))["time"].values
            if decoded.dtype.kind != "M" or np.isnat(decoded).any():
                raise UsageError(f"{file.path}: its time in '{attributes['units']}' is not a date")
            return decoded.astype("datetime64[s]")
    if not (file.path.stem.isdecimal() and len(file.path.stem) == 4):
        raise UsageError(f"{file.path}: has no `time` with units, and its name is not a year: its dates are not known")
    return np.datetime64(f"{file.path.stem}-01-01", "s") + np.arange(frames) * 6 * HOUR


def turns(dates: np.ndarray) -> np.ndarray:
    """How much of the day and how much of the year is over at these dates (UTC), 0 to 1: (...) -> (..., 2) float32."""
    day, year = ((dates - dates.astype(f"datetime64[{unit}]")) / np.timedelta64(1, "D") for unit in "DY")
    return np.stack([day, year / YEAR], -1).astype(np.float32)
