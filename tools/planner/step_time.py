"""The time of a training step, from its operations and messages (tools.planner.trace) and a GPU's data sheet.

Computation: the roofline (Williams et al. 2009, doi:10.1145/1498765.1498785), operation by operation. Communication:
tools.planner.collective_time. The pipeline's bubble: Narayanan et al. 2021 (arXiv:2104.04473).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from distributed.data_parallel import SHARDED
from tools.instruments.phases import PHASES
from tools.instruments.tracker import ATTENTION
from tools.planner.collective_time import collective_time, node_shapes
from tools.planner.hardware import Gpu
from tools.planner.trace import Trace
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

UNCALIBRATED, MEASURED = 0.35, 0.25  # half-widths of the band, see StepTime

# torch.compile fuses chains of elementwise operations: about every second tensor stays in registers.
COMPILED_TRAFFIC, COMPILED_LAUNCHES = 0.5, 0.5
GRAPH_LAUNCHES = 0.1  # a CUDA graph is launched once; about 1 us remains between its kernels
HEAD_SIZES = 32, 64, 96, 128, 192, 256  # of the kernels of FlashAttention-2; other sizes are padded

BOUNDS = {
    "matmul": "compute", ATTENTION: "compute", "memory": "memory bandwidth", "launch": "launches",
    "bubble": "bubble of the pipeline",
}  # fmt: skip
SAME_WEIGHTS = "dp", "cp", "domain", "image"  # groups whose ranks reduce gradients of the same weights


def step_time(traces: Sequence[Trace], config: Config, layout: Layout, gpu: Gpu) -> "StepTime":
    """StepTime of the slowest traced rank.

    traces: of trace_step. gpu: of load_gpu; node = rank // gpu.gpus_per_node.

    Gradient reductions and, but on a CPU, gathers of sharded parameters overlap with the computation of their phase,
    except for one bucket. The exchanges of ring attention overlap with attention. The step waits for every other
    message. On a measured machine computation takes as long as that of the slowest rank. Where all
    ranks share one image, parameters and tokens travel along the same group: all gathers then count as waited for, an
    upper bound. Raises UsageError for fp8 on a GPU without it.
    """
    if config.amp_mode == "fp8" and gpu.fp8 is None:
        raise UsageError(f"amp_mode fp8: {gpu.name} has no 8-bit products (fp8 in its entry): use --amp_mode bf16")
    return max((StepTime(trace, config, layout, gpu) for trace in traces), key=lambda step: step.seconds)


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

    def __init__(self, trace: Trace, config: Config, layout: Layout, gpu: Gpu):
        self.trace, self.config, self.layout, self.gpu = trace, config, layout, gpu
        self.error = MEASURED if gpu.measured else UNCALIBRATED
        self.late = gpu.measured.slowest if gpu.measured and layout.world_size > 1 else 1.0  # of the slowest rank
        self.ranks = min(layout.world_size, gpu.gpus_per_node)
        self.compute = self._compute(self.ranks)
        self.collectives = self._collectives()
        self.table = self.compute.copy()  # {(phase, part): seconds}
        host = self._host()
        if gpu.device == "cpu":  # the host computes by itself
            self.table.update({(phase, "launch"): seconds for phase, seconds in host.items()})
        pipelined = sum(seconds for (phase, _), seconds in self.table.items() if phase != "update")
        pipelined += self._communicate()
        if gpu.device != "cpu":
            for phase, seconds in self._phases().items():
                self.table[phase, "launch"] = max(0.0, host[phase] - seconds)
        self.table["backward", "bubble"] = self._bubble(pipelined)

        self.phases = self._phases()
        self.parts: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
        most: dict[str, float] = defaultdict(float)
        for (_, part), seconds in self.table.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        for part, seconds in self.parts.items():
            kind, _, group = part.partition(" ")
            most[BOUNDS.get(part, f"{kind} ({group})")] += seconds
        self.seconds = sum(self.parts.values())
        self.bound = max(most, key=lambda name: most[name])

    def _phases(self):
        return {phase: sum(s for (when, _), s in self.table.items() if when == phase) for phase in PHASES}

    def _compute(self, ranks):
        """{(phase, part): seconds} of operations, while so many ranks of a node compute."""
        seconds, speeds = Counter(), self.gpu.measured.speeds(ranks) if self.gpu.measured else None
        for operation, calls in self.trace.operations.items():
            part = operation.kind if operation.flops else "memory"
            seconds[operation.phase, part] += calls * self._operation(operation, speeds) * self.late
        return seconds

    def _operation(self, operation, speeds):
        gpu, moved = self.gpu, operation.moved
        if self.config.enable_jit and operation.kind == "pointwise" and operation.phase != "update":
            moved *= COMPILED_TRAFFIC
        if speeds:
            dtype = str(operation.dtype).removeprefix("torch.")
            if dtype == "float32" and operation.kind == "matmul" and self.config.enable_tf32:
                dtype = "tf32"
            head = self.config.embed_dim // self.config.num_heads
            return speeds.seconds(operation._replace(moved=moved), dtype, head)
        traffic = moved / (gpu.bandwidth * gpu.memory_efficiency)
        if not operation.flops:
            return traffic
        return max(traffic, operation.flops / self._rate(operation.kind, operation.dtype))

    def _rate(self, kind: str, dtype: torch.dtype) -> float:
        """FLOP/s that an operation reaches."""
        gpu = self.gpu
        low = {torch.float16: gpu.fp16, torch.bfloat16: gpu.bf16}
        if kind == ATTENTION:
            # In float32 each product is three in TF32 (CUTLASS, OpMultiplyAddFastF32), whatever enable_tf32 says.
            peak = low.get(dtype, max(gpu.fp32, gpu.tf32 / 3))
            size = self.config.embed_dim // self.config.num_heads
            padded = next((n for n in HEAD_SIZES if n >= size), size)
            return peak * gpu.attention_efficiency * size / padded
        if self.config.amp_mode == "fp8" and gpu.fp8:  # all: embedding and head, which stay in bf16, are a few percent
            return gpu.fp8 * gpu.matmul_efficiency
        return low.get(dtype, gpu.tf32 if self.config.enable_tf32 else gpu.fp32) * gpu.matmul_efficiency

    def _collectives(self) -> list[dict[str, Any]]:
        counts: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for message, times in self.trace.messages.items():  # an extrapolated trace may count below zero
            key = message.phase, message.kind, message.group
            counts[key] += times
            sizes[key] += times * message.sent
        found = []
        for (phase, kind, group), sent in sizes.items():
            count, ranks = max(1, round(counts[phase, kind, group])), self.trace.groups[group]
            shapes = node_shapes(ranks, self.layout.world_size, self.gpu.gpus_per_node)
            ring = not (kind == "send" or self._is_ring(kind, group))
            seconds = max(collective_time(kind, sent, count, len(ranks), *shape, self.gpu, ring) for shape in shapes)
            found.append({
                "phase": phase, "kind": kind, "group": group, "ranks": ranks, "count": count, "bytes": round(sent),
                "inside": all(nodes == 1 for nodes, _ in shapes), "seconds": seconds,
            })  # fmt: skip
        return found

    def _is_ring(self, kind, group):
        """Tell whether a collective is an exchange of ring attention: an all-to-all to the next rank alone."""
        method = {"cp": self.config.cp_method, "domain": self.config.domain_method}.get(_kind_of(group))
        return kind == "all_to_all" and method == "ring"

    def _overlaps(self, collective):
        """The work that hides a collective: "compute" of its phase, "attention" of its phase, or None."""
        phase, kind, group = collective["phase"], collective["kind"], collective["group"]
        if self._is_ring(kind, group):
            return ATTENTION
        if phase == "backward" and kind == "all_reduce" and _kind_of(group) in SAME_WEIGHTS:
            return "compute"  # gradients; over the ranks of one image where these are all
        sharded = _kind_of(group) == "dp" and self.config.data_parallel in SHARDED
        if phase != "update" and sharded and self.gpu.device != "cpu":  # on a CPU fully_shard waits for each one
            return "compute"
        return None

    def _bucket(self, collective):
        """Seconds of the one reduction or gather, the first or the last, that nothing hides."""
        calls = collective["count"]
        if self.config.data_parallel not in SHARDED:  # an extrapolated trace has the bytes, but not their buckets
            size = len(collective["ranks"])
            sent = 2 * (size - 1) / size * self.config.bucket_cap_mb * 2**20  # of a full bucket
            calls = max(calls, collective["bytes"] / sent)
        return collective["seconds"] / calls

    def _communicate(self) -> float:
        """Add what computation does not hide of the collectives; returns the seconds that every micro-batch waits."""
        together = defaultdict(list)  # collectives that the same work hides
        for collective in self.collectives:
            together[collective["phase"], self._overlaps(collective)].append(collective)
        waited = 0.0
        for (phase, overlap), found in together.items():
            total = left = sum(c["seconds"] for c in found)
            if overlap == ATTENTION:
                size = len(found[0]["ranks"])
                left = max(0, total - self.compute[phase, ATTENTION] * (size - 1) / size)
            elif overlap:
                parts = 1 if self.config.data_parallel in SHARDED else self.config.gradient_accumulation
                computing = sum(seconds for (when, _), seconds in self.compute.items() if when == phase)
                left = min(total, max(0, total - computing / parts) + sum(map(self._bucket, found)))
            left = total - (total - left) * (self.gpu.measured.overlap if self.gpu.measured else 1)
            for collective in found:
                part = f"communication {_kind_of(collective['group'])}"
                self.table[phase, part] += left * collective["seconds"] / total if total else 0
            waited += 0 if overlap == "compute" else left
        return waited

    def _host(self):
        """{phase: seconds} in which the host launches operations: a lower bound; on a CPU beside computing."""
        config, gpu, seconds = self.config, self.gpu, Counter()
        each = gpu.measured.speeds(self.ranks).host if gpu.measured else dict.fromkeys(PHASES, gpu.launch)
        if gpu.device != "cpu":
            factor = GRAPH_LAUNCHES if config.enable_cuda_graphs else COMPILED_LAUNCHES if config.enable_jit else 1
            each = dict.fromkeys(PHASES, factor * fmean(each.values()))
            for collective in self.collectives:
                seconds[collective["phase"]] += collective["count"] * each[collective["phase"]] * self.late
        else:
            for name, calls in wrapped(self.trace, self.collectives, config).items():
                for phase, own in gpu.measured.around.get(name, {}).items():
                    seconds[phase] += calls * own * self.late
        for operation, calls in self.trace.operations.items():
            seconds[operation.phase] += calls * each[operation.phase] * self.late
        return seconds

    def _bubble(self, seconds):
        """Idle time of a stage with so many seconds of work.

        While the pipeline fills and drains only some ranks of a node compute: where they share memory, each is then
        faster.
        """
        config, stages, gained = self.config, self.layout.pp, 0.0
        passes = config.gradient_accumulation * (2 if config.pp_schedule == "interleaved" else 1)
        if self.gpu.measured and stages <= self.ranks:
            for working in range(1, stages):
                faster = self._compute(self.ranks * working // stages)
                gained += sum(self.compute[key] - faster[key] for key in faster if key[0] != "update")
        return ((stages - 1) * seconds - 2 * gained) / passes


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
