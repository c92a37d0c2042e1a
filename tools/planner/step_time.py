"""The time of a training step, from its operations and messages (tools.planner.trace) and a GPU's data sheet.

Computation: operation by operation; communication: collective by collective (both tools.planner.operation_time). The
pipeline's bubble: Narayanan et al. 2021 (arXiv:2104.04473).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.instruments.tracker import ATTENTION
from tools.planner.hardware import Gpu
from tools.planner.rank_seconds import RankSeconds, Table, by_phase, kind_of, total_but
from tools.planner.trace import Trace
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

UNCALIBRATED, MEASURED = 0.35, 0.25  # half-widths of the band, see StepTime

# _bound reads here what it calls each part. A part of communication has the name of its group.
BOUNDS = {
    "matmul": "compute",
    ATTENTION: "compute",
    "memory": "memory bandwidth",
    "launch": "launches",
    "bubble": "bubble of the pipeline",
}


@dataclass(frozen=True)
class StepTime:
    """A step of a traced rank, without reading and preparing data.

    seconds: of the step, the sum of `parts`: matmul, attention, memory (all other kernels), launch (the GPU waits for
    the host), communication that computation does not hide, one part for each kind of group ("communication tp"), and
    bubble (of the pipeline). phases: the same seconds by phase of the step. bound: the largest part, in words.
    collectives: {phase, kind, group, ranks, count, bytes, inside, seconds} of each kind of collective: bytes sent and
    seconds of all `count` calls, hidden or not; inside: whether every such group lies inside a node.

    error: relative half-width of the band around `seconds`. It comes from runs of one model family on 1 to 16 A100s,
    published in 2024 and 2025 (the forecasting ViT of the NERSC deep learning at scale tutorials): every run that
    tests/test_plan_time.py lists lies inside the band. Other GPUs were not compared with measurements. A run on 64 GPUs
    lies outside, at 1.7 times the prediction: stragglers and the reading of data are not modelled. Of a measured
    machine: `python -m tools.planner.validate`.
    """

    seconds: float
    error: float
    parts: dict[str, float]
    phases: dict[str, float]
    bound: str
    collectives: list[dict[str, Any]]


def step_time(
    traces: Sequence[Trace],
    config: Config,
    layout: Layout,
    gpu: Gpu,
    inference: bool = False,
) -> StepTime:
    """StepTime of the slowest traced rank.

    traces: of trace_step. inference: of forward passes alone. gpu: of load_gpu; node = rank // gpu.gpus_per_node.

    Gradient reductions and, but on a CPU, gathers of sharded parameters overlap with the computation of their phase,
    except for one bucket. The exchanges of ring attention overlap with attention. The step waits for every other
    message. On a measured machine computation takes as long as that of the slowest rank. Where all
    ranks share one image, parameters and tokens travel along the same group: all gathers then count as waited for, an
    upper bound. Raises UsageError for fp8 on a GPU without it.
    """
    if config.amp_mode == "fp8" and gpu.fp8 is None:
        raise UsageError(f"amp_mode fp8: {gpu.name} has no 8-bit products (fp8 in its entry): use --amp_mode bf16")
    of_ranks = [rank_time(trace, config, layout, gpu, inference) for trace in traces]
    return max(of_ranks, key=lambda step: step.seconds)


def rank_time(
    trace: Trace,
    config: Config,
    layout: Layout,
    gpu: Gpu,
    inference: bool = False,
) -> StepTime:
    """StepTime of one traced rank. Its seconds are collected by phase and part in four stages."""
    rank = RankSeconds(trace, config, layout, gpu, inference)
    on_cpu = gpu.device == "cpu"

    # 1. Computing.
    computing = rank.computing(rank.ranks_of_a_node)
    collectives = rank.collectives()
    host = rank.host(collectives)
    table = computing.copy()
    if on_cpu:
        # A CPU is its own host, so that it does not compute while it launches operations.
        for phase, seconds in host.items():
            table[phase, "launch"] = seconds
    # Seconds that every micro-batch has its part of: the update comes once a step.
    of_micro_batches = total_but(table, "update")

    # 2. Communication that computation does not hide.
    for (phase, work), hidden_together in rank.by_what_hides_them(collectives).items():
        total = sum(collective["seconds"] for collective in hidden_together)
        exposed = rank.not_hidden(phase, work, hidden_together, computing)
        # Each collective bears its share of it.
        for collective in hidden_together:
            part = f"communication {kind_of(collective['group'])}"
            share = collective["seconds"] / total if total else 0.0
            table[phase, part] += exposed * share
        if work != "compute":
            of_micro_batches += exposed

    # 3. The time in which a GPU waits for its host. A graph that is replayed hides its gaps behind nothing.
    if not on_cpu:
        for phase, seconds in by_phase(table).items():
            hidden = 0.0 if config.enable_cuda_graphs else seconds
            table[phase, "launch"] = max(0.0, host[phase] - hidden)

    # 4. The time in which a stage of a pipeline has nothing to do.
    table["backward", "bubble"] = rank.bubble(of_micro_batches, computing)

    parts = _by_part(table)
    error = MEASURED if gpu.measured else UNCALIBRATED
    return StepTime(
        seconds=sum(parts.values()),
        error=error,
        parts=parts,
        phases=by_phase(table),
        bound=_bound(parts),
        collectives=collectives,
    )


def _by_part(table: Table) -> dict[str, float]:
    """{part: seconds of all phases}, also of the parts in BOUNDS that take no time."""
    sums = defaultdict(float, dict.fromkeys(BOUNDS, 0.0))
    for (_, part), seconds in table.items():
        sums[part] += seconds
    return sums


def _bound(parts: Mapping[str, float]) -> str:
    """What takes most of a step, in words."""
    sums = defaultdict[str, float](float)
    for part, seconds in parts.items():
        kind, _, group = part.partition(" ")
        sums[BOUNDS.get(part, f"{kind} ({group})")] += seconds
    return max(sums, key=lambda name: sums[name])
