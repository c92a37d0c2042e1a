"""A case on one rank: its training step and a batch, as measurements of ranks use them."""

import time
from typing import Any

import torch.distributed as dist

from distributed.shard.rules.attention import set_attention_method
from tools.instruments.assembly import build_step, random_batch
from tools.instruments.memory import memory_of_a_step
from tools.instruments.overlap import hidden_share_of
from tools.instruments.team import Case, Rank
from tools.instruments.tracker import messages_of_a_step
from utils import comm
from utils.device import library, synchronize

WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order, memory is allocated
PROFILED_STEPS = 3


class RankCase:
    """A case on one rank: its training step, and a batch of random numbers."""

    def __init__(self, rank: Rank, case: Case):
        self.rank, self.device, self.case = rank, rank.device, case
        self.gpu = library(self.device, "max_memory_allocated")
        self.before = self.gpu.memory_allocated() if self.gpu else 0
        self.take_turn()
        self.x, self.y = random_batch(case.config, self.device)
        self.step = build_step(case.config, self.device, f"layout '{case.name}'")

    def take_turn(self) -> None:
        """Make its groups, and its method of attention over split images, those of this process."""
        self.rank.use_mesh(self.case.layout)
        set_attention_method(self.case.config.domain_method)

    def train(self, steps: int) -> None:
        """Make so many optimizer steps, and wait for the last."""
        for _ in range(steps):
            self.step(0, self.x, self.y)
        synchronize(self.device)

    def times(self, steps: int) -> dict[str, float]:
        """Seconds of a step, and of its CPU time: the mean over some steps that all ranks start together."""
        self.train(1)  # the turns of other cases have emptied the caches
        if comm.world_size() > 1:
            dist.barrier()
        synchronize(self.device)
        started, cpu = time.perf_counter(), time.process_time()
        self.train(steps)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        return {"seconds": seconds / steps, "cpu_seconds": cpu_seconds / steps}

    def figures(self) -> dict[str, Any]:
        """Memory and messages of a step, and on a GPU the share of communication that computation hides."""
        self.train(WARMUP_STEPS - 1)
        if self.gpu:
            self.gpu.reset_peak_memory_stats()
        self.train(1)
        allocated = self.gpu.max_memory_allocated() - self.before if self.gpu else None
        memory: dict[str, float | None] = memory_of_a_step(self.step, self.x, self.y) | {"allocated at most": allocated}
        if self.case.config.tp_backend == "dtensor":  # a saved DTensor has the size of the whole, not of its part
            memory["activations"] = None
        return {
            "memory": memory,
            "messages": messages_of_a_step(self.step, self.x, self.y),
            "hidden": hidden_share_of(lambda: self.train(PROFILED_STEPS)) if self.gpu else None,
        }
