"""Layouts of rungs 2 and 3 on this machine: speed, memory and messages beside the planner's formulas.

`dp`, weak scaling: every rank has the same local batch. The yardstick of a world size is `independent`: as many ranks
with the same local work, started together, that send one another nothing (--noddp).
`mp`, strong scaling: all layouts train with the same whole batch. The yardstick of a model size is one rank.
"""

import math
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from networks.vit import patch_grid
from tools.benchmarks.cases import HELD, STATES, compare, conditions, named_case, parse_layout
from tools.instruments.phases import PHASES
from tools.instruments.team import Case
from tools.instruments.tracker import Messages
from tools.pictures import HELD_COLORS, SHADES, draw_bars, finish, mark, panels, save
from tools.tables import MIB, machine, print_tables, spread
from training.model import build_model
from utils.config import choices, load_config
from utils.layout import Layout

STRATEGIES = choices("data_parallel")
LAYOUTS = (
    "tp2", "tp2,sequence_parallel", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all", "pp2",
    "tp4", "cp4", "tp2xcp2", "tp2xpp2", "tp2xdp2", "tp2xdp2,data_parallel=fsdp", "cp2xdp2,data_parallel=fsdp",
)  # fmt: skip
INDEPENDENT, ONE = "independent", "one rank"
NO_GPU = "hidden: the share of communication under compute is read from the kernels of a GPU; there is none here"


