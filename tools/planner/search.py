"""Search of many layouts: the best ones for a number of GPUs, and how far the best one scales.

What grows with the number of ranks and is no message are two assumptions: the slowest of many ranks, and reading. Every
step waits for its slowest rank. The step times of ranks are taken to be independent and normal, with a relative
standard deviation `jitter`: of n ranks the slowest is expected at 1 + jitter z(n), z(n) the mean of the largest of n
standard normal numbers (Blom 1958). Batches are read ahead, so a step takes the longer of computing and reading.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from tools.planner.hardware import Gpu
from tools.planner.layouts import candidates
from tools.planner.plan import Plan, plan_layout
from tools.planner.step_time import calibrate
from tools.planner.textbook import textbook_traces
from tools.planner.trace import trace_step
from training.run_folder import read_summary
from utils.config import SCRIPTS, check_config, load_config, parse_command_line, read_named_config
from utils.errors import UsageError
from utils.schema import Config

MOST_GPUS = 2**17
READING = "reading"
VERDICTS = ("fits", "marginal", "no")
# Options that fix the layout: with one of them a single layout is planned.
LAYOUT_OPTIONS = (
    "tensor_parallel", "row_parallel_size", "context_parallel", "pipeline_parallel", "domain_parallel", "data_parallel",
    "dp_shard",
)  # fmt: skip


def gpu_counts(text: str) -> list[int]:
    """Numbers of GPUs: "16" -> [16], "8..64" -> [8, 16, 32, 64]. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= MOST_GPUS:
        raise UsageError(f"--gpus '{text}': expected a number from 1 to {MOST_GPUS}, or a range as 8..4096")
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return counts


class Request:
    """A config on a GPU. words: options, as the training scripts take them. summary: path of a run's summary.json."""

    compared: int  # layouts, by search.best_layouts
    refused: dict[str, int]  # {reason: how many others}

    def __init__(self, words: Sequence[str], gpu: Gpu, summary: Path | str | None = None):
        self.words, self.gpu, self.summary = words, gpu, summary
        self.named = {word[2:].split("=")[0] for word in words if word.startswith("--")}

    def config(self, gpus: int) -> Config:
        """The config on this number of GPUs. Raises UsageError where it does not fit."""
        script = "train_mp.py" if self.named.isdisjoint(("domain_parallel", "domain_method")) else "train_shard.py"
        return load_config(self.words, world_size=gpus, splits=SCRIPTS[script].splits)

    def any_layout(self) -> Config:
        """The config, whatever the layout. Raises UsageError for local_batch_size, which depends on it."""
        options = parse_command_line(self.words, None, SCRIPTS["train.py"].yaml_config)
        path, name = options.pop("yaml_config"), options.pop("config")
        if "local_batch_size" in options:
            raise UsageError("local_batch_size: layouts are compared at the same --global_batch_size; give that")
        settings = {**read_named_config(path, name), **options}
        return check_config(settings, name, f"{path}: {name}", options)

    @cached_property
    def calibration(self) -> float | None:
        """The factor on times of computation, from the run whose summary was given; None without one."""
        if self.summary is None:
            return None
        path = Path(self.summary)
        summary = read_summary(path, config=str)
        ranks = summary["world_size"]
        settings = read_named_config(path.with_name("config.yaml"), summary["config"])
        config = check_config(settings, summary["config"], str(path.with_name("config.yaml")), world_size=ranks)
        layout = config.layout(ranks, self.gpu.gpus_per_node)
        return calibrate(trace_step(config, layout, self.gpu.device), config, layout, self.gpu, summary)

    def plan(self, gpus: int) -> Plan:
        """The Plan of the layout that the options name. Raises UsageError where it is impossible."""
        config = self.config(gpus)
        layout = config.layout(gpus, self.gpu.gpus_per_node)
        return plan_layout(config, layout, self.gpu, self.calibration)


