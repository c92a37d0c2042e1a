"""A pretend GPU whose work ends when it would: time is a number that whoever works or waits moves on."""

import torch

HOST, DEVICE, COPY = 0.002, 0.050, 0.004  # seconds: of a step on the host and on the device; of a batch's copy


class Stream:
    """Work that a device does in its order."""

    def __init__(self, clock):
        self.clock, self.ends = clock, 0.0

    def work(self, seconds):
        """Queue some."""
        self.ends = max(self.ends, self.clock.now) + seconds

    def wait_stream(self, other):
        self.ends = max(self.ends, other.ends)

    def record_event(self):
        return Event(self.clock).record(self)


class Event:
    """A moment of a stream."""

    def __init__(self, clock):
        self.clock, self.at = clock, 0.0

    def record(self, stream=None):
        self.at = max((stream or self.clock.main).ends, self.clock.now)
        return self

    def synchronize(self):
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class PretendGpu:
    """A library of a device, as torch.cuda is one, and the time of host and device."""

    def __init__(self):
        self.now = 0.0
        self.main, self.side = Stream(self), Stream(self)

    def Stream(self, device):
        return self.side

    def Event(self, enable_timing):
        return Event(self)

    def current_stream(self, device):
        return self.main

    def stream(self, side):
        side.work(COPY)
        return torch.no_grad()  # a context

    def synchronize(self, device):
        self.now = max(self.now, self.main.ends, self.side.ends)

    def perf_counter(self):
        return self.now

    def step(self, *_):
        """A training step, queued: its loss."""
        self.now += HOST
        self.main.work(DEVICE)
        return torch.tensor(0.0)
