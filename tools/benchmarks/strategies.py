"""Data-parallel strategies x world sizes on this machine: speed, memory and messages beside the planner's formulas.

Weak scaling: every rank has the same local batch, of random numbers. The yardstick of a world size is `independent`: as
many ranks with the same local work, started together, that send one another nothing (--noddp).
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from pandas import DataFrame

from tools.benchmarks.cases import (
    MEMORY,
    check_machine,
    conditions,
    in_columns,
    memory_bars,
    named_case,
    ratios,
    train_in_turns,
)
from tools.instruments.team import Case
from tools.instruments.tracker import Messages
from tools.pictures import SHADES, draw_bars, finish, panels, save
from tools.tables import MIB, machine, print_table, spread
from training.model import build_model
from utils.config import choices, load_config
from utils.layout import Layout

STRATEGIES = choices("data_parallel")
INDEPENDENT = "independent"
NAME = {"strategy": "{strategy}", "ranks": "{ranks}"}
SPEED = {
    **NAME, "samples/s": "{samples_per_sec:.2f}", "of independent": "{efficiency:.1%}", "in the rounds": "{rounds}",
    "of one rank": "{of_one_rank:.1%}", "hidden": "{hidden:.0%}",
}  # fmt: skip
HELD_COLUMNS = {name: f"{{{name}:.2f}}" for name in ("parameters at most", "activations", "allocated at most")}


def run(
    words: list[str],
    strategies: Sequence[str] = STRATEGIES,
    world_sizes: Sequence[int] = (1, 2),
    steps: int = 4,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure and print three tables: speed, memory, messages.

    words: options of the config. strategies: each a value of data_parallel, with options of its own after commas:
    'fsdp,wrap_policy=none'. steps: timed in one turn. Returns the figures, as JSON has them.
    Raises UsageError for what cannot be run, before anything is started, and where a rank fails.
    """
    cases = [case for size in sorted(set(world_sizes)) for case in build_cases(words, strategies, size)]
    device, config = check_machine("dp", cases, "--world_sizes"), cases[0].config
    parameters = sum(p.numel() for p in build_model(config).parameters())

    rows = train_in_turns(cases, device, steps, rounds)
    batch = config.global_batch_size // cases[0].ranks
    alone = {case.ranks: rows[case] for case in cases if case.name == INDEPENDENT}
    for case, row in rows.items():
        efficiency = ratios(alone[case.ranks], row)
        row |= {
            "strategy": case.name, "samples_per_sec": case.ranks * batch / median(row["seconds"]),
            "efficiency": median(efficiency), "efficiency_of_rounds": efficiency,
            "of_one_rank": median(ratios(alone[1], row)) if 1 in alone else None,
        }  # fmt: skip
    results = list(rows.values())
    print_tables(results)
    print(f"{parameters:,} parameters, local batch {batch}, {conditions(device, rounds, steps)}")
    return {
        "config": config.config, "machine": machine(device), "parameters": parameters, "local_batch_size": batch,
        "rows": results,
    }  # fmt: skip


def build_cases(words: list[str], strategies: Sequence[str], size: int) -> list[Case]:
    """The cases of a world size, checked; the first is the yardstick. In one rank the strategies are all the same."""
    config = load_config(words)
    batch = config.global_batch_size  # of one rank
    shared = {"local_batch_size": batch, "global_batch_size": batch * size}
    apart = config.model_copy(update={"data_parallel": "ddp", "noddp": True, **shared})
    cases = [Case(INDEPENDENT, apart, Layout(size))]
    for text in dict.fromkeys(strategies):
        options = {"data_parallel": text.partition(",")[0], **shared}
        cases.append(named_case(text, "train.py", [*words, *(f"--{k}={v}" for k, v in options.items())], size))
    for case in cases:
        build_model(case.config)  # its sizes fit
    return cases if size > 1 else cases[:1]


def of_step(messages: Messages) -> dict[str, tuple[float, float]]:
    """{kind: (collectives, bytes)} of all phases together."""
    kinds = sorted({kind for sent in messages.values() for kind in sent})
    of_kinds = {kind: [sent[kind] for sent in messages.values() if kind in sent] for kind in kinds}
    return {
        kind: (sum(calls for calls, _ in found), sum(size for _, size in found)) for kind, found in of_kinds.items()
    }


def print_tables(results: list[dict[str, Any]]) -> None:
    """Speed, memory and messages of all rows."""
    title = "Speed: samples/s of all ranks, beside as many independent ranks, and beside one rank times their number"
    print_table(title, SPEED, [r | {"rounds": spread(r["efficiency_of_rounds"], ".0%")} for r in results])
    if all(r["hidden"] is None for r in results):
        print(
            "hidden: the share of communication under compute is read from the kernels of a GPU; there is none here\n"
        )
    rows = [in_columns(r) for r in results]
    for row in rows:
        sent, formula = of_step(row["messages"]), of_step(row["predicted_messages"])
        row["ratio"] = row["states"] / row["states_formula"]
        row["kinds"] = ", ".join(f"{n} {kind} {size / MIB:.2f}" for kind, (n, size) in sent.items()) or "none"
        row["sent"], row["sent_formula"] = (sum(size for _, size in kinds.values()) / MIB for kinds in (sent, formula))
    columns = NAME | MEMORY | {"ratio": "{ratio:.3f}"} | HELD_COLUMNS
    print_table("Memory: MiB on the rank that holds most", columns, rows)
    columns = NAME | {"calls, kind, MiB": "{kinds}", "sum": "{sent:.2f}", "formula": "{sent_formula:.2f}"}
    print_table("Messages: collectives of an optimizer step, and MiB that a rank sends in them", columns, rows)


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Left: memory of a rank at the largest world size, stacked, the formula as a mark. Right: samples/s."""
    results, title = figures["rows"], figures["config"]
    largest = max(r["ranks"] for r in results)
    rows = [r for r in results if r["ranks"] == largest]
    figure, (left, right) = panels(len(rows), 2, 12)
    memory_bars(left, rows, "strategy", f"{title}: memory of a rank, {largest} ranks")
    speeds = DataFrame(results).pivot(index="strategy", columns="ranks", values="samples_per_sec")
    draw_bars(right, speeds.reindex([r["strategy"] for r in rows]).add_suffix(" ranks"), SHADES, stacked=False)
    finish(right, title=f"{title}: samples/s of all ranks", xlabel="samples/s")
    save(figure, path)
