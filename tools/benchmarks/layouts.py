"""Layouts side by side on this machine: speed, memory and communication.

Each preset makes groups of cases; in a group the first is what the others are compared with.

dp: strategies of rung 2 on numbers of ranks, weak scaling. Every rank has the same local batch, and the first is
`independent`: as many ranks with the same local work, started together, that send one another nothing (--noddp).
mp: layouts of rung 3 for model sizes, strong scaling. All train with the same whole batch; the first is one rank.
domain: layouts of rung 4 for image sizes. The same image on one device, which is the first, whole images on every
device (DDP), or one image over several devices (domain).
"""

import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pandas import DataFrame

from tools.benchmarks.cases import check_machine, in_turns, parse_layout, row_of, split_words, turn
from tools.instruments.rank_case import build_case
from tools.instruments.ranks import Case, Teams
from tools.instruments.tracker import PASSES
from tools.pictures import draw_bars, finish, panels, save
from tools.planner.trace import HELD, STATES
from tools.tables import GIB, MIB, format_tables, machine
from utils.command_line import choices
from utils.config import load_config
from utils.errors import UsageError

# PRESETS takes these layouts where a command names none.
STRATEGIES = choices("data_parallel")
LAYOUTS = (
    "tp2",
    "tp2,sequence_parallel",
    "cp2",
    "cp2,cp_method=ring",
    "cp2,cp_method=all_to_all",
    "pp2",
    "tp4",
    "cp4",
    "tp2xcp2",
    "tp2xpp2",
    "tp2xdp2",
    "tp2xdp2,data_parallel=fsdp",
    "cp2xdp2,data_parallel=fsdp",
)
DOMAINS = ("dp2", "domain2", "domain2,data_parallel=ddp")
INDEPENDENT = "independent"
ONE = "one rank"


def run(
    words: list[str],
    preset: str,
    layouts: Sequence[str],
    sizes: Sequence[int],
    memory_limit_gib: float | None,
    steps: int,
    rounds: int,
    inference: bool = False,
) -> dict[str, Any]:
    """Measure the layouts of a preset, and print three tables: speed, memory, communication.

    words: options of the config. layouts: names, with options of their own after commas: 'cp4,cp_method=ring'. sizes:
    numbers of ranks (dp), embedding sizes (mp), or points along each side of an image (domain). memory_limit_gib: of a
    rank, None for all that there is; where memory runs out the row says so, and the others go on. steps: timed in one
    turn. inference: measure forward passes without gradients, and print their latency and memory. Returns the figures,
    as JSON has them. Raises UsageError for what cannot be run, and where a rank fails.
    """
    groups = _build_groups(preset, words, layouts, sizes)
    cases = [case for group in groups.values() for case in group]
    device = check_machine(cases)
    limit = memory_limit_gib and memory_limit_gib * GIB  # bytes
    turns = _measure(groups, steps, rounds, limit, inference)

    rows = _build_rows(groups, turns)

    # Communication has a line for each pass in which a layout sends anything.
    messages = []
    for row in rows:
        if not row.get("seconds"):  # memory ran out
            continue
        for phase in PASSES:
            sent = sent_in(row, phase)
            if sent["kinds"]:
                messages.append(row | sent | {"pass": phase})
    # Speed and memory are two tables of the same rows.
    shown = [in_columns(row) for row in rows]
    if inference:
        print(format_tables("inference", shown, messages))
    else:
        print(format_tables("layouts", shown, shown, messages))
    config = cases[0].config
    measured = "forward passes" if inference else "steps"
    print(f"{config.config}: {config.depth} blocks; {rounds} rounds of {steps} {measured}; {device}")
    return {
        "preset": preset,
        "inference": inference,
        "config": config.config,
        "machine": machine(device),
        "rows": rows,
    }


def _build_rows(groups: dict[str, list[Case]], turns: dict[Case, list[Any]]) -> list[dict[str, Any]]:
    """The rows of all cases, from the figures of their turns. Each group has a yardstick of its own, its first case."""
    rows: list[dict[str, Any]] = []
    for size, group in groups.items():
        rows_of_group: list[dict[str, Any]] = [{"size": size} | row_of(case, turns[case]) for case in group]
        for row in rows_of_group:
            _compare_with_first(row, rows_of_group[0])
        rows += rows_of_group
    return rows


def _build_groups(
    preset: str,
    words: list[str],
    layouts: Sequence[str],
    sizes: Sequence[int],
) -> dict[str, list[Case]]:
    """{size in words: its cases} of a preset; without layouts or sizes, those of the preset."""
    usual_layouts, usual_sizes, cases_of, template = PRESETS[preset]
    groups = {}
    for size in sorted(set(sizes or usual_sizes)):
        # A size of None stands for that of the words, and has no name.
        name = template.format(size) if size else ""
        groups[name] = cases_of(words, layouts or usual_layouts, size)
    return groups


