"""The NVIDIA DALI data loader: the same samples in the same order as the native one, equal to float rounding.

A DALI pipeline requests one sample after another, reads ahead in worker processes, copies each batch to the GPU and
normalises it there, while the previous step computes. On a machine without a GPU the same pipeline runs on the CPU.
"""

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from utils.data_loader import Batch, BatchLoader
from utils.errors import ConnectionLostError, UsageError
from utils.sample_order import ChannelStatistics, Order
from utils.signals import stop_signals_held_back

try:
    from nvidia.dali import fn, pipeline_def, types

    from utils.dali_source import SampleSource
except ImportError as error:
    raise UsageError(
        f"data_loader_config 'dali': NVIDIA DALI cannot be imported ({error}): "
        "pip install -r requirements/dali.txt, or choose --data_loader_config=pytorch"
    ) from None


class DaliDataLoader(BatchLoader):
    """The loader over DALI. Each pass has num_workers processes; 0: none."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.streams: list[BatchStream] = []  # open ones

    def close(self) -> None:
        """Close the files and end the reading processes."""
        for stream in self.streams:
            stream.close()
        super().close()

    def _batches(self, order: Order, iterations: range) -> Iterator[Batch]:
        stream = BatchStream(self, SampleSource(self.dataset, order, iterations))
        self.streams.append(stream)
        try:
            for iteration in iterations:
                yield self._split(stream.next(), order.samples(iteration))
        finally:
            self.streams.remove(stream)
            stream.close()


class LostWorkerError(Exception):
    """A reading process has ended. It is no OSError: multiprocessing takes those for an answer of the system."""


class BatchStream:
    """A DALI pipeline and its processes, which give the batches of the source one after another."""

    def __init__(self, loader: BatchLoader, source: SampleSource):
        self.device = loader.device
        gpu = gpu_of(loader.device)
        workers = max(1, loader.num_workers)
        self.pipeline: Any = normalised_samples(
            source,
            loader.statistics,
            parallel=loader.num_workers > 0,
            on_gpu=gpu is not None,
            device_id=gpu,
            batch_size=loader.batch_size,
            num_threads=workers,
            py_num_workers=workers,
            py_start_method="spawn",
        )
        # Which processes are DALI's is seen by comparing before and after.
        others = set(multiprocessing.active_children())
        with stop_signals_held_back():
            resource_tracker.ensure_running()  # multiprocessing's helper process; starting it unblocks signals
        with stop_signals_held_back(), without_the_script():
            self.pipeline.build()
        self.workers = set(multiprocessing.active_children()) - others

    def close(self) -> None:
        """End the pipeline and its processes."""
        self.pipeline = None  # the only reference: DALI ends the processes and waits for them
        for worker in self.workers:  # where it has lost one, not always all
            worker.kill()
            worker.join()

    def next(self) -> Tensor:
        """The next batch, (B, n + k, C, h, w). The memory is the tensor's own: DALI does not write to it again."""
        # DALI copies in order with the work of this stream.
        stream = torch.cuda.current_stream(self.device) if gpu_of(self.device) is not None else None
        before = signal.signal(signal.SIGCHLD, lambda *_: self._check(1))  # DALI may wait for a lost one forever
        try:
            try:
                self._check(0)
                (batch,) = self.pipeline.run(stream)
            finally:
                signal.signal(signal.SIGCHLD, before)
            return torch.from_dlpack(batch.as_tensor()).to(self.device)
        except Exception as error:  # a worker's comes as its text, of another class
            # The text of a worker's error names its class.
            message = str(error.__cause__)
            kind: type[Exception] = UsageError
            if f"{ConnectionLostError.__name__}: {message}" in str(error):
                kind = ConnectionLostError
            elif f"{UsageError.__name__}: {message}" not in str(error):
                message = self._loss(1)  # its pipes close before it has ended
            if not message:
                raise
        raise kind(message)  # out here it does not hold DALI's frames, so the processes can end

    def _check(self, within: float) -> None:
        # It asks for no exit code: a second signal in mid-question would lose it, and that process would seem to live.
        if self._ended(within):
            raise LostWorkerError

    def _ended(self, within: float) -> bool:
        """Whether a process has ended, or ends in so many seconds."""
        sentinels = [worker.sentinel for worker in self.workers]
        return bool(connection.wait(sentinels, within))

    def _loss(self, within: float) -> str:
        """An error for a process that has ended, or ends in so many seconds; '' while all live."""
        if not self._ended(within):
            return ""
        for worker in self.workers:
            worker.join(1)  # DALI ends the others, with 0
        codes = [worker.exitcode for worker in self.workers if worker.exitcode]
        code = codes[0] if codes else 0
        return (
            f"a data worker ended with exit code {code}; if it was killed for want of memory, "
            "choose a smaller batch or num_data_workers"
        )


def gpu_of(device: torch.device) -> int | None:
    """The number of the GPU on which DALI works, None for the CPU: it knows NVIDIA's, not those of ROCm."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.current_device() if device.index is None else device.index


@pipeline_def
def normalised_samples(source: SampleSource, statistics: ChannelStatistics, parallel: bool, on_gpu: bool) -> Any:
    """The pipeline: normalised samples of the source, on the GPU where there is one."""
    float32 = types.FLOAT  # type: ignore[attr-defined]  # not in DALI's stubs
    samples = fn.external_source(source, batch=False, parallel=parallel, dtype=float32, ndim=4)  # (n + k, C, h, w)
    # Normalisation runs where the batch is used.
    if on_gpu:
        samples = samples.gpu()
    return fn.normalize(samples, mean=statistics.means[None], stddev=statistics.stds[None])


@contextmanager
def without_the_script() -> Iterator[None]:
    """Processes that start inside do not import this program's script, and with it torch, which they do not need."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
