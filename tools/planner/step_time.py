"""The time of a training step, from its operations and messages (tools.planner.trace) and a GPU's data sheet.

Computation: operation by operation (tools.planner.operation_time). Communication: a collective takes its latency and
its bytes over the bandwidth, the alpha-beta model (Hockney 1994). The pipeline's bubble: Narayanan et al. 2021
(arXiv:2104.04473).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from distributed.data_parallel import SHARDED
from tools.instruments.tracker import ATTENTION, PHASES
from tools.planner.hardware import Gpu
from tools.planner.operation_time import COMPILED_LAUNCHES, OperationTimes
from tools.planner.trace import Trace
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

UNCALIBRATED, MEASURED = 0.35, 0.25  # half-widths of the band, see StepTime

# Seconds between two kernels of a CUDA graph, which is launched once. Measured on an H100, config quick: a step of
# about 300 kernels takes 1.53 ms, 1.29 ms of them in kernels.
GRAPH_GAP = 0.8e-6

BOUNDS = {
    "matmul": "compute", ATTENTION: "compute", "memory": "memory bandwidth", "launch": "launches",
    "bubble": "bubble of the pipeline",
}  # fmt: skip
PASSES = {"all_reduce": 2}  # round the ring; others: 1
SAME_WEIGHTS = "dp", "cp", "domain", "image"  # groups whose ranks reduce gradients of the same weights


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


def step_time(traces: Sequence[Trace], config: Config, layout: Layout, gpu: Gpu, inference: bool = False) -> StepTime:
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
    return max((rank_time(trace, config, layout, gpu, inference) for trace in traces), key=lambda step: step.seconds)


def rank_time(trace: Trace, config: Config, layout: Layout, gpu: Gpu, inference: bool = False) -> StepTime:
    """StepTime of one traced rank."""
    measured, on_cpu, ranks = gpu.measured, gpu.device == "cpu", min(layout.world_size, gpu.gpus_per_node)
    late = measured.slowest if measured and layout.world_size > 1 else 1.0  # of the slowest rank
    sharded, times = config.data_parallel in SHARDED, OperationTimes(config, layout, gpu)

    def computing(ranks):
        """{(phase, part): seconds} of operations, while so many ranks of a node compute."""
        seconds, speeds = Counter(), measured.speeds(ranks) if measured else None
        for operation, calls in trace.operations.items():
            part = operation.kind if operation.flops else "memory"
            seconds[operation.phase, part] += calls * times.seconds(operation, speeds) * late
        return seconds

    def sums(table):
        return {phase: sum(s for (when, _), s in table.items() if when == phase) for phase in PHASES}

    def is_ring(kind, group):
        """Tell whether a collective is an exchange of ring attention: an all-to-all to the next rank alone."""
        method = {"cp": config.cp_method, "domain": config.domain_method}.get(group)
        return kind == "all_to_all" and method == "ring"

    def overlap_of(phase, kind, group):
        """The work that hides a collective: "compute" of its phase, "attention" of its phase, or None."""
        if is_ring(kind, group):
            return ATTENTION
        if phase == "backward" and kind == "all_reduce" and group in SAME_WEIGHTS:
            return "compute"  # gradients; over the ranks of one image where these are all
        if phase != "update" and sharded and group == "dp" and not on_cpu:  # there fully_shard waits for each one
            return "compute"
        return None

    def bucket(collective):
        """Seconds of the one reduction or gather, the first or the last, that nothing hides."""
        calls = collective["count"]
        if not sharded:  # an extrapolated trace has the bytes, but not their buckets
            size = len(collective["ranks"])
            sent = 2 * (size - 1) / size * config.bucket_cap_mb * 2**20  # of a full bucket
            calls = max(calls, collective["bytes"] / sent)
        return collective["seconds"] / calls

    counts, sizes = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for message, calls in trace.messages.items():  # an extrapolated trace may count below zero
        counts[message[:3]] += calls
        sizes[message[:3]] += calls * message.sent
    collectives = []
    together = defaultdict[tuple[str, str | None], list[Any]](list)  # collectives that the same work hides
    for (phase, kind, group), sent in sizes.items():
        count, members = max(1, round(counts[phase, kind, group])), trace.groups[group]
        shapes = node_shapes(members, layout.world_size, gpu.gpus_per_node)
        ring = not (kind == "send" or is_ring(kind, _kind_of(group)))
        seconds = max(collective_time(kind, sent, count, len(members), *shape, gpu, ring) for shape in shapes)
        collective: dict[str, Any] = {
            "phase": phase, "kind": kind, "group": group, "ranks": members, "count": count, "bytes": round(sent),
            "inside": all(nodes == 1 for nodes, _ in shapes), "seconds": seconds,
        }  # fmt: skip
        collectives.append(collective)
        together[phase, overlap_of(phase, kind, _kind_of(group))].append(collective)

    # The host launches operations: a lower bound, on a CPU beside computing.
    each = measured.speeds(ranks).host if measured else dict.fromkeys(PHASES, gpu.launch)
    host = dict.fromkeys(PHASES, 0.0)
    if on_cpu and measured:
        for name, calls in wrapped(trace, collectives, config).items():
            for phase, own in measured.around.get(name, {}).items():
                host[phase] += calls * own * late
    else:
        each = dict.fromkeys(PHASES, host_seconds(config, fmean(each.values())))
        for collective in collectives:
            host[collective["phase"]] += collective["count"] * each[collective["phase"]] * late
    for operation, calls in trace.operations.items():
        host[operation.phase] += calls * each[operation.phase] * late

    if inference:  # what was measured around training steps has other phases too
        host = {phase: seconds * (phase == "forward") for phase, seconds in host.items()}

    compute = computing(ranks)
    table = compute.copy()  # {(phase, part): seconds}
    if on_cpu:  # the host computes by itself
        table.update({(phase, "launch"): seconds for phase, seconds in host.items()})
    every = sum(seconds for (phase, _), seconds in table.items() if phase != "update")  # what every micro-batch waits
    for (phase, overlap), found in together.items():
        total = left = sum(c["seconds"] for c in found)
        if overlap == ATTENTION:
            size = len(found[0]["ranks"])
            left = max(0, total - compute[phase, ATTENTION] * (size - 1) / size)
        elif overlap:
            batches = 1 if sharded else config.gradient_accumulation
            left = min(total, max(0, total - sums(compute)[phase] / batches) + sum(map(bucket, found)))
        left = total - (total - left) * (measured.overlap if measured else 1)
        for collective in found:
            part = f"communication {_kind_of(collective['group'])}"
            table[phase, part] += left * collective["seconds"] / total if total else 0
        every += 0 if overlap == "compute" else left
    if not on_cpu:
        for phase, seconds in sums(table).items():
            is_replayed = config.enable_cuda_graphs  # the gaps between its kernels hide behind nothing
            table[phase, "launch"] = host[phase] if is_replayed else max(0.0, host[phase] - seconds)

    # A stage idles while the pipeline fills and drains. Only some ranks of a node compute then: where they share
    # memory, each is faster.
    gained = 0.0
    if measured and layout.pp <= ranks:
        for working in range(1, layout.pp):
            faster = computing(ranks * working // layout.pp)
            gained += sum(compute[key] - faster[key] for key in faster if key[0] != "update")
    passes = config.gradient_accumulation * (2 if config.pp_schedule == "interleaved" else 1)
    table["backward", "bubble"] = ((layout.pp - 1) * every - 2 * gained) / passes

    parts: Any = Counter(dict.fromkeys(BOUNDS, 0.0))
    bounds = Counter[Any]()
    for (_, part), seconds in table.items():
        parts[part] += seconds
    for part, seconds in parts.items():
        kind, _, group = part.partition(" ")
        bounds[BOUNDS.get(part, f"{kind} ({group})")] += seconds
    return StepTime(
        sum(parts.values()), MEASURED if measured else UNCALIBRATED, parts, sums(table),
        max(bounds, key=lambda name: bounds[name]), collectives,
    )  # fmt: skip


def host_seconds(config: Config, launch: float) -> float:
    """Seconds of an operation beside its computing: launching it, or what a CUDA graph leaves of that.

    launch: seconds of the host for an operation in eager mode.
    """
    if config.enable_cuda_graphs:
        return GRAPH_GAP
    return launch * (COMPILED_LAUNCHES if config.enable_jit else 1)


def wrapped(trace: Trace, collectives: Sequence[Mapping[str, Any]], config: Config) -> Counter[str]:
    """Work of the code around a model in a step, by name: the messages of fsdp, tp, cp and pp.

    ddp: once, since its work is for each weight, however many buckets there are. domain: ShardTensor has a rule for
    each operation of the forward pass. full, selective: blocks that are computed again. collectives: of StepTime.
    """
    counted, blocks = Counter[str](), config.depth // config.pipeline_parallel
    groups = {_kind_of(collective["group"]) for collective in collectives}
    for collective in collectives:
        name = _kind_of(collective["group"])
        if name == "dp" or (name in SAME_WEIGHTS and collective["kind"] == "all_reduce"):
            name = "fsdp" if config.data_parallel in SHARDED else "ddp"
        counted[name] += collective["count"]
    counted["ddp"] = min(1, counted["ddp"])
    split = config.domain_parallel not in (1, "1", "1x1")
    counted["domain"] = split * round(sum(n for op, n in trace.operations.items() if op.phase == "forward"))
    if config.activation_checkpointing in ("full", "selective"):
        passes = config.gradient_accumulation * config.rollout_steps
        counted[config.activation_checkpointing] = blocks // config.checkpointing_interval * passes
    if config.data_parallel in SHARDED and groups & {"cp", "domain", "image"}:  # parameters travel as tokens do
        counted["fsdp"] = max(counted["fsdp"], (blocks + 1) * (2 if config.data_parallel == "zero2" else 3))
    return counted


def _kind_of(group: str) -> str:
    return group.partition("_")[0]


@cache
def node_shapes(ranks: tuple[int, ...], world_size: int, gpus_per_node: int) -> set[tuple[int, int]]:
    """{(nodes, fewest ranks on a node)} of every group of a world that is laid out like this one.

    Every group is this one, shifted: ranks are numbered in row-major order of the mesh.
    """
    offsets, seen, shapes = np.array(ranks) - min(ranks), np.zeros(world_size, dtype=bool), {}
    while not seen.all():
        first = int(seen.argmin())
        seen[first + offsets] = True
        if first % gpus_per_node not in shapes:  # groups that start at the same place of a node are placed alike
            _, count = np.unique((first + offsets) // gpus_per_node, return_counts=True)
            shapes[first % gpus_per_node] = len(count), int(count.min())
    return set(shapes.values())


def collective_time(
    kind: str, sent: float, count: int, size: int, nodes: int, fewest: int, gpu: Gpu, ring: bool
) -> float:
    """Seconds of `count` collectives in which a rank sends `sent` bytes altogether.

    size: ranks of the group. nodes: that the group spans. fewest: ranks of the group on a node, at least.
    ring: each message passes all ranks (rings through all NICs of the group; Jeaugey 2019, "Massively Scale Your Deep
    Learning Training with NCCL 2.4"); else it goes to one other rank.
    """
    link, nic = gpu.link * gpu.network_efficiency, gpu.nic * gpu.network_efficiency
    hop_inside, hop_across = gpu.hop_inside, gpu.hop_across
    if gpu.measured:
        if size > nodes:
            link, hop_inside = _measured(kind, 1, ring, gpu)
        if nodes > 1:
            nic, hop_across = _measured(kind, nodes, ring, gpu)
    if nodes == 1:
        seconds = sent / link
    elif not ring:
        seconds = sent / nic
    elif kind == "all_to_all":
        seconds = sent * (size - fewest) / (size - 1) / nic  # what leaves the node
    else:
        seconds = sent / min(link, nic * fewest)
    if not ring:
        hops = hop_across if nodes > 1 else hop_inside
    else:
        hops = (size - nodes) * hop_inside + (nodes - 1) * hop_across
        if kind == "all_reduce":  # small messages take a tree of nodes
            tree = (size / nodes - 1) * hop_inside + math.log2(nodes) * hop_across
            hops = min(hops, tree)
    return count * PASSES.get(kind, 1) * hops + seconds


def _measured(kind, nodes, ring, gpu):
    """(bytes/s, latency of a hop) of a measured machine, with which its own groups take what was measured."""
    found = gpu.measured.collective("send" if not ring else kind, nodes, gpu.name)
    hops = PASSES.get(kind, 1) * (found.ranks - 1) if ring else 1
    return found.bandwidth, found.latency / hops