def run_dp(
    words: list[str],
    strategies: Sequence[str] = STRATEGIES,
    world_sizes: Sequence[int] = (1, 2),
    steps: int = 4,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure strategies x world sizes, and print three tables: speed, memory, messages.

    words: options of the config. strategies: each a value of data_parallel, with options of its own after commas:
    'fsdp,wrap_policy=none'. steps: timed in one turn. Returns the figures, as JSON has them.
    Raises UsageError for what cannot be run, before anything is started, and where a rank fails.
    """
    groups = [strategy_cases(words, strategies, size) for size in sorted(set(world_sizes))]
    device, results = compare("dp", "strategy", groups, "--world_sizes", steps, rounds)
    config, ranks = groups[0][0].config, groups[0][0].ranks
    parameters, batch = sum(p.numel() for p in build_model(config).parameters()), config.global_batch_size // ranks
    for row in results:
        efficiency = [1 / ratio for ratio in row.pop("ratio_of_rounds")]
        alone = [one / own for one, own in zip(results[0]["seconds"], row["seconds"], strict=True)]
        row |= {
            "samples_per_sec": row["ranks"] * batch / median(row["seconds"]), "efficiency": median(efficiency),
            "efficiency_of_rounds": efficiency, "of_one_rank": median(alone) if ranks == 1 else None,
        }  # fmt: skip
    shown = [r | in_columns(r) | {"rounds": spread(r["efficiency_of_rounds"], ".0%")} for r in results]
    print_tables("dp", shown, shown, shown)
    if all(r["hidden"] is None for r in results):
        print(f"{NO_GPU}\n")
    print(f"{parameters:,} parameters, local batch {batch}, {conditions(device, rounds, steps)}")
    return {
        "config": config.config, "machine": machine(device), "parameters": parameters, "local_batch_size": batch,
        "rows": results,
    }  # fmt: skip


def run_mp(
    words: list[str], layouts: Sequence[str] = LAYOUTS, embed_dims: Sequence[int] = (), steps: int = 2, rounds: int = 3
) -> dict[str, Any]:
    """Measure layouts x model sizes, and print three tables: time, memory, messages.

    words: options of the config. layouts: sizes joined by x, as tp2xdp2, with options of their own after commas:
    'cp4,cp_method=ring'. embed_dims: model sizes; none: that of the config. steps: timed in one turn.
    Returns the figures, as JSON has them.
    Raises UsageError for what cannot be run, before anything is timed, and where a rank fails.
    """
    models = [[f"--embed_dim={n}"] for n in embed_dims] or [[]]
    groups = [layout_cases([*words, *own], layouts) for own in models]
    device, results = compare("mp", "layout", groups, "--layouts", steps, rounds)
    for row in results:
        row |= {"step_seconds": median(row["seconds"]), "ratio": median(row["ratio_of_rounds"])}
    shown = [
        r | in_columns(r) | {"ms": 1000 * r["step_seconds"], "rounds": spread(r["ratio_of_rounds"], ".2f")}
        for r in results
    ]
    passes = [row | in_columns(row, [phase]) | {"pass": phase} for row, phase in product(shown, PHASES)]
    sends = [row for row in passes if row["messages"][row["pass"]] or row["predicted_messages"][row["pass"]]]
    print_tables("mp", shown, shown, sends)
    config = groups[0][0].config
    tokens = math.prod(patch_grid(config.img_size, config.patch_size)[0])
    batch = f"batch {config.global_batch_size} over all ranks"
    print(f"{config.depth} blocks, {tokens:,} tokens, {batch}, {conditions(device, rounds, steps)}")
    return {
        "config": config.config, "machine": machine(device), "global_batch_size": config.global_batch_size,
        "depth": config.depth, "tokens": tokens, "rows": results,
    }  # fmt: skip


def strategy_cases(words: list[str], strategies: Sequence[str], size: int) -> list[Case]:
    """The cases of a world size, checked; the first is the yardstick. In one rank the strategies are all the same."""
    config = load_config(words)
    batch = config.global_batch_size  # of one rank
    shared = {"local_batch_size": batch, "global_batch_size": batch * size}
    apart = config.model_copy(update={"data_parallel": "ddp", "noddp": True, **shared})
    cases = [Case(INDEPENDENT, apart, Layout(size))]
    for text in dict.fromkeys(strategies):
        options = {"data_parallel": text.partition(",")[0], **shared}
        cases.append(named_case(text, "train.py", [*words, *(f"--{k}={v}" for k, v in options.items())], size))
    return cases if size > 1 else cases[:1]


def layout_cases(words: list[str], layouts: Sequence[str]) -> list[Case]:
    """The cases of a model size, checked; the first is the yardstick, one rank."""
    words = ["--config=mp_quick", *words]
    cases = [named_case(ONE, "train_mp.py", words, 1)]
    for text in dict.fromkeys(layouts):
        sizes, ranks = parse_layout(text.partition(",")[0], ("tp", "cp", "pp", "dp"), "tp4 or tp2xcp2xdp2")
        split = [
            f"--tensor_parallel={sizes['tp']}", f"--context_parallel={sizes['cp']}",
            f"--pipeline_parallel={sizes['pp']}", f"--global_batch_size={cases[0].config.global_batch_size}",
        ]  # fmt: skip
        # Micro-batches for a pipeline, unless the words say otherwise.
        parts = [f"--gradient_accumulation={2 * int(sizes['pp'])}"] if sizes["pp"] != "1" else []
        cases.append(named_case(text, "train_mp.py", [*parts, *words, *split], ranks))
    return cases


def by_kind(messages: Messages, phases: Sequence[str] = PHASES) -> dict[str, tuple[float, float]]:
    """{kind: (collectives, bytes)} of some phases together."""
    found: dict[str, tuple[float, float]] = {}
    for kind, (calls, size) in sorted(pair for phase in phases for pair in messages[phase].items()):
        before = found.get(kind, (0, 0))
        found[kind] = before[0] + calls, before[1] + size
    return found


def in_columns(row: dict[str, Any], phases: Sequence[str] = PHASES) -> dict[str, Any]:
    """The memory and the messages of a row, of some phases, as values of a table, sizes in MiB."""
    held = {name: size / MIB for name, size in row["memory"].items()}
    formula = {f"{name} formula": size / MIB for name, size in row["predicted_memory"].items()}
    states, states_formula = sum(held[n] for n in STATES), sum(formula[f"{n} formula"] for n in STATES)
    sent, sent_formula = (by_kind(row[name], phases) for name in ("messages", "predicted_messages"))
    calls, of_formula = (
        ", ".join(f"{calls:.0f} {kind}" for kind, (calls, _) in kinds.items()) for kinds in (sent, sent_formula)
    )
    return held | formula | {
        "states": states, "states_formula": states_formula, "states_ratio": states / states_formula,
        "kinds": ", ".join(f"{n} {kind} {size / MIB:.2f}" for kind, (n, size) in sent.items()) or "none",
        "calls": calls or "none", "formula": of_formula or "none",
        "sent": sum(size for _, size in sent.values()) / MIB,
        "sent_formula": sum(size for _, size in sent_formula.values()) / MIB,
    }  # fmt: skip


def write_dp(path: str, figures: dict[str, Any]) -> None:
    """Left: memory of a rank at the largest world size, stacked, the formula as a mark. Right: samples/s."""
    results, title = figures["rows"], figures["config"]
    largest = max(r["ranks"] for r in results)
    figure, axes, labels = _memory(results, "strategy", "ranks", largest, f"{title}: memory of a rank, {largest} ranks")
    speeds = DataFrame(results).pivot(index="strategy", columns="ranks", values="samples_per_sec")
    draw_bars(axes, speeds.reindex(labels).add_suffix(" ranks"), SHADES, stacked=False)
    finish(axes, title=f"{title}: samples/s of all ranks", xlabel="samples/s")
    save(figure, path)


def write_mp(path: str, figures: dict[str, Any]) -> None:
    """Of the last model size: memory of a rank, and MiB sent in a step, each stacked, the formula as a mark."""
    results, size = figures["rows"], figures["rows"][-1]["embed_dim"]
    figure, axes, labels = _memory(results, "layout", "embed_dim", size, f"memory of a rank, embed_dim {size}")
    rows = [r for r in results if r["embed_dim"] == size]
    sent = DataFrame([{phase: in_columns(r, [phase])["sent"] for phase in PHASES} for r in rows], labels)
    draw_bars(axes, sent, SHADES[:3])
    mark(axes, [in_columns(r)["sent_formula"] for r in rows], "formula")
    finish(axes, title="sent by a rank in a step", xlabel="MiB")
    save(figure, path)


def _memory(rows: Sequence[dict[str, Any]], name: str, key: str, only: int, title: str) -> tuple[Figure, Axes, list]:
    """A figure with two panels, the second one, and the labels of its bars: rows with this value of `key`.

    The first panel has the memory of a rank by use, and its formula as a mark. name: the key of a row's label.
    """
    shown = [row for row in rows if row[key] == only]
    labels = [row[name] for row in shown]
    figure, (axes, other) = panels(len(shown), 2, 12)
    memory, formula = (DataFrame([row[part] for row in shown], labels) / MIB for part in ("memory", "predicted_memory"))
    draw_bars(axes, memory[list(HELD)].fillna(0), list(HELD_COLORS.values()))
    mark(axes, formula.sum(axis=1), "formula")
    finish(axes, title=title, xlabel="MiB")
    return figure, other, labels
