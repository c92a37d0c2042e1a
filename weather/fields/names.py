"""What the names and units of variables in the files of others mean: weather/era5.yaml has them."""

from typing import NamedTuple

import xarray

from utils.errors import UsageError
from weather.fields.channels import BY_NAME, ERA5, ON_LEVELS, QUANTITIES, channel_key

LAST = 1000  # the rank of a name that no list has


class Meaning(NamedTuple):
    """What the name of a variable says.

    rank: of several variables of one quantity, the lowest is taken. level: in hPa, if the name has it. units: those of
    a variable that states none; "" where its name does not tell.
    """

    rank: int
    quantity: str
    level: int | None
    units: str


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


def units_of(variable: xarray.Variable) -> str:
    """The units that a variable states, powers without ** and ^ ('m s-1'); '' if it states none."""
    stated = str(variable.attrs.get("units", ""))
    return stated.replace("**", "").replace("^", "").strip()


def conversion(subject: str, theirs: str, ours: str) -> tuple[float, float]:
    """(factor, offset) from their units to ours, which era5.yaml lists. subject: begins the message.

    Raises UsageError for units that are not known.
    """
    # Files disagree about capitals: kelvin and Kelvin, degC and degc.
    known = {spelling.lower(): factors for spelling, factors in ERA5["units"][ours].items()}
    lowered = theirs.lower()
    if lowered not in known:
        listed = ", ".join(ERA5["units"][ours])
        raise UsageError(f"{subject} unknown units '{theirs}' (known: {listed})")
    return known[lowered]


def describe(quantity: str, level: float | None) -> str:
    """A quantity at a level (hPa), by the two names that it is best known by; an unknown one by its own."""
    known = QUANTITIES[quantity].names[:2] if quantity in QUANTITIES else (quantity,)
    names = " or ".join(known)
    return names if level is None else f"{names} at {level} hPa"
