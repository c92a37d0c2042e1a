"""The 20 channels of FourCastNet (Pathak et al. 2022, arXiv:2202.11214), in file order, in ERA5's units."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Channel(NamedTuple):
    """One variable of the state: its short name, units and descriptive name."""

    name: str
    units: str
    long_name: str


CHANNELS = (
    Channel("u10", "m s-1", "eastward wind at 10 m"),
    Channel("v10", "m s-1", "northward wind at 10 m"),
    Channel("t2m", "K", "temperature at 2 m"),
    Channel("sp", "Pa", "surface pressure"),
    Channel("mslp", "Pa", "mean sea level pressure"),
    Channel("t850", "K", "temperature at 850 hPa"),
    Channel("u1000", "m s-1", "eastward wind at 1000 hPa"),
    Channel("v1000", "m s-1", "northward wind at 1000 hPa"),
    Channel("z1000", "m2 s-2", "geopotential at 1000 hPa"),
    Channel("u850", "m s-1", "eastward wind at 850 hPa"),
    Channel("v850", "m s-1", "northward wind at 850 hPa"),
    Channel("z850", "m2 s-2", "geopotential at 850 hPa"),
    Channel("u500", "m s-1", "eastward wind at 500 hPa"),
    Channel("v500", "m s-1", "northward wind at 500 hPa"),
    Channel("z500", "m2 s-2", "geopotential at 500 hPa"),
    Channel("t500", "K", "temperature at 500 hPa"),
    Channel("z50", "m2 s-2", "geopotential at 50 hPa"),
    Channel("r500", "%", "relative humidity at 500 hPa"),
    Channel("r850", "%", "relative humidity at 850 hPa"),
    Channel("tcwv", "kg m-2", "total column water vapour"),
)

TIMED = ("hour", "day")  # forcings: the local hour, and the day of the year; a cosine and a sine of each


def count_forcings(names: Sequence[str]) -> tuple[int, int]:
    """(channels that stay the same, channels that change with the date) of the forcings of these names."""
    timed = sum(name in TIMED for name in names)
    return len(names) - timed, 2 * timed


def pressure_level(name: str) -> int | None:
    """The level of a channel in hPa: 500 of z500; None for one at the surface, such as u10 or t2m."""
    match = re.fullmatch(r"[a-z]+?(\d+)", name)
    return int(match[1]) if match and name not in ("u10", "v10") else None
