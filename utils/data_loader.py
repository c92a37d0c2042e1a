"""Batches of normalised samples on the device: what every data loader promises, and the native one.

Natively, threads read samples straight into the batch buffers of a small ring. To a GPU the whole batch goes in one
copy, from pinned memory, on a side stream, while the previous step computes, and is normalised there in one pass. On
the CPU the buffer itself is the batch: the reading threads normalise each frame from the page cache into its place.
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
from utils.errors import UsageError
from utils.sample_order import rank_indices, training_indices, validation_counts, validation_indices
from utils.schema import Config
from utils.tiles import own_window
from weather.dataset import FieldDataset, Statistics, load_statistics

# A frame seen in its file is only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

Batch = tuple[Tensor, Tensor]  # (input, target)
Indices = partial[np.ndarray]  # indices(iteration): the samples of this rank


class BatchLoader:
    """Batches of (input, target) from a FieldDataset, normalised: (B, n_in, h, w) and (B, n_out, h, w).

    A batch is valid until the next one is asked for: its memory is used again.
    statistics: of the channels of the dataset. batch_size: of this rank; the ranks' batches side by side are the batch
    of a single process. num_workers: threads or processes that read ahead. A loader says in `_batches` how it reads.
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
        """Samples of the data set."""
        return len(self.dataset)

    def train(self, seed: int, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches of the training steps start, ..., stop - 1."""
        args = self.num_samples, self.batch_size * comm.get_size("dp"), seed
        yield from self._shared_batches(self._own(training_indices, args), range(start, stop))

    def valid(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Every sample once over all ranks, as (input, target, count): only the first `count` of a batch are new.

        The last batch is filled up with repeated samples, so that every batch has the same shape; a rank's count may
        be 0 there.
        """
        rank, ranks = comm.get_rank("dp"), comm.get_size("dp")
        counts = validation_counts(self.num_samples, self.batch_size, rank, ranks)
        indices = self._own(validation_indices, (self.num_samples, self.batch_size * ranks))
        for (x, y), count in zip(self._shared_batches(indices, range(len(counts))), counts, strict=True):
            yield x, y, count

    def close(self) -> None:
        """Close the files and end what reads from them."""
        self.dataset.close()

    def _own(self, indices: Callable[..., np.ndarray], args: tuple[int, ...]) -> Indices:
        return partial(rank_indices, indices, args, comm.get_rank("dp"), comm.get_size("dp"))

    def _batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        """One (input, target) for each of `iterations`, a range, of the samples indices(iteration)."""
        raise NotImplementedError

    def _shared_batches(self, indices: Indices, iterations: range) -> Iterator[Batch]:
        """The same where several ranks train on the same samples: the first one reads and sends them to the others."""
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
    """Whether this rank reads; of ranks that are alike in data and context parallelism only the first does."""
    return comm.get_rank("tp_pp") == 0


class Slot:
    """A reused batch buffer: (B, 2, C, h, w) float32, pinned where the batches go to a GPU."""

    def __init__(self, shape: Sequence[int], pinned: bool):
        self.tensor = torch.empty(shape, dtype=torch.float32, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.reads: list[Future[None]] = []
        self.copied: torch.cuda.Event | None = None  # the copy to the device is done, the buffer may be filled again


def reading_threads(count: int) -> ThreadPoolExecutor:
    """A pool of threads whose own torch operations use one core each: they must not take those of the step."""
    usual, started = torch.get_num_threads(), threading.Barrier(count)

    def use_one_core():
        torch.get_num_threads()  # a thread takes over the usual number at its first look: before, not after
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(count, initializer=use_one_core)
    wait([pool.submit(started.wait) for _ in range(count)])
    torch.set_num_threads(usual)  # of this thread, and of those that start from here on
    return pool


class DataLoader(BatchLoader):
    """The native loader. Its workers are threads; without any it reads when the batch is asked for."""

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
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = reading_threads(num_workers) if num_workers else None
        shape = (self.batch_size, *self.dataset.shape)
        self.slots = [Slot(shape, device.type == "cuda") for _ in range(3 if num_workers else 1)]

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
        """Read samples into outs (n, 2, C, h, w); for the CPU normalise them on the way."""
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
        with torch.cuda.stream(self.side_stream):
            frames = slot.tensor.to(self.device, non_blocking=True)
            slot.copied = self.side_stream.record_event()
            frames = self._normalise(frames)
        main = torch.cuda.current_stream(self.device)
        main.wait_stream(self.side_stream)
        frames.record_stream(main)
        return self._split(frames)

    def _normalise(self, frames: Tensor) -> Tensor:
        return torch.addcmul(self.bias, frames, self.scale)  # (value - mean) / std

    def _normalise_into(self, out: np.ndarray, frames: np.ndarray) -> None:
        """The same on the host, in one pass over the memory: (2, C, h, w)."""
        source, target = torch.from_numpy(frames), torch.from_numpy(out)
        if source[0].is_contiguous():
            for frame, place in zip(source.split(1), target.split(1), strict=True):
                torch.native_batch_norm(frame, *self.affine, False, 0, 0, out=(place, *self.no_moments))
        else:  # a part of the image
            planes = zip(target.unbind(1), source.unbind(1), self.bias, self.affine[0].tolist(), strict=True)
            for place, plane, bias, scale in planes:
                torch.add(bias, plane, alpha=scale, out=place)


def loader_class(name: str) -> type[BatchLoader]:
    """The class of the data loader that the config names. DALI is imported only where it is asked for."""
    if name == "pytorch":
        return DataLoader
    from utils.data_loader_dali import DaliDataLoader

    return DaliDataLoader


def build_loaders(config: Config, device: torch.device) -> list[BatchLoader]:
    """Training and validation loader, as the config says. Raises UsageError where data and config disagree."""
    if config.model == "classifier":
        from training.tasks.classify import build_class_loaders

        return build_class_loaders(config, device)
    Loader = loader_class(config.data_loader_config) if reads_samples() else BatchLoader
    n_in, n_out, batch_size = config.n_in_channels, config.n_out_channels, config.global_batch_size
    own_batch_size = batch_size // comm.get_size("dp")
    window = own_window(config.img_size, config.patch_size)
    train, valid = (
        FieldDataset(folder, max(n_in, n_out), config.img_size, config.dt, limit, *window)
        for folder, limit in (
            (config.train_data_path, config.limit_nsamples),
            (config.valid_data_path, config.limit_nsamples_val),
        )
    )
    if batch_size > len(train):
        raise UsageError(
            f"global_batch_size {batch_size} is larger than the training data: "
            f"{len(train)} samples in {config.train_data_path}"
        )
    shared = statistics_of(config), n_in, n_out, own_batch_size, device, config.num_data_workers
    return [Loader(dataset, *shared) for dataset in (train, valid)]


def statistics_of(config: Config) -> Statistics:
    """The statistics that a config names, of its channels and its image. Raises UsageError as load_statistics."""
    channels = max(config.n_in_channels, config.n_out_channels)
    paths = config.global_means_path, config.global_stds_path, config.time_means_path
    return load_statistics(*paths, channels, config.img_size)
