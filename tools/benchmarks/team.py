"""Processes of one machine that train together when told to: the ranks of a benchmark."""

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tools.instruments.assembly import build_step
from tools.instruments.counting import CollectiveCounter
from tools.instruments.memory import memory_of_a_step
from utils import comm
from utils.device import synchronize
from utils.errors import UsageError
from utils.layout import Layout
from utils.rank_failure import exit_at_once
from utils.schema import Config

Interval = tuple[float, float]  # start, end
Serve = Callable[[Connection, Any], None]

WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order, memory is there
PROFILED_STEPS = 3
LEAVE_SECONDS = 10  # that a rank has to end by itself


class Team:
    """`size` ranks, each of which holds every case at once: [(config, layout), ...].

    serve: called as serve(pipe, cases) in each rank, `_serve` where none is given.
    figures: of each case, what `Case.measure` gives on every rank.
    Raises UsageError, here and in `turn`, where a rank fails or is gone; use it as a context, which ends the processes.
    """

    combine: ClassVar[Callable[[list[float]], float]] = sum  # of the ranks' answers in a turn

    def __init__(self, size: int, cases: Sequence[Any], serve: Serve | None = None):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.size = size
        self.processes: list[SpawnProcess] = []
        self.pipes: list[Connection] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_rank, args=(theirs, rank, size, port, serve or _serve, cases), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
            self.figures = list(zip(*self._answers(), strict=True))
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def turn(self, case: int, steps: int) -> float:
        """Samples per second of all ranks together in a case (by `_serve`)."""
        for pipe in self.pipes:
            pipe.send((case, steps))
        return type(self).combine(self._answers())

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            asked = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in cast(list[Connection], wait(asked)):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise UsageError(f"rank {rank} of {self.size} has ended (out of memory?)") from None
                if isinstance(answers[rank], Exception):
                    raise answers[rank]
        return [answers[rank] for rank in range(self.size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None:
            for pipe in self.pipes:
                pipe.send(None)
        for process in self.processes:
            if kind is None:
                process.join(LEAVE_SECONDS)
            process.kill()  # they may wait for one another
        for process in self.processes:
            process.join()


def _run_rank(pipe: Connection, rank: int, size: int, port: int, serve: Serve, cases: Sequence[Any]) -> None:
    """In the child. Whatever happens to another one the parent ends this one, and this one ends after the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well
    threading.Thread(target=_end_after_the_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    try:
        return serve(pipe, cases)
    except (EOFError, ConnectionError):  # the parent is gone, or another rank is, which the parent sees
        pass
    except Exception as error:
        if not isinstance(error, UsageError):
            traceback.print_exc()
            error = UsageError(f"rank {rank} of {size} failed: {type(error).__name__}: {error}")
        with suppress(OSError):
            pipe.send(error)
    exit_at_once(0)


def _end_after_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    exit_at_once(0)


def _serve(pipe: Connection, cases: Sequence[tuple[Config, Layout]]) -> None:
    config = cases[0][0]
    device = comm.init(config.device, config.comm_timeout)
    if device.type == "cpu":
        torch.set_num_threads(1)
    random = torch.Generator().manual_seed(config.seed + comm.rank())
    samples = config.local_batch_size
    assert samples
    x = torch.randn(samples, config.n_in_channels, *config.img_size, generator=random).to(device)
    y = torch.randn(samples, config.n_out_channels, *config.img_size, generator=random).to(device)
    built, figures = [], []
    for own, layout in cases:
        built.append(Case(own, layout, device, x, y))
        figures.append(built[-1].measure())
    pipe.send(figures)
    while (turn := pipe.recv()) is not None:
        case, steps = turn
        pipe.send(steps * samples / built[case].seconds(steps))
    comm.shutdown()


class Case:
    """One strategy on one rank."""

    def __init__(self, config: Config, layout: Layout, device: torch.device, x: Tensor, y: Tensor):
        self.device, self.x, self.y = device, x, y
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else None
        comm.build_mesh(device, layout)
        self.step = build_step(config, device, config.config)

    def train(self, steps: int) -> None:
        """Make so many optimizer steps, and wait for the last."""
        for _ in range(steps):
            self.step(0, self.x, self.y)
        synchronize(self.device)

    def seconds(self, steps: int) -> float:
        """Time of some steps, begun together with the other ranks."""
        self.train(1)  # what the turns of others have pushed out of the caches
        if comm.world_size() > 1:
            dist.barrier()
        started = time.perf_counter()
        self.train(steps)
        return time.perf_counter() - started

    def measure(self) -> dict[str, Any]:
        """Memory, collectives of a step by kind, and on a GPU how many of them compute hides: {name: figures}."""
        cuda = self.device.type == "cuda"
        self.train(WARMUP_STEPS - 1)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.train(1)
        allocated = None if self.before is None else torch.cuda.max_memory_allocated() - self.before
        memory = memory_of_a_step(self.step, self.x, self.y)
        with CollectiveCounter() as counted:
            self.train(1)
        return {
            "memory": memory | {"allocated at most": allocated},
            "calls": dict(counted.calls),
            "bytes": dict(counted.bytes),
            "hidden": self._hidden_share() if cuda else None,
        }

    def _hidden_share(self) -> float | None:
        """Of the time in which NCCL's kernels run, the share in which others run too; None where there are none."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.train(PROFILED_STEPS)
        communication, compute = [], []
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
                if "nccl" in name:
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