def _measure(
    groups: dict[str, list[Case]],
    steps: int,
    rounds: int,
    limit: float | None,
    inference: bool,
) -> dict[Case, list[Any]]:
    """The figures of each turn of every case; None for one in which memory ran out, which was the last of its case.

    The speed after each round is told on stderr, since all rounds may take long.
    """
    turns: dict[Case, list[Any]] = {}
    named = {}
    for size, group in groups.items():
        for case in group:
            turns[case] = []
            # A layout may be measured at several sizes, so the size belongs to its name.
            named[f"{case.name} {size}"] = case
    config = next(iter(turns)).config
    without_memory: set[str] = set()
    complete = 0  # rounds
    with Teams(config) as teams:
        for number, name, case in in_turns(named, rounds, without_memory):
            is_first = number == 0
            if number > complete:
                complete = number
                shown = [in_columns(row) for row in _build_rows(groups, turns)]
                speed = format_tables("layouts_so_far", shown)
                print(f"\nafter round {complete} of {rounds}:\n{speed}\n", file=sys.stderr, flush=True)
            figures = turn(teams, case, steps, limit, is_first, inference)
            turns[case].append(figures)
            # A case that lacks memory once would lack it in every round.
            if figures is None:
                without_memory.add(name)
    return turns


def _compare_with_first(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Add speedup and reduction of memory to a row, relative to the first of its group."""
    if "seconds" not in row or "seconds" not in first:  # memory ran out
        return
    # The two are compared within each round, since the machine may be slower in another one.
    speedups = []
    for own, other in zip(row["seconds_of_rounds"], first["seconds_of_rounds"], strict=True):
        # The batches of the two may differ, so samples per second are compared.
        own_speed = row["batch"] / own
        first_speed = first["batch"] / other
        speedups.append(own_speed / first_speed)
    row["speedup_of_rounds"] = speedups
    row["speedup"] = statistics.median(speedups)
    row["reduction"] = first["memory"]["peak"] / row["memory"]["peak"]


def strategy_cases(
    words: list[str],
    strategies: Sequence[str],
    size: int,
) -> list[Case]:
    """The cases of a number of ranks; in one rank the strategies are all the same."""
    batch = load_config(words).global_batch_size  # of one rank
    words = [
        *words,
        f"--local_batch_size={batch}",
        f"--global_batch_size={batch * size}",
    ]
    # Independent ranks do the same work without messages: whatever a strategy loses against them is the cost of
    # communication.
    independent = [*words, "--data_parallel=ddp", "--noddp"]
    cases = [build_case(INDEPENDENT, "train.py", independent, size)]
    # A strategy that is named twice is measured once.
    for text in dict.fromkeys(strategies):
        strategy = text.partition(",")[0]
        cases.append(build_case(text, "train.py", [*words, f"--data_parallel={strategy}"], size))
    return cases if size > 1 else cases[:1]


def layout_cases(
    words: list[str],
    layouts: Sequence[str],
    size: int | None = None,
) -> list[Case]:
    """The cases of an embedding size, None for that of the words, all with the same whole batch."""
    words = ["--config=mp_quick", *words]
    if size:
        words.append(f"--embed_dim={size}")
    cases = [build_case(ONE, "train_mp.py", words, 1)]
    # Every layout has the batch of the one rank (strong scaling).
    batch = f"--global_batch_size={cases[0].config.global_batch_size}"
    for text in dict.fromkeys(layouts):
        sizes, ranks = parse_layout(text, ("tp", "cp", "pp", "dp"))
        # The words follow the split, so that they win over its micro-batches.
        cases.append(build_case(text, "train_mp.py", [*split_words(sizes), *words, batch], ranks))
    return cases


def domain_cases(
    words: list[str],
    layouts: Sequence[str],
    side: int,
) -> list[Case]:
    """The cases of square images; a device, or those that share an image, take one image at a time."""
    words = ["--config=classify_quick", *words, "--img_size", str(side), str(side)]
    cases = [build_case(ONE, "train_shard.py", [*words, "--global_batch_size=1"], 1)]
    for text in dict.fromkeys(layouts):
        sizes, ranks = parse_layout(text, ("domain", "tp", "dp"))
        # Options in a layout's name come last, so that 'domain2,data_parallel=ddp' overrides this strategy.
        strategy = "ddp" if sizes["domain"] == "1" else "fsdp"
        given = [
            *split_words(sizes),
            *words,
            f"--data_parallel={strategy}",
            f"--global_batch_size={sizes['dp']}",
        ]
        cases.append(build_case(text, "train_shard.py", given, ranks))
    return cases


# Usual layouts, usual sizes, the function that makes the cases of a size, and how a size is called.
PRESETS: dict[str, tuple[Any, ...]] = {
    "dp": (STRATEGIES, (1, 2), strategy_cases, "ranks {}"),
    "mp": (LAYOUTS, (None,), layout_cases, "embed {}"),
    "domain": (DOMAINS, (32, 64), domain_cases, "{0} x {0}"),
}


def in_columns(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row as values of a table; times in ms, sizes in MiB."""
    if row["out_of_memory"]:
        return row | {"ms": "out of memory"}
    columns = {name: size / MIB for name, size in row["memory"].items()}
    columns["states"] = sum(columns[name] for name in STATES)
    # The range over the rounds tells how far the median can be trusted.
    if "speedup" in row:
        speedups = row["speedup_of_rounds"]
        columns["rounds"] = f"{min(speedups):.2f} to {max(speedups):.2f}"
    columns["ms"] = f"{1000 * row['seconds']:.1f}"
    return row | columns


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Of the last size: memory of a rank by use, samples/s, and MiB that a rank sends by phase."""
    rows = [row for row in _rows_of_last_size(figures) if "seconds" in row]
    if not rows:
        raise UsageError(f"{path}: memory ran out everywhere at the last size, there is nothing to draw")
    labels = [row["layout"] for row in rows]
    figure, (memory_axes, speed_axes, sent_axes) = panels(len(rows), 3, 16)

    memory = DataFrame([row["memory"] for row in rows], labels)
    held = memory[list(HELD)].fillna(0)  # (layouts, uses) bytes
    draw_bars(memory_axes, held / MIB)
    finish(memory_axes, title=f"{figures['config']}: memory of a rank", xlabel="MiB")

    speed = [row["samples_per_sec"] for row in rows]
    draw_bars(speed_axes, DataFrame({"all ranks": speed}, labels))
    finish(speed_axes, title="speed", xlabel="samples/s")

    sent = []
    for row in rows:
        sent.append({phase: sent_in(row, phase)["sent"] for phase in PASSES})
    draw_bars(sent_axes, DataFrame(sent, labels))
    finish(sent_axes, title="sent by a rank in a step", xlabel="MiB")
    save(figure, path)


def _rows_of_last_size(figures: dict[str, Any]) -> list[dict[str, Any]]:
    last = figures["rows"][-1]["size"]
    return [row for row in figures["rows"] if row["size"] == last]


def write_memory_picture(path: str, figures: dict[str, Any]) -> None:
    """Memory of rank 0 through a training step, a line for each layout of the last size.

    The phases of a step have the same width in all layouts, whatever number of allocations each has.
    """
    rows = [row for row in _rows_of_last_size(figures) if row.get("curve")]
    if not rows:
        raise UsageError(f"{path}: there is no training step to draw: memory ran out, or --inference was given")
    figure, (axes,) = panels(10, 1, 10)
    for row in rows:
        places, sizes = curve_of(row["curve"])
        axes.step(places, sizes, where="post", linewidth=1.2, label=row["layout"])
    names = [name for name, _ in stretches(rows[0]["curve"])]
    for number, name in enumerate(names):
        axes.axvline(number, color="black", linewidth=0.5, linestyle=":")
        above = axes.get_xaxis_transform()  # x counts phases, y is a fraction of the height
        axes.text(number + 0.5, 1.01, name, transform=above, ha="center", fontsize="small")
    # Places inside a phase count allocations and not seconds, so the axis has no numbers.
    axes.set_xticks([])
    axes.set_ylim(bottom=0)
    finish(axes, xlabel="a training step, by allocations and releases", ylabel="MiB on rank 0")
    save(figure, path)


def stretches(curve: Sequence[Sequence[Any]]) -> list[tuple[str, list[float]]]:
    """(phase, MiB of its points) of each stretch of a step, from the first forward pass to the end of the update."""
    found: list[tuple[str, list[float]]] = []
    for phase, points in groupby(curve, key=itemgetter(0)):
        found.append((phase, [size / MIB for _, size in points]))
    # The curve of a measured step may begin and end with work that belongs to no training step.
    names = [name for name, _ in found]
    first = names.index("forward") if "forward" in names else 0
    last = len(names) - names[::-1].index("update") if "update" in names else len(names)
    return found[first:last]


def curve_of(curve: Sequence[Sequence[Any]]) -> tuple[list[float], list[float]]:
    """(places, MiB) of a curve, each stretch of a phase one unit wide."""
    places: list[float] = []
    sizes: list[float] = []
    for number, (_, points) in enumerate(stretches(curve)):
        count = len(points)
        places += [number + i / count for i in range(count)]  # number <= place < number + 1
        sizes += points
    return places, sizes


def sent_in(row: dict[str, Any], phase: str) -> dict[str, Any]:
    """The messages of a phase of a row as values of a table; sizes in MiB."""
    kinds = row["messages"][phase]
    texts = []
    sent = 0
    for kind, (calls, size) in kinds.items():
        texts.append(f"{calls:.0f} {kind} {size / MIB:.2f}")
        sent += size
    return {"kinds": ", ".join(texts), "sent": sent / MIB}
