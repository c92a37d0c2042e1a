"""Named ranges around parts of a step: for profilers, and for whoever listens in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class SpanListener(Protocol):
    """Told of each span of this process."""

    def start(self, name: str) -> Any:
        """A span begins. What is returned is given to `stop`."""

    def stop(self, name: str, mark: Any) -> None:
        """That span has ended."""


LISTENERS: list[SpanListener] = []


@contextmanager
def listening(listener: SpanListener) -> Iterator[None]:
    """Inside, a listener is told of the spans of this process."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range around a part of the step: for torch.profiler, Nsight Systems (NVTX, NVIDIA GPUs) and LISTENERS."""
    # torch.cuda is ROCm's too, and NVTX is NVIDIA's.
    nvtx = torch.cuda.is_available() and torch.version.cuda is not None
    with torch.profiler.record_function(name):
        if nvtx:
            torch.cuda.nvtx.range_push(name)
        marks = [(listener, listener.start(name)) for listener in LISTENERS]
        try:
            yield
        finally:
            for listener, mark in marks:
                listener.stop(name, mark)
            if nvtx:
                torch.cuda.nvtx.range_pop()
