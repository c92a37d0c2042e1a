"""Sources as one: frames of the channels that are asked for, ERA5's or a user's own, at the dates of the sources."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.fields.channels import Channel, describe, value_range
from weather.fields.dates import minute
from weather.fields.grid import Grid
from weather.fields.humidity import relative_humidity
from weather.fields.requests import ERA5_REQUESTS, ERA5_SOUGHT, Request, humidity_sources
from weather.fields.value_check import Key, Problem, ValueCheck
from weather.sources.store import Store, check_same_grid, describe_stores, open_stores

BLOCK_BYTES = 64e6  # of frames that are read at once, where chunks hold no more
KEPT_BYTES = 2 * 2**30  # of frames that are read at once, at most
SHOWN = 3  # sources in a message
FILL = (
    "fill such values first (xarray: fillna, interpolate_na), or take a region without them; a missing value that the "
    "file does not state belongs into its attribute _FillValue"
)


@dataclass(frozen=True, eq=False)
class Group:
    """What is read at once: a variable at levels that the same stores hold."""

    variable: str
    levels: list[float | None]
    stores: list[Store]

    @cached_property
    def spans(self) -> np.ndarray:
        """The first and the last date of each store, (2, N) datetime64[s]."""
        return np.transpose([store.times[[0, -1]] for store in self.stores])

    def find_near(self, times: np.ndarray) -> list[int]:
        """The numbers of the stores that may hold some of `times`: most of many files hold other dates."""
        first, last = self.spans
        is_near = (first <= times[-1]) & (last >= times[0])
        return np.flatnonzero(is_near).tolist()


class SourceData:
    """Several sources as one. The first that holds a value is read.

    addresses: of NetCDF and GRIB files and Zarr stores, or Stores that are open already. requests: the channels, in
    their order. block: side of the square blocks of points that are averaged; rows and columns left over at the south
    and the east are dropped. is_era5: the sources must be as ERA5 is published (see Store), and relative humidity is
    derived where none has it with units.
    Attributes: channels, with units; grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError, naming source, variable and what to do, where they are no such data.
    """

    def __init__(
        self,
        addresses: Iterable[Path | str | Store],
        requests: Sequence[Request],
        block: int = 1,
        is_era5: bool = False,
    ):
        self.requests = requests
        self.block = block
        self.is_era5 = is_era5
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
        if not is_era5:
            _ = self.groups  # a channel that no source holds is refused at once
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
    def groups(self) -> list[Group]:
        """All that is read.

        Raises UsageError if no source holds a variable or a level of it, or holds it in other units or dimensions.
        """
        groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        for (variable, level), request in self.reads.items():
            numbers = [number for number, store in enumerate(self.stores) if store.holds(variable, level)]
            if not numbers:
                raise UsageError(self._explain(request))
            new = Group(variable, [], [self.stores[number] for number in numbers])
            group = groups.setdefault((variable, tuple(numbers)), new)
            group.levels.append(level)
        return list(groups.values())

    def _explain(self, request: Request) -> str:
        """Why no source holds what is read: a message."""
        variable = request.variable
        if not self.is_era5:
            # Of several sources the one that has the variable says more.
            near = [store for store in self.stores if store.fields[variable]]
            store = (near or self.stores)[0]
            return f"{store.address}: {store.explain(request)}"
        reason = ""
        if variable == "q" and self.derived:
            humid = [store.address for store in self.stores if store.fields["r"]]
            why = f"that of {humid[0]} has no units (%, or 1)" if humid else "there is none"
            reason = f", from which relative humidity is derived, as {why}"
        return f"no source holds {describe(variable, request.level)}{reason}: {self._describe_sources()}"

    def _describe_sources(self) -> str:
        """What the sources hold, of many the first ones of each kind."""
        by_address: dict[str, list[Store]] = {}
        for store in self.stores:
            by_address.setdefault(store.address, []).append(store)
        # Files for other months hold the same variables, and are one kind.
        kinds: dict[str, list[Store]] = {}
        for stores in by_address.values():
            kind = [f"{sorted(store.source.variables)} {store.levels}" for store in stores]
            kinds.setdefault(" ".join(kind), stores)
        shown = list(kinds.values())[:SHOWN]
        text = "; ".join(describe_stores(stores) for stores in shown)
        more = len(by_address) - len(shown)
        return f"{text}; and {more} more sources" if more else text

    @cached_property
    def dates(self) -> np.ndarray:
        """The dates that all channels have, (T,) datetime64[s]. Raises UsageError where there is none."""
        times = []
        for group in self.groups:
            of_stores = np.concatenate([store.times for store in group.stores])
            times.append(np.unique(of_stores))
        # A frame needs all of its channels.
        common = reduce(np.intersect1d, times)
        if not len(common):
            addresses = ", ".join(dict.fromkeys(store.address for store in self.stores))
            spans = []
            for group, dates in zip(self.groups, times, strict=True):
                spans.append(f"{group.variable} {minute(dates[0])} to {minute(dates[-1])}")
            raise UsageError(f"{addresses}: no date has all variables: {'; '.join(spans)}")
        # Dates that some variables lack are told, since a gap in time breaks samples.
        most = max(map(len, times))
        if len(common) < most:
            print(f"{len(common)} of {most} dates have all variables: the others are left out")
        return common

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no source holds one of `times` (T,), or parts of what will be read are not there."""
        alone = {}  # of each group, the instants that one store alone holds
        for group in self.groups:
            held = [store.times for store in group.stores]
            found = [shared(times, dates)[0] for dates in held]
            counts = np.bincount(np.concatenate(found), minlength=len(times))
            absent = times[counts == 0]
            if len(absent):
                more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
                first = min(dates[0] for dates in held)
                last = max(dates[-1] for dates in held)
                raise UsageError(
                    f"{describe(group.variable, group.levels[0])}: {minute(absent[0])} is missing{more}, needed are "
                    f"00, 06, 12, 18 UTC; the sources hold {minute(first)} to {minute(last)}"
                )
            # Where another source holds the instant too, NaN may stand in this one.
            alone[group] = times[counts == 1]
        # One source after the other, as each may have to be opened again.
        for store in self.stores:
            for group in self.groups:
                _, frames = shared(alone[group], store.times)
                if store in group.stores and len(frames):
                    for level in group.levels:
                        store.check(group.variable, level, frames)

    def announce(self) -> None:
        """Print what is derived, and how much memory frames take that are decoded together, of ERA5's many frames."""
        if self.derived:
            print("relative humidity: derived from specific humidity and temperature")
        chunk, _ = self._longest_chunk
        if self.is_era5 and chunk > 1:
            kept = self._frame_bytes * min(chunk, self._most_frames)
            size = f"{kept / 1e9:.1f} GB" if kept > 1e8 else f"{kept / 1e6:.1f} MB"
            print(f"chunks hold several frames: keeps up to {size} of decoded chunks")

    @property
    def _frame_bytes(self) -> int:
        """Bytes of a frame on the points of the stores: of all variables at all levels."""
        points = len(self.stores[0].latitude) * len(self.stores[0].longitude)
        return 4 * len(self.reads) * points

    @property
    def _most_frames(self) -> int:
        return max(1, KEPT_BYTES // self._frame_bytes)

    @cached_property
    def _longest_chunk(self) -> tuple[int, Group]:
        """The most frames that a chunk holds, and whose chunk it is."""
        longest = []
        for group in self.groups:
            sizes = [store.chunk_frames(group.variable, group.levels[0]) for store in group.stores]
            longest.append(max(sizes))
        most = max(longest)
        return most, self.groups[longest.index(most)]

    def blocks(self, times: np.ndarray) -> Iterator[np.ndarray]:
        """Parts of `times`, increasing: each holds whole chunks, so that none is decoded twice, as far as memory goes.

        A store in chunks of 240 hours would be decoded 40 times for its 40 six-hourly frames, one by one.
        """
        _, group = self._longest_chunk
        # A number for each chunk of each store; of two stores that hold an instant the first one is read.
        chunks = np.zeros(len(times), np.int64)
        chunks_before = 0
        for store in reversed(group.stores):
            here, frames = shared(times, store.times)
            size = store.chunk_frames(group.variable, group.levels[0])
            chunks[here] = chunks_before + frames // size
            chunks_before += len(store.times)
        is_new = np.diff(chunks) != 0
        ends = np.append(np.flatnonzero(is_new) + 1, len(times))

        usual = max(1, int(BLOCK_BYTES // self._frame_bytes))
        first = 0
        while first < len(times):
            later = ends[ends > first]
            fitting = later[later <= first + usual]
            end = fitting[-1] if len(fitting) else min(later[0], first + self._most_frames)
            yield times[first:end]
            first = end

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for values that are no data."""
        out = np.empty((len(times), len(self.requests), *map(len, self.grid)), np.float32)
        # What humidity is derived from, on the points of the stores: (T, h, w) each.
        kept: dict[Key, np.ndarray] = {}
        for group in self.groups:
            values, sources = self._read(group, times)  # (T, L, h, w), (T,)
            stores = [group.stores[source] for source in sources]
            for number, level in enumerate(group.levels):
                key = group.variable, level
                fields = values[:, number]
                self._check_values(self.reads[key], times, fields, stores)
                if self.derived and group.variable in ("q", "t"):
                    kept[key] = fields
                for channel, request in enumerate(self.requests):
                    if (request.variable, request.level) == key:
                        out[:, channel] = self._average(fields)
        for channel, request in enumerate(self.requests):
            if self._is_derived(request):
                out[:, channel] = self._average(self._derive_humidity(kept, request, times))
        return out

    def _read(self, group: Group, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (T, L, h, w) float32 of a group at `times`, and the number (T,) of the store in it that each is of.

        A value is of the first source that holds the instant; where that one has NaN, of the next one.
        """
        rows = len(self.stores[0].latitude)
        columns = len(self.stores[0].longitude)
        values = np.full((len(times), len(group.levels), rows, columns), np.nan, np.float32)
        sources = np.full(len(times), -1)
        for number in group.find_near(times):
            store = group.stores[number]
            here, frames = shared(times, store.times)
            is_lacking = sources[here] < 0
            for index in np.flatnonzero(~is_lacking):
                frame = values[here[index]]
                is_lacking[index] = np.isnan(frame).any()
            here = here[is_lacking]
            if not len(here):
                continue
            read = store.read(group.variable, group.levels, frames[is_lacking])
            is_new = sources[here] < 0
            if not is_new.all():  # what was read before stays, unless it is NaN
                before = values[here]
                read = np.where(np.isnan(before), read, before)
            values[here] = read
            sources[here[is_new]] = number
        return values, sources

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
        stores: Sequence[Store],
    ) -> None:
        """Raise UsageError for fields (T, h, w) that are no data: source, variable, date, place, what it is, mend.

        stores: that they are of.
        """
        # ERA5 has no value outside its range, and what is read here is never looked at again.
        check = ValueCheck([(request.quantity or request.name, request.level)], strict=self.is_era5)
        # A frame that is the same everywhere is noticed where all channels are; one of an unknown channel may be so.
        problem = check.find(fields[:, None])
        if problem is None:
            return
        store = stores[problem.frame]
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

    def __init__(self, addresses: Iterable[Path | str | Store], block: int = 1):
        super().__init__(addresses, ERA5_REQUESTS, block, is_era5=True)


def shared(times: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The dates that are in two increasing arrays: their indices in the first, and in the second."""
    # The fewer dates are looked for among the more.
    if len(times) > len(others):
        places, here = shared(others, times)
        return here, places
    places = np.searchsorted(others, times)
    places = np.minimum(places, len(others) - 1)
    here = np.flatnonzero(others[places] == times)
    return here, places[here]


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
