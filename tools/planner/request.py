"""The planner's input: a config with options, a GPU, and maybe a run that calibrates the times."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from tools.planner.formulas import MODELS, formula_traces
from tools.planner.hardware import Gpu
from tools.planner.plan import Plan, plan_layout
from tools.planner.step_time import calibrate
from tools.planner.trace import in_rounds, trace_step
from training.run_folder import read_summary
from utils.config import SCRIPTS, check_config, load_config, parse_command_line, read_named_config
from utils.errors import UsageError
from utils.schema import Config

MOST_GPUS = 2**17
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

    @property
    def names_a_layout(self) -> bool:
        """Whether the options fix a single layout."""
        return not self.named.isdisjoint(LAYOUT_OPTIONS)

    @property
    def script(self) -> str:
        """The script that runs the layout that the options name."""
        shares_images = not self.named.isdisjoint(("domain_parallel", "domain_method"))
        return "train_shard.py" if shares_images else "train_mp.py"

    def config(self, gpus: int) -> Config:
        """The config on this number of GPUs. Raises UsageError where it does not fit."""
        return load_config(self.words, world_size=gpus, splits=SCRIPTS[self.script].splits)

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
        plan = plan_layout(config, layout, self.gpu, self.calibration)
        if config.model not in MODELS or (layout.pp > 1 and in_rounds(config)):  # which have no formula
            return plan
        by_formula = plan_layout(config, layout, self.gpu, traces=formula_traces(config, layout))
        return replace(plan, formula_peak=by_formula.peak)
