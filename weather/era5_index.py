"""Which source holds which quantity at which instant: found once for all sources, so that a frame costs no search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from utils.errors import UsageError
from weather.channels import QUANTITIES
from weather.era5_axes import minute
from weather.era5_blocks import BlockReader
from weather.era5_store import Store

Needed = Mapping[str, Sequence[int | None]]  # {quantity: its levels in hPa, None for the surface}
SHOWN = 3  # sources in a message


@dataclass(frozen=True)
class Holders:
    """Where the frames of one quantity at one level lie, in the order of their dates.

    times (N,) datetime64[s]; stores (N,), the number of a source; frames (N,), an index of its times. Of sources that
    hold the same instant the first one comes first.
    """

    times: np.ndarray
    stores: np.ndarray
    frames: np.ndarray

    def find(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first entry, number of entries) of each of `times` (T,)."""
        first = np.searchsorted(self.times, times, "left")
        end = np.searchsorted(self.times, times, "right")
        return first, end - first


class Index:
    """The Holders of all needed quantities and levels, and what is read through them.

    Raises UsageError if no source holds one of them, or holds it in other units or dimensions.
    """

    def __init__(self, stores: Sequence[Store], needed: Needed, derived: bool = False):
        self.stores, self.needed, self.derived = stores, needed, derived
        self.blocks = BlockReader(stores, sum(len(levels) for levels in needed.values()))
        self.holders: dict[tuple[str, int | None], Holders] = {}
        self._by_numbers: dict[tuple[int, ...], Holders] = {}
        for quantity, levels in needed.items():
            for level in levels:
                self.holders[quantity, level] = self._find_holders(quantity, level)

    def _find_holders(self, quantity: str, level: int | None) -> Holders:
        numbers = [number for number, store in enumerate(self.stores) if store.holds(quantity, level)]
        if not numbers:
            raise UsageError(f"no source holds {describe(quantity, level)}{self._reason(quantity)}: {self._contents()}")
        # Most quantities lie in the same sources as another one.
        if tuple(numbers) not in self._by_numbers:
            times = np.concatenate([self.stores[number].times for number in numbers])
            lengths = [len(self.stores[number].times) for number in numbers]
            frames = np.concatenate([np.arange(length) for length in lengths])
            order = np.argsort(times, kind="stable")  # of one instant, the first source stays first
            self._by_numbers[tuple(numbers)] = Holders(times[order], np.repeat(numbers, lengths)[order], frames[order])
        return self._by_numbers[tuple(numbers)]

    def _reason(self, quantity: str) -> str:
        """Why humidity is looked for, where it is derived, at the end of a message."""
        if quantity != "q" or not self.derived:
            return ""
        without_units = [store.address for store in self.stores if store.fields.get("r")]
        given = f", as that of {without_units[0]} has no units (%, or 1)" if without_units else ", as there is none"
        return f", from which relative humidity is derived{given}"

    def _contents(self) -> str:
        """What the sources hold, of many the first ones of each kind."""
        kinds: dict[tuple[str, ...], Store] = {}
        for store in self.stores:
            kinds.setdefault((*store.source.variables, str(store.levels)), store)
        texts = [store.describe() for store in list(kinds.values())[:SHOWN]]
        more = len(self.stores) - len(texts)
        return "; ".join(texts) + (f"; and {more} more sources" if more else "")

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no source holds one of `times` (T,), or parts of what will be read are not there."""
        for (quantity, level), holders in self.holders.items():
            _, counts = holders.find(times)
            if (counts == 0).any():
                absent = times[counts == 0]
                many = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
                span = f"{minute(holders.times[0])} to {minute(holders.times[-1])}"
                raise UsageError(
                    f"{describe(quantity, level)}: {minute(absent[0])} is missing{many}, needed are 00, 06, 12, 18 UTC; "
                    f"the sources hold {span}"
                )
        self._check_parts(times)

    def _check_parts(self, times: np.ndarray) -> None:
        """Look for parts that were never written, in the sources that hold an instant alone."""
        parts: dict[int, list[tuple[str, int | None, np.ndarray]]] = {}
        for (quantity, level), holders in self.holders.items():
            first, counts = holders.find(times)
            entries = first[counts == 1]
            numbers, frames = holders.stores[entries], holders.frames[entries]
            for number in np.unique(numbers):
                parts.setdefault(int(number), []).append((quantity, level, frames[numbers == number]))
        # One source after the other, as each may have to be opened again.
        for number in sorted(parts):
            for quantity, level, frames in parts[number]:
                self.stores[number].check(quantity, [level], frames)

    def kept_bytes(self) -> int:
        """The most bytes of decoded frames that are kept, 0 where no chunk holds more than one frame."""
        most = 1
        for (quantity, level), holders in self.holders.items():
            for number in np.unique(holders.stores):
                most = max(most, self.stores[number].chunk_frames(quantity, level))
        return self.blocks.kept_bytes(most)

    def _entries(self, quantity: str, levels: Sequence[int | None], times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first entry, number of entries) in the Holders of each level, both (T, L)."""
        found = [self.holders[quantity, level].find(times) for level in levels]
        return np.stack([first for first, _ in found], 1), np.stack([count for _, count in found], 1)

    def read(self, quantity: str, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (T, L, H, W) float32 at all needed levels, and the source (T, L) of each.

        A value is of the first source that holds the instant; where that one has NaN, of the next one.
        """
        levels = self.needed[quantity]
        first, counts = self._entries(quantity, levels, times)
        store = self.stores[0]
        values = np.empty((len(times), len(levels), len(store.latitude), len(store.longitude)), np.float32)
        sources = np.empty(first.shape, int)
        for attempt in range(counts.max()):
            wanted = counts > attempt
            if attempt > 0:
                wanted &= np.isnan(values).any((-2, -1))
            if not wanted.any():
                break
            self._read_entries(quantity, first + attempt, wanted, values, sources if attempt == 0 else None)
        return values, sources

    def _read_entries(
        self, quantity: str, entries: np.ndarray, wanted: np.ndarray, values: np.ndarray, sources: np.ndarray | None
    ) -> None:
        """Fill `values` where `wanted` (T, L), from entries (T, L) of the Holders.

        sources: filled too at the first attempt; None at later ones, which replace NaN alone.
        """
        levels = self.needed[quantity]
        numbers, frames = np.full(entries.shape, -1), np.zeros(entries.shape, int)
        for i, level in enumerate(levels):
            rows = wanted[:, i]
            holders = self.holders[quantity, level]
            numbers[rows, i] = holders.stores[entries[rows, i]]
            frames[rows, i] = holders.frames[entries[rows, i]]
        for number in np.unique(numbers[wanted]):
            chosen = wanted & (numbers == number)
            rows, columns = np.flatnonzero(chosen.any(1)), np.flatnonzero(chosen.any(0))
            of_rows = frames[rows].max(1, where=chosen[rows], initial=0)  # one frame for all levels of an instant
            read = self.blocks.read(int(number), quantity, [levels[i] for i in columns], of_rows)
            for k, i in enumerate(columns):
                here = chosen[rows, i]
                target = rows[here]
                if sources is not None:
                    values[target, i] = read[here, k]
                    sources[target, i] = number
                else:
                    before = values[target, i]
                    values[target, i] = np.where(np.isnan(before), read[here, k], before)


def describe(quantity: str, level: float | None) -> str:
    """A quantity at a level, by the two names that it is best known by."""
    names = " or ".join(QUANTITIES[quantity].names[:2])
    return names if level is None else f"{names} at {level} hPa"
