"""Batches of normalised samples on the device: the interface of all data loaders, and the native loader.

The native loader's threads read samples straight into the batch buffers of a small ring. A batch for a GPU is copied
from pinned memory on a side stream, while the previous step computes, and normalised there in one pass. On the CPU the
buffer itself is the batch: the threads normalise each frame from the page cache into its place.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from utils import comm
from utils.device import library, pinned_tensor
from utils.sample_order import rank_indices, training_indices, validation_counts, validation_indices
from weather.dataset import FieldDataset, Statistics

# A frame seen in its file is only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

AHEAD = 2  # batches that a GPU has not done with when the next one is made
Batch = tuple[Tensor, Tensor]  # (input, target)
Indices = partial[np.ndarray]  # indices(iteration): the samples of this rank


class BatchLoader:
    """Batches of (input, target) from a FieldDataset, normalised: (B, n_in, h, w) and (B, n_out, h, w).

    A batch is valid until the next one is requested: its memory is used again.
    statistics: of the dataset's channels. batch_size: samples of this rank; the ranks' batches side by side are the
    batch of a single process. num_workers: threads or processes that read ahead. Subclasses implement `_batches`.
    """

    def __init__(
        self,
        dataset: FieldDataset,
        statistics: Statistics,
        n_in: int,
        n_out: int,
        batch_size: int,
        device: torch.device,
        num_workers: int = 0,
    ):
        self.dataset, self.batch_size, self.device, self.num_workers = dataset, batch_size, device, num_workers
        self.statistics, self.n_in, self.n_out = statistics, n_in, n_out

    @property
    def num_samples(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)

    def train(self, seed: int, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches of the training steps start, ..., stop - 1."""
        args = self.num_samples, self.batch_size * comm.get_size("dp"), seed
        yield from self._paced(self._shared_batches(self._own(training_indices, args), range(start, stop)))

    def valid(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Every sample once over all ranks, as (input, target, count): only the first `count` of a batch are new.

        The last batch is filled up with repeated samples, so that every batch has the same shape; a rank's count may
        be 0 there.
        """
        rank, ranks = comm.get_rank("dp"), comm.get_size("dp")
        counts = validation_counts(self.num_samples, self.batch_size, rank, ranks)
        indices = self._own(validation_indices, (self.num_samples, self.batch_size * ranks))
        batches = self._paced(self._shared_batches(indices, range(len(counts))))
        for (x, y), count in zip(batches, counts, strict=True):
            yield x, y, count

    def check_step(self, seed: int, iteration: int) -> None:
        """Raise UsageError where a sample of this rank, of a training step, holds a value that is not finite."""
        indices = self._own(training_indices, (self.num_samples, self.batch_size * comm.get_size("dp"), seed))
        self._check(indices(iteration))

    def check_all(self) -> None:
        """As check_step, for all samples."""
        self._check(range(self.num_samples))

    def _check(self, samples):
        for index in samples:
            self.dataset.check_finite(index)

    def listing(self) -> dict[str, str]:
        """{name: what this rank sees of it} of the files."""
        return self.dataset.listing()

    def close(self) -> None:
        """Close the files and end what reads from them."""
        self.dataset.close()

    def _own(self, indices: Callable[..., np.ndarray], args: tuple[int, ...]) -> Indices:
        return partial(rank_indices, indices, args, comm.get_rank("dp"), comm.get_size("dp"))

    def _paced(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with the host at most AHEAD of the device: each batch takes memory there."""
        gpu = library(self.device, "current_stream")
        if gpu is None:
            yield from batches
            return
        used = deque[torch.Event]()
        for batch in batches:
            yield batch
            used.append(gpu.current_stream(self.device).record_event())
            if len(used) > AHEAD:
                used.popleft().synchronize()

    def _batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        """One (input, target) for each of `iterations`, a range, of the samples indices(iteration)."""
        raise NotImplementedError

    def _shared_batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        """As _batches; where several ranks train on the same samples, the first one reads and broadcasts them."""
        group = comm.get_group("tp_pp")
        if comm.get_size("tp_pp") == 1:
            yield from self._batches(indices, iterations)
        elif reads_samples():
            for x, y in self._batches(indices, iterations):
                x, y = x.contiguous(), y.contiguous()
                for tensor in (x, y):
                    dist.broadcast(tensor, group=group, group_src=0)
                yield x, y
        else:
            h, w = self.dataset.shape[2:]
            for _ in iterations:
                x, y = (torch.empty(self.batch_size, n, h, w, device=self.device) for n in (self.n_in, self.n_out))
                for tensor in (x, y):
                    dist.broadcast(tensor, group=group, group_src=0)
                yield x, y

    def _split(self, frames: Tensor) -> Batch:
        """Input and target of normalised samples (B, 2, C, h, w)."""
        return frames[:, 0, : self.n_in], frames[:, 1, : self.n_out]


def reads_samples() -> bool:
    """Whether this rank reads. Of the ranks that train on the same samples only the first one does."""
    return comm.get_rank("tp_pp") == 0


class Slot:
    """A reused batch buffer: (B, 2, C, h, w) float32, pinned where the batches go to a GPU."""

    def __init__(self, shape: Sequence[int], pinned: bool):
        self.tensor = pinned_tensor(shape) if pinned else torch.empty(shape)
        self.array = self.tensor.numpy()
        self.reads: list[Future[None]] = []
        self.copied: torch.Event | None = None  # the copy to the device is done, the buffer may be filled again


def reading_threads(count: int) -> ThreadPoolExecutor:
    """A pool of threads whose torch operations use one core each, so that the training step keeps the others."""
    usual, started = torch.get_num_threads(), threading.Barrier(count)

    def use_one_core():
        torch.get_num_threads()  # a thread takes over the usual number at its first look: before, not after
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(count, initializer=use_one_core)
    wait([pool.submit(started.wait) for _ in range(count)])
    torch.set_num_threads(usual)  # of this thread, and of those that start from here on
    return pool


class DataLoader(BatchLoader):
    """The native loader. Its workers are threads; without workers it reads when a batch is requested."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        device, num_workers = self.device, self.num_workers
        means, stds = torch.from_numpy(self.statistics.means), torch.from_numpy(self.statistics.stds)
        self.scale = (1 / stds).to(device)
        self.bias = (-means / stds).to(device)
        # Batch normalisation with given statistics: weight, bias, mean 0, variance 1.
        self.affine = self.scale.flatten(), self.bias.flatten(), torch.zeros(len(means)), torch.ones(len(means))
        self.no_moments = torch.empty(0), torch.empty(0)
        self.normalise_on_read = device.type == "cpu"
        self.gpu = library(device, "Stream")
        self.side_stream = self.gpu.Stream(device) if self.gpu else None
        self.pool = reading_threads(num_workers) if num_workers else None
        shape = (self.batch_size, *self.dataset.shape)
        self.slots = [Slot(shape, self.gpu is not None) for _ in range(3 if num_workers else 1)]

    def close(self) -> None:
        """Close the files and end the reading threads."""
        if self.pool:
            self.pool.shutdown(cancel_futures=True)
        super().close()

    def _batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        index_lists = map(indices, iterations)
        free, reading = deque(self.slots), deque[Slot]()
        try:
            while True:
                while free and (samples := next(index_lists, None)) is not None:
                    reading.append(self._start_reading(free.popleft(), samples))
                if not reading:
                    return
                slot = reading.popleft()
                for read in slot.reads:
                    read.result()
                batch = self._to_device(slot)
                free.append(slot)
                yield batch
        finally:
            for slot in reading:  # left early: no thread may still write into a buffer
                for read in slot.reads:
                    read.cancel() or read.exception()

    def _start_reading(self, slot: Slot, indices: np.ndarray) -> Slot:
        if slot.copied is not None:
            slot.copied.synchronize()
        if self.pool is None:
            self._read(indices, slot.array)
        else:
            parts = [slice(k, None, self.num_workers) for k in range(self.num_workers)]
            slot.reads = [self.pool.submit(self._read, indices[part], slot.array[part]) for part in parts]
        return slot

    def _read(self, indices: np.ndarray, outs: np.ndarray) -> None:
        """Read samples into outs, (n, 2, C, h, w), and normalise them where the batch stays on the CPU."""
        for index, out in zip(indices, outs, strict=True):
            if not self.normalise_on_read:
                self.dataset.read(index, out)
            elif self.dataset.mappable:
                with self.dataset.mapped(index) as frames:
                    self._normalise_into(out, frames)
            else:
                self.dataset.read(index, out)
                self._normalise_into(out, out)

    def _to_device(self, slot: Slot) -> Batch:
        if self.device.type == "cpu":
            return self._split(slot.tensor)
        if self.side_stream is None:
            return self._split(self._normalise(slot.tensor.to(self.device)))
        with self.gpu.stream(self.side_stream):
            frames = slot.tensor.to(self.device, non_blocking=True)
            slot.copied = self.side_stream.record_event()
            frames = self._normalise(frames)
        main = self.gpu.current_stream(self.device)
        main.wait_stream(self.side_stream)
        frames.record_stream(main)
        return self._split(frames)

    def _normalise(self, frames: Tensor) -> Tensor:
        return torch.addcmul(self.bias, frames, self.scale)  # (value - mean) / std

    def _normalise_into(self, out: np.ndarray, frames: np.ndarray) -> None:
        """Normalise frames (2, C, h, w) on the host, in one pass over the memory."""
        source, target = torch.from_numpy(frames), torch.from_numpy(out)
        if source[0].is_contiguous():
            for frame, place in zip(source.split(1), target.split(1), strict=True):
                torch.native_batch_norm(frame, *self.affine, False, 0, 0, out=(place, *self.no_moments))
        else:  # a part of the image
            planes = zip(target.unbind(1), source.unbind(1), self.bias, self.affine[0].tolist(), strict=True)
            for place, plane, bias, scale in planes:
                torch.add(bias, plane, alpha=scale, out=place)
