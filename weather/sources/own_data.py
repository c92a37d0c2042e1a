"""A user's own sources as one: frames of the channels that were asked for, at the dates that all of them have."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from utils.errors import UsageError
from weather.fields.channels import Channel
from weather.fields.grid import Grid
from weather.fields.requests import Request
from weather.fields.value_check import ValueCheck
from weather.sources.axes import minute
from weather.sources.era5 import block_means
from weather.sources.index import Index
from weather.sources.own_store import check_same_grid, open_own_stores

EVERY_FRAME = np.timedelta64(1, "s")
FILL = (
    "fill such values first (xarray: fillna, interpolate_na), or take a region without them; a missing value that the "
    "file does not state belongs into its attribute _FillValue"
)


class OwnData:
    """Several sources as one. The first that holds a value is read.

    addresses: of NetCDF and GRIB files and Zarr stores. requests: the channels, in their order. block: side of the
    square blocks of points that are averaged; rows and columns left over at the south and the east are dropped.
    Attributes: channels, with units; grid, averaged too; dates, (T,) datetime64[s], at which all channels are there.
    Raises UsageError, naming source, variable and what to do, where they are no such data.
    """

    def __init__(self, addresses: Sequence[str], requests: Sequence[Request], block: int = 1):
        self.requests = requests
        self.block = block
        # Points are averaged after reading, so that all sources have one grid first.
        self.stores = open_own_stores(addresses, requests)
        check_same_grid(self.stores)
        latitude = block_means(self.stores[0].latitude, block, -1)
        longitude = block_means(self.stores[0].longitude, block, -1)
        # A patch needs neighbours, and so do the weights of rows.
        if min(len(latitude), len(longitude)) < 2:
            raise UsageError(f"coarsen {block}: leaves {len(latitude)} x {len(longitude)} points of {addresses[0]}")
        self.grid = Grid(latitude, longitude)
        self._check_requests()
        self.channels = [self._describe(request) for request in requests]
        self.index = self._make_index()
        self.dates = self._common_dates()

    def _check_requests(self) -> None:
        """Raise UsageError where no source holds a channel."""
        for request in self.requests:
            name = request.variable
            holders = [store for store in self.stores if store.holds(name, request.level)]
            if holders:
                continue
            # Of several sources the one that has the variable says more.
            near = [store for store in self.stores if store.fields.get(name)]
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
            if store.fields.get(request.variable):
                units.setdefault(store.units(request.variable), store.address)
        if len(units) > 1:
            listed = " and ".join(f"'{unit}' in {address}" for unit, address in units.items())
            raise UsageError(f"{request.variable} has the units {listed}: bring them into one")
        return known._replace(units=next(iter(units)))

    def _make_index(self) -> Index:
        # All levels of a variable are read at once.
        needed: dict[str, list[float | None]] = {}
        for request in self.requests:
            levels = needed.setdefault(request.variable, [])
            levels.append(request.level)
        return Index(self.stores, needed, step=EVERY_FRAME)

    def _common_dates(self) -> np.ndarray:
        times = [np.unique(holders.times) for holders in self.index.holders.values()]
        # A frame needs all of its channels.
        common = reduce(np.intersect1d, times)
        addresses = ", ".join(dict.fromkeys(store.address for store in self.stores))
        if not len(common):
            spans = []
            for (variable, _), dates in zip(self.index.holders, times, strict=True):
                spans.append(f"{variable} {minute(dates[0])} to {minute(dates[-1])}")
            raise UsageError(f"{addresses}: no date has all variables: {'; '.join(spans)}")
        # Dates that some variables lack are told, since a gap in time breaks samples.
        most = max(len(dates) for dates in times)
        if len(common) < most:
            print(f"{len(common)} of {most} dates have all variables: the others are left out")
        return common

    def check(self) -> None:
        """Raises UsageError where parts of what will be read were never written."""
        self.index.check(self.dates)

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at some of the dates. Raises UsageError for values that are no data."""
        height = len(self.grid.latitude)
        width = len(self.grid.longitude)
        # (T, C, H, W), filled channel by channel
        out = np.empty((len(times), len(self.requests), height, width), np.float32)
        for variable, levels in self.index.needed.items():
            values, sources = self.index.read(variable, times)  # (T, L, h, w), (T, L)
            for number, level in enumerate(levels):
                channel = self._channel_of(variable, level)
                fields = values[:, number]
                self._check_values(channel, times, fields, sources[:, number])
                rows = block_means(fields, self.block, -1)
                out[:, channel] = block_means(rows, self.block, -2)
        return out

    def _channel_of(self, variable: str, level: float | None) -> int:
        keys = [(request.variable, request.level) for request in self.requests]
        return keys.index((variable, level))

    def _check_values(self, channel: int, times: np.ndarray, fields: np.ndarray, sources: np.ndarray) -> None:
        """Raise UsageError for fields (T, h, w) of a channel that are no data: source, variable, date, place, mend."""
        request = self.requests[channel]
        check = ValueCheck([(request.quantity or request.name, request.level)])
        # A frame that is the same everywhere is noticed where all channels are; one of an unknown channel may be so.
        problem = check.find(fields[:, None])
        if problem is None:
            return
        # The message names the variable as the file calls it, where its reader will look.
        store = self.stores[sources[problem.frame]]
        name = store.fields[request.variable][0].name
        field = fields[problem.frame]
        date = minute(times[problem.frame])
        where = f"{store.address}: {name}, {date}"
        # A whole field of NaN was never written; some points are often land.
        if np.isnan(field).all():
            raise UsageError(f"{where}: is NaN at every point: was it never written? Leave it out, or {FILL}")
        mend = FILL if not np.isfinite(field).all() or "fill value" in problem.text else self._mend(request)
        place = f"row {problem.row} from the north, column {problem.column}"
        raise UsageError(f"{where}: {place} {problem.text} ({mend})")

    def _mend(self, request: Request) -> str:
        if not request.quantity:
            return "leave the variable, or these frames, out"
        # A name of ours for another quantity is the likely slip.
        other = f"--variables NAME={request.variable}"
        return f"write its true units, or convert it; if it is something else than {request.name}, name it: {other}"
