"""The speed of a run."""

import time

WARMUP_ITERATIONS = 10  # left out of the steady-state speed: compilation, allocation, the first reads


class Clock:
    """Measures the time in training steps, from `start` to `stop`, without validation and checkpoints."""

    def __init__(self) -> None:
        self.iterations = 0
        self.epoch_seconds, self.epoch_samples = 0.0, 0
        self.seconds, self.samples = 0.0, 0
        self.steady_seconds, self.steady_samples = 0.0, 0
        self.data_wait = self.interval = 0.0

    def start(self) -> None:
        """Begin to count time."""
        self.started = time.perf_counter()

    def stop(self, iterations: int, samples: int) -> float:
        """Count the iterations since `start`, which the device has finished; returns samples per second."""
        seconds = self.interval = time.perf_counter() - self.started
        if self.iterations >= WARMUP_ITERATIONS:
            self.steady_seconds += seconds
            self.steady_samples += samples
        self.iterations += iterations
        self.seconds += seconds
        self.samples += samples
        self.epoch_seconds += seconds
        self.epoch_samples += samples
        return samples / seconds

    def lap(self) -> tuple[float, int]:
        """Seconds and samples of the epoch; begins the next one."""
        lap = self.epoch_seconds, self.epoch_samples
        self.epoch_seconds, self.epoch_samples = 0.0, 0
        return lap

    def steady_samples_per_sec(self) -> float | None:
        """Speed after the warmup, or of all steps in a shorter run; None where no step was made."""
        if self.steady_samples:
            return self.steady_samples / self.steady_seconds
        return self.samples / self.seconds if self.samples else None

    def data_wait_fraction(self) -> float | None:
        """Share of the training time in which the step waited for its batch."""
        return self.data_wait / self.seconds if self.seconds else None
