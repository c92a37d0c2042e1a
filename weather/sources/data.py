"""Sources as one: frames of the channels that are asked for, ERA5's or a user's own, at the dates of the sources."""

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.fields.channels import Channel, describe, value_range
from weather.fields.dates import minute
from weather.fields.grid import HOUR, Grid
from weather.fields.humidity import relative_humidity
from weather.fields.requests import ERA5_REQUESTS, ERA5_SOUGHT, Request, humidity_sources
from weather.fields.value_check import Key, Problem, ValueCheck
from weather.sources.index import Index
from weather.sources.store import Store, check_same_grid, open_stores

EVERY_FRAME = np.timedelta64(1, "s")
SIX_HOURS = 6 * HOUR
KEPT_BYTES = 2 * 2**30  # of decoded frames, at most
FILL = (
    "fill such values first (xarray: fillna, interpolate_na), or take a region without them; a missing value that the "
    "file does not state belongs into its attribute _FillValue"
)


class SourceData:
    """Several sources as one. The first that holds a value is read.

    addresses: of NetCDF and GRIB files and Zarr stores, or Stores that are open already. requests: the channels, in
    their order. block: side of the square blocks of points that are averaged; rows and columns left over at the south
    and the east are dropped. is_era5: the sources must be as ERA5 is published (see Store), and relative humidity is
    derived where none has it with units. step: from one frame that will be asked for to the next. kept_bytes: of
    frames that were decoded with others, and are kept for later: 0 where frames are read in any order.
    Attributes: channels, with units; grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError, naming source, variable and what to do, where they are no such data.
    """

    def __init__(
        self,
        addresses: Iterable[Path | str | Store],
        requests: Sequence[Request],
        block: int = 1,
        is_era5: bool = False,
        step: np.timedelta64 = EVERY_FRAME,
        kept_bytes: int = KEPT_BYTES,
    ):
        self.requests = requests
        self.block = block
        self.is_era5 = is_era5
        self.step = step
        self.most_bytes = kept_bytes
        sought = ERA5_SOUGHT if is_era5 else requests
        self.stores: list[Store] = []
        for address in addresses:
            opened = [address] if isinstance(address, Store) else open_stores(str(address), sought, is_era5)
            self.stores += opened
        # Points are averaged after reading, so that all sources have one grid first.
        check_same_grid(self.stores)
        self.grid = self._average_grid()

        # Humidity without units may be a fraction or a percentage: then it is safer to derive it.
        humidity = [field for store in self.stores for field in store.fields.get("r", [])]
        self.derived = is_era5 and not any(field.units for field in humidity)
        self.reads: dict[tuple[str, float | None], Request] = {}  # what is read, by variable and level
        for request in requests:
            for read in humidity_sources(request) if self._is_derived(request) else [request]:
                self.reads[read.variable, read.level] = read
        self.needed: dict[str, list[float | None]] = {}  # variable: its levels
        for variable, level in self.reads:
            self.needed.setdefault(variable, []).append(level)
        if not is_era5:
            self._check_requests()
        self.channels = [self._describe(request) for request in requests]

    def _average_grid(self) -> Grid:
        """The grid of blocks of points. Raises UsageError for blocks that do not fit the sources."""
        store = self.stores[0]
        height = len(store.latitude)
        width = len(store.longitude)
        # Rows may be left over, at the south pole; columns of the globe may not.
        if self.block < 1 or (self.is_era5 and width % self.block):
            raise UsageError(f"coarsen {self.block}: must divide the {width} longitudes of {store.address}")
        # A patch needs neighbours, and so do the weights of rows.
        rows = height // self.block
        columns = width // self.block
        if min(rows, columns) < 2:
            raise UsageError(f"coarsen {self.block}: leaves {rows} x {columns} points of {store.address}")
        latitude = block_means(store.latitude, self.block, -1)
        longitude = block_means(store.longitude, self.block, -1)
        return Grid(latitude, longitude)

    def _is_derived(self, request: Request) -> bool:
        return self.derived and request.quantity == "r"

    def _check_requests(self) -> None:
        """Raise UsageError where no source holds a channel."""
        for request in self.requests:
            name = request.variable
            holders = [store for store in self.stores if store.holds(name, request.level)]
            if holders:
                continue
            # Of several sources the one that has the variable says more.
            near = [store for store in self.stores if store.fields[name]]
            store = (near or self.stores)[0]
            raise UsageError(f"{store.address}: {store.explain(request)}")

    def _describe(self, request: Request) -> Channel:
        """The Channel of a request. Raises UsageError where sources state different units of one that is not known."""
        # Values of a quantity that we know are converted to our units.
        known = request.known
        if request.quantity:
            return known
        # Of another variable nobody could tell which of two units its values have.
        units: dict[str, str] = {}
        for store in self.stores:
            if store.fields[request.variable]:
                units.setdefault(store.units(request.variable), store.address)
        if len(units) > 1:
            listed = " and ".join(f"'{unit}' in {address}" for unit, address in units.items())
            raise UsageError(f"{request.variable} has the units {listed}: bring them into one")
        return known._replace(units=next(iter(units)))

    @cached_property
    def index(self) -> Index:
        """Where each variable lies. Raises UsageError if no source holds one, or a level of it."""
        return Index(self.stores, self.needed, self.derived, self.most_bytes, self.step)

    @cached_property
    def dates(self) -> np.ndarray:
        """The dates that all channels have, (T,) datetime64[s]. Raises UsageError where there is none."""
        times = [np.unique(holders.times) for holders in self.index.holders.values()]
        # A frame needs all of its channels.
        common = reduce(np.intersect1d, times)
        if not len(common):
            addresses = ", ".join(dict.fromkeys(store.address for store in self.stores))
            spans = []
            for (variable, _), dates in zip(self.index.holders, times, strict=True):
                spans.append(f"{variable} {minute(dates[0])} to {minute(dates[-1])}")
            raise UsageError(f"{addresses}: no date has all variables: {'; '.join(spans)}")
        # Dates that some variables lack are told, since a gap in time breaks samples.
        most = max(len(dates) for dates in times)
        if len(common) < most:
            print(f"{len(common)} of {most} dates have all variables: the others are left out")
        return common

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no source holds one of `times` (datetime64[s]), or parts of it were never written."""
        self.index.check(times)

    def announce(self) -> None:
        """Print what is derived, and how much memory is used beside that of the frames, of ERA5's many frames."""
        if self.derived:
            print("relative humidity: derived from specific humidity and temperature")
        kept = self.index.kept_bytes()
        if self.is_era5 and kept:
            size = f"{kept / 1e9:.1f} GB" if kept > 1e8 else f"{kept / 1e6:.1f} MB"
            print(f"chunks hold several frames: keeps up to {size} of decoded chunks")

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for values that are no data."""
        out = np.empty((len(times), len(self.requests), *map(len, self.grid)), np.float32)
        # What humidity is derived from, on the points of the stores: (T, h, w) each.
        kept: dict[Key, np.ndarray] = {}
        for variable, levels in self.needed.items():
            values, sources = self.index.read(variable, times)  # (T, L, h, w), (T, L)
            for number, level in enumerate(levels):
                fields = values[:, number]
                self._check_values(self.reads[variable, level], times, fields, sources[:, number])
                if self.derived and variable in ("q", "t"):
                    kept[variable, level] = fields
                for channel, request in enumerate(self.requests):
                    if (request.variable, request.level) == (variable, level):
                        out[:, channel] = self._average(fields)
        for channel, request in enumerate(self.requests):
            if self._is_derived(request):
                out[:, channel] = self._average(self._derive_humidity(kept, request, times))
        return out

    def _average(self, fields: np.ndarray) -> np.ndarray:
        """Fields (T, H, W), of the points (T, h, w) of the stores."""
        rows = block_means(fields, self.block, -1)
        return block_means(rows, self.block, -2)

    def _derive_humidity(self, fields: dict[Key, np.ndarray], request: Request, times: np.ndarray) -> np.ndarray:
        """Relative humidity (T, h, w) at a level (hPa). Raises UsageError if it is none."""
        level = request.level
        assert level is not None
        field = relative_humidity(fields["q", level], fields["t", level], 100 * level)
        # Cold air is easily far above saturation, where q is rounded: of single points this says nothing.
        lowest, highest = value_range("r", level)
        limited = np.clip(field, lowest, highest)
        problem = ValueCheck([("r", level)], strict=True).find(limited[:, None])
        if problem is not None:
            what = f"{describe('r', level)}, derived from specific humidity and temperature"
            raise UsageError(f"{what}, {minute(times[problem.frame])}: {_place(problem)} {problem.text}")
        return field

    def _check_values(
        self,
        request: Request,
        times: np.ndarray,
        fields: np.ndarray,
        sources: np.ndarray,
    ) -> None:
        """Raise UsageError for fields (T, h, w) that are no data: source, variable, date, place, what it is, mend.

        sources: the numbers (T,) of the stores that they are of.
        """
        # ERA5 has no value outside its range, and what is read here is never looked at again.
        check = ValueCheck([(request.quantity or request.name, request.level)], strict=self.is_era5)
        # A frame that is the same everywhere is noticed where all channels are; one of an unknown channel may be so.
        problem = check.find(fields[:, None])
        if problem is None:
            return
        store = self.stores[sources[problem.frame]]
        date = minute(times[problem.frame])
        if self.is_era5:
            what = describe(request.quantity, request.level)
            raise UsageError(f"{store.address}: {what}, {date}: {_place(problem)} {problem.text}")
        # The message names the variable as the file calls it, where its reader will look.
        found = store.find(request.variable, request.level)
        name = found.name if found is not None else request.variable
        where = f"{store.address}: {name}, {date}"
        field = fields[problem.frame]
        # A whole field of NaN was never written; some points are often land.
        if np.isnan(field).all():
            raise UsageError(f"{where}: is NaN at every point: was it never written? Leave it out, or {FILL}")
        mend = FILL if not np.isfinite(field).all() or "fill value" in problem.text else _mend(request)
        raise UsageError(f"{where}: {_place(problem)} {problem.text} ({mend})")


class Era5(SourceData):
    """Sources of ERA5 as one: frames of our 20 channels. Arguments as of SourceData."""

    def __init__(self, addresses: Iterable[Path | str | Store], block: int = 1, kept_bytes: int = KEPT_BYTES):
        super().__init__(addresses, ERA5_REQUESTS, block, True, SIX_HOURS, kept_bytes)


def _place(problem: Problem) -> str:
    return f"row {problem.row} from the north, column {problem.column}"


def _mend(request: Request) -> str:
    if not request.quantity:
        return "leave the variable, or these frames, out"
    # A name of ours for another quantity is the likely slip.
    other = f"--variables NAME={request.variable}"
    return f"write its true units, or convert it; if it is something else than {request.name}, name it: {other}"


def block_means(values: np.ndarray, block: int, axis: int) -> np.ndarray:
    """Averages over blocks of `block` points along an axis; points left over at its end are dropped."""
    if block == 1:
        return values
    # (..., N) to (..., N / block, block), of which the last axis is averaged.
    last = np.moveaxis(values, axis, -1)
    length = last.shape[-1] // block
    whole_blocks = last[..., : length * block]
    blocks = whole_blocks.reshape(*last.shape[:-1], length, block)
    return np.moveaxis(blocks.mean(-1), -1, axis)
