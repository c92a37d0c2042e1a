"""Which source holds which quantity at which instant: found once for all sources, so that a frame costs no search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from utils.errors import UsageError
from weather.fields.channels import describe
from weather.fields.dates import minute
from weather.sources.blocks import BlockReader
from weather.sources.store import Store, describe_stores

Needed = Mapping[str, Sequence[float | None]]  # {quantity: its levels in hPa, None for the surface}
SHOWN = 3  # sources in a message


@dataclass(frozen=True, eq=False)
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

    derived: humidity is derived, of which messages speak. step: as for a BlockReader.
    Raises UsageError if no source holds one of them, or holds it in other units or dimensions.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        needed: Needed,
        derived: bool,
        kept_bytes: int,
        step: np.timedelta64,
    ):
        self.stores = stores
        self.needed = needed
        self.derived = derived
        # A frame has a field for each quantity at each level.
        fields = sum(len(levels) for levels in needed.values())
        self.blocks = BlockReader(stores, fields, kept_bytes, step)
        self.holders: dict[tuple[str, float | None], Holders] = {}
        self._by_numbers: dict[tuple[int, ...], Holders] = {}
        for quantity, levels in needed.items():
            for level in levels:
                self.holders[quantity, level] = self._find_holders(quantity, level)

    def _find_holders(self, quantity: str, level: float | None) -> Holders:
        numbers = []
        for number, store in enumerate(self.stores):
            if store.holds(quantity, level):
                numbers.append(number)
        if not numbers:
            what = describe(quantity, level)
            reason = self._describe_reason(quantity)
            held = self._describe_sources()
            raise UsageError(f"no source holds {what}{reason}: {held}")
        # Most quantities lie in the same sources as another one.
        key = tuple(numbers)
        if key not in self._by_numbers:
            self._by_numbers[key] = self._merge_times(numbers)
        return self._by_numbers[key]

    def _merge_times(self, numbers: list[int]) -> Holders:
        """The Holders of what lies in the sources of these numbers."""
        # One table of all frames: date, source, index in the source; sorted by date.
        times = []
        stores = []
        frames = []
        for number in numbers:
            count = len(self.stores[number].times)
            times.append(self.stores[number].times)
            stores.append(np.full(count, number))
            frames.append(np.arange(count))
        all_times = np.concatenate(times)
        order = np.argsort(all_times, kind="stable")  # of one instant, the first source stays first
        return Holders(
            all_times[order],
            np.concatenate(stores)[order],
            np.concatenate(frames)[order],
        )

    def _describe_reason(self, quantity: str) -> str:
        """Why specific humidity is looked for, as a part of a message."""
        if quantity != "q" or not self.derived:
            return ""
        reason = "from which relative humidity is derived"
        for store in self.stores:
            if store.fields.get("r"):
                return f", {reason}, as that of {store.address} has no units (%, or 1)"
        return f", {reason}, as there is none"

    def _describe_sources(self) -> str:
        """What the sources hold, of many the first ones of each kind."""
        by_address: dict[str, list[Store]] = {}
        for store in self.stores:
            of_address = by_address.setdefault(store.address, [])
            of_address.append(store)
        # Files for other months hold the same variables, and are one kind.
        kinds: dict[tuple[str, ...], list[Store]] = {}
        for stores in by_address.values():
            kind = [f"{sorted(store.source.variables)} {store.levels}" for store in stores]
            kinds.setdefault(tuple(kind), stores)
        shown = list(kinds.values())[:SHOWN]
        text = "; ".join(describe_stores(stores) for stores in shown)
        more = len(by_address) - len(shown)
        return f"{text}; and {more} more sources" if more else text

    def check(self, times: np.ndarray) -> None:
        """Raises UsageError if no source holds one of `times` (T,), or parts of what will be read are not there."""
        for (quantity, level), holders in self.holders.items():
            _, counts = holders.find(times)
            absent = times[counts == 0]
            if len(absent):
                what = describe(quantity, level)
                more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
                first = minute(holders.times[0])
                last = minute(holders.times[-1])
                raise UsageError(
                    f"{what}: {minute(absent[0])} is missing{more}, needed are 00, 06, 12, 18 UTC; "
                    f"the sources hold {first} to {last}"
                )
        self._check_parts(times)

    def _check_parts(self, times: np.ndarray) -> None:
        """Look for parts that were never written, in the sources that hold an instant alone."""
        parts: dict[int, list[tuple[str, float | None, np.ndarray]]] = {}
        for (quantity, level), holders in self.holders.items():
            first, counts = holders.find(times)
            # Where another source holds the instant too, NaN may stand in this one.
            entries = first[counts == 1]
            numbers = holders.stores[entries]
            frames = holders.frames[entries]
            for number in np.unique(numbers):
                of_store = parts.setdefault(int(number), [])
                of_store.append((quantity, level, frames[numbers == number]))
        # One source after the other, as each may have to be opened again.
        for number in sorted(parts):
            for quantity, level, frames in parts[number]:
                self.stores[number].check(quantity, level, frames)

    def kept_bytes(self) -> int:
        """The most bytes of decoded frames that are kept, 0 where no chunk holds more than one frame."""
        most = 1
        for (quantity, level), holders in self.holders.items():
            for number in np.unique(holders.stores):
                chunk = self.stores[number].chunk_frames(quantity, level)
                most = max(most, chunk)
        return self.blocks.kept_bytes(most)

    def read(
        self,
        quantity: str,
        times: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values (T, L, H, W) float32 at all needed levels, and the number of the source (T, L) of each.

        A value is of the first source that holds the instant; where that one has NaN, of the next one.
        """
        levels = self.needed[quantity]
        shape = len(times), len(levels)
        rows = len(self.stores[0].latitude)
        columns = len(self.stores[0].longitude)
        values = np.empty((*shape, rows, columns), np.float32)
        sources = np.full(shape, -1)
        # Levels that lie in the same sources are read at once.
        places: dict[Holders, list[int]] = {}
        for place, level in enumerate(levels):
            places.setdefault(self.holders[quantity, level], []).append(place)
        for holders, of_levels in places.items():
            first, counts = holders.find(times)
            # First the first source of each instant, then others for what is NaN.
            for attempt in range(counts.max()):
                wanted = counts > attempt
                if attempt > 0:
                    wanted &= np.isnan(values[:, of_levels]).any((1, 2, 3))
                frames = np.flatnonzero(wanted)
                entries = first[frames] + attempt
                for number in np.unique(holders.stores[entries]).tolist():
                    is_here = holders.stores[entries] == number
                    of_store = holders.frames[entries[is_here]]
                    read = self.blocks.read(number, quantity, [levels[i] for i in of_levels], of_store)
                    here = np.ix_(frames[is_here], of_levels)
                    if attempt > 0:  # what was read before stays, unless it is NaN
                        before = values[here]
                        read = np.where(np.isnan(before), read, before)
                    else:
                        sources[here] = number
                    values[here] = read
        return values, sources
