"""Figures that a run logs at every reading: loss, gradient, speed, memory, time by phase, the slowest rank."""

import math
import time
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.models.info import PASSES, peak_flops_per_sec
from training.step.optimizer import learning_rate
from training.step.step import StepOutput, TrainingStep
from utils import comm
from utils.device import device_module, peak_memory_bytes, synchronize
from utils.rank_failure import recorded_collectives
from utils.schema import Config

VOTE_SECONDS = 2  # of steps, after which several ranks ask each other whether one was told to stop

Reading = dict[str, float | None]
WARMUP_ITERATIONS = 10  # left out of the steady-state speed: compilation, allocation, the first reads
# data: the device waits for the batch. pipeline: forward and backward of all stages. reduce: of gradients, what the
# backward pass leaves of it. optimizer: clipping and update.
PHASES = ("data", "forward", "backward", "pipeline", "reduce", "optimizer")
MOST_STEPS = 10  # of an interval that are measured on an accelerator


class Telemetry:
    """Collects the steps of this rank, and reads them at once, together with those of all ranks.

    clock: of the run. times: of the phases; they are measured inside `listening(times)`.
    """

    def __init__(self, config: Config, step: TrainingStep):
        self.config = config
        self.device = step.device
        self.clock = Clock()
        self.times = PhaseTimes(step.device, not config.enable_cuda_graphs)
        self.losses: list[Tensor] = []  # on the device, not read yet
        self.square: Tensor | None = None  # this rank's share of the squared norm of the last step's gradient
        self.vote_every = 1  # steps, the same on all ranks
        self.called: int | None = None  # collectives until the end of the first step after a reading
        # Of a sample with all its members, in one step of a forecast.
        self.flops = PASSES * step.task.facts.flops * config.ensemble_size
        self.peak = peak_flops_per_sec(step.device, config)

    def add(self, output: StepOutput) -> None:
        """Note a step, whose output is on the device."""
        self.losses.append(output.loss)
        self.square = output.grad_norm_squared
        is_first = len(self.losses) == 1
        if is_first and self.clock.iterations <= WARMUP_ITERATIONS:
            self.called = count_calls()

    def is_vote_due(self, iteration: int) -> bool:
        """Tell whether the ranks ask each other after this iteration: where steps are slow, oftener than they read."""
        return comm.world_size() == 1 or iteration % self.vote_every == 0

    def read(
        self,
        iteration: int,
        stop: bool,
    ) -> tuple[list[float], Reading, bool]:
        """Bring what the last iterations left to the host: the one place where it waits for the device.

        stop: whether this rank was asked to stop. Returns the losses, means over the batch of all ranks; the reading;
        and whether any rank was asked to stop. One reduction carries all of it: each rank has a row in a table.
        """
        # All steps have finished afterwards, so the events on the device can be read.
        synchronize(self.device)
        count = len(self.losses)
        ranks = comm.world_size()
        messages = self._calls_per_step(count)
        sums = self._sum_over_ranks(count, stop)
        self.losses.clear()
        speed = self.clock.stop(count, count * self.config.global_batch_size)

        # The slowest rank's step, of a table that all ranks have: so they count alike.
        seconds = sums.table[:, :-1].nansum(1).max().item()
        self.vote_every = max(1, int(VOTE_SECONDS / max(seconds, 1e-3)))
        own_row = sums.table[comm.rank()]
        own_times = dict(zip(PHASES, own_row.tolist(), strict=False))
        self.clock.data_wait += own_times["data"] * count
        # Where gradients are reduced the ranks meet, so the phases before, data and forward, show who is slow.
        before_others = sums.table[:, :2].nansum(1)  # (ranks,)

        forecast_steps = self.config.forecast_steps(iteration - 1, iteration)
        flops = speed * self.flops * forecast_steps
        mfu = flops / self.peak / ranks if self.peak else None
        losses = (sums.losses / ranks).tolist()
        reading: Reading = {
            "Loss/train": losses[-1],
            "gradient/norm": sums.squared_norm.sqrt().item(),
            "learning_rate": learning_rate(self.config, iteration - 1),
            "speed/samples_per_sec": speed,
            "speed/flops_per_sec": flops,
            "speed/mfu": mfu,
            "memory/peak_bytes": own_row[-1].item(),
            "memory/most_bytes": sums.table[:, -1].max().item(),
            "messages": messages,
            "time/step": self.clock.interval / count,
            **{f"time/{name}": value for name, value in own_times.items()},
            "time/slowest_rank": int(before_others.argmax()),
            "time/slowest_over_mean": (before_others.max() / before_others.mean()).item(),
        }
        stopping = sums.stops.item() > 0
        return losses, reading, stopping

    def _calls_per_step(self, count: int) -> float | None:
        """Collectives in a step, the mean over all but the first of `count` steps; None where it is not known."""
        called = self.called
        self.called = None
        if called is None or count == 1:
            return None
        return (count_calls() - called) / (count - 1)

    def _sum_over_ranks(self, count: int, stop: bool) -> "RankSums":
        """Add up the figures of all ranks in one reduction, and bring them to the host."""
        ranks = comm.world_size()
        # A rank fills its own row, and zeros elsewhere: the sum over the ranks holds the rows of all.
        table = torch.zeros(ranks, len(PHASES) + 1)
        own_row = [*self.times.read(count), peak_memory_bytes(self.device)]
        table[comm.rank()] = torch.tensor(own_row)

        square = self.square
        if square is None:
            square = self.losses[0].new_tensor(math.nan)
        # All figures are packed into one tensor of the losses' type.
        figures = torch.stack([*self.losses, square])
        stops = figures.new_tensor([stop])
        message = torch.cat([figures, stops, table.flatten().to(figures)])
        packed = comm.all_reduce(message).cpu()
        return RankSums(
            losses=packed[:count],
            squared_norm=packed[count],
            stops=packed[count + 1],
            table=packed[count + 2 :].view(ranks, -1),
        )


