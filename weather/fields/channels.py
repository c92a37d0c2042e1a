"""Channels by name: their quantity, level, units and the range of their values, also under the names of others.

The 20 channels of FourCastNet (Pathak et al. 2022, arXiv:2202.11214) are those of our own files, in file order and in
ERA5's units. weather/era5.yaml has the quantities.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ruamel.yaml import YAML

from utils.errors import UsageError

TABLES = Path(__file__).parents[1] / "era5.yaml"
ERA5: dict[str, Any] = YAML(typ="safe", pure=True).load(TABLES)
# Quantities, and quantities at a pressure level in hPa.
NAMES = "u10 v10 t2m sp mslp t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"

# The pressure at sea level is below: larger levels are in Pa.
HIGHEST_HPA = 1100
PA_PER_HPA = 100
LAST = 1000  # the rank of a name that no list has


class Quantity(NamedTuple):
    """A variable of ERA5: its units, its names in the files of others, and the range of its physical values."""

    units: str
    long_name: str
    names: tuple[str, ...]
    lowest: float
    highest: float


class Meaning(NamedTuple):
    """What the name of a variable says.

    rank: of several variables of one quantity, the lowest is taken. level: in hPa, if the name has it. units: those of
    a variable that states none; "" where its name does not tell.
    """

    rank: int
    quantity: str
    level: int | None
    units: str


class Channel(NamedTuple):
    """One variable of the state: its short name, units and descriptive name."""

    name: str
    units: str
    long_name: str


QUANTITIES = {name: Quantity(*row) for name, row in ERA5["quantities"].items()}
ON_LEVELS = frozenset(ERA5["on_levels"])
# {a name in lower case: the quantity}. What lies on levels is told apart from what does not by its level.
BY_NAME: dict[str, str] = {}
for _quantity, _row in QUANTITIES.items():
    BY_NAME |= {_other.lower(): _quantity for _other in (*_row.names, _quantity)}


def channel_key(name: str) -> tuple[str, int | None]:
    """(quantity, pressure level in hPa or None) of a channel: u10 is ('u10', None), u500 is ('u', 500).

    Names of others are known too: U10M is ('u10', None), temperature_850 is ('t', 850). The quantity of any other name
    is the name itself, and not one of QUANTITIES. A level above 1100 is in Pa: z50000 is ('z', 500).
    """
    name = name.strip()
    lowered = name.lower()
    if lowered in BY_NAME and BY_NAME[lowered] not in ON_LEVELS:
        is_level_of_wind = re.fullmatch(r"[uv]100", lowered)  # u100 is the wind at 100 hPa, not at 100 m
        if not is_level_of_wind:
            return BY_NAME[lowered], None
    # A quantity, and a level in digits behind it: z500, temperature_850, t_850hPa.
    match = re.fullmatch(r"([a-z_]+?)_?(\d+)(?:hpa)?", lowered)
    if match and BY_NAME.get(match[1]) in ON_LEVELS:
        level = int(match[2])
        if level <= HIGHEST_HPA:
            return BY_NAME[match[1]], level
        if level % PA_PER_HPA == 0:
            return BY_NAME[match[1]], level // PA_PER_HPA
    return name, None


def channel_of(name: str) -> Channel:
    """The Channel under our own name: U10M is u10. One that is not known keeps its name and has no units."""
    quantity, level = channel_key(name)
    if quantity not in QUANTITIES:
        bare_name = name.strip()
        return Channel(bare_name, "", bare_name)
    units, long_name, *_ = QUANTITIES[quantity]
    if level is None:
        return Channel(quantity, units, long_name)
    return Channel(f"{quantity}{level}", units, f"{long_name} at {level} hPa")


def split_units(name: str) -> tuple[str, str]:
    """(name, units) of a channel: 't2m [K]' is ('t2m', 'K'), 'u10     ' is ('u10', '').

    Brackets with a number and no power hold a level or a height, which stay: 'u (850 hPa)'.
    """
    match = re.fullmatch(r"\s*(.*?\S)\s*[\[(]([^\[\]()]*)[\])]\s*", name)
    if match is None or re.match(r"\s*\d", match[2]):
        return name.strip(), ""
    return match[1], match[2].strip()


def bare_units(units: str) -> str:
    """Units with powers without ** and ^: 'm s**-1' is 'm s-1'."""
    return units.replace("**", "").replace("^", "").strip()


def spell_units(units: str) -> str:
    """Units in one spelling, to compare them: 'm  s**-1' is 'm s-1', 'HPA' is 'hpa'."""
    return " ".join(bare_units(units).lower().split())


def find_conversion(units: str, ours: str) -> tuple[float, float] | None:
    """(factor, offset) from units to ours; None where era5.yaml does not know them."""
    # The table lists, for each unit of ERA5, what others write in its place.
    for spelling, (factor, offset) in ERA5["units"][ours].items():
        if spell_units(spelling) == spell_units(units):
            return factor, offset
    return None


def are_same_units(quantity: str, units: str, others: str) -> bool:
    """Whether two units of a quantity mean the same: 'm/s' and 'm s**-1' do."""
    if spell_units(units) == spell_units(others):
        return True
    if quantity not in QUANTITIES:
        return False
    # Two spellings of one unit have the same factor and offset.
    ours = QUANTITIES[quantity].units
    known = find_conversion(units, ours)
    return known is not None and known == find_conversion(others, ours)


def value_range(quantity: str, level: float | None) -> tuple[float, float]:
    """(lowest, highest) physical value of a quantity, at a level (hPa) if it lies on levels, in ERA5's units.

    Infinite for a quantity that is not known.
    """
    if quantity not in QUANTITIES:
        return -np.inf, np.inf
    by_level = ERA5["level_ranges"].get(quantity)
    if by_level is None or not level:
        return QUANTITIES[quantity].lowest, QUANTITIES[quantity].highest
    # np.interp needs increasing levels.
    levels = sorted(by_level)
    depths = np.log(levels)
    # Between the levels of the table the bounds are linear in the logarithm of pressure.
    depth = np.log(level)
    lowest = np.interp(depth, depths, [by_level[p][0] for p in levels])
    highest = np.interp(depth, depths, [by_level[p][1] for p in levels])
    return float(lowest), float(highest)


@functools.lru_cache(maxsize=1024)  # hundreds of files have the same names
def meaning_of(name: str) -> Meaning | None:
    """The Meaning of a name in any capitals, None for an unknown one.

    T2M and VAR_2T are t2m, z500 is z at 500 hPa, and gh is z as a height.
    """
    # Archives of GRIB put VAR_ before the short names.
    lowered = name.lower().removeprefix("var_")
    if lowered in ERA5["also"]:
        quantity, units = ERA5["also"][lowered]
        return Meaning(LAST, quantity, None, units)
    if lowered in BY_NAME:
        quantity = BY_NAME[lowered]
        names = [*QUANTITIES[quantity].names, quantity]
        return Meaning(names.index(lowered), quantity, None, "")
    # Else it may be a quantity and a level, as the channels of year files are named.
    quantity, level = channel_key(lowered)
    if quantity in ON_LEVELS and level is not None:
        return Meaning(LAST, quantity, level, "")
    return None


def units_of(attributes: Mapping[str, Any]) -> str:
    """The units that a variable states, powers without ** and ^ ('m s-1'); '' if it states none."""
    return bare_units(str(attributes.get("units", "")))


def conversion(subject: str, theirs: str, ours: str) -> tuple[float, float]:
    """(factor, offset) from their units to ours. subject: begins the message. Raises UsageError for unknown units."""
    known = find_conversion(theirs, ours)
    if known is None:
        listed = ", ".join(ERA5["units"][ours])
        raise UsageError(f"{subject} unknown units '{theirs}' (known: {listed})")
    return known


def describe(quantity: str, level: float | None) -> str:
    """A quantity at a level (hPa), by the two names that it is best known by; an unknown one by its own."""
    known = QUANTITIES[quantity].names[:2] if quantity in QUANTITIES else (quantity,)
    names = " or ".join(known)
    return names if level is None else f"{names} at {level} hPa"


CHANNELS = tuple(channel_of(name) for name in NAMES.split())
