"""Data-parallel strategies x world sizes on this machine: speed, memory beside ZeRO's formulas, messages.

The ranks of every world size are there at once and hold every strategy at once. All take turns in every round, and a
ratio is taken within a round, so that the machine's own ups and downs cancel. Weak scaling: every rank has the same
local batch, of random numbers. The yardstick of a world size is `independent`: as many ranks with the same local work,
started together, that tell one another nothing (--noddp).
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from distributed.data_parallel import DTYPES, SHARDED
from tools.benchmarks.team import Team
from tools.instruments.memory import predicted_memory
from tools.tables import format_table, machine, write_json
from training.model import build_model
from utils.config import load_config
from utils.device import select_device
from utils.errors import UsageError
from utils.files import whole_file
from utils.launch import read_launch
from utils.layout import Layout
from utils.schema import Config

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
INDEPENDENT = "independent"
SPLIT = ("parameters", "gradients", "optimizer")  # what the formulas of ZeRO are about
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A strategy with the config that it runs with, and its ranks."""

    name: str
    config: Config
    layout: Layout


def run(
    words: list[str],
    strategies: Sequence[str] = STRATEGIES,
    world_sizes: Sequence[int] = (1, 2),
    steps: int = 4,
    rounds: int = 3,
    json_path: str | None = None,
    png_path: str | None = None,
) -> dict[str, Any]:
    """Measure and print three tables: speed, memory, messages.

    words: options of the config. strategies: each a value of data_parallel, with options of its own after commas:
    'fsdp,wrap_policy=none'. steps: timed in one turn. Returns what json_path gets.
    Raises UsageError for what cannot be run, before anything is started, and where a rank fails.
    """
    if min(*world_sizes, steps, rounds) < 1:
        raise UsageError("--world_sizes, --steps and --rounds are 1 or more")
    if read_launch().world_size > 1:
        raise UsageError("benchmark.py dp starts its ranks itself: start it with plain python, in one process")
    world_sizes = sorted(set(world_sizes))
    cases = {size: build_cases(words, strategies, size) for size in world_sizes}
    config = cases[world_sizes[0]][0].config
    device = select_device(config.device)
    if device.type != "cpu" and world_sizes[-1] > torch.accelerator.device_count():
        raise UsageError(
            f"{world_sizes[-1]} ranks need as many devices; this machine has {torch.accelerator.device_count()} "
            f"({device.type}): lower --world_sizes, or --device cpu"
        )
    numbers = sum(p.numel() for p in build_model(config).parameters())

    with ExitStack() as stack:
        teams = {
            size: stack.enter_context(Team(size, [(case.config, case.layout) for case in own]))
            for size, own in cases.items()
        }
        turns = [
            {(size, i): teams[size].turn(i, steps) for size in teams for i in range(len(cases[size]))}
            for _ in range(rounds)
        ]
    results = [
        summarize(
            case, teams[size].figures[i], [(turn[size, i], turn[size, 0], turn.get((1, 0))) for turn in turns], numbers
        )
        for size, own in cases.items()
        for i, case in enumerate(own)
    ]
    print_tables(results)
    print(
        f"{numbers:,} parameters, local batch {config.local_batch_size}, {rounds} rounds of {steps} steps; "
        f"{device.type}{', one thread per rank: more ranks than cores share them' if device.type == 'cpu' else ''}"
    )
    summary = {
        "config": config.config, "machine": machine(device), "parameters": numbers,
        "local_batch_size": config.local_batch_size, "rows": results,
    }  # fmt: skip
    if json_path:
        write_json(json_path, summary)
    if png_path:
        write_picture(png_path, results, config.config)
    return summary


