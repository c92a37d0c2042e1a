"""Image sizes x ways to use several devices, for a model of rung 4: time, memory and throughput.

The same image on one device, whole images on every device (DDP), or one image over several devices (domain), whose
weights are sharded too (fsdp). A forward pass and a training step are measured apart, because one may fit where the
other does not. Where memory runs out, the table says so, and the sweep goes on.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from networks.vit import patch_grid
from tools.benchmarks.cases import check_machine, conditions, most, named_case, parse_layout
from tools.instruments.memory import memory_of_a_step, optimizer_states
from tools.instruments.rank_case import RankCase
from tools.instruments.team import Case, OutOfMemory, Rank, Teams
from tools.instruments.tracker import Tracker
from tools.pictures import COLORS, save
from tools.planner.layouts import split_refusal
from tools.tables import MIB, TABLES, format_table, machine
from utils import comm
from utils.config import read_mappings
from utils.device import empty_cache, library
from utils.errors import UsageError

LAYOUTS = ("dp2", "domain2", "domain2,data_parallel=ddp")
ONE = "one device"
SIZES = (32, 64, 32)
MODES = ("forward", "training")
FIGURES = (
    "seconds", "seconds_of_rounds", "images_per_sec", "cpu_seconds", "peak", "activations", "loss", "speedup",
    "speedup_of_rounds", "memory_reduction",
)  # fmt: skip


def run(
    words: list[str],
    layouts: Sequence[str] = LAYOUTS,
    sizes: Sequence[int] = SIZES,
    dims: int = 2,
    memory_limit_gib: float | None = None,
    steps: int = 3,
    rounds: int = 3,
) -> dict[str, Any]:
    """Measure and print the tables; returns the figures, as JSON has them. Arguments as of build_points, and:

    memory_limit_gib: of a rank, None for all that there is. steps: timed in one turn.
    Raises UsageError for what cannot be run, before anything is timed, and where a rank fails.
    """
    points, limit = build_points(words, layouts, sizes, dims), memory_limit_gib and memory_limit_gib * 2**30
    device, config = check_machine("domain", points[0], "--layouts"), points[0][0].config
    results = []
    with Teams(config) as teams:
        for point in points:
            turns: dict[Case, list[Any]] = {case: [] for case in point}
            for case, own in [*turns.items()] * rounds:
                if None not in own:  # it has not run out of memory
                    own.append(measure(teams, case, steps, limit, memory=not own))
            one = summarize(point[0], turns[point[0]], None)
            results += [one] + [summarize(case, turns[case], one) for case in point[1:]]
    print_tables(results)
    model = f"{config.depth} blocks of {config.embed_dim}, patches of {config.patch_size}"
    print(f"{model}, {conditions(device, rounds, steps)}")
    return {
        "config": config.config, "machine": machine(device), "embed_dim": config.embed_dim, "depth": config.depth,
        "patch_size": config.patch_size, "memory_limit_gib": memory_limit_gib, "rows": results,
    }  # fmt: skip


def build_points(
    words: list[str], layouts: Sequence[str], sizes: Sequence[int] = SIZES, dims: int = 2
) -> list[list[Case]]:
    """The points of the sweep, checked: at each of them the cases of all layouts, one device first.

    words: options of the config. layouts: sizes joined by x, as domain2xdp2, with options of their own after commas:
    'domain2,data_parallel=ddp'. sizes: first and last side of an image in points, and the step between. dims: 2 or 3.
    A device, or those that share an image, take one image at a time.
    """
    start, stop, step = sizes
    if start < 1 or step < 1 or stop < start:
        raise UsageError(f"--sizes {start} {stop} {step}: expected START, a larger STOP, and a STEP of 1 or more")
    words = ["--config=classify_quick", *words]
    ways = [named_case(ONE, "train_shard.py", words, 1)]
    for text in dict.fromkeys(layouts):
        split, ranks = parse_layout(text.partition(",")[0], ("domain", "tp", "dp"), "domain2 or domain2x2xdp2")
        shared = [
            f"--data_parallel={'ddp' if split['domain'] == '1' else 'fsdp'}", f"--domain_parallel={split['domain']}",
            f"--tensor_parallel={split['tp']}", f"--global_batch_size={split['dp']}",
        ]  # fmt: skip
        ways.append(named_case(text, "train_shard.py", [*words, *shared], ranks))

    def case_of(way: Case, side: int, mode: str) -> Case:
        config = way.config.model_copy(update={"img_size": [side] * dims, "global_batch_size": way.layout.dp})
        if refusal := split_refusal(config, way.layout.tp, 1, 1, config.domain_parallel):
            raise UsageError(f"layout '{way.name}': {refusal}")
        return replace(way, config=config, training=mode == "training")

    return [[case_of(way, *point) for way in ways] for point in product(range(start, stop + 1, step), MODES)]


def measure(
    teams: Teams, case: Case, steps: int, limit: float | None = None, memory: bool = False
) -> list[dict[str, Any]] | None:
    """Figures of every rank: seconds and CPU seconds of a step, with `memory` bytes held and the first loss too.

    limit: bytes that a rank may hold. None where a rank has run out of memory. Nothing of the case is kept.
    """
    try:
        return teams.call(case.ranks, _measure_once, case, steps, limit, memory)
    except OutOfMemory:
        return None


def _measure_once(rank: Rank, case: Case, steps: int, limit: float | None, memory: bool) -> dict[str, Any]:
    gpu = library(rank.device, "max_memory_allocated", "set_per_process_memory_fraction")
    if gpu:
        gpu.empty_cache()  # ranks of other layouts use the same devices
        total = gpu.get_device_properties(rank.device).total_memory
        gpu.set_per_process_memory_fraction(min(1, limit / total) if limit else 1)
        gpu.reset_peak_memory_stats()
    own = RankCase(rank, case)
    figures = (_held(own, limit) if memory else {}) | own.times(steps)
    del own
    empty_cache(rank.device)
    return figures


def _held(own: RankCase, limit: float | None) -> dict[str, Any]:
    """loss: of the initial weights. peak: bytes at most held at once, parameters and input included.

    activations: bytes kept for the backward pass; None in a forward pass alone.
    """
    loss = own.step.loss(own.forward(), own.y).detach()
    figures: dict[str, Any] = {"loss": comm.global_mean(loss[None]).item(), "activations": None}
    own.train(1)
    there = [*own.step.parallel.module.parameters(), *optimizer_states(own.step.optimizer), own.x]
    with Tracker(there, limit) as live:  # on a GPU its allocator knows better, below
        if own.case.training:
            figures["activations"] = memory_of_a_step(own.step, own.x, own.y)["activations"]
        else:
            own.train(1)
    return figures | {"peak": own.gpu.max_memory_allocated() if own.gpu else live.memory()["peak"]}


def summarize(case: Case, turns: list[Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """One row. turns: figures of every rank, of every round; None where memory ran out. one: row of one device."""
    ranks, dp = case.ranks, case.layout.dp
    row: dict[str, Any] = dict.fromkeys(FIGURES) | {
        "layout": case.name, "devices_of_an_image": ranks // dp, "ranks": ranks, "image": case.config.img_size,
        "tokens": math.prod(patch_grid(case.config.img_size, case.config.patch_size)[0]), "mode": MODES[case.training],
        "out_of_memory": None in turns,
    }  # fmt: skip
    if None in turns:
        return row
    seconds = [max(figures["seconds"] for figures in turn) for turn in turns]
    cpu_seconds = [statistics.mean(figures["cpu_seconds"] for figures in turn) for turn in turns]
    row |= {"seconds": statistics.median(seconds), "seconds_of_rounds": seconds}
    row |= {"images_per_sec": dp / row["seconds"], "cpu_seconds": statistics.median(cpu_seconds)}
    row |= most([{name: figures[name] for name in ("peak", "activations", "loss")} for figures in turns[0]])
    one = one or row
    if not one["out_of_memory"]:
        ratios = [dp * alone / own for own, alone in zip(seconds, one["seconds_of_rounds"], strict=True)]
        row |= {"speedup": statistics.median(ratios), "speedup_of_rounds": ratios}
        row["memory_reduction"] = one["peak"] / row["peak"]
    return row


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table of each figure, image sizes x layouts."""
    frame = DataFrame([r | {"image": in_points(r["image"])} for r in results])
    frame = frame.sort_values("mode", kind="stable")  # forward, training; else as measured
    for title, table in read_mappings(TABLES, "tables")["domain"].items():
        shown = frame[frame["mode"] == "training"] if table["figure"] == "activations" else frame
        values = shown[table["figure"]].astype(float) / table["per"]
        words = values.map(table["shown"].format).mask(values.isna(), "-").mask(shown["out_of_memory"], "out of memory")
        rows = shown.assign(words=words).groupby(["mode", "image"], sort=False)["words"].agg(list)
        columns = dict.fromkeys(["", "image", *frame["layout"].unique()], "")
        print(f"{title}\n\n{format_table(columns, [(*key, *row) for key, row in rows.items()])}\n")


def in_points(image: Sequence[int]) -> str:
    """Size of an image in words: 32 x 64."""
    return " x ".join(map(str, image))


def write_picture(path: str, figures: dict[str, Any]) -> None:
    """Time and memory over the size of an image: a forward pass above, a training step below."""
    frame = DataFrame(figures["rows"])
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    sides = dict(zip(frame["tokens"], frame["image"].map(in_points), strict=True))
    drawn = (("time", "seconds", 1e3, "ms"), ("memory", "peak", 1 / MIB, "MiB at most, of a rank"))
    for axes, (mode, (title, name, factor, label)) in zip(grid.flat, product(MODES, drawn), strict=True):
        curves = frame[frame["mode"] == mode].pivot(index="tokens", columns="layout", values=name).astype(float)
        curves = curves[frame["layout"].unique()] * factor
        curves.plot(ax=axes, marker="o", color=COLORS, logx=True, logy=True, legend=False)
        axes.set(title=f"{mode}: {title}", ylabel=label)
        axes.set_xlabel("points of an image; where a line ends, memory has run out")
        axes.set_xticks(list(sides), sides.values(), minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    save(figure, path)
