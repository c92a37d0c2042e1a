"""Cases measured side by side on the ranks of this machine: time, memory and communication of a step.

A case is a config in a layout. In every round all cases take turns, and a ratio is taken within a round, so that the
ups and downs of the machine cancel. In its turn a case is built and given up again: what it holds is its own.
"""

import math
import os
import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from pandas import DataFrame

from tools.instruments.pool import OutOfMemory, Process
from tools.instruments.rank_case import WARMUP_STEPS, RankCase
from tools.instruments.team import Case, Teams
from tools.instruments.tracker import by_phase
from tools.planner.trace import HELD, measured_inference, observe_step
from utils.device import device_module, empty_cache, select_device
from utils.errors import UsageError

MEMORY = (*HELD, "parameters at most", "peak")
POINTS = 100  # of a curve in one stretch of a phase
RANKS_PER_CORE = 32  # more would only fill the machine


def check_machine(cases: Sequence[Case]) -> torch.device:
    """The device of the cases. Raises UsageError for a lack of devices."""
    device = select_device(cases[0].config.device)
    most = max(case.ranks for case in cases)
    if device.type != "cpu":
        devices = torch.accelerator.device_count()
        if most > devices:
            raise UsageError(
                f"{most} ranks need as many devices; this machine has {devices} ({device.type}): "
                "give smaller layouts, or --device cpu"
            )
    if most > RANKS_PER_CORE * (os.cpu_count() or 1):
        raise UsageError(f"{most} ranks are too many for {os.cpu_count()} cores: give smaller layouts")
    return device


def turn(
    teams: Teams,
    case: Case,
    steps: int,
    limit: float | None,
    first: bool,
    inference: bool = False,
) -> list[dict[str, Any]] | None:
    """The figures of every rank; None where one has run out of memory."""
    try:
        return teams.call(case.ranks, measure_case, case, steps, limit, first, inference)
    except OutOfMemory:
        return None


def measure_case(
    rank: Process,
    case: Case,
    steps: int,
    limit: float | None,
    first: bool,
    inference: bool = False,
) -> dict[str, Any]:
    """On a rank: build a case and time some steps of it; in its first turn its memory and messages are measured too.

    inference: forward passes without gradients, in place of training steps.
    """
    gpu = device_module(rank.device, "max_memory_allocated", "set_per_process_memory_fraction")
    if gpu:
        gpu.empty_cache()  # ranks of other layouts use the same devices
        total = gpu.get_device_properties(rank.device).total_memory
        fraction = min(1, limit / total) if limit else 1
        gpu.set_per_process_memory_fraction(fraction)
        gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated() if gpu else 0  # none of the case's
    built = RankCase(rank, case)
    warm_up = built.forecast if inference else built.train
    warm_up(WARMUP_STEPS)
    figures: dict[str, Any] = {"seconds": built.seconds(steps, inference)}
    # Measuring memory and messages slows a step down, so it comes after the timed steps.
    if first:
        peak = gpu.max_memory_allocated() - before if gpu else 0  # its allocator knows better
        curve: list[tuple[str, int]] = []
        if inference:
            trace = measured_inference(built.step, built.x)
        else:
            trace = observe_step(built.step, built.x, built.y, curve)
        memory = {name: trace.held.get(name) for name in MEMORY}
        most = peak or trace.memory["peak"]
        memory["peak"] = most
        if case.config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            memory["activations"] = None
        # A CPU has no allocator that knows the limit, so its tensors are compared afterwards.
        if limit and most > limit:
            raise MemoryError(f"{most:.0f} bytes of tensors: the limit is {limit:.0f}")
        figures |= {"memory": memory, "messages": trace.messages, "curve": thinned(curve)}
    # The next case finds the device empty.
    del built
    empty_cache(rank.device)
    return figures


def thinned(curve: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """A curve of memory with at most POINTS points of each stretch of a phase, each the most of its part."""
    found: list[tuple[str, int]] = []
    for phase, points in groupby(curve, key=itemgetter(0)):
        sizes = [size for _, size in points]
        length = math.ceil(len(sizes) / POINTS)
        for start in range(0, len(sizes), length):
            part = sizes[start : start + length]
            found.append((phase, max(part)))
    return found


def row_of(case: Case, turns: list[Any]) -> dict[str, Any]:
    """The figures of a case, of the rank that has most. turns: figures of every rank, None where memory ran out."""
    row: dict[str, Any] = {
        "layout": case.name,
        "ranks": case.ranks,
        "batch": case.config.global_batch_size,
        "out_of_memory": None in turns,
    }
    if None in turns:
        return row
    # The harmonic mean: ranks that do not wait for one another add up their speeds.
    seconds = []
    for turn in turns:
        of_ranks = [figures["seconds"] for figures in turn]
        seconds.append(statistics.harmonic_mean(of_ranks))
    median = statistics.median(seconds)
    first_turn = turns[0]  # in which memory and messages were measured
    memory = DataFrame([figures["memory"] for figures in first_turn], dtype=float)  # (ranks, uses) bytes
    messages = [figures["messages"] for figures in first_turn]
    return row | {
        "seconds": median,
        "seconds_of_rounds": seconds,
        "samples_per_sec": row["batch"] / median,
        "memory": memory.max(skipna=False).to_dict(),
        "messages": by_phase(*messages),
        "curve": first_turn[0]["curve"],
    }
