"""Layouts of rung 3 x model sizes on this machine: time of a step, memory of a rank, messages beside their minimum.

All layouts train with the same whole batch of random numbers (strong scaling). The ranks of every number are there at
once and hold every case at once; all take turns in every round, and the time of a step is given as the ratio to one
rank with the whole batch, in the same round.
"""

import math
import re
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tools.benchmarks.mp_ranks import Ranks
from tools.benchmarks.mp_tables import HELD, print_tables, write_picture
from tools.benchmarks.mp_theory import PHASES, grid, local_parameters, predicted_activations, predicted_messages
from tools.instruments.memory import predicted_memory
from tools.tables import machine, write_json
from training.model import build_model
from utils.config import load_config
from utils.device import select_device
from utils.errors import UsageError
from utils.launch import read_launch
from utils.layout import Layout
from utils.schema import Config

LAYOUTS = (
    "tp2", "tp2,sequence_parallel", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all", "pp2",
    "tp4", "cp4", "tp2xcp2", "tp2xpp2", "tp2xdp2", "tp2xdp2,data_parallel=fsdp", "cp2xdp2,data_parallel=fsdp",
)  # fmt: skip
ONE = "one rank"
YAML = "config/mp.yaml"
SPLITS = ("tensor_parallel", "context_parallel", "pipeline_parallel")


@dataclass(frozen=True, eq=False)
class Case:
    """A layout with the config that it runs with; compared by identity, since it is a key."""

    name: str
    config: Config
    layout: Layout


def run(
    words: list[str],
    layouts: Sequence[str] = LAYOUTS,
    embed_dims: Sequence[int] = (),
    steps: int = 2,
    rounds: int = 3,
    json_path: str | None = None,
    png_path: str | None = None,
) -> dict[str, Any]:
    """Measure and print three tables: time, memory, messages.

    words: options of the config. layouts: sizes joined by x, as tp2xdp2, with options of their own after commas:
    'cp4,cp_method=ring'. embed_dims: model sizes; none: that of the config. steps: timed in one turn.
    Returns what json_path gets.
    Raises UsageError for what cannot be run, before anything is timed, and where a rank fails.
    """
    if min(steps, rounds, *embed_dims) < 1:
        raise UsageError("--embed_dims, --steps and --rounds are 1 or more")
    if read_launch().world_size > 1:
        raise UsageError("benchmark.py mp starts its ranks itself: start it with plain python, in one process")
    cases = [
        case for own in ([f"--embed_dim={n}"] for n in embed_dims) for case in build_cases([*words, *own], layouts)
    ]
    cases = cases or build_cases(words, layouts)
    config, sizes = cases[0].config, sorted({case.layout.world_size for case in cases})
    device = select_device(config.device)
    if device.type != "cpu" and sizes[-1] > torch.accelerator.device_count():
        raise UsageError(
            f"{sizes[-1]} ranks need as many devices; this machine has {torch.accelerator.device_count()} "
            f"({device.type}): give smaller --layouts, or --device cpu"
        )
    with ExitStack() as stack:
        teams = {}
        for size in sizes:
            own = [case for case in cases if case.layout.world_size == size]
            teams[size] = stack.enter_context(Ranks(size, own)), own
        turns = [
            {case: ranks.turn(i, steps) / steps for ranks, own in teams.values() for i, case in enumerate(own)}
            for _ in range(rounds)
        ]
        figures = {case: one for ranks, own in teams.values() for case, one in zip(own, ranks.figures, strict=True)}
    yardstick = {case.config.embed_dim: case for case in cases if case.name == ONE}
    results = [
        summarize(case, figures[case], [(turn[case], turn[yardstick[case.config.embed_dim]]) for turn in turns])
        for case in cases
    ]
    print_tables(results)
    print(
        f"{config.depth} blocks, {math.prod(grid(config)):,} tokens, batch {config.global_batch_size} over all ranks, "
        f"{rounds} rounds of {steps} steps; "
        f"{device.type}{', one thread per rank: more ranks than cores share them' if device.type == 'cpu' else ''}"
    )
    summary = {
        "config": config.config, "machine": machine(device), "global_batch_size": config.global_batch_size,
        "depth": config.depth, "tokens": math.prod(grid(config)), "rows": results,
    }  # fmt: skip
    if json_path:
        write_json(json_path, summary)
    if png_path:
        write_picture(png_path, [r for r in results if r["embed_dim"] == results[-1]["embed_dim"]])
    return summary


