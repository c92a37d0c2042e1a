"""Sources of ERA5 as one: frames of our 20 channels at the dates that are asked for."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from utils.errors import UsageError
from weather.channels import CHANNELS, QUANTITIES, channel_key
from weather.era5_store import Store, relative_humidity, units_of
from weather.grid import Grid


class Era5:
    """Several stores as one: each holds some variables at some times. The first store that holds a value is read.

    addresses: of Zarr stores and NetCDF files, or Stores that are open already. block: side of the square blocks of
    points that are averaged; rows left over at the south pole are dropped.
    Attributes: grid, averaged too; derived: whether relative humidity is derived.
    Raises UsageError if the stores do not fit together.
    """

    def __init__(self, addresses: Iterable[Path | str | Store], block: int = 1):
        self.block = block
        self.stores: list[Store] = []
        for address in addresses:
            self.stores.append(address if isinstance(address, Store) else Store(str(address)))
        first = self.stores[0]
        self.points = len(first.latitude), len(first.longitude)
        for store in self.stores:
            axes = (store.latitude, first.latitude), (store.longitude, first.longitude)
            if not all(len(own) == len(other) and np.allclose(own, other, atol=1e-3) for own, other in axes):
                raise UsageError(f"{store.address}: its grid is not that of {first.address}")
        if block < 1 or self.points[1] % block or self.points[0] < block:
            raise UsageError(f"coarsen {block}: must divide the {self.points[1]} longitudes of {first.address}")
        self.grid = Grid(*(block_means(x, block, -1) for x in (first.latitude, first.longitude)))

        humidity = [store.variable("r") for store in self.stores]
        self.derived = not any(variable is not None and units_of(variable) for variable in humidity)
        self.keys = [channel_key(channel.name) for channel in CHANNELS]
        self.needed: dict[str, list[int | None]] = {}  # quantity: its levels
        for name, level in self.keys:
            for quantity in ("q", "t") if name == "r" and self.derived else (name,):
                levels = self.needed.setdefault(quantity, [])
                levels += [level] * (level not in levels)

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no store holds a variable, a level or one of `times` (datetime64[s])."""
        for quantity, levels in self.needed.items():
            for level in levels:
                what, holders = _describe(quantity, level), [s for s in self.stores if s.holds(quantity, level)]
                if not holders:
                    raise UsageError(f"no source holds {what}")
                found = np.max([store.times.get_indexer(times) for store in holders], axis=0) >= 0  # -1: not there
                if not found.all():
                    first = _minute(times[~found][0])
                    raise UsageError(f"{what}: {first} is missing, needed are 00, 06, 12, 18 UTC")

    def frames(self, times: np.ndarray) -> np.ndarray:
        """Read frames (T, C, H, W) float32 at `times`, after `check`. Raises UsageError for unphysical values."""
        fields: dict[tuple[str, int | None], np.ndarray] = {}
        for quantity, levels in self.needed.items():
            values = self._read(quantity, levels, times)
            _check_values(quantity, levels, times, values)
            fields |= {(quantity, level): values[:, i] for i, level in enumerate(levels)}  # (T, h, w)
        out = np.empty((len(times), len(CHANNELS), *map(len, self.grid)), np.float32)
        for channel, (name, level) in enumerate(self.keys):
            if name == "r" and level and self.derived:
                field = relative_humidity(fields["q", level], fields["t", level], 100 * level)
            else:
                field = fields[name, level]
            out[:, channel] = block_means(block_means(field, self.block, -1), self.block, -2)
        return out

    def _read(self, quantity: str, levels: Sequence[int | None], times: np.ndarray) -> np.ndarray:
        """(T, L, h, w) on the points of the stores, each value from the first store that holds it."""
        out = np.empty((len(times), len(levels), *self.points), np.float32)
        todo = np.ones((len(times), len(levels)), bool)
        for store in self.stores:
            here = [i for i, level in enumerate(levels) if store.variable(quantity, level) is not None]
            frames = store.times.get_indexer(times)
            rows = np.flatnonzero((frames >= 0) & todo[:, here].any(1))
            if len(rows):
                values = store.read(quantity, [levels[i] for i in here], frames[rows])
                for k, i in enumerate(here):
                    wanted = todo[rows, i]
                    out[rows[wanted], i] = values[wanted, k]
                    todo[rows, i] = False
        return out


def block_means(values: np.ndarray, block: int, axis: int) -> np.ndarray:
    """Averages over blocks of `block` points along an axis; points left over at its end are dropped."""
    if block == 1:
        return values
    values = np.moveaxis(values, axis, -1)
    values = values[..., : values.shape[-1] // block * block].reshape(*values.shape[:-1], -1, block)
    return np.moveaxis(values.mean(-1), -1, axis)


def _check_values(quantity: str, levels: Sequence[int | None], times: np.ndarray, values: np.ndarray) -> None:
    """Raises UsageError for NaN and for a value outside the physical range (a fill value, other units)."""
    units, _, _, lowest, highest = QUANTITIES[quantity]
    sound = (values >= lowest) & (values <= highest)  # false for NaN
    if not sound.all():
        index = tuple(np.argwhere(~sound)[0])
        value, where = values[index], f"{_describe(quantity, levels[index[1]])}, {_minute(times[index[0]])}"
        what = "NaN" if np.isnan(value) else f"{value:g}, outside {lowest:g} to {highest:g} {units}"
        raise UsageError(f"{where}: row {index[2]} from the north, column {index[3]} is {what}")


def _describe(quantity: str, level: int | None) -> str:
    return " or ".join(QUANTITIES[quantity].names) + ("" if level is None else f" at {level} hPa")


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))
