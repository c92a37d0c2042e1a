"""Open years of data: HDF5 files, NetCDF 4 files, which are HDF5 too, and Zarr stores, also of several years.

The path of a store that holds several years, or lies elsewhere, is gs://bucket/era5.zarr#1979-2015. Behind '#' stand
the years that are wanted, each of which is a year of data by itself, as a year file is. Without years, a store is a
single one, from its first frame to its last.
"""

import itertools
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from utils.errors import UsageError, reported_as_usage_error
from weather.sources.file_formats import has_zarr_metadata
from weather.sources.remote_store import RemoteOptions, is_address
from weather.years.year_data import YearFile

if TYPE_CHECKING:  # zarr is an optional library, and slow to import
    from weather.years.zarr_year import ZarrStore

SUFFIXES = (".h5", ".hdf5", ".nc", ".nc4", ".zarr")  # in any capitals
YEARS = re.compile(r"(?P<store>.+)#(?P<years>[^#/]*)")


class SharedStore:
    """A store that all of its years share; it is opened when one of them is. It travels to a process unopened."""

    def __init__(self, address: str, options: RemoteOptions):
        self.address = address
        self.options = options
        self.lock = threading.Lock()
        self.opened: ZarrStore | None = None

    def open(self) -> "ZarrStore":
        """The open store. Raises UsageError."""
        from weather.years.zarr_year import ZarrStore

        # Threads of a loader may come at the same time.
        with self.lock:
            if self.opened is None:
                self.opened = ZarrStore(self.address, self.options)
            return self.opened

    def __reduce__(self) -> tuple[Any, ...]:
        # Threads and connections stay where they are.
        return SharedStore, (self.address, self.options)


@dataclass(frozen=True)
class StorePath:
    """A store, or one or several of its years; as far as messages need it, a pathlib.Path. text: as it was given."""

    store: SharedStore
    years: tuple[int, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.store.address}#{self.years[0]}"

    @property
    def name(self) -> str:
        """The last part, with the years."""
        # A listing of files begins with it, on every rank the same.
        store, _, years = str(self).partition("#")
        last = store.rstrip("/").rpartition("/")[2]
        if not years:
            return last
        return f"{last}#{years}"

    @property
    def stem(self) -> str:
        """The year, where it is one."""
        if len(self.years) == 1:
            return str(self.years[0])
        return self.name.removesuffix(".zarr")

    def by_year(self) -> list["StorePath"]:
        """A path for each year; this one where no years are named."""
        # All of them share the open store.
        if not self.years:
            return [self]
        return [StorePath(self.store, (year,)) for year in self.years]


def data_path(text: str | Path, options: RemoteOptions | None = None) -> Path | StorePath:
    """The path of a folder of years, or of a store. Raises UsageError for years that cannot be read.

    text: a folder, the address of a store, either of them with years behind '#'.
    """
    if isinstance(text, Path):
        return text
    match = YEARS.fullmatch(text)
    # A folder may have '#' in its name. One that is not there is named by whoever looks into it.
    is_folder = match is None or Path(text).is_dir()
    if is_folder and not is_address(text):
        return Path(text)
    address = text
    years: tuple[int, ...] = ()
    if match is not None:
        address = match["store"]
        with reported_as_usage_error(UsageError, text):
            years = parse_years(match["years"])
    # A path of pathlib would make one slash of the two in an address.
    store = SharedStore(address.rstrip("/"), options or RemoteOptions())
    return StorePath(store, years, text)


def is_store(folder: Path) -> bool:
    """Tell whether a folder is a Zarr store, by its name or by what is in it."""
    return folder.suffix.lower() == ".zarr" or has_zarr_metadata(folder)


def parse_years(text: str) -> tuple[int, ...]:
    """The years of '1979', '1979-1982' or '1979,1981-1983' as a tuple of ints. Raises UsageError."""
    years: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{4})(-(\d{4}))?", part.strip())
        if not match:
            raise UsageError(f"years '{text}': write 1979, 1979-1982 or 1979,1981-1983")
        first = int(match[1])
        last = int(match[3] or match[1])
        if first > last:
            raise UsageError(f"years '{text}': {first} is after {last}")
        years += range(first, last + 1)
    return tuple(years)


@overload
def year_paths(folder: Path) -> list[Path]: ...


@overload
def year_paths(folder: StorePath) -> list[StorePath]: ...


def year_paths(folder: Path | StorePath) -> list[Path] | list[StorePath]:
    """The years in a folder, by name; of a Zarr store those that its path names, or the store as a single one.

    Names that begin with a dot are passed over: macOS leaves ._1979.h5 beside 1979.h5.
    Raises UsageError for a year in two formats.
    """
    if isinstance(folder, StorePath):
        return folder.by_year()
    if is_store(folder):
        return [folder]
    visible = [path for path in folder.glob("*") if not path.name.startswith(".")]
    paths = sorted(path for path in visible if path.suffix.lower() in SUFFIXES)
    for path, other in itertools.pairwise(paths):
        if path.stem == other.stem:
            raise UsageError(f"{folder}: holds {path.name} and {other.name}: the same year twice? Move one away")
    return paths


def open_year(path: Path | StorePath) -> YearFile:
    """Open a year of data: a file, a store, or one of a store's years. Raises UsageError."""
    if isinstance(path, Path) and not is_store(path):
        from weather.years.hdf5_year import Hdf5Year  # a program that reads no data needs no h5py

        return Hdf5Year(path)
    from weather.years.zarr_year import SourceYear, ZarrYear  # an optional library, and slow to import

    shared = path.store if isinstance(path, StorePath) else SharedStore(str(path), RemoteOptions())
    years = path.years if isinstance(path, StorePath) else ()
    year = years[0] if years else None
    named = cast(Path, path)  # as far as a year needs it: for its name, and for messages
    store = shared.open()
    return SourceYear(named, store, year) if store.is_source else ZarrYear(named, store, year)
