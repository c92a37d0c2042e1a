"""The program of DALI's worker processes, which read samples. Nothing here imports torch, which takes seconds."""

import multiprocessing
import os
import signal
import threading
from typing import Any

import numpy as np
from nvidia.dali import types

from utils.sample_order import Dataset, Order
from utils.signals import STOP_SIGNALS


class SampleSource:
    """The function that DALI calls for every sample, here or in a worker process, which opens the files for itself."""

    def __init__(self, dataset: Dataset, order: Order, iterations: range):
        self.dataset = dataset
        self.order = order
        self.iterations = iterations

    def __call__(self, info: types.SampleInfo) -> np.ndarray:
        """One sample, (n + k, C, h, w) float32; StopIteration after the last batch."""
        if info.iteration >= len(self.iterations):
            raise StopIteration
        self.dataset.open()
        iteration = self.iterations[info.iteration]
        frames = self.order.frames(iteration)
        sample = np.empty((frames, *self.dataset.shape[1:]), np.float32)
        samples = self.order.samples(iteration)
        self.dataset.read(samples[info.idx_in_batch], sample)
        return sample

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        threading.Thread(target=end_when_the_trainer_says_so, daemon=True).start()


def end_when_the_trainer_says_so() -> None:
    """In a worker: end it when the trainer is gone, even killed, or when the stop signal comes from the trainer."""
    trainer = multiprocessing.parent_process()
    if trainer is None:  # not in a worker
        return
    while trainer.is_alive():
        received = signal.sigtimedwait(STOP_SIGNALS, 1)
        if received is not None and received.si_pid == trainer.pid:
            break
    os._exit(0)
