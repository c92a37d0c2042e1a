"""The time of a piece of work on a device."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from utils.device import device_module, synchronize

HEAD_START = 2048  # side of the products that keep a GPU busy while the host queues what is measured


def timed(
    device: torch.device,
    work: Callable[..., Any],
    *args: Any,
) -> tuple[float, Any]:
    """(seconds of work(*args), what it returns): from an idle device to the end of all that was queued."""
    # Work that is queued already does not count.
    synchronize(device)
    started = time.perf_counter()
    result = work(*args)
    synchronize(device)
    return time.perf_counter() - started, result


def device_seconds(
    device: torch.device,
    work: Callable[..., Any],
    *args: Any,
) -> float:
    """Seconds that a device takes for work(*args), without the host's time to queue it, which may be longer.

    The host gets a head start: products keep the device busy until all is queued. Two events of the device stand
    around the work.
    """
    gpu = device_module(device, "Event")
    if gpu is None:
        return timed(device, work, *args)[0]
    a = torch.zeros(HEAD_START, HEAD_START, device=device)
    # The whole time bounds the host's time to queue the work.
    whole, _ = timed(device, work, *args)
    product, _ = timed(device, torch.mm, a, a)
    first, last = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
    # The lead is twice that time, since the host's speed varies.
    for _ in range(1 + math.ceil(2 * whole / product)):
        torch.mm(a, a)
    first.record()
    work(*args)
    last.record()
    synchronize(device)
    return first.elapsed_time(last) / 1e3  # elapsed_time gives milliseconds
