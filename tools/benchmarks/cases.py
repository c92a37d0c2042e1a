"""Cases measured side by side on the ranks of this machine: time, memory and communication of a step.

A case is a config in a layout, which commands name as 'tp2xdp2' or 'domain2x2xdp2,amp_mode=bf16'. In every round all
cases take turns, and a ratio is taken within a round, so that the ups and downs of the machine cancel. In its turn a
case is built and given up again: what it holds is its own.
"""

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby, product
from operator import itemgetter
from typing import Any, TypeVar

import torch
from pandas import DataFrame

from tools.instruments.rank_case import WARMUP_STEPS, RankCase
from tools.instruments.ranks import Case, OutOfMemory, Process, Teams
from tools.instruments.tracker import by_phase
from tools.planner.trace import HELD, measured_inference, observe_step
from utils.config import STRATEGIES
from utils.device import device_module, empty_cache, select_device
from utils.errors import UsageError

MEMORY = (*HELD, "parameters at most", "peak")
POINTS = 100  # of a curve in one stretch of a phase
RANKS_PER_CORE = 32  # more would only fill the machine
# The key of the config that has the size of each dimension of a layout.
OPTIONS = {
    "tp": "tensor_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_parallel",
    "domain": "domain_parallel",
    "ens": "ensemble_parallel",
}

T = TypeVar("T")


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


def in_turns(
    cases: Mapping[str, T],
    rounds: int,
    left_out: Container[str] = (),
) -> Iterator[tuple[int, str, T]]:
    """All cases in each round, as (number of the round, name, case), but those that are left out by then."""
    started = time.monotonic()
    turns = list(product(range(rounds), cases))  # (round, name): a round ends when every case has had its turn
    for turn, (number, name) in enumerate(turns, 1):
        if name in left_out:  # the caller may have added it since the last turn
            continue
        seconds = time.monotonic() - started
        print(f"turn {turn} of {len(turns)}, after {seconds:.0f} s: {name}", file=sys.stderr, flush=True)
        yield number, name, cases[name]


def split_words(sizes: dict[str, str]) -> list[str]:
    """The options that split a model as parse_layout says, in micro-batches for a pipeline; other words may follow."""
    words = [f"--{option}={sizes[dim]}" for dim, option in OPTIONS.items()]
    stages = int(sizes["pp"])
    # Fewer micro-batches would let the stages idle for longer.
    if stages > 1:
        words.append(f"--gradient_accumulation={2 * stages}")
    return words


def _named_strategy(name: str) -> str:
    """How to name a layout where a strategy of data parallelism stands in place of a dimension; "" where none does."""
    for part in name.split("x"):
        for strategy in STRATEGIES:
            size = part.removeprefix(strategy)
            if size == part:
                continue
            sized = name.replace(part, f"dp{size if size.isdecimal() else 2}")
            return f"{strategy} is what the ranks of dp share, not a dimension: {sized},data_parallel={strategy}"
    return ""


def parse_layout(
    text: str,
    dims: Sequence[str],
) -> tuple[dict[str, str], int]:
    """Sizes and ranks of a layout: 'domain2x2xdp2,amp_mode=bf16' -> {'domain': '2x2', 'dp': '2', others: '1'}, 8.

    dims: those that it may have. Raises UsageError, with an example, for anything else, and for a layout of one rank.
    """
    name = text.partition(",")[0]
    sizes: dict[str, str] = {}
    ranks = 1
    is_understood = True
    # An x joins two dimensions where a letter follows. Before a digit it stands between rows and columns of tiles.
    for part in re.split("x(?=[a-z])", name):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*(?:x[1-9]\d*)?)", part)
        if match is None or match[1] not in dims or match[1] in sizes:
            is_understood = False
            break
        dim, size = match.groups()
        # Only an image is split along two sides.
        if "x" in size and dim != "domain":
            is_understood = False
            break
        sizes[dim] = size
        ranks *= math.prod(map(int, size.split("x")))
    if not is_understood:
        meant = _named_strategy(name)
        if meant:
            raise UsageError(f"layout '{name}': {meant}")
        raise UsageError(f"layout '{name}': expected sizes of {', '.join(dims)} joined by x, as {dims[0]}2xdp2")
    if ranks == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    # Dimensions that the name leaves out have size 1.
    return dict.fromkeys([*OPTIONS, "dp"], "1") | sizes, ranks