def best_layouts(request: Request, gpus: int, top: int) -> list[Plan]:
    """Traced plans of the best layouts: those that fit first, the fastest first.

    All candidates are compared by formula; of candidates that split the model alike only the best is kept.
    Sets request.compared, and request.refused: {reason: number of layouts that no script runs}.
    """
    found, request.refused = formula_plans(request, gpus)
    request.compared = len(found)
    kept: dict[tuple, Plan] = {}
    for plan in sorted(found, key=_order):
        layout = plan.layout
        kept.setdefault((layout.tp, layout.cp, layout.pp, layout.domain), plan)
    best = [plan for plan in kept.values() if plan.fits != "no"][:top] or list(kept.values())[:top]
    traced = [plan_layout(plan.config, plan.layout, request.gpu, request.calibration) for plan in best]
    return sorted(traced, key=_order)


def formula_plans(request: Request, gpus: int, times: int = 1) -> tuple[list[Plan], dict[str, int]]:
    """Plans by textbook formulas of all layouts that the scripts can run, and {reason: number of refused layouts}.

    times: factor on the batch that was asked for.
    """
    config, gpu = request.any_layout(), request.gpu
    config = config.model_copy(update={"global_batch_size": times * config.global_batch_size})
    valid, refused = candidates(config, gpus, gpu.gpus_per_node, request.named)
    plans = [plan_layout(c, layout, gpu, request.calibration, textbook_traces(c, layout)) for c, layout in valid]
    return plans, refused


def _order(plan: Plan) -> tuple[int, float]:
    cost = plan.needed if plan.fits == "no" else plan.time.seconds / plan.config.global_batch_size
    return VERDICTS.index(plan.fits), cost


def expected_slowest(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers, within 2 %; 0 of one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def sample_bytes(config: Config) -> int:
    """Bytes of a sample in year files: its state, and what follows it for the target, in float32."""
    points = math.prod(config.img_size)
    targets = config.n_out_channels * config.longest_rollout if config.task == "forecast" else 0
    return 4 * points * (config.n_in_channels + targets)


class Assumptions(NamedTuple):
    """jitter: relative standard deviation of a rank's step time. node_read, total_read: bytes/s of files."""

    jitter: float
    node_read: float
    total_read: float

    def seconds(self, plan: Plan) -> tuple[float, str]:
        """(seconds of a step, what bounds it) of a plan at its number of ranks."""
        computing = plan.time.seconds * (1 + self.jitter * expected_slowest(plan.layout.world_size))
        read = plan.config.global_batch_size * sample_bytes(plan.config)
        reading = read / min(self.total_read, plan.nodes * self.node_read)
        return (reading, READING) if reading > computing else (computing, plan.time.bound)

    def text(self, config: Config) -> str:
        """The assumptions in a line."""
        return (
            f"Assumed: step times of ranks vary by {self.jitter:.1%} (--jitter), each step waits for the slowest; a "
            f"sample of {sample_bytes(config) / 1e6:.2f} MB is read at {self.node_read / 1e9:g} GB/s a node "
            f"(--node_read), {self.total_read / 1e9:g} GB/s of all (--total_read), while the step before computes."
        )


@dataclass(frozen=True)
class Point:
    """A point of a scaling curve. scaling: strong or weak. efficiency: samples/s per GPU, relative to the first.

    seconds, bound: of a step with the slowest of all ranks and with reading, see tools.planner.search.
    """

    plan: Plan
    scaling: str
    seconds: float
    bound: str
    efficiency: float

    @property
    def samples_per_sec(self) -> float:
        """Samples of all GPUs together."""
        return self.plan.config.global_batch_size / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The point as JSON can hold it."""
        own = {"step_time_s": self.seconds, "bound": self.bound, "samples_per_sec": self.samples_per_sec}
        return {"scaling": self.scaling, "efficiency": self.efficiency} | self.plan.to_json() | own


def scaling(request: Request, counts: Sequence[int], assumed: Assumptions) -> list[Point]:
    """Points of the best layouts by formula. Strong: the same batch on all. Weak: it grows with the GPUs."""
    points = []
    for kind in ("strong", "weak"):
        first = None
        for gpus in counts:
            plans, _ = formula_plans(request, gpus, gpus // counts[0] if kind == "weak" else 1)
            if not plans:  # the batch is too small for so many
                continue
            plan = min(plans, key=_order)
            seconds, bound = assumed.seconds(plan)
            speed = plan.config.global_batch_size / seconds / gpus
            first = first or speed
            points.append(Point(plan, kind, seconds, bound, speed / first))
    return points
