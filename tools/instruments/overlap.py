"""How much of a GPU's communication runs while it computes."""

from collections.abc import Callable

import torch

Interval = tuple[float, float]  # start, end


def hidden_share_of(run: Callable[[], None]) -> float | None:
    """Of the time in which kernels of NCCL, RCCL or oneCCL run, the share in which others run too; None without any.

    run: called once under the profiler.
    """
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        run()
    communication, compute = [], []
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation:
            name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
            if "ccl" in name:
                communication.append(span)
            elif not name.startswith(("memcpy", "memset")):
                compute.append(span)
    return hidden_share(communication, compute)


def hidden_share(communication: list[Interval], compute: list[Interval]) -> float | None:
    """Share of the time covered by some intervals in which others go on as well; None where there is no such time."""
    total = _length(communication)
    return (total + _length(compute) - _length(communication + compute)) / total if total else None


def _length(intervals: list[Interval]) -> float:
    """Length of the union."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