def build_cases(words: list[str], layouts: Sequence[str]) -> list[Case]:
    """The cases of a model size, checked; the first is the yardstick, one rank."""
    words = ["--config=mp_quick", *words]
    one = load_config(words, yaml_config=YAML, splits=SPLITS)
    cases = [Case(ONE, one, one.layout(1))]
    for text in dict.fromkeys(layouts):
        name, *own = text.split(",")
        sizes = parse_layout(name)
        ranks, pp = math.prod(sizes.values()), sizes["pp"]
        split = [
            f"--tensor_parallel={sizes['tp']}", f"--context_parallel={sizes['cp']}", f"--pipeline_parallel={pp}",
            f"--global_batch_size={one.global_batch_size}",
        ]  # fmt: skip
        parts = [f"--gradient_accumulation={2 * pp}"] if pp > 1 else []  # unless the words say otherwise
        every = [*parts, *words, *split, *(f"--{option}" for option in own)]
        config = load_config(every, world_size=ranks, yaml_config=YAML, splits=SPLITS)
        # hsdp without dp_shard: half of the ranks share one copy, as on two nodes
        cases.append(Case(text, config, config.layout(ranks, max(1, ranks // 2))))
    for case in cases:
        build_model(case.config)  # its sizes fit
    return cases


def parse_layout(name: str) -> dict[str, int]:
    """Sizes of a layout: 'tp2xdp2' -> {'tp': 2, 'cp': 1, 'pp': 1, 'dp': 2}."""
    words = name.split("x")
    parts = [part for word in words if (part := re.fullmatch(r"(tp|cp|pp|dp)([1-9]\d*)", word))]
    if len({part[1] for part in parts}) < len(words):
        raise UsageError(f"layout '{name}': expected sizes of tp, cp, pp, dp joined by x, as tp4 or tp2xcp2xdp2")
    sizes = dict.fromkeys(("tp", "cp", "pp", "dp"), 1) | {part[1]: int(part[2]) for part in parts}
    if math.prod(sizes.values()) == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    return sizes


def summarize(case: Case, figures: Sequence[dict[str, Any]], turns: list[tuple[float, float]]) -> dict[str, Any]:
    """One row. figures: of every rank. turns: (seconds of a step, of one rank) of every round."""
    config, layout = case.config, case.layout
    memory = {
        name: max((figure["memory"].get(name) or 0) for figure in figures) or None
        for name in (*HELD, "allocated at most")
    }
    messages = {}
    for phase in PHASES:
        of_ranks = [figure["messages"][phase] for figure in figures]
        kinds = sorted(set().union(*of_ranks))
        messages[phase] = {
            kind: tuple(map(max, zip(*(of[kind] for of in of_ranks if kind in of), strict=True))) for kind in kinds
        }
    shared = Layout(layout.dp * layout.cp, shard=layout.shard and layout.shard * layout.cp)
    return {
        "layout": case.name,
        "embed_dim": config.embed_dim,
        "ranks": layout.world_size,
        "step_seconds": statistics.median(own for own, _ in turns),
        "ratio": statistics.median(own / one for own, one in turns),
        "ratio_of_rounds": [own / one for own, one in turns],
        "memory": memory,
        "predicted_memory": predicted_memory(config, local_parameters(config, layout), shared)
        | {"activations": predicted_activations(config, layout)},
        "messages": messages,
        "predicted_messages": predicted_messages(config, layout),
    }
