"""The common part of the benchmarks of ranks: cases named on the command line, turns, tables and pictures.

Every benchmark of ranks measures cases, each a config in a layout. In every round all cases take turns, and a ratio is
taken within a round, so that the ups and downs of the machine cancel.
"""

import math
import os
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from pandas import DataFrame

from tools.instruments.phases import PHASES
from tools.instruments.rank_case import build_case, figures_of, seconds_of
from tools.instruments.team import Case, Teams
from tools.instruments.tracker import Messages, by_phase
from tools.planner.trace import trace_step
from training.model import build_model
from utils.device import select_device
from utils.errors import UsageError
from utils.launch import read_launch

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out
HELD = (*STATES, "activations")
RANKS_PER_CORE = 32  # more would only fill the machine


def parse_layout(name: str, dims: Collection[str], example: str) -> tuple[dict[str, str], int]:
    """Sizes and ranks of a layout: 'domain2x2xdp2' -> {'domain': '2x2', 'tp': '1', 'dp': '2'}, 8.

    Raises UsageError, with an example, for anything else, and for a layout of one rank.
    """
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d*(?:x[1-9]\d*)?)", part) for part in re.split("x(?=[a-z])", name)]
    sizes = {part[1]: part[2] for part in parts if part and part[1] in dims}
    if len(sizes) < len(parts) or any("x" in size for dim, size in sizes.items() if dim != "domain"):
        raise UsageError(f"layout '{name}': expected sizes of {', '.join(dims)} joined by x, as {example}")
    ranks = math.prod(int(number) for size in sizes.values() for number in size.split("x"))
    if ranks == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    return dict.fromkeys(dims, "1") | sizes, ranks


def named_case(text: str, script: str, words: Sequence[str], ranks: int) -> Case:
    """The Case of a text like 'tp2,data_parallel=fsdp': a name, then options of its own. words: options before them."""
    return build_case(text, script, [*words, *(f"--{option}" for option in text.split(",")[1:])], ranks)


def check_machine(command: str, cases: Sequence[Case], option: str) -> torch.device:
    """The device that cases run on. Raises UsageError in a process that a launcher started, and for a lack of devices.

    option: of the command, which says how many ranks there are.
    """
    if read_launch().world_size > 1:
        raise UsageError(f"benchmark.py {command} starts its ranks itself: start it with plain python, in one process")
    device, most = select_device(cases[0].config.device), max(case.ranks for case in cases)
    if device.type != "cpu" and most > torch.accelerator.device_count():
        raise UsageError(
            f"{most} ranks need as many devices; this machine has {torch.accelerator.device_count()} ({device.type}): "
            f"give smaller {option}, or --device cpu"
        )
    if most > RANKS_PER_CORE * (os.cpu_count() or 1):
        raise UsageError(f"{most} ranks are too many for {os.cpu_count()} cores: give smaller {option}")
    return device


def conditions(device: torch.device, rounds: int, steps: int) -> str:
    """How cases were measured, in words."""
    shared = ", one thread per rank: more ranks than cores share them" if device.type == "cpu" else ""
    return f"{rounds} rounds of {steps} steps; {device.type}{shared}"


def compare(
    command: str, key: str, groups: Sequence[Sequence[Case]], option: str, steps: int, rounds: int
) -> tuple[torch.device, list[dict[str, Any]]]:
    """Build all cases at once, each on its ranks, and train in turns; returns the device and a row for each case.

    groups: of cases that are compared with the first of them. command, option: as of check_machine. A row has under
    `key` the case's name, its memory and messages, of the rank that has most, beside the planner's trace, and the
    seconds of a step in each round, the harmonic mean over the ranks, with the ratios to those of the first case.
    """
    cases = [case for group in groups for case in group]
    device = check_machine(command, cases, option)
    for case in cases:
        build_model(case.config)  # its sizes fit
    with Teams(cases[0].config) as teams:
        rows = {case: {key: case.name} | _row(case, teams.call(case.ranks, figures_of, case), device) for case in cases}
        for case, row in [*rows.items()] * rounds:
            row["seconds"].append(statistics.harmonic_mean(teams.call(case.ranks, seconds_of, case, steps)))
    for first, case in ((group[0], case) for group in groups for case in group):
        seconds = zip(rows[case]["seconds"], rows[first]["seconds"], strict=True)
        rows[case]["ratio_of_rounds"] = [own / yardstick for own, yardstick in seconds]
    return device, list(rows.values())


def _row(case: Case, figures: Sequence[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    hidden = [figure["hidden"] for figure in figures if figure["hidden"] is not None]
    ranks = {*case.layout.groups("cp")[0], *case.layout.groups("pp")[0]}  # the others are like these
    traces = trace_step(case.config, case.layout, device.type, ranks)
    predicted = most([trace.held for trace in traces])
    if case.config.enable_jit:  # code that is traced is not compiled
        predicted["activations"] = math.nan
    return {
        "ranks": case.ranks, "embed_dim": case.config.embed_dim, "seconds": [],
        "memory": most([figure["memory"] for figure in figures]),
        "predicted_memory": {name: predicted[name] for name in HELD},
        "messages": most_messages([figure["messages"] for figure in figures]),
        "predicted_messages": most_messages([by_phase(trace.messages) for trace in traces]),
        "hidden": sum(hidden) / len(hidden) if hidden else None,
    }  # fmt: skip


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
