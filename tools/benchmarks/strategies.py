"""Data-parallel strategies x world sizes on this machine: speed, memory and messages beside the planner's formulas.

Weak scaling: every rank has the same local batch, of random numbers. The yardstick of a world size is `independent`: as
many ranks with the same local work, started together, that send one another nothing (--noddp).
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tools.benchmarks.cases import (
    HELD,
    STATES,
    Messages,
    build_case,
    check_machine,
    conditions,
    formulas_of,
    train_in_turns,
)
from tools.instruments.team import Case
from tools.pictures import HELD_COLORS, SHADES, finish, mark, panels, save, stack
from tools.tables import MIB, in_mib, machine, print_table, spread
from training.model import build_model
from utils.config import SCRIPTS, choices, load_config
from utils.layout import Layout

STRATEGIES = choices("data_parallel")
INDEPENDENT = "independent"


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

    figures, turns = train_in_turns(cases, steps, rounds)
    batch = config.global_batch_size // cases[0].ranks
    # Samples/s of all ranks, in every round.
    speeds = {case: [sum(batch / seconds for seconds in ranks) for ranks in own] for case, own in turns.items()}
    alone = {case.ranks: speeds[case] for case in cases if case.name == INDEPENDENT}
    results = [summarize(case, figures[case], speeds[case], alone[case.ranks], alone.get(1), device) for case in cases]
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
    for text in strategies:
        options = {"data_parallel": text.partition(",")[0], **shared}
        given = [f"--{name}={value}" for name, value in options.items()]
        cases.append(build_case(text, [*words, *given], size, SCRIPTS["train.py"]))
    for case in cases:
        build_model(case.config)  # its sizes fit
    return cases if size > 1 else cases[:1]


def summarize(
    case: Case,
    figures: dict[str, Any],
    speeds: list[float],
    independent: list[float],
    one_rank: list[float] | None,
    device: torch.device,
) -> dict[str, Any]:
    """One row. speeds: samples/s in every round, of the case, of the yardstick, and of one rank."""
    ratios = [own / yardstick for own, yardstick in zip(speeds, independent, strict=True)]
    of_one = [own / one / case.ranks for own, one in zip(speeds, one_rank or [], strict=bool(one_rank))]
    memory, messages = formulas_of(case, device)
    return {
        "strategy": case.name,
        "ranks": case.ranks,
        "samples_per_sec": statistics.median(speeds),
        "efficiency": statistics.median(ratios),
        "efficiency_of_rounds": ratios,
        "of_one_rank": statistics.median(of_one) if of_one else None,
        "memory": figures["memory"],
        "predicted_memory": {name: memory[name] for name in STATES},
        "calls": _of_step(figures["messages"], 0),
        "bytes": _of_step(figures["messages"], 1),
        "predicted_bytes": _of_step(messages, 1),
        "hidden": figures["hidden"],
    }


def _of_step(messages: Messages, which: int) -> dict[str, float]:
    """{kind: collectives (0) or bytes (1)} of all phases together."""
    kinds = sorted({kind for sent in messages.values() for kind in sent})
    return {kind: sum(sent[kind][which] for sent in messages.values() if kind in sent) for kind in kinds}


def print_tables(results: list[dict[str, Any]]) -> None:
    """Speed, memory and messages of summarized cases."""
    columns = {
        "strategy": "", "ranks": "d", "samples/s": ".2f", "of independent": ".1%", "in the rounds": "",
        "of one rank": ".1%", "hidden": ".0%",
    }  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        (r["strategy"], r["ranks"], r["samples_per_sec"], r["efficiency"], spread(r["efficiency_of_rounds"], ".0%"),
         r["of_one_rank"], r["hidden"])
        for r in results
    ]  # fmt: skip
    title = "Speed: samples/s of all ranks, beside as many independent ranks, and beside one rank times their number"
    print_table(title, columns, rows)
    if all(r["hidden"] is None for r in results):
        print(
            "hidden: the share of communication under compute is read from the kernels of a GPU; there is none here\n"
        )

    last = ("parameters at most", "activations", "allocated at most")
    columns = {
        "strategy": "", "ranks": "d", **dict.fromkeys(STATES, ".2f"), "sum": ".2f", "formula": ".2f", "ratio": ".3f",
        **dict.fromkeys(last, ".2f"),
    }  # fmt: skip
    rows = []
    for r in results:
        held = {name: in_mib(size) for name, size in r["memory"].items()}
        total, formula = sum(held[name] or 0 for name in STATES), sum(r["predicted_memory"].values()) / MIB
        sizes = [*(held[name] for name in STATES), total, formula, total / formula, *(held[name] for name in last)]
        rows.append((r["strategy"], r["ranks"], *sizes))
    print_table("Memory: MiB on the rank that holds most", columns, rows)

    rows = []
    for r in results:
        kinds = ", ".join(f"{calls} {kind} {r['bytes'][kind] / MIB:.2f}" for kind, calls in r["calls"].items())
        total, formula = (sum(r[name].values()) / MIB for name in ("bytes", "predicted_bytes"))
        rows.append((r["strategy"], r["ranks"], kinds or "none", total, formula))
    columns = {"strategy": "", "ranks": "d", "calls, kind, MiB": "", "sum": ".2f", "formula": ".2f"}
    print_table("Messages: collectives of an optimizer step, and MiB that a rank sends in them", columns, rows)


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Left: memory of a rank at the largest world size, stacked, the formula as a mark. Right: samples/s."""
    results, title = figures["rows"], figures["config"]
    sizes = sorted({r["ranks"] for r in results})
    rows = [r for r in results if r["ranks"] == sizes[-1]]
    figure, (left, right) = panels([r["strategy"] for r in rows], 2, 12)
    stack(left, {name: [in_mib(r["memory"][name]) for r in rows] for name in HELD}, list(HELD_COLORS.values()))
    mark(left, [sum(r["predicted_memory"].values()) / MIB for r in rows], "formula, without activations")
    finish(left, title=f"{title}: memory of a rank, {sizes[-1]} ranks", xlabel="MiB")
    height = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        speeds = {r["strategy"]: r["samples_per_sec"] for r in results if r["ranks"] == size}
        drawn = {k + (i - (len(sizes) - 1) / 2) * height: r["strategy"] for k, r in enumerate(rows)}
        drawn = {place: name for place, name in drawn.items() if name in speeds}
        bars = [speeds[name] for name in drawn.values()]
        label = f"{size} rank{'s' * (size > 1)}"
        right.barh(list(drawn), bars, height * 0.9, label=label, color=SHADES[i % len(SHADES)])
    finish(right, title=f"{title}: samples/s of all ranks", xlabel="samples/s")
    save(figure, path)
