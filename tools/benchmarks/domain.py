"""Image sizes x ways to use several devices, for the classifier of rung 4: time, memory and throughput.

The same image on one device, whole images on every device (DDP), or one image over several devices (domain), whose
weights are sharded too (fsdp). A forward pass and a training step are measured apart, because the one fits where the
other does not. All layouts take turns in every round, and a ratio to one device is taken within a round. Where memory
runs out the size is noted as such, and the sweep goes on.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch

from networks.vit import patch_grid
from tools.benchmarks.domain_ranks import Teams
from tools.benchmarks.domain_tables import print_tables, write_csv, write_picture
from tools.tables import machine, write_json
from training.model import build_model
from utils.config import load_config
from utils.device import select_device
from utils.errors import UsageError, reported_as_usage_error
from utils.launch import read_launch
from utils.layout import Layout, tile_counts
from utils.schema import Config

LAYOUTS = ("dp2", "domain2", "domain2,data_parallel=ddp")
ONE = "one device"
SIZES = (32, 64, 32)
MODES = ("forward", "training")
YAML, NAME = "config/shard.yaml", "classify_quick"
SPLITS = ("domain_parallel", "tensor_parallel")


@dataclass(frozen=True, eq=False)
class Case:
    """A layout at one point of the sweep.

    config: of this image and precision. batch: images that a device, or those that share an image, take at a time.
    memory_limit: bytes of a rank, or None.
    """

    name: str
    layout: Layout
    config: Config
    batch: int
    mode: str
    memory_limit: float | None

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return math.prod(patch_grid(self.config.img_size, self.config.patch_size)[0])


def run(
    words: list[str],
    layouts: Sequence[str] = LAYOUTS,
    sizes: Sequence[int] = SIZES,
    dims: int = 2,
    precisions: Sequence[str] = ("none",),
    batches: Sequence[int] = (1,),
    memory_limit_gib: float | None = None,
    steps: int = 3,
    rounds: int = 3,
    json_path: str | None = None,
    csv_path: str | None = None,
    png_path: str | None = None,
) -> dict[str, Any]:
    """Measure and print the tables.

    words: options of the config. layouts: sizes joined by x, as domain2xdp2, with options of their own after commas:
    'domain2,data_parallel=ddp'. sizes: first and last side of an image in points, and the step between. dims: 2 or 3.
    precisions: values of amp_mode. batches: images that a device, or those that share an image, takes at a time.
    Returns what json_path gets. Raises UsageError for what cannot be run, before anything is timed, and where a rank
    fails.
    """
    if min(steps, rounds, *batches) < 1 or (memory_limit_gib is not None and memory_limit_gib <= 0):
        raise UsageError("--batches, --steps and --rounds are 1 or more, --memory_limit_gib more than 0")
    if read_launch().world_size > 1:
        raise UsageError("benchmark.py domain starts its ranks itself: start it with plain python, in one process")
    points = build_points(words, layouts, sizes, dims, precisions, batches, memory_limit_gib)
    config, most = points[0][0].config, max(case.layout.world_size for case in points[0])
    device = select_device(config.device)
    if device.type != "cpu" and most > torch.accelerator.device_count():
        raise UsageError(
            f"{most} ranks need as many devices; this machine has {torch.accelerator.device_count()} ({device.type}): "
            "give smaller --layouts, or --device cpu"
        )
    results = []
    with Teams() as teams:
        for point in points:
            results += measure(teams, point, steps, rounds)
    print_tables(results)
    model = f"{config.depth} blocks of {config.embed_dim}, patches of {config.patch_size}"
    shared = ", one thread per rank: more ranks than cores share them" if device.type == "cpu" else ""
    print(f"{model}, {rounds} rounds of {steps} steps; {device.type}{shared}")
    summary = {
        "config": config.config, "machine": machine(device), "embed_dim": config.embed_dim, "depth": config.depth,
        "patch_size": config.patch_size, "memory_limit_gib": memory_limit_gib, "rows": results,
    }  # fmt: skip
    if json_path:
        write_json(json_path, summary)
    if csv_path:
        write_csv(csv_path, results)
    if png_path:
        write_picture(png_path, results)
    return summary


def build_points(
    words: list[str],
    layouts: Sequence[str],
    sizes: Sequence[int] = SIZES,
    dims: int = 2,
    precisions: Sequence[str] = ("none",),
    batches: Sequence[int] = (1,),
    memory_limit_gib: float | None = None,
) -> list[list[Case]]:
    """The points of the sweep, checked: at each of them the Cases of all layouts, one device first."""
    ways = {text: parse_layout(words, text) for text in (ONE, *layouts)}
    limit = memory_limit_gib and memory_limit_gib * 2**30
    points = [
        [
            Case(
                name, layout, config.model_copy(update={"img_size": [side] * dims, "amp_mode": precision}), batch,
                mode, limit,
            )
            for name, (layout, config) in ways.items()
        ]
        for precision, batch, side, mode in product(precisions, batches, parse_sizes(sizes), MODES)
    ]  # fmt: skip
    for case in chain.from_iterable(points):
        check(case)
    return points


def check(case: Case) -> None:
    """Raise UsageError where the model cannot be built, or an image has too few patches to be shared."""
    config = case.config
    with reported_as_usage_error(ValueError, config.config):
        build_model(config)
        grid, _ = patch_grid(config.img_size, config.patch_size)
    domain, heads = math.prod(case.layout.domain), config.num_heads // config.tensor_parallel
    if config.domain_method == "all_to_all" and heads % domain:
        raise UsageError(f"layout '{case.name}': all_to_all cannot split {heads} heads over {domain} ranks")
    for ranks, patches in zip(case.layout.domain, grid, strict=False):
        if ranks > patches:
            raise UsageError(
                f"layout '{case.name}': {patches} patches of {config.img_size} cannot be shared by {ranks}"
            )


def parse_sizes(sizes: Sequence[int]) -> list[int]:
    """Sides of the images: (start, stop, step) -> [start, start + step, .., at most stop]."""
    start, stop, step = sizes
    if start < 1 or step < 1 or stop < start:
        raise UsageError(f"--sizes {start} {stop} {step}: expected START, a larger STOP, and a STEP of 1 or more")
    return list(range(start, stop + 1, step))


def parse_layout(words: list[str], text: str) -> tuple[Layout, Config]:
    """Layout and Config that a text names, as 'domain2x2xdp2,data_parallel=ddp'."""
    words = [f"--config={NAME}", *words]
    if text == ONE:
        return Layout(1), load_config(words, yaml_config=YAML)
    name, *own = text.split(",")
    parts = [re.fullmatch(r"(domain)([1-9]\d*(?:x[1-9]\d*)?)|(dp|tp)([1-9]\d*)", part) for part in _split(name)]
    sizes = {part[1] or part[3]: part[2] or part[4] for part in parts if part}
    if not all(parts) or len(sizes) < len(parts):
        raise UsageError(f"layout '{name}': expected sizes of domain, tp, dp joined by x, as domain2 or domain2x2xdp2")
    domain, tp, dp = (sizes.get(each, "1") for each in ("domain", "tp", "dp"))
    ranks = math.prod(tile_counts(domain)) * int(tp) * int(dp)
    if ranks == 1:
        raise UsageError(f"layout '{name}': it has one rank, which is measured anyway")
    shared = [
        f"--data_parallel={'ddp' if domain == '1' else 'fsdp'}", f"--domain_parallel={domain}",
        f"--tensor_parallel={tp}", f"--global_batch_size={dp}",
    ]  # fmt: skip
    words = [*words, *shared, *(f"--{option}" for option in own)]
    config = load_config(words, world_size=ranks, yaml_config=YAML, splits=SPLITS)
    return config.layout(ranks, max(1, ranks // 2)), config


def _split(name: str) -> list[str]:
    return re.split("x(?=[a-z])", name)


def measure(teams: Teams, cases: list[Case], steps: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the layouts at one point of the sweep; the first layout is the yardstick."""
    turns: dict[Case, list[Any]] = {case: [] for case in cases}
    for number in range(rounds):
        for case, own in turns.items():
            if None not in own:
                own.append(teams.measure(case, steps, memory=number == 0))
    one = summarize(cases[0], turns[cases[0]], None)
    return [one] + [summarize(case, turns[case], one) for case in cases[1:]]


