"""A source of real data as it is stored: variables of xarray that are neither decoded nor read yet."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xarray

from utils.errors import reading

# {dimension: the indices along it that will be read, increasing}. All of a dimension that is not named will be read.
Selection = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """An opened file, store or group.

    address: as messages name it. variables: by name, as stored, so with scale factors and fill values among their
    attributes. check(name, selection): raises UsageError if parts of a variable were never written, or cannot be
    decompressed here. find_groups(): addresses of the groups inside it that hold variables.
    """

    address: str
    variables: Mapping[str, xarray.Variable]
    check: Callable[[str, Selection], None] = lambda name, selection: None  # for a format that cannot lack parts
    find_groups: Callable[[], list[str]] = list  # for a format without groups: none


@contextmanager
def reading_quietly(what: str) -> Iterator[None]:
    """As `reading`, without the warnings of libraries: what matters in them becomes an error or a line of ours."""
    # Fill values of two kinds, metadata that are not consolidated, encodings of old files.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with reading(what):
            yield
