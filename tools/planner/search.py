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
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from tools.planner.hardware import Gpu
from tools.planner.layouts import arguments, candidates, script_of
from tools.planner.plan import VERDICTS, Plan, plan_layout
from tools.planner.textbook import textbook_traces
from tools.slurm import on_nodes, submit
from utils.command_line import parse_command_line
from utils.config import SCRIPTS, SPLITS, check_config, load_config, read_named_config
from utils.errors import UsageError
from utils.schema import Config

MOST_GPUS = 2**17
# Options that fix the layout: with one of them a single layout is planned.
LAYOUT_OPTIONS = (*SPLITS, "row_parallel_size", "data_parallel", "dp_shard")


def gpu_counts(text: str) -> list[int]:
    """Numbers of GPUs: "16" -> [16], "8..64" -> [8, 16, 32, 64]. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = 0, 0
    if match:
        first = int(match[1])
        last = int(match[2] or first)
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
        self.words = words
        self.gpu = gpu
        self.inference = inference
        # Keys of the config that the words set.
        options = [word for word in words if word.startswith("--")]
        self.named = {option[2:].split("=")[0] for option in options}

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
        splits_images = not self.named.isdisjoint(("domain_parallel", "domain_method"))
        # train_shard.py alone splits images, and train_mp.py makes every other split.
        script = "train_shard.py" if splits_images else "train_mp.py"
        config = load_config(self.words, world_size=gpus, splits=SCRIPTS[script].splits)
        layout = config.layout(gpus, self.gpu.gpus_per_node)
        return plan_layout(config, layout, self.gpu, inference=self.inference)


def best_layouts(request: Request, gpus: int, top: int) -> list[Plan]:
    """Traced plans of the best layouts: those that fit first, the fastest first.

    All candidates are compared by formula; of candidates that split the model alike only the best is kept. A trace
    takes seconds, so each is told on stderr.
    Sets request.compared, and request.refused: {reason: number of layouts that no script runs}.
    """
    found, request.refused = formula_plans(request, gpus)
    request.compared = len(found)

    # The best of each split of the model.
    kept: dict[tuple, Plan] = {}
    for plan in sorted(found, key=_order):
        split = tuple(getattr(plan.config, name) for name in (*SPLITS, "ensemble_parallel"))
        # Plans come best first, so the first one of a split stays.
        kept.setdefault(split, plan)

    # Those that fit; where none does, those that need least.
    fitting = [plan for plan in kept.values() if plan.fits != "no"]
    best = (fitting or list(kept.values()))[:top]

    # The formulas are approximate, a trace is exact: its order may be another one.
    traced = []
    started = time.monotonic()
    for number, plan in enumerate(best, 1):
        seconds = time.monotonic() - started
        text = f"tracing layout {number} of {len(best)} (of {len(found)} that can run), after {seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)
        traced.append(plan_layout(plan.config, plan.layout, request.gpu))
    return sorted(traced, key=_order)


def formula_plans(
    request: Request,
    gpus: int,
    times: int = 1,
) -> tuple[list[Plan], dict[str, int]]:
    """Plans by textbook formulas of all layouts that the scripts can run, and {reason: number of refused layouts}.

    times: factor on the batch that was asked for.
    """
    gpu = request.gpu
    config = request.any_layout()
    batch = times * config.global_batch_size
    config = config.model_copy(update={"global_batch_size": batch})
    valid, refused = candidates(config, gpus, gpu.gpus_per_node, request.named)
    plans = []
    for own_config, layout in valid:
        traces = textbook_traces(own_config, layout)
        plans.append(plan_layout(own_config, layout, gpu, traces))
    return plans, refused


def _order(plan: Plan) -> tuple[int, float]:
    """The best plan first: one that fits, and of those the fastest; of those that do not, the one that needs least."""
    verdict = list(VERDICTS).index(plan.fits)
    if plan.fits == "no":
        return verdict, plan.needed
    seconds_of_a_sample = plan.time.seconds / plan.config.global_batch_size
    return verdict, seconds_of_a_sample


def expected_slowest(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers, within 2 %; 0 of one."""
    # Blom's plotting position of the largest: 3/8 and 1/4 suit the normal distribution.
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def sample_bytes(config: Config) -> int:
    """Bytes of a sample in year files: its frames, and what follows it for the target, in float32."""
    points = math.prod(config.img_size)
    channels = config.state_channels
    if config.task == "forecast":
        channels += config.n_out_channels * config.longest_rollout
    return 4 * points * channels  # float32 has 4 bytes


def at_scale(plan: Plan) -> Plan:
    """A Plan whose step waits for the slowest of all ranks and for reading, as the module says."""
    gpu = plan.gpu
    bound = plan.time.bound
    late = gpu.jitter * expected_slowest(plan.layout.world_size)
    seconds = plan.time.seconds * (1 + late)

    # A step takes the longer of computing and reading.
    read = plan.config.global_batch_size * sample_bytes(plan.config)  # bytes
    read_rate = min(gpu.total_read, plan.nodes * gpu.node_read)
    reading = read / read_rate
    if reading > seconds:
        seconds, bound = reading, "reading"
    time = replace(plan.time, seconds=seconds, bound=bound)
    return replace(plan, time=time)


def scaling(request: Request, counts: Sequence[int]) -> list[Plan]:
    """Plans of the best layouts by formula, with `curve`. Strong: the same batch on all. Weak: it grows with them."""
    points = []
    for kind in ("strong", "weak"):
        first = None
        for gpus in counts:
            # Weak scaling starts at the batch that was asked for.
            times = gpus // counts[0] if kind == "weak" else 1
            plans, _ = formula_plans(request, gpus, times)
            if not plans:  # the batch is too small for so many
                continue
            plan = at_scale(min(plans, key=_order))
            speed = plan.samples_per_sec / gpus  # of one GPU
            first = first or speed
            curve = {"scaling": kind, "efficiency": speed / first}
            points.append(replace(plan, curve=curve))
    return points


def submit_plan(plan: Plan, request: Request, options: str) -> str:
    """Queue the run of a plan, after a preflight in the same job; returns what was done, in words.

    options: further words for sbatch, as a shell reads them. Raises UsageError where the plan does not fit the GPU or
    its nodes, and where Slurm refuses.
    """
    if plan.fits == "no":
        raise UsageError("--submit: this layout does not fit into memory: --choose another, or give more --gpus")
    script = SCRIPTS[script_of(vars(plan.config))]
    words = [script.submit, *arguments(plan.config, request.words)]
    nodes = on_nodes(plan.layout.world_size, plan.gpu.gpus_per_node)
    sbatch = ["sbatch", "--parsable", *nodes]
    line = f"{shlex.join(sbatch)} {options} {shlex.join(words)}"
    return f"job {submit(['export PREFLIGHT=1', line])}: PREFLIGHT=1 {line}"
