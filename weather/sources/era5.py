"""Sources of ERA5 as one: frames of our 20 channels at the dates that are asked for."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.fields.channels import CHANNELS, channel_key, value_range
from weather.fields.grid import Grid
from weather.fields.humidity import relative_humidity
from weather.fields.names import describe
from weather.fields.value_check import Key, ValueCheck
from weather.sources.axes import minute
from weather.sources.index import KEPT_BYTES, Index
from weather.sources.store import Store, open_stores


class Era5:
    """Several stores as one: each holds some variables at some times. The first store that holds a value is read.

    addresses: of Zarr stores, NetCDF and GRIB files, or Stores that are open already. block: side of the square blocks
    of points that are averaged; rows left over at the south pole are dropped. kept_bytes: of frames that were decoded
    with others, and are kept for later: 0 where frames are read in any order.
    Attributes: grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError if the stores do not fit together.
    """

    def __init__(
        self,
        addresses: Iterable[Path | str | Store],
        block: int = 1,
        kept_bytes: int = KEPT_BYTES,
    ):
        self.block = block
        self.most_bytes = kept_bytes
        self.stores: list[Store] = []
        for address in addresses:
            opened = [address] if isinstance(address, Store) else open_stores(str(address))
            self.stores.extend(opened)
        self._check_grids()
        first = self.stores[0]
        latitude = block_means(first.latitude, block, -1)
        longitude = block_means(first.longitude, block, -1)
        self.grid = Grid(latitude, longitude)

        # Humidity without units may be a fraction or a percentage: then it is safer to derive it.
        humidity = [field for store in self.stores for field in store.fields.get("r", [])]
        self.derived = not any(field.units for field in humidity)
        self.keys = [channel_key(channel.name) for channel in CHANNELS]
        self.needed: dict[str, list[int | None]] = {}  # quantity: its levels
        for name, level in self.keys:
            is_derived = name == "r" and self.derived
            quantities = ("q", "t") if is_derived else (name,)
            for quantity in quantities:
                levels = self.needed.setdefault(quantity, [])
                if level not in levels:
                    levels.append(level)

    def _check_grids(self) -> None:
        """Raise UsageError for stores on different grids, and for blocks that do not fit theirs."""
        first = self.stores[0]
        for store in self.stores:
            same_rows = _are_close(store.latitude, first.latitude)
            same_columns = _are_close(store.longitude, first.longitude)
            if not (same_rows and same_columns):
                raise UsageError(f"{store.address}: its grid is not that of {first.address}")
        # Rows may be left over, at the south pole; columns may not.
        height = len(first.latitude)
        width = len(first.longitude)
        if self.block < 1 or width % self.block or height < self.block:
            raise UsageError(f"coarsen {self.block}: must divide the {width} longitudes of {first.address}")

    @cached_property
    def index(self) -> Index:
        """Where each quantity lies. Raises UsageError if no store holds a variable or a level."""
        return Index(self.stores, self.needed, self.derived, self.most_bytes)

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no store holds a variable, a level or one of `times` (datetime64[s]), or all of it."""
        self.index.check(times)

    def kept_bytes(self) -> int:
        """The most bytes of decoded frames that are kept, 0 where chunks hold one frame."""
        return self.index.kept_bytes()

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for unphysical values."""
        # What is stored, on the points of the stores: (T, h, w) each.
        fields: dict[Key, np.ndarray] = {}
        for quantity, levels in self.needed.items():
            values, sources = self.index.read(quantity, times)  # (T, L, h, w), (T, L)
            keys: list[Key] = [(quantity, level) for level in levels]
            self._check_values(keys, times, values, sources)
            for number, key in enumerate(keys):
                fields[key] = values[:, number]

        # The channels of it, averaged over blocks: (T, C, H, W).
        height = len(self.grid.latitude)
        width = len(self.grid.longitude)
        out = np.empty((len(times), len(CHANNELS), height, width), np.float32)
        for channel, (name, level) in enumerate(self.keys):
            if name == "r" and level and self.derived:
                field = self._derive_humidity(fields, level, times)
            else:
                field = fields[name, level]
            rows = block_means(field, self.block, -1)
            out[:, channel] = block_means(rows, self.block, -2)
        return out

    def _derive_humidity(
        self,
        fields: dict[Key, np.ndarray],
        level: int,
        times: np.ndarray,
    ) -> np.ndarray:
        """Relative humidity (T, h, w) at a level (hPa). Raises UsageError if it is none."""
        pressure = 100 * level
        field = relative_humidity(fields["q", level], fields["t", level], pressure)
        # Cold air is easily far above saturation, where q is rounded: of single points this says nothing.
        lowest, highest = value_range("r", level)
        limited = np.clip(field, lowest, highest)
        self._check_values([("r", level)], times, limited[:, None])
        return field

    def _check_values(
        self,
        keys: list[Key],
        times: np.ndarray,
        values: np.ndarray,
        sources: np.ndarray | None = None,
    ) -> None:
        """Raise UsageError for values (T, L, h, w) that are no weather: source, quantity, date, place, what it is.

        sources: the numbers (T, L) of the stores that the values are of; None for values that were derived.
        """
        # ERA5 has no value outside its range, and what is read here is never looked at again.
        check = ValueCheck(keys, strict=True)
        problem = check.find(values)
        if problem is None:
            return
        quantity, level = keys[problem.channel]
        what = describe(quantity, level)
        if sources is None:
            what = f"{what}, derived from specific humidity and temperature"
        else:
            number = sources[problem.frame, problem.channel]
            what = f"{self.stores[number].address}: {what}"
        date = minute(times[problem.frame])
        place = f"row {problem.row} from the north, column {problem.column}"
        raise UsageError(f"{what}, {date}: {place} {problem.text}")


def _are_close(axis: np.ndarray, other: np.ndarray) -> bool:
    return len(axis) == len(other) and np.allclose(axis, other, atol=1e-3)


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
