"""Exercise 10, rung 2: what a trace says about communication.

A collective costs nothing while other kernels run beside it: it is hidden. What counts is the time in which it runs
alone, exposed. A profiler's table, which adds up durations by name, cannot tell the two apart; the time line can.

Fill in three questions to a trace of a GPU, as `--profile torch` writes it (trace.json.gz). The check draws traces of
its own in that form. Times overlap: of kernels on several streams too, and then a microsecond counts once.

Done for real in docs/examples/read_trace.py (hidden). Chapter: docs/profiling.md.
"""

import json
from pathlib import Path

Kernel = tuple[str, float, float]  # name, start and end in microseconds


def kernels(path: Path) -> tuple[list[Kernel], list[Kernel]]:
    """(communication, compute): [(name, start, end), ...] of both, in microseconds.

    Ranges such as "nccl:all_reduce" (cat gpu_user_annotation) lie over kernels and are none themselves.
    """
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    return [k for k in found if "nccl" in k[0].lower()], [k for k in found if "nccl" not in k[0].lower()]


def exposed(start: float, end: float, compute: list[Kernel]) -> float:
    """Microseconds from start to end in which none of the compute kernels runs."""
    # TODO: mind kernels that overlap each other, and those that begin before or end after
    alone, reached = 0.0, start
    for _, begin, stop in sorted(compute, key=lambda kernel: kernel[1]):
        alone += max(0, min(begin, end) - reached)
        reached = max(reached, stop)
    return alone + max(0, end - reached)
    # END


def longest_kernel(communication: list[Kernel], compute: list[Kernel]) -> str:
    """Name of the kernel, of both kinds, that took longest in one go."""
    # TODO
    return max(communication + compute, key=lambda kernel: kernel[2] - kernel[1])[0]
    # END


def most_exposed(communication: list[Kernel], compute: list[Kernel]) -> str:
    """Name of the collective with the most exposed time, all its calls together."""
    # TODO
    times: dict[str, float] = {}
    for name, start, end in communication:
        times[name] = times.get(name, 0) + exposed(start, end, compute)
    return max(times, key=lambda name: times[name])
    # END


def hidden_share(communication: list[Kernel], compute: list[Kernel]) -> float:
    """Share of the time of all collectives that is hidden, 0 to 1. They do not overlap each other."""
    # TODO
    alone = sum(exposed(start, end, compute) for _, start, end in communication)
    return 1 - alone / sum(end - start for _, start, end in communication)
    # END