def summarize(case: Case, turns: list[Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """One row. turns: figures of every rank, of every round; None where memory ran out. one: row of one device."""
    ranks, dp = case.layout.world_size, case.layout.dp
    row: dict[str, Any] = {
        "layout": case.name, "devices_of_an_image": ranks // dp, "ranks": ranks, "image": case.config.img_size,
        "tokens": case.tokens, "precision": case.config.amp_mode, "batch": case.batch, "mode": case.mode,
        "out_of_memory": None in turns,
    }  # fmt: skip
    if None in turns:
        return row | dict.fromkeys(
            ("seconds", "seconds_of_rounds", "images_per_sec", "cpu_seconds", "peak", "activations", "loss", "speedup",
             "speedup_of_rounds", "memory_reduction")
        )  # fmt: skip
    of_rounds = [max(figures["seconds"] for figures in turn) for turn in turns]
    seconds, images = statistics.median(of_rounds), case.batch * dp
    memory = {
        name: max(figures[name] for figures in turns[0]) if turns[0][0][name] is not None else None
        for name in ("peak", "activations")
    }
    row |= {
        "seconds": seconds,
        "seconds_of_rounds": of_rounds,
        "images_per_sec": images / seconds,
        "cpu_seconds": statistics.median(statistics.mean(figures["cpu_seconds"] for figures in turn) for turn in turns),
        **memory,
        "loss": turns[0][0]["loss"],
    }
    yardstick = row if one is None else one
    if yardstick["out_of_memory"]:
        return row | dict.fromkeys(("speedup", "speedup_of_rounds", "memory_reduction"))
    ratios = [
        images / case.batch * alone / own for own, alone in zip(of_rounds, yardstick["seconds_of_rounds"], strict=True)
    ]
    return row | {
        "speedup": statistics.median(ratios),
        "speedup_of_rounds": ratios,
        "memory_reduction": yardstick["peak"] / row["peak"],
    }
