"""Batches of normalised samples on the device: the interface of all data loaders, and the native loader.

The native loader's threads read samples straight into the batch buffers of a small ring. A batch for a GPU is copied
from pinned memory on a side stream, while the previous step computes, and normalised there in one pass. On the CPU the
buffer itself is normalised, and is the batch.

Each task has one ring of buffers, shared by its loaders. Only one pass over the data reads at a time. Validation begins
while training has batches read ahead; it takes the buffers, and training reads those samples again afterwards.
"""

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from utils import comm
from utils.agreement import Vote
from utils.device import device_module, empty_host_cache
from utils.errors import ConnectionLostError
from utils.sample_order import ChannelStatistics, Dataset, ForcingChannels, Order


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


AHEAD = 2  # batches that a GPU has not done with when the next one is made
Batch = tuple[Tensor, Tensor]  # (input, target)
T = TypeVar("T")


@dataclass(eq=False)
class BatchLoader:
    """Normalised batches of a data set (utils/sample_order.py): inputs (B, n n_in, h, w), targets (B, k n_out, h, w).

    The input holds n frames, the present one first, then the earlier ones. The target holds the k steps of a forecast,
    one after the other. Forcings of k steps follow the input's channels.
    A batch is valid until the next one is requested: its memory is used again.
    statistics: of the dataset's channels. batch_size: samples of this rank; the ranks' batches side by side are the
    batch of a single process, and with several micro_batches (of a training step) their i-th ones side by side are its
    i-th one. num_workers: threads or processes that read ahead. forcings: further inputs, None for
    none. stages: the steps of a forecast, see sample_order.Order. frames: of the input.
    Subclasses implement `_batches`.
    """

    dataset: Dataset
    statistics: ChannelStatistics
    n_in: int
    n_out: int
    batch_size: int
    device: torch.device
    num_workers: int = 0
    forcings: ForcingChannels | None = None
    stages: Sequence[tuple[int, int]] = ((0, 1),)
    frames: int = 1
    micro_batches: int = 1
    vote: Vote = field(default_factory=Vote, init=False)  # of all ranks, where they read what can be lost

    @property
    def num_samples(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)

    def train(
        self,
        seed: int,
        start: int,
        stop: int,
    ) -> Generator[Batch, None, None]:
        """Batches of the training steps start, ..., stop - 1."""
        yield from self._paced(self._shared_batches(self.order(seed), range(start, stop)))

    def valid(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Every sample once over all ranks, as (input, target, count): only the first `count` of a batch are new.

        The last batch is filled up with repeated samples, so that every batch has the same shape; a rank's count may
        be 0 there.
        """
        order = self.order()
        # Ranks have as many batches, so that they meet in the same collectives.
        counts = order.counts()
        batches = self._paced(self._shared_batches(order, range(len(counts))))
        for (x, y), count in zip(batches, counts, strict=True):
            yield x, y, count

    def check_finite(self, samples: Iterable[int]) -> None:
        """Raise UsageError where one of these samples holds a value that is not finite."""
        for index in samples:
            self.dataset.check_finite(index)

    def listing(self) -> dict[str, str]:
        """{name: what this rank sees of it} of the files."""
        return self.dataset.listing()

    def close(self) -> None:
        """Close the files and end what reads from them."""
        self.dataset.close()

    def share_memory_with(self, other: "BatchLoader") -> None:
        """Use the buffers of another loader, one at a time, where both have buffers of the same kind."""

    def order(self, seed: int | None = None) -> Order:
        """Samples that this rank reads in each iteration of training, or of validation if there is no seed."""
        return Order(
            num_samples=self.num_samples,
            batch_size=self.batch_size,
            rank=comm.get_rank("dp"),
            ranks=comm.get_size("dp"),
            seed=seed,
            stages=self.stages,
            inputs=self.frames,
            micro_batches=self.micro_batches,
        )

    def _paced(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with the host at most AHEAD of the device: each batch takes memory there."""
        gpu = device_module(self.device, "current_stream")
        if gpu is None:
            yield from batches
            return
        # Without a limit the host would queue batches until the memory is full.
        used = deque[torch.Event]()
        for batch in batches:
            yield batch
            used.append(gpu.current_stream(self.device).record_event())
            if len(used) > AHEAD:
                used.popleft().synchronize()

    def _batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        """One (input, target) for each of `iterations`, a range, of the samples that `order` gives."""
        raise NotImplementedError

    def _shared_batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        """As _batches; where several ranks train on the same samples, the first one reads and broadcasts them."""
        # Ranks of a model, and those of the members of a sample, share samples: reading them once is enough.
        group = comm.get_group("same_data")
        if comm.get_size("same_data") == 1:
            yield from self._read_together(self._batches(order, iterations))
        elif reads_samples():
            for x, y in self._read_together(self._batches(order, iterations)):
                x = x.contiguous()
                y = y.contiguous()
                dist.broadcast(x, group=group, group_src=0)
                dist.broadcast(y, group=group, group_src=0)
                yield x, y
        else:
            h, w = self.dataset.shape[2:]
            # This rank knows the shapes, and receives the values.
            for steps in self._read_together(map(order.steps, iterations)):
                forced = self.forcings.channels(steps) if self.forcings else 0
                inputs = self.frames * self.n_in + forced
                outputs = steps * self.n_out
                x = torch.empty(self.batch_size, inputs, h, w, dtype=torch.float32, device=self.device)
                y = torch.empty(self.batch_size, outputs, h, w, dtype=torch.float32, device=self.device)
                dist.broadcast(x, group=group, group_src=0)
                dist.broadcast(y, group=group, group_src=0)
                yield x, y

    def _read_together(self, batches: Iterator[T]) -> Iterator[T]:
        """The batches, each when all ranks have theirs; ConnectionLostError on all ranks where one has lost its source.

        A rank without a batch could not take part in the step, and the others would wait for it there. So those who
        read what can be lost agree first: one number, summed over all ranks on the host.
        """
        can_be_lost = getattr(self.dataset, "is_remote", False)
        if not can_be_lost or comm.world_size() == 1:
            yield from batches
            return
        while True:
            lost: ConnectionLostError | None = None
            batch: T | None = None
            try:
                batch = next(batches, None)
            except ConnectionLostError as error:
                lost = error
            # All ranks leave here together, or none.
            if self.vote(lost is not None):
                raise next(filter(None, comm.gather(lost)))
            if batch is None:  # every rank has as many
                return
            yield batch

    def _split(self, frames: Tensor, samples: np.ndarray) -> Batch:
        """Input and target of normalised samples (B, n + k, C, h, w) of these numbers."""
        n = self.frames
        x = frames[:, :n, : self.n_in]  # (B, n, n_in, h, w), the present frame last
        y = frames[:, n:, : self.n_out].flatten(1, 2)  # (B, k n_out, h, w)
        # The present frame comes first; a single one needs no copy.
        x = x.flip(1).flatten(1, 2) if n > 1 else x[:, 0]  # (B, n n_in, h, w)
        if self.forcings:
            steps = frames.shape[1] - n
            dates = self.dataset.dates(samples, steps)  # (B, k)
            x = torch.cat([x, self.forcings(dates)], 1)
        return x, y


def reads_samples() -> bool:
    """Tell whether this rank reads. Of the ranks that train on the same samples only the first one does."""
    return comm.get_rank("same_data") == 0


class DataLoader(BatchLoader):
    """The native loader. Its workers are threads; without workers it reads when a batch is requested."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # (value - mean) / std is computed as value * scale + bias, in one pass.
        means = torch.from_numpy(self.statistics.means)  # (C, 1, 1)
        stds = torch.from_numpy(self.statistics.stds)
        self.scale = (1 / stds).to(self.device)
        self.bias = (-means / stds).to(self.device)
        self.gpu = device_module(self.device, "Stream")
        self.side_stream = self.gpu.Stream(self.device) if self.gpu else None
        self.pool = ThreadPoolExecutor(self.num_workers) if self.num_workers else None
        self.ring = SlotRing(pinned=self.gpu is not None)
        self._join_ring()

    def share_memory_with(self, other: BatchLoader) -> None:
        """Read into the buffers of another loader of this kind, and let it read into its own when this one does not."""
        if isinstance(other, DataLoader):
            self.ring.leave()
            self.ring = other.ring
            self._join_ring()

    def _join_ring(self) -> None:
        # With workers one batch can be read while another is copied.
        shape = (self.batch_size, *self.dataset.shape)
        slots = 3 if self.num_workers else 1
        self.ring.join(shape, slots)

    def close(self) -> None:
        """Close the files, end the reading threads, and give the buffers back."""
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
        self.ring.leave()
        super().close()

    def _batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        reading = ReadingAhead(self, order, iterations)
        try:
            while True:
                slot = reading.next()
                if slot is None:
                    break
                frames = self.to_device(slot)
                yield self._split(frames, slot.samples)
        finally:
            reading.stop()  # left early, or one failed: no thread may still write into a buffer
            self.ring.release(reading)

    def start_reading(self, slot: Slot, order: Order, iteration: int) -> None:
        """Begin to fill a slot with the samples of an iteration; without workers it is full afterwards."""
        # The copy of the last batch out of this slot must have ended.
        if slot.copied is not None:
            slot.copied.synchronize()
        slot.samples = order.samples(iteration)
        slot.reads = []
        # A shorter rollout fills only the front of the buffer.
        shape = (self.batch_size, order.frames(iteration), *self.dataset.shape[1:])
        slot.tensor = slot.memory[: math.prod(shape)].view(shape)
        for index, out in zip(slot.samples, slot.tensor.numpy(), strict=True):
            if self.pool:
                slot.reads.append(self.pool.submit(self.dataset.read, index, out))
            else:
                self.dataset.read(index, out)

    def to_device(self, slot: Slot) -> Tensor:
        """The samples of a slot, normalised: (value - mean) / std."""
        # On the CPU the buffer itself becomes the batch.
        if self.side_stream is None:
            frames = slot.tensor.to(self.device)
            return torch.addcmul(self.bias, frames, self.scale, out=frames)
        with self.gpu.stream(self.side_stream):
            frames = slot.tensor.to(self.device, non_blocking=True)
            slot.copied = self.side_stream.record_event()
            frames = torch.addcmul(self.bias, frames, self.scale)
        # The step waits for the copy; the host does not.
        main = self.gpu.current_stream(self.device)
        main.wait_stream(self.side_stream)
        # The allocator must not reuse this memory while the step reads it.
        frames.record_stream(main)
        return frames


class ReadingAhead:
    """One pass over iterations, which reads ahead as far as there are slots."""

    def __init__(self, loader: DataLoader, order: Order, iterations: range):
        self.loader = loader
        self.order = order
        self.iterations = iterations
        self.started = 0  # iterations whose reading has begun
        self.free: deque[Slot] = deque()
        self.reading: deque[Slot] = deque()

    def next(self) -> Slot | None:
        """The slot with the next batch, which stays as it is until the next call; None after the last one."""
        if self.loader.ring.claim(self):
            self.free = deque(self.loader.ring.slots)
        while self.free and self.started < len(self.iterations):
            slot = self.free.popleft()
            self.loader.start_reading(slot, self.order, self.iterations[self.started])
            self.reading.append(slot)
            self.started += 1
        if not self.reading:
            return None
        # Batches come in order, so the oldest one is waited for.
        slot = self.reading[0]
        for read in slot.reads:
            read.result()
        self.reading.popleft()
        self.free.append(slot)
        return slot

    def stop(self) -> None:
        """Return when no thread writes into a slot; what was read ahead is read again when it is asked for."""
        for slot in self.reading:
            for read in slot.reads:
                read.cancel() or read.exception()
        # These iterations are read again when somebody asks for them.
        self.started -= len(self.reading)
        self.reading.clear()
        self.free.clear()