class RankSums(NamedTuple):
    """Figures of the last steps, summed over all ranks, on the CPU.

    losses: of each step, (count,). squared_norm: of the last step's gradient. stops: ranks that were asked to stop.
    table: a row for each rank, (ranks, PHASES + 1): the seconds of each phase in a step, then the peak of memory.
    """

    losses: Tensor
    squared_norm: Tensor
    stops: Tensor
    table: Tensor


def count_calls() -> int:
    """Collectives that this rank has called in all its groups, as torch numbers them; 0 where it keeps no record."""
    # Calls are numbered within their group, and the last one of a group has the highest number.
    calls_of_group = {}
    for call in recorded_collectives():
        calls_of_group[call["group"]] = call["number"]
    return sum(calls_of_group.values())


def words_of_seconds(seconds: float) -> str:
    """A time in words, as exact as one wants to know it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


class Clock:
    """Measures the time in training steps, from `start` to `stop`, without validation and checkpoints."""

    def __init__(self) -> None:
        self.iterations = 0
        self.seconds = 0.0  # of all steps
        self.samples = 0
        self.epoch = self.steady = (0.0, 0)  # these two at the start of the epoch, and after the warmup
        self.data_wait = self.interval = 0.0
        self.began: float | None = None  # the first step

    def start(self) -> None:
        """Begin to count time."""
        self.started = time.perf_counter()
        if self.began is None:
            self.began = self.started

    def stop(self, iterations: int, samples: int) -> float:
        """Count the iterations since `start`, which the device has finished; returns samples per second."""
        self.interval = time.perf_counter() - self.started
        self.seconds += self.interval
        self.samples += samples
        if self.iterations < WARMUP_ITERATIONS:
            self.steady = self.seconds, self.samples
        self.iterations += iterations
        return samples / self.interval

    def lap(self) -> tuple[float, int]:
        """Seconds and samples of the epoch; begins the next one."""
        seconds, samples = self.epoch
        self.epoch = self.seconds, self.samples
        return self.seconds - seconds, self.samples - samples

    def elapsed(self) -> float:
        """Seconds since the first step, with validation and checkpoints."""
        assert self.began is not None
        return time.perf_counter() - self.began

    def steady_samples_per_sec(self) -> float | None:
        """Speed after the warmup, or of all steps in a shorter run; None where no step was made."""
        seconds, samples = self.steady if self.samples > self.steady[1] else (0.0, 0)
        return (self.samples - samples) / (self.seconds - seconds) if self.samples else None

    def data_wait_fraction(self) -> float | None:
        """Share of the training time in which the device, or the CPU that trains, waited for its batch."""
        return self.data_wait / self.seconds if self.seconds else None


class PhaseTimes:
    """Seconds of the spans of PHASES, while it listens; the host's clock measures them, on an accelerator its events.

    An event is recorded as work is queued, and read when the host has waited for the device anyway. The events of
    `data` stand behind the last kernel of the step before and behind the wait for the batch's copy: between them the
    device has nothing to do. The host's time would tell something else, since in here it also waits for the device.
    events: False where the device's work is not queued by the code in the spans (CUDA graphs); then `data` is all.
    """

    def __init__(self, device: torch.device, events: bool = True):
        self.on_host = device.type == "cpu"
        self.library = device_module(device, "Event")
        self.spans_queue_work = events
        self.seconds: dict[str, float] = defaultdict(float)
        self.queued: list[tuple[str, Any, Any]] = []  # (phase, event at its start, event at its end)
        self.steps = 0  # whose phases are queued

    def start(self, name: str) -> Any:
        """A mark of this moment, for `stop`; None where it is not measured."""
        if name not in PHASES:
            return None
        if self.on_host:
            return time.perf_counter()
        is_data = name == "data"
        if self.library is None:  # the best that such a device lets one see
            return time.perf_counter() if is_data else None
        is_measured = self.spans_queue_work and self.steps < MOST_STEPS
        return self._event() if is_data or is_measured else None

    def stop(self, name: str, mark: Any) -> None:
        """Count the time since a mark."""
        if isinstance(mark, float):
            self.seconds[name] += time.perf_counter() - mark
        elif mark is not None:
            self.queued.append((name, mark, self._event()))
            self.steps += name == "optimizer"

    def _event(self):
        event = self.library.Event(enable_timing=True)
        event.record()
        return event

    def read(self, iterations: int) -> list[float]:
        """Seconds of a step in each of PHASES, mean over the iterations since the last reading.

        On an accelerator call it when the device has finished them. NaN: not measured.
        """
        means = {name: seconds / iterations for name, seconds in self.seconds.items()}
        for name, start, end in self.queued:
            measured_steps = iterations if name == "data" else max(1, self.steps)  # every batch is measured
            means[name] = means.get(name, 0) + start.elapsed_time(end) / 1e3 / measured_steps
        self.seconds.clear()
        self.queued.clear()
        self.steps = 0
        return [means.get(name, float("nan")) for name in PHASES]
