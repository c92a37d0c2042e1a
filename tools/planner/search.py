"""Search of many layouts: the best ones for a number of GPUs, how far the best one scales, and its job.

What grows with the number of ranks and is no message are two assumptions: the slowest of many ranks, and reading. Every
step waits for its slowest rank. The step times of ranks are taken to be independent and normal, with a relative
standard deviation `jitter` (of a Gpu): of n ranks the slowest is expected at 1 + jitter z(n), z(n) the mean of the
largest of n standard normal numbers (Blom 1958). Batches are read ahead, so a step takes the longer of computing and
reading.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from tools.planner.hardware import Gpu
from tools.planner.layouts import arguments, candidates, script_of
from tools.planner.plan import VERDICTS, Plan, plan_layout
from tools.planner.textbook import textbook_traces
from tools.slurm import on_nodes, submit
from utils.config import SCRIPTS, SPLITS, check_config, load_config, parse_command_line, read_named_config
from utils.errors import UsageError
from utils.schema import Config

MOST_GPUS = 2**17
# Options that fix the layout: with one of them a single layout is planned.
LAYOUT_OPTIONS = (*SPLITS, "row_parallel_size", "data_parallel", "dp_shard")


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
    """A config on a GPU. words: options, as the training scripts take them. inference: without training."""

    compared: int  # layouts, by search.best_layouts
    refused: dict[str, int]  # {reason: how many others}

    def __init__(self, words: Sequence[str], gpu: Gpu, inference: bool = False):
        self.words, self.gpu, self.inference = words, gpu, inference
        self.named = {word[2:].split("=")[0] for word in words if word.startswith("--")}

    def any_layout(self) -> Config:
        """The config, whatever the layout. Raises UsageError for local_batch_size, which depends on it."""
        options = parse_command_line(self.words, None, SCRIPTS["train.py"].yaml_config)
        path, name = options.pop("yaml_config"), options.pop("config")
        if "local_batch_size" in options:
            raise UsageError("local_batch_size: layouts are compared at the same --global_batch_size; give that")
        settings = {**read_named_config(path, name), **options}
        return check_config(settings, name, f"{path}: {name}", options)

    def plan(self, gpus: int) -> Plan:
        """The Plan of the layout that the options name. Raises UsageError where it is impossible."""
        script = "train_mp.py" if self.named.isdisjoint(("domain_parallel", "domain_method")) else "train_shard.py"
        config = load_config(self.words, world_size=gpus, splits=SCRIPTS[script].splits)
        layout = config.layout(gpus, self.gpu.gpus_per_node)
        return plan_layout(config, layout, self.gpu, inference=self.inference)


def best_layouts(request: Request, gpus: int, top: int) -> list[Plan]:
    """Traced plans of the best layouts: those that fit first, the fastest first.

    All candidates are compared by formula; of candidates that split the model alike only the best is kept.
    Sets request.compared, and request.refused: {reason: number of layouts that no script runs}.
    """
    found, request.refused = formula_plans(request, gpus)
    request.compared = len(found)
    kept: dict[tuple, Plan] = {}
    for plan in sorted(found, key=_order):
        kept.setdefault(tuple(getattr(plan.config, name) for name in SPLITS), plan)
    best = [plan for plan in kept.values() if plan.fits != "no"][:top] or list(kept.values())[:top]
    return sorted((plan_layout(plan.config, plan.layout, request.gpu) for plan in best), key=_order)


def formula_plans(request: Request, gpus: int, times: int = 1) -> tuple[list[Plan], dict[str, int]]:
    """Plans by textbook formulas of all layouts that the scripts can run, and {reason: number of refused layouts}.

    times: factor on the batch that was asked for.
    """
    config, gpu = request.any_layout(), request.gpu
    config = config.model_copy(update={"global_batch_size": times * config.global_batch_size})
    valid, refused = candidates(config, gpus, gpu.gpus_per_node, request.named)
    plans = [plan_layout(c, layout, gpu, textbook_traces(c, layout)) for c, layout in valid]
    return plans, refused


def _order(plan: Plan) -> tuple[int, float]:
    cost = plan.needed if plan.fits == "no" else plan.time.seconds / plan.config.global_batch_size
    return list(VERDICTS).index(plan.fits), cost


def expected_slowest(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers, within 2 %; 0 of one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def sample_bytes(config: Config) -> int:
    """Bytes of a sample in year files: its frames, and what follows it for the target, in float32."""
    points = math.prod(config.img_size)
    targets = config.n_out_channels * config.longest_rollout if config.task == "forecast" else 0
    return 4 * points * (config.state_channels + targets)


def at_scale(plan: Plan) -> Plan:
    """A Plan whose step waits for the slowest of all ranks and for reading, as the module says."""
    gpu, seconds, bound = plan.gpu, plan.time.seconds, plan.time.bound
    seconds *= 1 + gpu.jitter * expected_slowest(plan.layout.world_size)
    read = plan.config.global_batch_size * sample_bytes(plan.config)
    reading = read / min(gpu.total_read, plan.nodes * gpu.node_read)
    if reading > seconds:
        seconds, bound = reading, "reading"
    return replace(plan, time=replace(plan.time, seconds=seconds, bound=bound))


def scaling(request: Request, counts: Sequence[int]) -> list[Plan]:
    """Plans of the best layouts by formula, with `curve`. Strong: the same batch on all. Weak: it grows with them."""
    points = []
    for kind in ("strong", "weak"):
        first = None
        for gpus in counts:
            plans, _ = formula_plans(request, gpus, gpus // counts[0] if kind == "weak" else 1)
            if not plans:  # the batch is too small for so many
                continue
            plan = at_scale(min(plans, key=_order))
            speed = plan.samples_per_sec / gpus
            first = first or speed
            points.append(replace(plan, curve={"scaling": kind, "efficiency": speed / first}))
    return points


def submit_plan(plan: Plan, request: Request, options: str) -> str:
    """Queue the run of a plan, after a preflight in the same job; returns what was done, in words.

    options: further words for sbatch, as a shell reads them. Raises UsageError where the plan does not fit the GPU or
    its nodes, and where Slurm refuses.
    """
    if plan.fits == "no":
        raise UsageError("--submit: this layout does not fit into memory: --choose another, or give more --gpus")
    words = [SCRIPTS[script_of(vars(plan.config))].submit, *arguments(plan.config, request.words)]
    sbatch = ["sbatch", "--parsable", *on_nodes(plan.layout.world_size, plan.gpu.gpus_per_node)]
    line = f"{shlex.join(sbatch)} {options} {shlex.join(words)}"
    return f"job {submit(['export PREFLIGHT=1', line])}: PREFLIGHT=1 {line}"
