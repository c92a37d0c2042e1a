"""Where the bytes of chunks come from: a store in a folder. remote_store.py has stores that are elsewhere."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np


class Place(NamedTuple):
    """Bytes of an object of a store: all of them, or `length` from `first` on; from the end, if `first` is negative."""

    key: str
    first: int = 0
    length: int | None = None


# What is done with the bytes at a place: they are decoded. It raises where they cannot be what was asked for.
Use = Callable[[memoryview], None]


def take_any(content: memoryview) -> None:
    """The use of bytes that may be anything."""


class ChunkSource(Protocol):
    """A store, as chunk_reader.py reads it."""

    def read_all(self, places: Sequence[Place], uses: Sequence[Use]) -> Iterator[None]:
        """Read the bytes at these places, and give each to its use, in any thread; yields as each is done, in order.

        Raises FileNotFoundError, and what a use raises.
        """

    def names(self, prefix: str) -> set[str] | None:
        """The names of all objects below a folder; None where the store cannot be listed."""


class ThreadBuffers(threading.local):
    """Memory of a thread, by purpose, that is kept and used again: new memory of this size costs as much as a read."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}

    def take(self, purpose: str, length: int) -> memoryview:
        """So many bytes, of any content, valid until the thread asks again."""
        # The largest buffer that was needed so far: chunks differ little in length.
        kept = self.buffers.get(purpose)
        if kept is None or len(kept) < length:
            kept = np.empty(length, np.uint8)
            self.buffers[purpose] = kept
        return kept.data[:length]


class LocalChunks:
    """A store in a folder: each object is a file. A read costs little, and a part is read without the rest of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.buffers = ThreadBuffers()

    def read_all(self, places: Sequence[Place], uses: Sequence[Use]) -> Iterator[None]:
        """As ChunkSource says, one after the other."""
        for (key, first, length), use in zip(places, uses, strict=True):
            with open(self.folder / key, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                # A place that is counted from the end: the index of a shard.
                begin = first if first >= 0 else size + first
                wanted = size - begin if length is None else length
                view = self.buffers.take("encoded", wanted)
                fill(file.fileno(), begin, view)
            use(view)
            yield

    def read_into(self, key: str, first: int, out: memoryview) -> None:
        """Fill `out` from a position in an object on. Raises FileNotFoundError, and EOFError at the object's end."""
        # To open a file takes microseconds. To keep thousands open takes more descriptors than a process has.
        with open(self.folder / key, "rb", buffering=0) as file:
            fill(file.fileno(), first, out)

    def names(self, prefix: str) -> set[str]:
        """As ChunkSource says."""
        # One walk costs less than a question for each of thousands of chunks.
        found: set[str] = set()
        for folder, _, files in os.walk(self.folder / prefix):
            relative = Path(folder).relative_to(self.folder).as_posix()
            found.update(f"{relative}/{name}" for name in files)
        return found


def fill(descriptor: int, position: int, view: memoryview) -> None:
    """Fill memory from a position in a file on. Raises EOFError where the file ends before."""
    while view:  # nearly always one read
        count = os.preadv(descriptor, [view], position)
        if count == 0:
            raise EOFError("the file was truncated")
        view = view[count:]
        position = position + count
