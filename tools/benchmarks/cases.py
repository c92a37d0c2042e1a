"""Cases measured side by side on the ranks of this machine: time, memory and communication of a step.

A case is a config in a layout. In every round all cases take turns, and a ratio is taken within a round, so that the
ups and downs of the machine cancel. In its turn a case is built and given up again: what it holds is its own.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pandas import DataFrame

from tools.instruments.pool import OutOfMemory
from tools.instruments.rank_case import WARMUP_STEPS, RankCase, hidden_share_of
from tools.instruments.team import Case, Rank, Teams
from tools.instruments.tracker import PHASES, Messages, Tracker, by_phase
from tools.planner.trace import Trace, measured, trace_step
from utils.device import empty_cache, library, select_device
from utils.errors import UsageError, reported_as_usage_error
from utils.launch import read_launch

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out
HELD = (*STATES, "activations")
MEMORY = (*HELD, "parameters at most", "peak")
RANKS_PER_CORE = 32  # more would only fill the machine
PROFILED_STEPS = 3


def check_machine(cases: Sequence[Case]) -> torch.device:
    """The device of the cases. Raises UsageError in a process that a launcher started, and for a lack of devices."""
    if read_launch().world_size > 1:
        raise UsageError("benchmark.py layouts starts its ranks itself: start it with plain python, in one process")
    device, most = select_device(cases[0].config.device), max(case.ranks for case in cases)
    if device.type != "cpu" and most > torch.accelerator.device_count():
        raise UsageError(
            f"{most} ranks need as many devices; this machine has {torch.accelerator.device_count()} ({device.type}): "
            "give smaller layouts, or --device cpu"
        )
    if most > RANKS_PER_CORE * (os.cpu_count() or 1):
        raise UsageError(f"{most} ranks are too many for {os.cpu_count()} cores: give smaller layouts")
    return device


def compare(
    groups: Mapping[str, Sequence[Case]], steps: int, rounds: int, limit: float | None = None
) -> tuple[torch.device, list[dict[str, Any]]]:
    """Measure all cases in turns; returns the device and a row for each case.

    groups: {size: cases that are compared with the first of them}. steps: timed in a turn. limit: bytes that a rank may
    hold. Where memory runs out the row says so, and the others go on. Raises UsageError for cases that cannot be run,
    before anything is timed, and where a rank fails.
    """
    cases = [case for group in groups.values() for case in group]
    device = check_machine(cases)
    traces: dict[Case, list[Trace]] = {}
    for case in cases:
        with reported_as_usage_error((UsageError, ValueError), f"layout '{case.name}'"):
            traces[case] = trace_step(case.config, case.layout, device.type) if case.training else []
    turns: dict[Case, list[Any]] = {case: [] for case in cases}
    with Teams(cases[0].config) as teams:
        for case, done in [*turns.items()] * rounds:
            if None not in done:  # it has not run out of memory
                done.append(_turn(teams, case, steps, limit, not done))
    rows: list[dict[str, Any]] = []
    for size, group in groups.items():
        of_group = [{"size": size} | _row(case, turns[case], traces[case]) for case in group]
        for row in of_group:
            _compare_speed(row, of_group[0])
        rows += of_group
    return device, rows


def _turn(teams: Teams, case: Case, steps: int, limit: float | None, first: bool) -> list[dict[str, Any]] | None:
    """The figures of every rank; None where one has run out of memory."""
    try:
        return teams.call(case.ranks, measure, case, steps, limit, first)
    except OutOfMemory:
        return None


def measure(rank: Rank, case: Case, steps: int, limit: float | None, first: bool) -> dict[str, Any]:
    """On a rank: build a case and time some steps of it; in its first turn its memory and messages are measured too."""
    gpu = library(rank.device, "max_memory_allocated", "set_per_process_memory_fraction")
    if gpu:
        gpu.empty_cache()  # ranks of other layouts use the same devices
        total = gpu.get_device_properties(rank.device).total_memory
        gpu.set_per_process_memory_fraction(min(1, limit / total) if limit else 1)
        gpu.reset_peak_memory_stats()
    built = RankCase(rank, case)
    built.train(WARMUP_STEPS)
    figures: dict[str, Any] = built.times(steps)
    if first:
        peak = gpu.max_memory_allocated() - built.before if gpu else None
        memory, messages = _memory_and_messages(built)
        if peak is None:  # on a GPU its allocator knows better
            peak = memory["peak"]
        if limit and peak > limit:
            raise MemoryError(f"{peak:.0f} bytes of tensors: the limit is {limit:.0f}")
        hidden = hidden_share_of(partial(built.train, PROFILED_STEPS)) if gpu else None
        figures |= {"memory": memory | {"peak": peak}, "messages": messages, "hidden": hidden}
    del built
    empty_cache(rank.device)
    return figures


def _memory_and_messages(built: RankCase) -> tuple[dict[str, Any], Messages]:
    """Bytes that this rank holds in a step, None where they are not measured, and what it sends."""
    if not built.case.training:
        with Tracker([*built.step.parallel.module.parameters(), built.x]) as tracker:
            built.train(1)
        return dict.fromkeys(MEMORY) | {"peak": tracker.memory()["peak"]}, by_phase(tracker.messages)
    trace = measured(built.step, built.x, built.y)
    memory = _memory(trace)
    if built.case.config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
        memory["activations"] = None
    return memory, by_phase(trace.messages)


def _memory(trace: Trace) -> dict[str, Any]:
    return {name: trace.held.get(name) for name in MEMORY} | {"peak": trace.memory["peak"]}


def _row(case: Case, turns: list[Any], traces: list[Trace]) -> dict[str, Any]:
    """The figures of a case, of the rank that has most. turns: figures of every rank, None where memory ran out."""
    row: dict[str, Any] = {
        "layout": case.name, "ranks": case.ranks, "batch": case.config.global_batch_size,
        "out_of_memory": None in turns,
    }  # fmt: skip
    if None in turns:
        return row
    # The harmonic mean: ranks that do not wait for one another add up their speeds.
    seconds = [statistics.harmonic_mean(figures["seconds"] for figures in turn) for turn in turns]
    cpu_seconds = [statistics.mean(figures["cpu_seconds"] for figures in turn) for turn in turns]
    planned = most([_memory(trace) for trace in traces]) or dict.fromkeys(MEMORY, math.nan)
    if case.config.enable_jit:  # code that is traced is not compiled
        planned["activations"] = planned["peak"] = math.nan
    hidden = [figures["hidden"] for figures in turns[0] if figures["hidden"] is not None]
    return row | {
        "seconds": statistics.median(seconds), "seconds_of_rounds": seconds,
        "cpu_seconds": statistics.median(cpu_seconds), "samples_per_sec": row["batch"] / statistics.median(seconds),
        "memory": most([figures["memory"] for figures in turns[0]]),
        "planned_memory": planned,
        "messages": most_messages([figures["messages"] for figures in turns[0]]),
        "planned_messages": most_messages([by_phase(trace.messages) for trace in traces]),
        "hidden": statistics.mean(hidden) if hidden else None,
    }  # fmt: skip


def _compare_speed(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Add the speed in samples/s relative to that of the first case of the group, in every round."""
    if "seconds" in row and "seconds" in first:
        pairs = zip(row["seconds_of_rounds"], first["seconds_of_rounds"], strict=True)
        row["speedup_of_rounds"] = [row["batch"] / own / (first["batch"] / yardstick) for own, yardstick in pairs]
        row["speedup"] = statistics.median(row["speedup_of_rounds"])


def most(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The largest value of each name; NaN where it was not measured."""
    return DataFrame(figures, dtype=float).max(skipna=False).to_dict()


def most_messages(of_ranks: Sequence[Messages]) -> Messages:
    """For each phase and kind the most collectives, and the most bytes, of a rank."""
    found: Messages = {phase: {} for phase in PHASES}
    for phase, own in found.items():
        for kind in sorted({kind for sent in of_ranks for kind in sent[phase]}):
            calls, sizes = zip(*(sent[phase].get(kind, (0, 0)) for sent in of_ranks), strict=True)
            own[kind] = max(calls), max(sizes)
    return found
