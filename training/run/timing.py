"""The speed of a run, and the time of each phase of a training step."""

import time
from collections import defaultdict
from typing import Any

import torch

from utils.device import device_module

WARMUP_ITERATIONS = 10  # left out of the steady-state speed: compilation, allocation, the first reads


def words_of_seconds(seconds: float) -> str:
    """A time in words, as exact as one wants to know it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


class Clock:
    """Measures the time in training steps, from `start` to `stop`, without validation and checkpoints."""

    def __init__(self) -> None:
        self.iterations = 0
        self.seconds = 0.0  # of all steps
        self.samples = 0
        self.epoch = self.steady = (0.0, 0)  # these two at the start of the epoch, and after the warmup
        self.data_wait = self.interval = 0.0
        self.began: float | None = None  # the first step

    def start(self) -> None:
        """Begin to count time."""
        self.started = time.perf_counter()
        if self.began is None:
            self.began = self.started

    def stop(self, iterations: int, samples: int) -> float:
        """Count the iterations since `start`, which the device has finished; returns samples per second."""
        self.interval = time.perf_counter() - self.started
        self.seconds += self.interval
        self.samples += samples
        if self.iterations < WARMUP_ITERATIONS:
            self.steady = self.seconds, self.samples
        self.iterations += iterations
        return samples / self.interval

    def lap(self) -> tuple[float, int]:
        """Seconds and samples of the epoch; begins the next one."""
        seconds, samples = self.epoch
        self.epoch = self.seconds, self.samples
        return self.seconds - seconds, self.samples - samples

    def elapsed(self) -> float:
        """Seconds since the first step, with validation and checkpoints."""
        assert self.began is not None
        return time.perf_counter() - self.began

    def steady_samples_per_sec(self) -> float | None:
        """Speed after the warmup, or of all steps in a shorter run; None where no step was made."""
        seconds, samples = self.steady if self.samples > self.steady[1] else (0.0, 0)
        return (self.samples - samples) / (self.seconds - seconds) if self.samples else None

    def data_wait_fraction(self) -> float | None:
        """Share of the training time in which the device, or the CPU that trains, waited for its batch."""
        return self.data_wait / self.seconds if self.seconds else None


# data: the device waits for the batch. pipeline: forward and backward of all stages. reduce: of gradients, what the
# backward pass leaves of it. optimizer: clipping and update.
PHASES = ("data", "forward", "backward", "pipeline", "reduce", "optimizer")
MOST_STEPS = 10  # of an interval that are measured on an accelerator


class PhaseTimes:
    """Seconds of the spans of PHASES, while it listens; the host's clock measures them, on an accelerator its events.

    An event is recorded as work is queued, and read when the host has waited for the device anyway. The events of
    `data` stand behind the last kernel of the step before and behind the wait for the batch's copy: between them the
    device has nothing to do. The host's time would tell something else, since in here it also waits for the device.
    events: False where the device's work is not queued by the code in the spans (CUDA graphs); then `data` is all.
    """

    def __init__(self, device: torch.device, events: bool = True):
        self.on_host = device.type == "cpu"
        self.library = device_module(device, "Event")
        self.spans_queue_work = events
        self.seconds: dict[str, float] = defaultdict(float)
        self.queued: list[tuple[str, Any, Any]] = []  # (phase, event at its start, event at its end)
        self.steps = 0  # whose phases are queued

    def start(self, name: str) -> Any:
        """A mark of this moment, for `stop`; None where it is not measured."""
        if name not in PHASES:
            return None
        if self.on_host:
            return time.perf_counter()
        is_data = name == "data"
        if self.library is None:  # the best that such a device lets one see
            return time.perf_counter() if is_data else None
        is_measured = self.spans_queue_work and self.steps < MOST_STEPS
        return self._event() if is_data or is_measured else None

    def stop(self, name: str, mark: Any) -> None:
        """Count the time since a mark."""
        if isinstance(mark, float):
            self.seconds[name] += time.perf_counter() - mark
        elif mark is not None:
            self.queued.append((name, mark, self._event()))
            self.steps += name == "optimizer"

    def _event(self):
        event = self.library.Event(enable_timing=True)
        event.record()
        return event

    def read(self, iterations: int) -> list[float]:
        """Seconds of a step in each of PHASES, mean over the iterations since the last reading.

        On an accelerator call it when the device has finished them. NaN: not measured.
        """
        means = {name: seconds / iterations for name, seconds in self.seconds.items()}
        for name, start, end in self.queued:
            measured_steps = iterations if name == "data" else max(1, self.steps)  # every batch is measured
            means[name] = means.get(name, 0) + start.elapsed_time(end) / 1e3 / measured_steps
        self.seconds.clear()
        self.queued.clear()
        self.steps = 0
        return [means.get(name, float("nan")) for name in PHASES]
