"""Layouts side by side on this machine: speed, memory and communication.

Each preset makes groups of cases; in a group the first is what the others are compared with.

dp: strategies of rung 2 on numbers of ranks, weak scaling. Every rank has the same local batch, and the first is
`independent`: as many ranks with the same local work, started together, that send one another nothing (--noddp).
mp: layouts of rung 3 for model sizes, strong scaling. All train with the same whole batch; the first is one rank.
domain: layouts of rung 4 for image sizes. The same image on one device, which is the first, whole images on every
device (DDP), or one image over several devices (domain).
"""

import math
import re
import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pandas import DataFrame

from tools.benchmarks.cases import check_machine, row_of, turn
from tools.benchmarks.turns import in_turns
from tools.instruments.rank_case import build_case
from tools.instruments.team import Case, Teams
from tools.instruments.tracker import PASSES
from tools.pictures import draw_bars, finish, panels, save
from tools.planner.trace import HELD, STATES
from tools.tables import GIB, MIB, format_tables, machine
from utils.config import choices, load_config
from utils.errors import UsageError

STRATEGIES = choices("data_parallel")
LAYOUTS = (
    "tp2", "tp2,sequence_parallel", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all", "pp2",
    "tp4", "cp4", "tp2xcp2", "tp2xpp2", "tp2xdp2", "tp2xdp2,data_parallel=fsdp", "cp2xdp2,data_parallel=fsdp",
)  # fmt: skip
DOMAINS = ("dp2", "domain2", "domain2,data_parallel=ddp")
INDEPENDENT, ONE = "independent", "one rank"
OPTIONS = {  # of the config, for the size of each dimension of a layout
    "tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel", "domain": "domain_parallel",
}  # fmt: skip


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
    names, usual, cases_of, called = PRESETS[preset]
    groups = {
        called.format(size) if size else "": cases_of(words, layouts or names, size)
        for size in sorted(set(sizes or usual))
    }
    cases = [case for group in groups.values() for case in group]
    device, limit = check_machine(cases), memory_limit_gib and memory_limit_gib * GIB
    turns: dict[Case, list[Any]] = {case: [] for case in cases}
    named = {f"{case.name} {size}": case for size, group in groups.items() for case in group}
    without_memory: set[str] = set()
    with Teams(cases[0].config) as teams:
        for number, name, case in in_turns(named, rounds, without_memory):
            turns[case].append(turn(teams, case, steps, limit, number == 0, inference))
            if turns[case][-1] is None:
                without_memory.add(name)
    rows: list[dict[str, Any]] = []
    for size, group in groups.items():
        first, *_ = of_group = [{"size": size} | row_of(case, turns[case]) for case in group]
        for row in of_group:
            if "seconds" in row and "seconds" in first:  # relative to the first of the group, in every round
                pairs = zip(row["seconds_of_rounds"], first["seconds_of_rounds"], strict=True)
                row["speedup_of_rounds"] = [row["batch"] / own / (first["batch"] / other) for own, other in pairs]
                row["speedup"] = statistics.median(row["speedup_of_rounds"])
                first_memory: Any = first["memory"]
                own_memory: Any = row["memory"]
                row["reduction"] = first_memory["peak"] / own_memory["peak"]
        rows += of_group
    passes = [row | sent_in(row, phase) | {"pass": phase} for row in rows for phase in PASSES if row.get("seconds")]
    shown = [in_columns(row) for row in rows]
    with_messages = [row for row in passes if row["kinds"]]
    if inference:
        print(format_tables("inference", shown, with_messages))
    else:
        print(format_tables("layouts", shown, shown, with_messages))
    config = cases[0].config
    measured = "forward passes" if inference else "steps"
    print(f"{config.config}: {config.depth} blocks; {rounds} rounds of {steps} {measured}; {device}")
    return {"preset": preset, "inference": inference, "config": config.config, "machine": machine(device), "rows": rows}


def strategy_cases(
    words: list[str],
    strategies: Sequence[str],
    size: int,
) -> list[Case]:
    """The cases of a number of ranks; in one rank the strategies are all the same."""
    batch = load_config(words).global_batch_size  # of one rank
    words = [*words, f"--local_batch_size={batch}", f"--global_batch_size={batch * size}"]
    cases = [build_case(INDEPENDENT, "train.py", [*words, "--data_parallel=ddp", "--noddp"], size)]
    for text in dict.fromkeys(strategies):
        cases.append(build_case(text, "train.py", [*words, f"--data_parallel={text.partition(',')[0]}"], size))
    return cases if size > 1 else cases[:1]


def layout_cases(
    words: list[str],
    layouts: Sequence[str],
    size: int | None = None,
) -> list[Case]:
    """The cases of an embedding size, None for that of the words, all with the same whole batch."""
    words = ["--config=mp_quick", *words, *([f"--embed_dim={size}"] if size else [])]
    cases = [build_case(ONE, "train_mp.py", words, 1)]
    batch = f"--global_batch_size={cases[0].config.global_batch_size}"
    for text in dict.fromkeys(layouts):
        sizes, ranks = parse_layout(text, ("tp", "cp", "pp", "dp"))
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
        shared = [
            f"--data_parallel={'ddp' if sizes['domain'] == '1' else 'fsdp'}",
            f"--global_batch_size={sizes['dp']}",
        ]
        cases.append(build_case(text, "train_shard.py", [*split_words(sizes), *words, *shared], ranks))
    return cases


def split_words(sizes: dict[str, str]) -> list[str]:
    """The options that split a model as parse_layout says, in micro-batches for a pipeline; other words may follow."""
    words = [f"--{option}={sizes[dim]}" for dim, option in OPTIONS.items()]
    return words if sizes["pp"] == "1" else [*words, f"--gradient_accumulation={2 * int(sizes['pp'])}"]