def build_cases(words: list[str], strategies: Sequence[str], size: int) -> list[Case]:
    """The cases of a world size, checked; the first is the yardstick. In one rank the strategies are all the same."""
    config = load_config(words)
    batch = config.global_batch_size  # of one rank
    apart: dict[str, Any] = {"data_parallel": "ddp", "noddp": True, "local_batch_size": batch}
    cases = [Case(INDEPENDENT, config.model_copy(update=apart), Layout(size))]
    for text in strategies:
        strategy, *own = text.split(",")
        shared = [f"--data_parallel={strategy}", f"--local_batch_size={batch}", f"--global_batch_size={batch * size}"]
        config = load_config([*words, *shared, *(f"--{option}" for option in own)], world_size=size)
        build_model(config)  # its sizes fit
        # hsdp without dp_shard: half of the ranks share one copy, as on two nodes
        cases.append(Case(text, config, config.layout(size, max(1, size // 2))))
    return cases if size > 1 else cases[:1]


def summarize(
    case: Case, figures: Sequence[dict[str, Any]], turns: list[tuple[float, float, float | None]], numbers: int
) -> dict[str, Any]:
    """One row. figures: of every rank. turns: (samples/s, of the yardstick, of one rank or None) of every round."""
    ratios = [own / yardstick for own, yardstick, _ in turns]
    of_one = [own / one / case.layout.dp for own, _, one in turns if one]
    memory = {
        name: max(figure["memory"][name] for figure in figures) if value is not None else None
        for name, value in figures[0]["memory"].items()
    }
    hidden = [figure["hidden"] for figure in figures if figure["hidden"] is not None]
    return {
        "strategy": case.name,
        "ranks": case.layout.dp,
        "samples_per_sec": statistics.median(own for own, _, _ in turns),
        "efficiency": statistics.median(ratios),
        "efficiency_of_rounds": ratios,
        "of_one_rank": statistics.median(of_one) if of_one else None,
        "memory": memory,
        "predicted_memory": predicted_memory(case.config, numbers, case.layout),
        "calls": figures[0]["calls"],
        "bytes": figures[0]["bytes"],
        "predicted_bytes": predicted_bytes(case.config, numbers, case.layout),
        "hidden": statistics.mean(hidden) if hidden else None,
    }


def predicted_bytes(config: Config, numbers: float, layout: Layout) -> dict[str, float]:
    """{kind: bytes that a rank sends in a step}, N ranks, S of which share one copy of the parameters."""
    n, strategy, micro_batches = layout.dp, config.data_parallel, config.gradient_accumulation
    if config.noddp or n == 1:
        return {}
    whole = 4 * numbers
    if strategy not in SHARDED:
        width = 2 if config.gradient_compression == "bf16" else 4
        sent = {"all_reduce": 2 * (n - 1) / n * width * numbers}
        return sent | ({"broadcast": whole} if strategy == "zero1" else {})
    s = layout.shard or n
    gathered = numbers * (DTYPES[config.gather_dtype] or torch.float32).itemsize
    sent = {
        "all_gather": (1 if strategy == "zero2" else 2) * micro_batches * (s - 1) / s * gathered,
        "reduce_scatter": (s - 1) / s * whole,
        "all_reduce": 2 * (n // s - 1) / (n // s) * whole / s,
    }
    return {kind: size for kind, size in sent.items() if size}


def print_tables(results: list[dict[str, Any]]) -> None:
    """Speed, memory and messages of summarized cases."""
    speed = {
        "strategy": "", "ranks": "d", "samples/s": ".2f", "of independent": ".1%", "in the rounds": "",
        "of one rank": ".1%", "hidden": ".0%",
    }  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for r in results:
        spread = f"{min(r['efficiency_of_rounds']):.0%} to {max(r['efficiency_of_rounds']):.0%}"
        rows.append(
            (r["strategy"], r["ranks"], r["samples_per_sec"], r["efficiency"], spread, r["of_one_rank"], r["hidden"])
        )
    print("Speed: samples/s of all ranks, beside as many independent ranks, and beside one rank times their number\n")
    print(format_table(speed, rows))
    if all(r["hidden"] is None for r in results):
        print(
            "\nhidden: the share of communication under compute is read from the kernels of a GPU; there is none here"
        )

    memory = {
        "strategy": "", "ranks": "d", **dict.fromkeys(SPLIT, ".2f"), "sum": ".2f", "formula": ".2f", "ratio": ".3f",
        "parameters at most": ".2f", "activations": ".2f", "allocated at most": ".2f",
    }  # fmt: skip
    rows = []
    for r in results:
        sizes: dict[str, Any] = {name: None if size is None else size / MIB for name, size in r["memory"].items()}
        total, formula = sum(sizes[name] for name in SPLIT), sum(r["predicted_memory"].values()) / MIB
        rows.append(
            (r["strategy"], r["ranks"], *(sizes[name] for name in SPLIT), total, formula, total / formula,
             *(sizes[name] for name in list(memory)[-3:]))
        )  # fmt: skip
    print("\nMemory: MiB on the rank that holds most\n")
    print(format_table(memory, rows))

    rows = []
    for r in results:
        kinds = ", ".join(f"{calls} {kind} {r['bytes'][kind] / MIB:.2f}" for kind, calls in sorted(r["calls"].items()))
        total, formula = (sum(r[name].values()) / MIB for name in ("bytes", "predicted_bytes"))
        rows.append((r["strategy"], r["ranks"], kinds or "none", total, formula))
    print("\nMessages: collectives of an optimizer step, and MiB that a rank sends in them\n")
    columns = {"strategy": "", "ranks": "d", "calls, kind, MiB": "", "sum": ".2f", "formula": ".2f"}
    print(format_table(columns, rows) + "\n")


def write_picture(path: str, results: list[dict[str, Any]], title: str) -> None:
    """Left: memory of a rank at the largest world size, stacked, the formula as a mark. Right: samples/s."""
    sizes = sorted({r["ranks"] for r in results})
    rows = [r for r in results if r["ranks"] == sizes[-1]]
    figure = Figure(figsize=(12, 1.8 + 0.45 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2)
    start = [0.0] * len(rows)
    for what, color in zip((*SPLIT, "activations"), ("#4477aa", "#66ccee", "#ccbb44", "#bbbbbb"), strict=True):
        values = [r["memory"][what] / MIB for r in rows]
        left.barh(range(len(rows)), values, left=start, label=what, color=color)
        start = [a + b for a, b in zip(start, values, strict=True)]
    formula = [sum(r["predicted_memory"].values()) / MIB for r in rows]
    left.plot(formula, range(len(rows)), "k|", markersize=16, label="formula, without activations")
    left.set(title=f"{title}: memory of a rank, {sizes[-1]} ranks", xlabel="MiB")
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        speeds = {r["strategy"]: r["samples_per_sec"] for r in results if r["ranks"] == size}
        places = [k + (i - (len(sizes) - 1) / 2) * height for k, r in enumerate(rows) if r["strategy"] in speeds]
        values = [speeds[r["strategy"]] for r in rows if r["strategy"] in speeds]
        shade = ("#ddaa99", "#cc6677", "#882255", "#441133")[i % 4]
        right.barh(places, values, height * 0.9, label=f"{size} rank{'s' * (size > 1)}", color=shade)
    right.set(title=f"{title}: samples/s of all ranks", xlabel="samples/s")
    for axes in (left, right):
        axes.set_yticks(range(len(rows)), [r["strategy"] for r in rows])
        axes.invert_yaxis()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(Path(path)) as part:
        figure.savefig(part, format="png", dpi=120)
