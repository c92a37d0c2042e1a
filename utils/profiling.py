"""Named ranges that profilers show."""

from contextlib import contextmanager

import torch


@contextmanager
def span(name):
    """A range around a part of the step, for torch.profiler and, on an NVIDIA GPU, for Nsight Systems (NVTX)."""
    nvtx = torch.cuda.is_available() and torch.version.cuda is not None
    with torch.profiler.record_function(name):
        if nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if nvtx:
                torch.cuda.nvtx.range_pop()