def parse_layout(
    text: str,
    dims: Sequence[str],
) -> tuple[dict[str, str], int]:
    """Sizes and ranks of a layout: 'domain2x2xdp2,amp_mode=bf16' -> {'domain': '2x2', 'dp': '2', others: '1'}, 8.

    dims: those that it may have. Raises UsageError, with an example, for anything else, and for a layout of one rank.
    """
    name = text.partition(",")[0]
    parts = [re.fullmatch(r"([a-z]+)([1-9]\d*(?:x[1-9]\d*)?)", part) for part in re.split("x(?=[a-z])", name)]
    sizes = {part[1]: part[2] for part in parts if part and part[1] in dims}
    if len(sizes) < len(parts) or any("x" in size for dim, size in sizes.items() if dim != "domain"):
        raise UsageError(f"layout '{name}': expected sizes of {', '.join(dims)} joined by x, as {dims[0]}2xdp2")
    ranks = math.prod(int(number) for size in sizes.values() for number in size.split("x"))
    if ranks == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    return dict.fromkeys([*OPTIONS, "dp"], "1") | sizes, ranks


PRESETS: dict[str, tuple[Any, ...]] = {  # names, sizes, the cases of a size, and what it is called
    "dp": (STRATEGIES, (1, 2), strategy_cases, "ranks {}"),
    "mp": (LAYOUTS, (None,), layout_cases, "embed {}"),
    "domain": (DOMAINS, (32, 64), domain_cases, "{0} x {0}"),
}


def sent_in(row: dict[str, Any], phase: str) -> dict[str, Any]:
    """The messages of a phase of a row as values of a table; sizes in MiB."""
    kinds = row["messages"][phase]
    texts = [f"{calls:.0f} {kind} {size / MIB:.2f}" for kind, (calls, size) in kinds.items()]
    return {"kinds": ", ".join(texts), "sent": sum(size for _, size in kinds.values()) / MIB}


def in_columns(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row as values of a table; times in ms, sizes in MiB."""
    if row["out_of_memory"]:
        return row | {"ms": "out of memory"}
    columns = {name: size / MIB for name, size in row["memory"].items()}
    columns["states"] = sum(columns[name] for name in STATES)
    if "speedup" in row:
        columns["rounds"] = f"{min(row['speedup_of_rounds']):.2f} to {max(row['speedup_of_rounds']):.2f}"
    return row | columns | {"ms": f"{1000 * row['seconds']:.1f}"}


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Of the last size: memory of a rank by use, samples/s, and MiB that a rank sends by phase."""
    rows = [row for row in figures["rows"] if row["size"] == figures["rows"][-1]["size"] and "seconds" in row]
    if not rows:
        raise UsageError(f"{path}: memory ran out everywhere at the last size, there is nothing to draw")
    labels = [row["layout"] for row in rows]
    figure, (held, speed, sent) = panels(len(rows), 3, 16)
    memory = DataFrame([row["memory"] for row in rows], labels)[list(HELD)].fillna(0) / MIB
    draw_bars(held, memory)
    finish(held, title=f"{figures['config']}: memory of a rank", xlabel="MiB")
    draw_bars(speed, DataFrame({"all ranks": [row["samples_per_sec"] for row in rows]}, labels))
    finish(speed, title="speed", xlabel="samples/s")
    draw_bars(sent, DataFrame([{p: sent_in(row, p)["sent"] for p in PASSES} for row in rows], labels))
    finish(sent, title="sent by a rank in a step", xlabel="MiB")
    save(figure, path)


def write_memory_picture(path: str, figures: dict[str, Any]) -> None:
    """Memory of rank 0 through a training step, a line for each layout of the last size.

    The phases of a step have the same width in all layouts, whatever number of allocations each has.
    """
    rows = [row for row in figures["rows"] if row["size"] == figures["rows"][-1]["size"] and row.get("curve")]
    if not rows:
        raise UsageError(f"{path}: there is no training step to draw: memory ran out, or --inference was given")
    figure, (axes,) = panels(10, 1, 10)
    for row in rows:
        places, sizes = curve_of(row["curve"])
        axes.step(places, sizes, where="post", linewidth=1.2, label=row["layout"])
    names = [name for name, _ in stretches(rows[0]["curve"])]
    for number, name in enumerate(names):
        axes.axvline(number, color="black", linewidth=0.5, linestyle=":")
        axes.text(number + 0.5, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", fontsize="small")
    axes.set_xticks([])
    axes.set_ylim(bottom=0)
    finish(axes, xlabel="a training step, by allocations and releases", ylabel="MiB on rank 0")
    save(figure, path)


def stretches(curve: Sequence[Sequence[Any]]) -> list[tuple[str, list[float]]]:
    """(phase, MiB of its points) of each stretch of a step, from the first forward pass to the end of the update."""
    found: list[tuple[str, list[float]]] = []
    for phase, points in groupby(curve, key=itemgetter(0)):
        found.append((phase, [size / MIB for _, size in points]))
    names = [name for name, _ in found]
    first = names.index("forward") if "forward" in names else 0
    last = len(names) - names[::-1].index("update") if "update" in names else len(names)
    return found[first:last]


def curve_of(curve: Sequence[Sequence[Any]]) -> tuple[list[float], list[float]]:
    """(places, MiB) of a curve, each stretch of a phase one unit wide."""
    places: list[float] = []
    sizes: list[float] = []
    for number, (_, own) in enumerate(stretches(curve)):
        places += [number + i / len(own) for i in range(len(own))]
        sizes += own
    return places, sizes
