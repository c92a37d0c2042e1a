"""The arrays of a year: variables of xarray by name, neither decoded nor read, whatever the format."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import xarray


class StoredArrays(Protocol):
    """What is read of a year: its path, its arrays by name, and the shape of its fields."""

    path: Path
    arrays: Mapping[str, xarray.Variable]
    shape: tuple[int, int, int, int]


def find_names(file: StoredArrays, names: Sequence[str]) -> list[str]:
    """The names in the file that are one of `names`, capitals aside, in the order of `names`."""
    found = []
    for name in names:
        # The spelling asked for comes before others, where a file has both.
        spellings = sorted(file.arrays, key=name.__ne__)
        found += [spelling for spelling in spellings if spelling.lower() == name]
    return found


def text_attribute(array: xarray.Variable, name: str, otherwise: str = "") -> str:
    """An attribute as text, without blanks around it."""
    return str(array.attrs.get(name, otherwise)).strip()
