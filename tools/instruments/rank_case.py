"""A case on one rank: its training step and a batch, as measurements of ranks use them."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from distributed.shard.rules.attention import set_attention_method
from tools.instruments.clock import timed
from tools.instruments.team import Case, Rank
from training.assembly import build_step, random_batch
from utils import comm
from utils.config import SCRIPTS, load_config
from utils.device import library, synchronize

WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order, memory is allocated
Interval = tuple[float, float]  # start, end


def build_case(name: str, script: str, words: Sequence[str], ranks: int, training: bool = True) -> Case:
    """The Case of a training script with these options. Raises UsageError where it does not fit the ranks."""
    config = load_config(words, None, ranks, SCRIPTS[script].yaml_config, SCRIPTS[script].splits)
    # hsdp without dp_shard: half of the ranks share one copy, as on two nodes
    return Case(name, config, config.layout(ranks, max(1, ranks // 2)), training)


class RankCase:
    """A case on one rank: its training step, and a batch of random numbers."""

    def __init__(self, rank: Rank, case: Case):
        self.rank, self.device, self.case = rank, rank.device, case
        self.gpu = library(self.device, "max_memory_allocated")
        self.before = self.gpu.memory_allocated() if self.gpu else 0
        self.take_turn()
        self.step = build_step(case.config, self.device, f"layout '{case.name}'")
        self.x, self.y = random_batch(self.step.task, self.device)
        if not case.training:
            self.step.parallel.module.eval()

    def take_turn(self) -> None:
        """Make its groups, and its method of attention over split images, those of this process."""
        self.rank.use_mesh(self.case.layout)
        set_attention_method(self.case.config.domain_method)

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """The model's output for this rank's batch, without gradients."""
        with self.step.autocast():
            return self.step.parallel.module(self.x)

    def train(self, steps: int) -> None:
        """Make so many optimizer steps, or forward passes, and wait for the last."""
        for _ in range(steps):
            if self.case.training:
                self.step(0, self.x, self.y)
            else:
                self.forward()
        synchronize(self.device)

    def times(self, steps: int) -> dict[str, float]:
        """Seconds of a step, and of its CPU time: the mean over some steps that all ranks start together."""
        self.train(1)  # the turns of other cases have emptied the caches
        if comm.world_size() > 1:
            dist.barrier()
        cpu = time.process_time()
        seconds, _ = timed(self.device, self.train, steps)
        return {"seconds": seconds / steps, "cpu_seconds": (time.process_time() - cpu) / steps}


def held(rank: Rank, case: Case) -> RankCase:
    """On a rank: its RankCase, which it builds and warms up once, and whose turn it is now."""
    key = repr(case)  # each call sends another copy of the case
    if key not in rank.kept:
        rank.kept[key] = RankCase(rank, case)
        rank.kept[key].train(WARMUP_STEPS)
    rank.kept[key].take_turn()
    return rank.kept[key]


def seconds_of(rank: Rank, case: Case) -> float:
    """On a rank: seconds of a step of a case that it holds."""
    return held(rank, case).times(1)["seconds"]


def hidden_share_of(run: Callable[[], None]) -> float | None:
    """Of the time in which kernels of NCCL, RCCL or oneCCL run, the share in which others run too; None without any.

    run: called once under the profiler.
    """
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        run()
    communication, compute = [], []
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation:
            name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
            if "ccl" in name:
                communication.append(span)
            elif not name.startswith(("memcpy", "memset")):
                compute.append(span)
    return hidden_share(communication, compute)


def hidden_share(communication: list[Interval], compute: list[Interval]) -> float | None:
    """Share of the time covered by some intervals in which others go on as well; None where there is no such time."""
    total = _length(communication)
    return (total + _length(compute) - _length(communication + compute)) / total if total else None


def _length(intervals: list[Interval]) -> float:
    """Length of the union."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
