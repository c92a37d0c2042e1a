"""Traces in the form of torch.profiler, drawn anew; the answers are counted microsecond by microsecond."""

import json
import tempfile
from collections import Counter
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from exercises.checks.common import Draw, Wrong

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
        for _, start, end in communication:
            compare_exposed(exercise, start, end, compute)

        everything = communication + compute
        (longest, *_) = max(everything, key=length)
        most = first_of(total_time(everything))
        hints = {"it took longest in all its calls together, one of another was longer": most}
        compare("the longest kernel", exercise.longest_kernel(*seen), longest, hints)

        exposed = exposed_time(communication, compute)
        most = first_of(total_time(communication))
        hints = {"it takes most time, but part of it is hidden": most}
        compare("the most exposed collective", exercise.most_exposed(*seen), first_of(exposed), hints)

        share = exposed.total() / total_time(communication).total()
        compare("hidden_share", exercise.hidden_share(*seen), 1 - share, {"that is the exposed share": share})


def compare_exposed(exercise: ModuleType, start: int, end: int, compute: list[Kernel]) -> None:
    """Check `exposed` for one collective. Raises Wrong."""
    want = alone(start, end, compute)
    beside = [(s, e) for _, s, e in sorted(compute, key=itemgetter(1)) if s < end and e > start]
    time_beside = sum(min(e, end) - max(s, start) for s, e in beside)
    hints = {
        "where two compute kernels overlap each other, the time counts once": end - start - time_beside,
        "nothing was taken off": end - start,
        "that is what is hidden": end - start - want,
    }
    got = exercise.exposed(start, end, compute)
    compare(f"exposed({start}, {end}) beside compute at {beside}", got, want, hints)


def first_of(times: Counter[str]) -> str:
    """The name with the most time."""
    (name, _), *_ = times.most_common()
    return name


def alone(start: int, end: int, compute: list[Kernel]) -> int:
    """Microseconds in which no compute kernel runs."""
    count = 0
    for t in range(start, end):
        is_beside = any(s <= t < e for _, s, e in compute)
        count += not is_beside
    return count


def length(kernel: Kernel) -> int:
    """Microseconds that a kernel takes."""
    return kernel[2] - kernel[1]


def total_time(kernels: list[Kernel]) -> Counter[str]:
    """{name: microseconds of all its kernels}."""
    total: Counter[str] = Counter()
    for kernel in kernels:
        total[kernel[0]] += length(kernel)
    return total


def exposed_time(communication: list[Kernel], compute: list[Kernel]) -> Counter[str]:
    """{name: microseconds in which its kernels run alone}."""
    total: Counter[str] = Counter()
    for name, start, end in communication:
        total[name] += alone(start, end, compute)
    return total


def compare(what: str, got: Any, want: Any, hints: dict[str, Any]) -> None:
    """Raise Wrong where the answer is not right. hints: {what to say: the wrong answer that it explains}."""
    if is_alike(got, want):
        return
    explained = [text for text, wrong in hints.items() if is_alike(got, wrong)]
    hint = explained[0] if explained else "compare with the definition"
    raise Wrong(f"{what} is {want}, not {got}: {hint}")


def is_alike(got: Any, want: Any) -> bool:
    """Tell whether two names are the same, or two numbers but for rounding."""
    are_numbers = isinstance(got, int | float) and not isinstance(want, str)
    return abs(got - want) < 1e-6 if are_numbers else got == want


def draw_kernels(draw: Draw) -> tuple[list[Kernel], list[Kernel]]:
    """Collectives one after another, compute on two streams; no two answers alike."""
    while True:
        communication = []
        t = 1000
        for _ in range(draw.integer(5, 9)):
            t += draw.integer(0, 40)
            end = t + draw.integer(10, 90)
            name = COLLECTIVES[draw.integer(0, 2)]
            communication.append((f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)", t, end))
            t = end
        compute = []
        for _ in range(2):
            t = 1000
            for _ in range(draw.integer(5, 10)):
                t += draw.integer(0, 60)
                end = t + draw.integer(5, 60)
                compute.append((COMPUTE[draw.integer(0, 4)], t, end))
                t = end
        exposed = sorted(exposed_time(communication, compute).values())
        lengths = sorted(map(length, communication + compute))
        has_one_most_exposed = len(exposed) == 1 or exposed[-1] > exposed[-2]
        if has_one_most_exposed and exposed[-1] > 0 and lengths[-1] > lengths[-2]:
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
