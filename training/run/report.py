"""What a run tells people: notes as it begins, the scores of a validation, the table at its end."""

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from training.forecasting.metrics import FORECASTS
from training.run.loggers import Charts, Figures, Logger
from training.step.attention_kernel import attention_notes
from training.step.step import TrainingStep
from utils import comm
from utils.config import SHARDED
from utils.device import peak_memory_bytes
from utils.errors import ArgumentParser
from utils.schema import Config

log = logging.getLogger(__name__)

# TensorBoard sorts by name, capitals first: its page opens on the losses and ends with the accuracy.
TAGS = {"val_loss": "Loss/valid", "acc": "valid_acc", "accuracy": "valid_accuracy"}


def write_validation(
    logger: Logger,
    scores: dict[str, Any],
    figures: Figures,
    iteration: int,
) -> None:
    """Log one validation: its scores, numbers or {channel: number}, and its pictures."""
    # Scores of channels have a tag each.
    values = {}
    for kind, score in scores.items():
        if not isinstance(score, dict):
            values[TAGS.get(kind, kind)] = score
            continue
        for number, (channel, value) in enumerate(score.items()):
            values[channel_tag(kind, number, channel)] = value
    tagged_figures = {f"forecast/{name}": figure for name, figure in figures.items()}
    logger.log(values, iteration, tagged_figures)


def channel_tag(kind: str, number: int, name: str) -> str:
    """The tag of a channel's score, numbered so that TensorBoard shows u10 first."""
    return f"{TAGS.get(kind, kind)}/{number:02d}_{name}"


def rmse_charts(channels: Sequence[str]) -> Charts:
    """A chart for each channel, of the RMSE of model, persistence and climatology; {} where none is scored."""
    charts: dict[str, list[Any]] = {}
    for number, name in enumerate(channels):
        tags = [channel_tag(kind, number, name) for kind in FORECASTS.values()]
        charts[name] = ["Multiline", tags]
    return {"RMSE of model, persistence, climatology": charts} if charts else {}


def print_result(summary: dict[str, Any], scores: str, config: Config) -> None:
    """Print, on rank 0, the result of a run for people, `scores` as text, and the command to try next."""
    if not comm.is_main():
        return
    with contextlib.suppress(OSError, ValueError):  # closed, or full: summary.json has all of it
        print(f"\n{scores}\n")
        print(f"finished {summary['iterations']} iterations, everything is in {summary['run']}")
        programs = os.path.relpath(Path(sys.executable).parent)  # of the virtual environment in use
        print(f"curves and maps:  {programs}/tensorboard --logdir {shlex.quote(config.expdir)}")
        if config.amp_mode == "none" and "SLURM_JOB_ID" not in os.environ:
            start = "python" if comm.world_size() == 1 else f"torchrun --nproc_per_node {comm.world_size()}"
            # The command is repeated with its own options, under another number.
            parser = ArgumentParser()
            parser.add_argument("--run_num")
            _, other_options = parser.parse_known_args()
            words = [os.path.relpath(sys.argv[0]), *other_options, "--run_num=bf16", "--amp_mode=bf16"]
            print(f"try next:         {programs}/{start} {shlex.join(words)}")


def log_notes(config: Config, step: TrainingStep) -> None:
    """Log what task, model and kernels have to say, and which options act otherwise on several ranks."""
    kernels = attention_notes(config, step.device, step.task.facts.usage)
    for note in (*step.task.notes, *step.parallel.notes, *kernels):
        log.info(note)
    # Overflows of fp16 are where ranks and one device differ.
    reads_each_step = config.data_parallel == "zero1" and config.amp_mode == "fp16"
    if reads_each_step and step.device.type != "cpu":
        log.info(
            "data_parallel zero1 with amp_mode fp16: the host waits for the device once a step, to see whether it "
            "overflowed, since the optimizer of zero1 does not skip by itself; bf16 needs no such look"
        )
    if config.amp_mode == "fp16" and comm.get_size("grad_reduce") > 1:
        log.info(
            "amp_mode fp16: each rank sums its part of a gradient, so a step may overflow, and be skipped, that "
            "does not on one device, or the reverse"
        )


def log_memory(step: TrainingStep) -> None:
    """Log the memory before anything is computed (the scaffolding of a run), and after the first forward pass."""
    high = partial(peak_memory_bytes, step.device)
    log.info("Memory high watermark of model and optimizer (scaffolding): %.3f GiB", high() / 2**30)

    def once(*_: Any) -> None:
        hook.remove()
        log.info("Memory high watermark after the first forward pass: %.3f GiB", high() / 2**30)

    # A stage of a pipeline is called in place of the model.
    called: nn.Module = next(iter(step.parallel.split.stages), step.parallel.model)
    hook = called.register_forward_hook(once)


def describe_devices(config: Config, device: torch.device) -> str:
    """The devices, and how the model is split over them, as text."""
    layout = config.layout(comm.world_size())
    split = layout.describe("tp", "cp", "domain", "ens", "pp", "dp")
    is_sharded = config.data_parallel in SHARDED and comm.get_size("grad_reduce") > 1
    if layout.dp > 1 or is_sharded:
        split += f" ({config.data_parallel})"
    return f"{comm.world_size()} x {device.type}: {split}" if split else str(device)
