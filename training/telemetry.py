"""Figures that a run logs at every reading: loss, gradient, speed, memory, time by phase, the slowest rank."""

import math

import torch
from torch import Tensor

from training.flops import PASSES, peak_flops_per_sec
from training.optimizer import learning_rate
from training.step import StepOutput, TrainingStep
from training.timing import PHASES, WARMUP_ITERATIONS, Clock, PhaseTimes
from utils import comm
from utils.device import peak_memory_bytes, synchronize
from utils.rank_failure import recorded_collectives
from utils.schema import Config

Reading = dict[str, float | None]


class Telemetry:
    """Collects the steps of this rank, and reads them at once, together with those of all ranks.

    clock: of the run. times: of the phases; they are measured inside `times.listening()`.
    """

    def __init__(self, config: Config, step: TrainingStep):
        self.config, self.device = config, step.device
        self.clock, self.times = Clock(), PhaseTimes(step.device, not config.enable_cuda_graphs)
        self.losses: list[Tensor] = []  # on the device, not read yet
        self.square: Tensor | None = None  # this rank's share of the squared norm of the last step's gradient
        self.called: int | None = None  # collectives until the end of the first step after a reading
        self.flops = PASSES * step.task.facts.flops  # of a sample, in one step of a forecast
        self.peak = peak_flops_per_sec(step.device, config)

    def add(self, output: StepOutput) -> None:
        """Note a step, whose output is on the device."""
        self.losses.append(output.loss)
        self.square = output.grad_norm_squared
        if len(self.losses) == 1 and self.clock.iterations <= WARMUP_ITERATIONS:
            self.called = count_calls()

    def read(self, iteration: int, stop: bool) -> tuple[list[float], Reading, bool]:
        """Bring what the last iterations left to the host: the one place where it waits for the device.

        stop: whether this rank was asked to stop. Returns the losses, means over the batch of all ranks; the reading;
        and whether any rank was asked to stop. One reduction carries all of it: each rank has a row in a table.
        """
        synchronize(self.device)
        count, ranks = len(self.losses), comm.world_size()
        called = None if self.called is None or count == 1 else (count_calls() - self.called) / (count - 1)
        self.called = None
        table = torch.zeros(ranks, len(PHASES) + 1)
        table[comm.rank()] = torch.tensor([*self.times.read(count), peak_memory_bytes(self.device)])
        square = self.losses[0].new_tensor(math.nan) if self.square is None else self.square
        own = torch.stack([*self.losses, square])
        packed = comm.all_reduce(torch.cat([own, own.new_tensor([stop]), table.flatten().to(own)])).cpu()
        losses, norm, stopping = (packed[:count] / ranks).tolist(), packed[count].sqrt(), packed[count + 1].item() > 0
        self.losses.clear()
        speed, seconds = self.clock.stop(count, count * self.config.global_batch_size), self.clock.interval
        table = packed[count + 2 :].view(ranks, -1)
        own_times = dict(zip(PHASES, table[comm.rank()].tolist(), strict=False))
        self.clock.data_wait += own_times["data"] * count
        forecast_steps = [steps for first, steps in self.config.rollout_stages if first < iteration][-1]
        flops = speed * self.flops * forecast_steps
        before_others = table[:, :2].nansum(1)  # of data and forward: where gradients are reduced the ranks meet
        reading: Reading = {
            "Loss/train": losses[-1],
            "gradient/norm": norm.item(),
            "learning_rate": learning_rate(self.config, iteration - 1),
            "speed/samples_per_sec": speed,
            "speed/flops_per_sec": flops,
            "speed/mfu": flops / self.peak / ranks if self.peak else None,
            "memory/peak_bytes": table[comm.rank(), -1].item(),
            "memory/most_bytes": table[:, -1].max().item(),
            "messages": called,
            "time/step": seconds / count,
            **{f"time/{name}": value for name, value in own_times.items()},
            "time/slowest_rank": int(before_others.argmax()),
            "time/slowest_over_mean": (before_others.max() / before_others.mean()).item(),
        }
        return losses, reading, stopping


def count_calls() -> int:
    """Collectives that this rank has called in all its groups, as torch numbers them; 0 where it keeps no record."""
    return sum({call["group"]: call["number"] for call in recorded_collectives()}.values())
