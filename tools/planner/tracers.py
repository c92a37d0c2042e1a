"""Traces of several layouts at the same time, by this process and by others beside it."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from tools.instruments.pool import Pool, Process, RanksFailed
from tools.planner.trace import Trace, trace_step
from utils.layout import Layout
from utils.schema import Config

LAYOUTS_OF_A_PROCESS = 4  # fewer are traced before another process has imported torch
# What a trace needs besides this module, and imports where it needs it.
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "training.tasks.forecast")


class Tracers(AbstractContextManager):
    """Processes that trace layouts, started at once: they import torch while the caller looks for the layouts.

    processes: at most, with this one. layouts: that will be traced, at most. Where they are few, or there is one core,
    this process traces them alone.
    """

    def __init__(self, processes: int, layouts: int):
        useful = min(processes, _cores(), layouts // LAYOUTS_OF_A_PROCESS)
        others = max(0, useful - 1)  # beside this one
        self.pools = [Pool(name="tracer") for _ in range(others)]
        # Each thread waits for its process.
        self.threads = [ThreadPoolExecutor(1) for _ in self.pools]
        for pool, thread in zip(self.pools, self.threads, strict=True):
            thread.submit(pool.call, 1, _import)

    def traces(
        self,
        layouts: Sequence[tuple[Config, Layout]],
        device_type: str,
        begins: Callable[[int], None],
    ) -> list[list[Trace]]:
        """The traces of each layout, as of trace_step, in the same order.

        begins: called with the number of a layout, from 0, as its turn comes. Raises ValueError as trace_step does.
        """
        numbers = iter(range(len(layouts)))  # whoever is free takes the next one
        found: dict[int, list[Trace]] = {}

        def taken() -> Iterator[int]:
            for number in numbers:
                begins(number)
                yield number

        def trace_beside(pool):
            try:
                for number in taken():
                    (found[number],) = pool.call(1, _trace, *layouts[number], device_type)
            except RanksFailed:
                pass  # what is missing is traced here, which shows an error as it is

        pairs = zip(self.pools, self.threads, strict=True)
        beside = [thread.submit(trace_beside, pool) for pool, thread in pairs]
        for number in taken():
            found[number] = trace_step(*layouts[number], device_type)
        for one in beside:
            one.result()
        for number, layout in enumerate(layouts):
            if number not in found:
                found[number] = trace_step(*layout, device_type)
        return [found[number] for number in range(len(layouts))]

    def __exit__(self, *_: object) -> None:
        for pool, thread in zip(self.pools, self.threads, strict=True):
            pool.end()  # ends the wait of its thread
            thread.shutdown()
            pool.end()  # of a process that started meanwhile


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _import(process: Process) -> None:
    for name in IMPORTED:
        importlib.import_module(name)


def _trace(process: Process, config: Config, layout: Layout, device_type: str) -> list[Trace]:
    return trace_step(config, layout, device_type)
