"""Decoded frames, kept while a conversion needs them: a chunk of a store may hold many, and is decoded as a whole.

A store in chunks of 240 hours would be decoded 40 times for its 40 six-hourly frames. So all frames of a chunk that a
conversion will ask for are read at once, as many as fit into a bound on memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weather.sources.store import Store

Levels = tuple[float | None, ...]
Place = tuple[int, str, Levels]  # number of a store, quantity, levels
NONE = np.timedelta64(0, "s")


@dataclass(frozen=True)
class Block:
    """Frames of a quantity: their indices in the store, increasing, and the values (N, L, H, W)."""

    frames: np.ndarray
    values: np.ndarray


class BlockReader:
    """Reads frames of stores, and keeps what was decoded with them.

    fields: number of fields (quantities at levels) of one frame, so that blocks of all of them are within `most` bytes;
    with 0 nothing is kept, and several threads may read.
    step: from one frame to the next that will be asked for; every frame, where it is a second.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        fields: int,
        most: int,
        step: np.timedelta64,
    ):
        self.stores = stores
        self.most = most
        self.step = step
        points = len(stores[0].latitude) * len(stores[0].longitude)
        self.frame_bytes = 4 * fields * points
        self.most_frames = max(1, most // self.frame_bytes)
        self.blocks: OrderedDict[Place, Block] = OrderedDict()

    def kept_bytes(self, chunk: int) -> int:
        """The most bytes that are kept if chunks hold `chunk` frames; 0 for chunks of one frame."""
        if chunk == 1:
            return 0
        # All fields of these frames are kept at a time.
        frames = min(self.most_frames, chunk)
        return frames * self.frame_bytes

    def read(
        self,
        number: int,
        quantity: str,
        levels: Sequence[float | None],
        frames: np.ndarray,
    ) -> np.ndarray:
        """(T, L, H, W) float32 of store `number`, as Store.read, at increasing indices of times."""
        store = self.stores[number]
        chunk = store.chunk_frames(quantity, levels[0])
        if chunk == 1 or not self.most:
            return store.read(quantity, levels, frames)
        place = number, quantity, tuple(levels)
        parts = []
        left = frames
        while len(left):
            block = self._block(place, left, chunk)
            # The block holds the first of them, and some that follow.
            is_inside = np.isin(left, block.frames)
            count = len(left) if is_inside.all() else int(np.argmin(is_inside))
            rows = np.searchsorted(block.frames, left[:count])
            parts.append(block.values[rows])
            left = left[count:]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block(self, place: Place, frames: np.ndarray, chunk: int) -> Block:
        """The kept block that holds the first of `frames`, or a new one of frames of its chunk."""
        kept = self.blocks.pop(place, None)
        is_kept = kept is not None and frames[0] in kept.frames
        if kept is None or not is_kept:
            kept = None  # its memory is free before the next block is read
            number, quantity, levels = place
            store = self.stores[number]
            wanted = self._frames_ahead(store, frames, chunk)
            values = store.read(quantity, levels, wanted)
            kept = Block(wanted, values)
        self.blocks[place] = kept  # the last one: used most recently
        self._forget()
        return kept

    def _frames_ahead(self, store: Store, frames: np.ndarray, chunk: int) -> np.ndarray:
        """Frames of the chunk of the first one: those asked for, and those that lie whole steps behind it."""
        first = int(frames[0])
        end = (first // chunk + 1) * chunk
        dates = store.times[first:end]
        is_wanted = (dates - dates[0]) % self.step == NONE
        asked = frames[frames < end]
        is_wanted[asked - first] = True
        wanted = first + np.flatnonzero(is_wanted)
        return wanted[: self.most_frames]

    def _forget(self) -> None:
        """Drop the blocks that were not used for longest, until the others are within the bound."""
        total = sum(block.values.nbytes for block in self.blocks.values())
        while total > self.most and len(self.blocks) > 1:
            _, dropped = self.blocks.popitem(last=False)
            total -= dropped.values.nbytes
