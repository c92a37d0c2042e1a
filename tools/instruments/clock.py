"""The time of a piece of work on a device."""

import time
from collections.abc import Callable
from typing import Any

import torch

from utils.device import synchronize


def timed(device: torch.device, work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """(seconds of work(*args), what it returns): from an idle device to the end of all that was queued."""
    synchronize(device)
    started = time.perf_counter()
    result = work(*args)
    synchronize(device)
    return time.perf_counter() - started, result
