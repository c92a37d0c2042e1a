"""Cases measured side by side on the ranks of this machine: time, memory and communication of a step.

A case is a config in a layout. In every round all cases take turns, and a ratio is taken within a round, so that the
ups and downs of the machine cancel. In its turn a case is built and given up again: what it holds is its own.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pandas import DataFrame

from tools.benchmarks.turns import in_turns
from tools.instruments.pool import OutOfMemory
from tools.instruments.rank_case import WARMUP_STEPS, RankCase
from tools.instruments.team import Case, Rank, Teams
from tools.instruments.tracker import PHASES, Messages, by_phase
from tools.planner.trace import measured
from utils.device import empty_cache, library, select_device
from utils.errors import UsageError

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out
HELD = (*STATES, "activations")
MEMORY = (*HELD, "parameters at most", "peak")
RANKS_PER_CORE = 32  # more would only fill the machine


def check_machine(cases: Sequence[Case]) -> torch.device:
    """The device of the cases. Raises UsageError for a lack of devices."""
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
    and where a rank fails.
    """
    cases = [case for group in groups.values() for case in group]
    device = check_machine(cases)
    turns: dict[Case, list[Any]] = {case: [] for case in cases}
    named = {f"{case.name} {size}": case for size, group in groups.items() for case in group}
    without_memory: set[str] = set()
    with Teams(cases[0].config) as teams:
        for number, name, case in in_turns(named, rounds, without_memory):
            turns[case].append(_turn(teams, case, steps, limit, number == 0))
            if turns[case][-1] is None:
                without_memory.add(name)
    rows: list[dict[str, Any]] = []
    for size, group in groups.items():
        first, *_ = of_group = [{"size": size} | _row(case, turns[case]) for case in group]
        for row in of_group:
            if "seconds" in row and "seconds" in first:  # relative to the first of the group, in every round
                pairs = zip(row["seconds_of_rounds"], first["seconds_of_rounds"], strict=True)
                row["speedup_of_rounds"] = [row["batch"] / own / (first["batch"] / other) for own, other in pairs]
                row["speedup"] = statistics.median(row["speedup_of_rounds"])
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
    figures: dict[str, Any] = {"seconds": built.seconds(steps)}
    if first:
        peak = gpu.max_memory_allocated() - built.before if gpu else 0  # its allocator knows better
        trace = measured(built.step, built.x, built.y)
        memory = {name: trace.held.get(name) for name in MEMORY} | {"peak": peak or trace.memory["peak"]}
        if case.config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            memory["activations"] = None
        if limit and memory["peak"] > limit:
            raise MemoryError(f"{memory['peak']:.0f} bytes of tensors: the limit is {limit:.0f}")
        figures |= {"memory": memory, "messages": by_phase(trace.messages)}
    del built
    empty_cache(rank.device)
    return figures


def _row(case: Case, turns: list[Any]) -> dict[str, Any]:
    """The figures of a case, of the rank that has most. turns: figures of every rank, None where memory ran out."""
    row: dict[str, Any] = {
        "layout": case.name, "ranks": case.ranks, "batch": case.config.global_batch_size,
        "out_of_memory": None in turns,
    }  # fmt: skip
    if None in turns:
        return row
    # The harmonic mean: ranks that do not wait for one another add up their speeds.
    seconds = [statistics.harmonic_mean(figures["seconds"] for figures in turn) for turn in turns]
    return row | {
        "seconds": statistics.median(seconds), "seconds_of_rounds": seconds,
        "samples_per_sec": row["batch"] / statistics.median(seconds),
        "memory": DataFrame([figures["memory"] for figures in turns[0]], dtype=float).max(skipna=False).to_dict(),
        "messages": most_messages([figures["messages"] for figures in turns[0]]),
    }  # fmt: skip


def most_messages(of_ranks: Sequence[Messages]) -> Messages:
    """For each phase and kind the most collectives, and the most bytes, of a rank."""
    found: Messages = {phase: {} for phase in PHASES}
    for phase, own in found.items():
        for kind in sorted({kind for sent in of_ranks for kind in sent[phase]}):
            calls, sizes = zip(*(sent[phase].get(kind, (0, 0)) for sent in of_ranks), strict=True)
            own[kind] = max(calls), max(sizes)
    return found
