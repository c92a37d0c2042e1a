"""The common part of the benchmarks of ranks: cases named on the command line, turns, a training step on a rank.

Every benchmark of ranks measures cases, each a config in a layout. In every round all cases take turns, and a ratio is
taken within a round, so that the ups and downs of the machine cancel.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from matplotlib.axes import Axes

from tools.instruments.phases import PHASES
from tools.instruments.rank_case import RankCase
from tools.instruments.team import Case, Rank, Teams
from tools.instruments.tracker import Messages, by_phase
from tools.pictures import HELD_COLORS, finish, mark, stack
from tools.planner.formulas import formula_traces
from tools.tables import MIB, in_mib
from utils.config import Script, load_config
from utils.device import select_device
from utils.errors import UsageError
from utils.launch import read_launch

C = TypeVar("C", bound=Case)
T = TypeVar("T")
STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out
HELD = (*STATES, "activations")
RANKS_PER_CORE = 32  # more would only fill the machine


# Cases by their names.


def parse_layout(name: str, dims: Collection[str], example: str) -> dict[str, str]:
    """Sizes of a layout: 'domain2x2xdp2' -> {'domain': '2x2', 'tp': '1', 'dp': '2'}.

    Raises UsageError, with an example, for anything else, and for a layout of one rank.
    """
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d*(?:x[1-9]\d*)?)", part) for part in re.split("x(?=[a-z])", name)]
    sizes = {part[1]: part[2] for part in parts if part and part[1] in dims}
    if len(sizes) < len(parts) or any("x" in size for dim, size in sizes.items() if dim != "domain"):
        raise UsageError(f"layout '{name}': expected sizes of {', '.join(dims)} joined by x, as {example}")
    sizes = dict.fromkeys(dims, "1") | sizes
    if ranks_of(sizes) == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    return sizes


def ranks_of(sizes: Mapping[str, str]) -> int:
    """Ranks of a layout from parse_layout."""
    return math.prod(int(number) for size in sizes.values() for number in size.split("x"))


def build_case(text: str, words: Sequence[str], ranks: int, script: Script) -> Case:
    """The Case of a text like 'tp2,data_parallel=fsdp': a name, then options of its own. words: options before them."""
    own = [f"--{option}" for option in text.split(",")[1:]]
    config = load_config([*words, *own], None, ranks, script.yaml_config, script.splits)
    # hsdp without dp_shard: half of the ranks share one copy, as on two nodes
    return Case(text, config, config.layout(ranks, max(1, ranks // 2)))


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


# Turns.


def take_turns(cases: Sequence[C], rounds: int, measure: Callable[[C, int], T | None]) -> dict[C, list[T | None]]:
    """{case: [measure(case, round), ...]}; after a None, a measurement that failed, the case is left out."""
    turns: dict[C, list[T | None]] = {case: [] for case in cases}
    for number in range(rounds):
        for case, own in turns.items():
            if None not in own:
                own.append(measure(case, number))
    return turns


def train_in_turns(
    cases: Sequence[Case], device: torch.device, steps: int, rounds: int
) -> tuple[dict[Case, dict[str, Any]], dict[Case, list[list[float]]]]:
    """Build all cases at once, each on its ranks, and train in turns.

    Returns ({case: a row with its memory and messages, of the rank that has most, beside the planner's formulas},
    {case: seconds of a step on every rank, in every round}).
    """
    numbers = {case: i for i, case in enumerate(cases)}
    with Teams(cases[0].config) as teams:
        rows = {case: _row(case, teams.call(case.ranks, hold, i, case), device) for case, i in numbers.items()}
        turns = take_turns(cases, rounds, lambda case, _: teams.call(case.ranks, train_held, numbers[case], steps))
    return rows, {case: [turn for turn in own if turn] for case, own in turns.items()}


def hold(rank: Rank, number: int, case: Case) -> dict[str, Any]:
    """On a rank: build a case and keep it; returns its figures."""
    rank.kept[number] = RankCase(rank, case)
    return rank.kept[number].figures()


def train_held(rank: Rank, number: int, steps: int) -> float:
    """On a rank: seconds of a step of a case that was built."""
    rank.kept[number].take_turn()
    return rank.kept[number].times(steps)["seconds"]


def _row(case: Case, figures: Sequence[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    hidden = [figure["hidden"] for figure in figures if figure["hidden"] is not None]
    traces = formula_traces(case.config, case.layout, range(case.layout.cp))
    predicted = most([trace.held for trace in traces])
    # The formulas do not hold for compiled code, nor for a CPU's mixed precision and attention with dropout.
    if case.config.enable_jit or (device.type == "cpu" and (case.config.dropout or case.config.amp_mode != "none")):
        predicted["activations"] = None
    return {
        "ranks": case.ranks, "embed_dim": case.config.embed_dim,
        "memory": most([figure["memory"] for figure in figures]),
        "predicted_memory": {name: predicted[name] for name in HELD},
        "messages": most_messages([figure["messages"] for figure in figures]),
        "predicted_messages": most_messages([by_phase(trace.messages) for trace in traces]),
        "hidden": sum(hidden) / len(hidden) if hidden else None,
    }  # fmt: skip


def most(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The largest value of each name; None where it was not measured."""
    columns = {name: [figure[name] for figure in figures] for name in figures[0]}
    return {name: None if None in values else max(values) for name, values in columns.items()}  # type: ignore[type-var]


def most_messages(of_ranks: Sequence[Messages]) -> Messages:
    """For each phase and kind the most collectives, and the most bytes, of a rank."""
    found: Messages = {phase: {} for phase in PHASES}
    for phase, own in found.items():
        for kind in sorted({kind for sent in of_ranks for kind in sent[phase]}):
            calls, sizes = zip(*(sent[phase].get(kind, (0, 0)) for sent in of_ranks), strict=True)
            own[kind] = max(calls), max(sizes)
    return found


# Tables and pictures of rows.


MEMORY = {name: f"{{{name}:.2f}}" for name in STATES} | {"sum": "{states:.2f}", "formula": "{states_formula:.2f}"}


def in_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of train_in_turns with its memory as single values in MiB, for tables."""
    held = {name: in_mib(size) for name, size in row["memory"].items()}
    formula = {f"{name} formula": in_mib(size) for name, size in row["predicted_memory"].items()}
    states, by_formula = (
        sum(held[name] or 0 for name in STATES),
        sum(formula[f"{name} formula"] or 0 for name in STATES),
    )
    return {**row, **held, **formula, "states": states, "states_formula": by_formula}


def memory_bars(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Memory of a rank by use, a bar for each row, and its formula as a mark."""
    stack(axes, {name: [in_mib(row["memory"][name]) for row in rows] for name in HELD}, list(HELD_COLORS.values()))
    mark(axes, [sum(size or 0 for size in row["predicted_memory"].values()) / MIB for row in rows], "formula")
    finish(axes, title=title, xlabel="MiB")
