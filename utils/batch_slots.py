"""Buffers that samples are read into: a ring of them for each task, shared by its loaders, pinned for a GPU.

Only one pass over the data reads at a time. Validation begins while training has batches read ahead; it takes the
buffers, and training reads those samples again afterwards.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from utils.device import empty_host_cache


class Reader(Protocol):
    """A pass over the data that reads into the slots."""

    def stop(self) -> None:
        """Return when nothing writes into a slot any more; what was read ahead is forgotten."""


class Slot:
    """A reused batch buffer, float32. numbers: how many it holds. pinned: its batches are copied to a GPU."""

    def __init__(self, numbers: int, pinned: bool):
        self.memory = torch.empty(numbers, dtype=torch.float32, pin_memory=pinned)
        self.tensor = self.memory  # the batch that it holds, (B, n + k, C, h, w)
        self.samples: np.ndarray = np.empty(0)  # numbers of those that it holds
        self.reads: list[Future[None]] = []
        self.copied: torch.Event | None = None  # the copy to the device is done, the buffer may be filled again


class SlotRing:
    """The slots of several loaders. They are allocated when one of them first reads."""

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.slots: list[Slot] = []
        self.numbers = self.count = 0  # of a slot, and of slots
        self.reader: Reader | None = None
        self.loaders = 0

    def join(self, shape: Sequence[int], count: int) -> None:
        """A loader shares the ring from now on. shape: of its largest batch. count: of slots that it reads into."""
        self.loaders += 1
        # Slots fit the largest batch of all loaders, and are made anew for it.
        self.numbers = max(self.numbers, math.prod(shape))
        self.count = max(self.count, count)
        self.slots.clear()

    def leave(self) -> None:
        """A loader reads no more; with the last one the memory goes back to the system."""
        self.loaders -= 1
        # The last loader that leaves gives the memory back.
        if self.loaders == 0 and self.slots:
            self.slots.clear()
            if self.pinned:
                empty_host_cache()

    def claim(self, reader: Reader) -> bool:
        """Let a reader have all slots; returns whether they were another's, who is stopped."""
        if self.reader is reader:
            return False
        # Whoever read before must not write into the slots any more.
        if self.reader is not None:
            self.reader.stop()
        self.reader = reader
        # Memory is taken as late as possible: a run that only resumes to its end needs none.
        if not self.slots:
            self.slots = [Slot(self.numbers, self.pinned) for _ in range(self.count)]
        return True

    def release(self, reader: Reader) -> None:
        """A reader has ended."""
        if self.reader is reader:
            self.reader = None
