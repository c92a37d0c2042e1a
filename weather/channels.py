"""The 20 channels of FourCastNet (Pathak et al. 2022, arXiv:2202.11214), in file order, in ERA5's units."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

ERA5: dict[str, Any] = YAML(typ="safe", pure=True).load(Path(__file__).with_name("era5.yaml"))
# Quantities, and quantities at a pressure level in hPa.
NAMES = "u10 v10 t2m sp mslp t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"


class Quantity(NamedTuple):
    """A variable of ERA5: its units, its names in the files of others, and the range of its physical values."""

    units: str
    long_name: str
    names: tuple[str, ...]
    lowest: float
    highest: float


class Channel(NamedTuple):
    """One variable of the state: its short name, units and descriptive name."""

    name: str
    units: str
    long_name: str


QUANTITIES = {name: Quantity(*row) for name, row in ERA5["quantities"].items()}


def channel_key(name: str) -> tuple[str, int | None]:
    """(quantity, pressure level in hPa or None) of a channel: u10 is ('u10', None), u500 is ('u', 500)."""
    match = re.fullmatch(r"([a-z]+?)(\d+)", name)
    return (match[1], int(match[2])) if match and name not in QUANTITIES else (name, None)


def _channel(name: str) -> Channel:
    quantity, level = channel_key(name)
    units, long_name, *_ = QUANTITIES[quantity]
    return Channel(name, units, f"{long_name} at {level} hPa" if level else long_name)


CHANNELS = tuple(_channel(name) for name in NAMES.split())
