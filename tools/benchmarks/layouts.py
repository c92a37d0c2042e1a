"""Layouts of rung 3 x model sizes on this machine: time of a step, memory and messages beside the planner's formulas.

All layouts train with the same whole batch of random numbers (strong scaling). The time of a step is given as the ratio
to one rank with the whole batch, in the same round.
"""

import math
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

from pandas import DataFrame

from networks.vit import patch_grid
from tools.benchmarks.cases import (
    MEMORY,
    check_machine,
    conditions,
    in_columns,
    memory_bars,
    named_case,
    parse_layout,
    ranks_of,
    ratios,
    train_in_turns,
)
from tools.instruments.phases import PHASES
from tools.instruments.team import Case
from tools.pictures import SHADES, draw_bars, finish, mark, panels, save
from tools.tables import MIB, machine, print_table, spread
from training.model import build_model

LAYOUTS = (
    "tp2", "tp2,sequence_parallel", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all", "pp2",
    "tp4", "cp4", "tp2xcp2", "tp2xpp2", "tp2xdp2", "tp2xdp2,data_parallel=fsdp", "cp2xdp2,data_parallel=fsdp",
)  # fmt: skip
ONE = "one rank"
NAME = {"layout": "{layout}", "embed": "{embed_dim}"}
TIME = {
    **NAME, "ranks": "{ranks}", "ms a step": "{ms:.0f}", "to one rank": "{ratio:.2f}", "in the rounds": "{rounds}",
}  # fmt: skip
ACTIVATIONS = {
    "activations": "{activations:.2f}", "its formula": "{activations formula:.2f}",
    "allocated at most": "{allocated at most:.2f}",
}  # fmt: skip
MESSAGES = {
    **NAME, "pass": "{pass}", "collectives": "{calls}", "MiB": "{size:.2f}", "formula": "{formula}",
    "formula, MiB": "{formula_size:.2f}",
}  # fmt: skip


def run(
    words: list[str],
    layouts: Sequence[str] = LAYOUTS,
    embed_dims: Sequence[int] = (),
    steps: int = 2,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure and print three tables: time, memory, messages.

    words: options of the config. layouts: sizes joined by x, as tp2xdp2, with options of their own after commas:
    'cp4,cp_method=ring'. embed_dims: model sizes; none: that of the config. steps: timed in one turn.
    Returns the figures, as JSON has them.
    Raises UsageError for what cannot be run, before anything is timed, and where a rank fails.
    """
    models = [[f"--embed_dim={n}"] for n in embed_dims] or [[]]
    cases = [case for own in models for case in build_cases([*words, *own], layouts)]
    device, config = check_machine("mp", cases, "--layouts"), cases[0].config

    rows = train_in_turns(cases, device, steps, rounds)
    alone = {case.config.embed_dim: rows[case] for case in cases if case.name == ONE}
    for case, row in rows.items():
        of_rounds = ratios(row, alone[case.config.embed_dim])
        row |= {"layout": case.name, "step_seconds": median(row["seconds"])}
        row |= {"ratio": median(of_rounds), "ratio_of_rounds": of_rounds}
    results = list(rows.values())
    print_tables(results)
    tokens = math.prod(patch_grid(config.img_size, config.patch_size)[0])
    batch = f"batch {config.global_batch_size} over all ranks"
    print(f"{config.depth} blocks, {tokens:,} tokens, {batch}, {conditions(device, rounds, steps)}")
    return {
        "config": config.config, "machine": machine(device), "global_batch_size": config.global_batch_size,
        "depth": config.depth, "tokens": tokens, "rows": results,
    }  # fmt: skip


def build_cases(words: list[str], layouts: Sequence[str]) -> list[Case]:
    """The cases of a model size, checked; the first is the yardstick, one rank."""
    words = ["--config=mp_quick", *words]
    one = named_case(ONE, "train_mp.py", words, 1)
    cases = [one]
    for text in dict.fromkeys(layouts):
        sizes = parse_layout(text.partition(",")[0], ("tp", "cp", "pp", "dp"), "tp4 or tp2xcp2xdp2")
        split = [
            f"--tensor_parallel={sizes['tp']}", f"--context_parallel={sizes['cp']}",
            f"--pipeline_parallel={sizes['pp']}", f"--global_batch_size={one.config.global_batch_size}",
        ]  # fmt: skip
        # Micro-batches for a pipeline, unless the words say otherwise.
        parts = [f"--gradient_accumulation={2 * int(sizes['pp'])}"] if sizes["pp"] != "1" else []
        cases.append(named_case(text, "train_mp.py", [*parts, *words, *split], ranks_of(sizes)))
    for case in cases:
        build_model(case.config)  # its sizes fit
    return cases


def print_tables(results: list[dict[str, Any]]) -> None:
    """Time, memory and messages of all rows."""
    times = [r | {"ms": 1000 * r["step_seconds"], "rounds": spread(r["ratio_of_rounds"], ".2f")} for r in results]
    print_table("Time of a step with the same whole batch, as ratio to one rank in the same round", TIME, times)
    print_table("Memory: MiB on the rank that holds most", NAME | MEMORY | ACTIVATIONS, map(in_columns, results))
    messages = []
    for r, phase in product(results, PHASES):
        sent, formula = r["messages"][phase], r["predicted_messages"][phase]
        if sent or formula:
            (calls, size), (expected, expected_size) = _in_words(sent), _in_words(formula)
            messages.append(
                r | {"pass": phase, "calls": calls, "size": size, "formula": expected, "formula_size": expected_size}
            )
    title = "Messages of a step: collectives, and MiB that a rank sends in them, beside the formulas"
    print_table(title, MESSAGES, messages)


def _in_words(messages: dict[str, tuple[float, float]]) -> tuple[str, float]:
    text = ", ".join(f"{calls:.0f} {kind}" for kind, (calls, _) in sorted(messages.items()))
    return text or "none", sum(size for _, size in messages.values()) / MIB


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Of the last model size: memory of a rank, and MiB sent in a step, each stacked, the formula as a mark."""
    results = [r for r in figures["rows"] if r["embed_dim"] == figures["rows"][-1]["embed_dim"]]
    figure, (left, right) = panels(len(results), 2, 12)
    memory_bars(left, results, "layout", f"memory of a rank, embed_dim {results[0]['embed_dim']}")
    labels = [r["layout"] for r in results]
    sent, formula = (
        DataFrame([{phase: _in_words(r[key][phase])[1] for phase in PHASES} for r in results], labels)
        for key in ("messages", "predicted_messages")
    )
    draw_bars(right, sent, SHADES[:3])
    mark(right, formula.sum(axis=1), "formula")
    finish(right, title="sent by a rank in a step", xlabel="MiB")
    save(figure, path)
