"""What the log says as a run begins: its devices, its memory, and what is worth knowing of its options."""

import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from training.step.attention_kernel import attention_notes
from training.step.step import TrainingStep
from utils import comm
from utils.config import SHARDED
from utils.device import peak_memory_bytes
from utils.schema import Config

log = logging.getLogger(__name__)


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
