"""Traces in the form of torch.profiler, drawn anew; the answers are counted microsecond by microsecond."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

from exercises.checks.common import Draw, Wrong, expect

WORLD_SIZES = (1,)
Kernel = tuple[str, int, int]  # name, start, end
COLLECTIVES = ("AllReduce_Sum_f32_RING_LL", "AllGather_RING_LL", "ReduceScatter_Sum_f32_RING_LL")
COMPUTE = (
    "sm90_xmma_gemm_f32f32",
    "flash_fwd_kernel",
    "flash_bwd_kernel",
    "vectorized_elementwise_kernel",
    "multi_tensor_apply",
)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check all functions on traces drawn at random. Raises Wrong."""
    for _ in range(20):
        communication, compute = draw_kernels(draw)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            path.write_text(json.dumps(trace_of(communication, compute)))
            seen = exercise.kernels(path)
        busy = {t for _, start, end in compute for t in range(start, end)}
        for _, start, end in communication:
            compare_exposed(exercise, start, end, compute, busy)
        total, alone = 0, defaultdict[str, int](int)
        for name, start, end in communication:
            alone[name] += sum(t not in busy for t in range(start, end))
            total += end - start
        longest = max(communication + compute, key=lambda k: k[2] - k[1])[0]
        compare_longest(exercise.longest_kernel(*seen), longest, communication, compute)
        compare_most(exercise.most_exposed(*seen), alone, communication)
        compare_share(exercise.hidden_share(*seen), 1 - sum(alone.values()) / total, communication, compute)


def draw_kernels(draw: Draw) -> tuple[list[Kernel], list[Kernel]]:
    """Collectives one after another, compute on two streams; no two answers alike."""
    while True:
        communication, compute, t = [], [], 1000
        for _ in range(draw.integer(5, 9)):
            t += draw.integer(0, 40)
            end = t + draw.integer(10, 90)
            name = COLLECTIVES[draw.integer(0, 2)]
            communication.append((f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)", t, end))
            t = end
        for t in (1000, 1000):
            for _ in range(draw.integer(5, 10)):
                t += draw.integer(0, 60)
                end = t + draw.integer(5, 60)
                compute.append((COMPUTE[draw.integer(0, 4)], t, end))
                t = end
        busy = {t for _, start, end in compute for t in range(start, end)}
        alone: dict[str, int] = defaultdict(int)
        for name, start, end in communication:
            alone[name] += sum(t not in busy for t in range(start, end))
        first, second = (sorted(alone.values(), reverse=True) + [0])[:2]
        lengths = sorted((end - start for _, start, end in communication + compute), reverse=True)
        if first > second and lengths[0] > lengths[1]:
            return communication, compute


def trace_of(communication: list[Kernel], compute: list[Kernel]) -> dict[str, Any]:
    """With what else is in such a file: operators of the host, copies, ranges, metadata without a duration."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}}]
    for stream, kernels in ((20, communication), (7, compute)):
        for name, start, end in kernels:
            place = {"ph": "X", "pid": 0, "tid": stream, "ts": start, "dur": end - start}
            events.append({**place, "cat": "kernel", "name": name, "args": {"device": 0, "stream": stream}})
            events.append({**place, "cat": "cpu_op", "name": "aten::op", "pid": 99, "ts": start - 50})
            if stream == 20:
                events.append({**place, "cat": "gpu_user_annotation", "name": "nccl:collective"})
    events.append({"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 9, "ts": 1000, "dur": 900})
    return {"schemaVersion": 1, "traceEvents": events}


def compare_exposed(exercise: ModuleType, start: int, end: int, compute: list[Kernel], busy: set[int]) -> None:
    """busy: microseconds in which a compute kernel runs."""
    got, want = exercise.exposed(start, end, compute), sum(t not in busy for t in range(start, end))
    expect(isinstance(got, int | float), f"exposed returned {got}, expected a number of microseconds")
    if abs(got - want) < 1e-6:
        return
    inside = sum(min(e, end) - max(s, start) for _, s, e in compute if min(e, end) > max(s, start))
    hint = "does every kernel count, from the later start to the earlier end?"
    if got == end - start - inside or (got == 0 and inside > end - start - want):
        hint = "where two compute kernels overlap each other, the time counts once"
    elif got == end - start:
        hint = "nothing was taken off"
    elif got == end - start - want:
        hint = "that is what is hidden"
    elif got < 0:
        hint = "less than nothing: cut kernels that begin before the collective or end after it"
    near = [(s, e) for _, s, e in sorted(compute, key=lambda k: k[1]) if s < end and e > start]
    raise Wrong(f"exposed({start}, {end}) beside compute at {near} is {got}, it is {want}: {hint}")


def compare_longest(got: str, want: str, communication: list[Kernel], compute: list[Kernel]) -> None:
    """got: the name that longest_kernel gave."""
    total: dict[str, int] = defaultdict(int)
    for name, start, end in communication + compute:
        total[name] += end - start
    hint = (
        "it took longest in all its calls together, one of another was longer"
        if got == max(total, key=lambda name: total[name])
        else ""
    )
    if got != want and not hint:
        hint = "collectives are kernels too" if got in COMPUTE else "compare end - start"
    expect(got == want, f"the longest kernel is {want}, not {got}: {hint}")


def compare_most(got: str, alone: dict[str, int], communication: list[Kernel]) -> None:
    """got: the name that most_exposed gave. alone: {name: exposed microseconds}."""
    want = max(alone, key=lambda name: alone[name])
    total: dict[str, int] = defaultdict(int)
    for name, start, end in communication:
        total[name] += end - start
    if got == want:
        return
    hint = "add up the exposed time of all calls of a name"
    if got == max(total, key=lambda name: total[name]):
        hint = "it takes most time, but part of it is hidden"
    raise Wrong(f"most_exposed is {got}: {hint}. Exposed are {dict(alone)}")


def compare_share(got: float, want: float, communication: list[Kernel], compute: list[Kernel]) -> None:
    """got: what hidden_share gave."""
    expect(isinstance(got, int | float), f"hidden_share returned {got}, expected a number")
    hint = (
        "that is the exposed share"
        if abs(got - (1 - want)) < 1e-6
        else "hidden time of all collectives, over their time"
    )
    expect(abs(got - want) < 1e-6, f"hidden_share is {got:.4f}, expected {want:.4f}: {hint}")
