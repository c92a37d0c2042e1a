"""The common part of the benchmarks of ranks: cases named on the command line, turns, a training step on a rank.

Every benchmark of ranks measures cases, each a config in a layout. In every round all cases take turns, and a ratio is
taken within a round, so that the ups and downs of the machine cancel.
"""

import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tools.instruments.assembly import build_step, random_batch
from tools.instruments.memory import memory_of_a_step
from tools.instruments.messages import messages_of_a_step
from tools.instruments.overlap import hidden_share_of
from tools.instruments.phases import PHASES
from tools.instruments.team import Case, Rank, Teams
from tools.planner.formulas import formula_traces
from utils import comm
from utils.config import Script, load_config
from utils.device import library, select_device, synchronize
from utils.errors import UsageError
from utils.launch import read_launch

C = TypeVar("C", bound=Case)
T = TypeVar("T")
Messages = dict[str, dict[str, tuple[float, float]]]  # by phase and kind: collectives, bytes that a rank sends

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out
HELD = (*STATES, "activations")
WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order, memory is allocated
PROFILED_STEPS = 3
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
    cases: Sequence[Case], steps: int, rounds: int
) -> tuple[dict[Case, dict[str, Any]], dict[Case, list[list[float]]]]:
    """Build all cases at once, each on its ranks, and train in turns.

    Returns ({case: memory, messages and hidden share, the most of any rank}, {case: seconds of a step on every rank, in
    every round}).
    """
    with Teams(cases[0].config) as teams:
        figures = {case: _most_of_ranks(teams.call(case.ranks, hold, i, case)) for i, case in enumerate(cases)}
        numbers = {case: i for i, case in enumerate(cases)}
        turns = take_turns(cases, rounds, lambda case, _: teams.call(case.ranks, train_held, numbers[case], steps))
    return figures, {case: [turn for turn in own if turn] for case, own in turns.items()}


def hold(rank: Rank, number: int, case: Case) -> dict[str, Any]:
    """On a rank: build a case and keep it; returns its figures."""
    rank.kept[number] = RankCase(rank, case)
    return rank.kept[number].figures()


def train_held(rank: Rank, number: int, steps: int) -> float:
    """On a rank: seconds of a step of a case that was built."""
    rank.use_mesh(rank.kept[number].case.layout)
    return rank.kept[number].times(steps)["seconds"]


def _most_of_ranks(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    hidden = [figure["hidden"] for figure in figures if figure["hidden"] is not None]
    return {
        "memory": most([figure["memory"] for figure in figures]),
        "messages": most_messages([figure["messages"] for figure in figures]),
        "hidden": sum(hidden) / len(hidden) if hidden else None,
    }


def most(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The largest value of each name; None where it was not measured."""
    found: dict[str, float | None] = {}
    for name in figures[0]:
        values = [value for figure in figures if (value := figure[name]) is not None]
        found[name] = max(values) if len(values) == len(figures) else None
    return found


def most_messages(of_ranks: Sequence[Messages]) -> Messages:
    """For each phase and kind the most collectives, and the most bytes, of a rank."""
    found: Messages = {phase: {} for phase in PHASES}
    for sent in of_ranks:
        for phase, kinds in sent.items():
            for kind, (calls, size) in sorted(kinds.items()):
                before = found[phase].get(kind, (0, 0))
                found[phase][kind] = max(before[0], calls), max(before[1], size)
    return found


def formulas_of(case: Case, device: torch.device) -> tuple[dict[str, float | None], Messages]:
    """(memory, messages) of a step by the planner's formulas, of the rank that holds or sends most.

    Activations are None where the formulas do not hold: for compiled code, and on a CPU, whose mixed precision and
    attention with dropout keep other tensors than a GPU's.
    """
    config, sent = case.config, []
    traces = formula_traces(config, case.layout, range(case.layout.cp))
    for trace in traces:
        messages: Messages = {phase: {} for phase in PHASES}
        for message, calls in trace.messages.items():
            before = messages[message.phase].get(message.kind, (0, 0))
            messages[message.phase][message.kind] = before[0] + calls, before[1] + calls * message.sent
        sent.append(messages)
    memory = most([trace.held for trace in traces])
    if config.enable_jit or (device.type == "cpu" and (config.dropout or config.amp_mode != "none")):
        memory["activations"] = None
    return memory, most_messages(sent)


# A training step on a rank.


class RankCase:
    """A case on one rank: its training step, and a batch of random numbers."""

    def __init__(self, rank: Rank, case: Case):
        self.device, self.case = rank.device, case
        self.gpu = library(self.device, "max_memory_allocated")
        self.before = self.gpu.memory_allocated() if self.gpu else 0
        rank.use_mesh(case.layout)
        self.x, self.y = random_batch(case.config, self.device)
        self.step = build_step(case.config, self.device, f"layout '{case.name}'")

    def train(self, steps: int) -> None:
        """Make so many optimizer steps, and wait for the last."""
        for _ in range(steps):
            self.step(0, self.x, self.y)
        synchronize(self.device)

    def times(self, steps: int) -> dict[str, float]:
        """Seconds of a step, and of its CPU time: the mean over some steps that all ranks start together."""
        self.train(1)  # the turns of other cases have emptied the caches
        if comm.world_size() > 1:
            dist.barrier()
        synchronize(self.device)
        started, cpu = time.perf_counter(), time.process_time()
        self.train(steps)
        return {
            "seconds": (time.perf_counter() - started) / steps, "cpu_seconds": (time.process_time() - cpu) / steps
        }  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """Memory and messages of a step, and on a GPU the share of communication that computation hides."""
        self.train(WARMUP_STEPS - 1)
        if self.gpu:
            self.gpu.reset_peak_memory_stats()
        self.train(1)
        allocated = self.gpu.max_memory_allocated() - self.before if self.gpu else None
        memory: dict[str, float | None] = memory_of_a_step(self.step, self.x, self.y) | {"allocated at most": allocated}
        if self.case.config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            memory["activations"] = None
        return {
            "memory": memory,
            "messages": messages_of_a_step(self.step, self.x, self.y),
            "hidden": hidden_share_of(lambda: self.train(PROFILED_STEPS)) if self.gpu else None,
        }
