"""The time of a training step, from its operations and messages (tools.planner.trace) and a GPU's data sheet.

Computation: operation by operation (tools.planner.operation_time). Communication: tools.planner.collective_time. The
pipeline's bubble: Narayanan et al. 2021 (arXiv:2104.04473).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tools.instruments.tracker import ATTENTION, PASSES
from tools.planner.collective_time import collective_time, node_shapes
from tools.planner.hardware import Gpu
from tools.planner.operation_time import COMPILED_LAUNCHES, OperationTimes
from tools.planner.trace import Trace
from utils.config import SHARDED
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

UNCALIBRATED, MEASURED = 0.35, 0.25  # half-widths of the band, see StepTime

# Seconds between two kernels of a CUDA graph, which is launched once. Measured on an H100, config quick: a step of
# about 300 kernels takes 1.53 ms, 1.29 ms of them in kernels.
GRAPH_GAP = 0.8e-6

# _bound reads here what it calls each part. A part of communication has the name of its group.
BOUNDS = {
    "matmul": "compute",
    ATTENTION: "compute",
    "memory": "memory bandwidth",
    "launch": "launches",
    "bubble": "bubble of the pipeline",
}
SAME_WEIGHTS = "dp", "cp", "domain", "ens", "image", "sample"  # groups whose ranks reduce gradients of the same weights

Table = defaultdict[tuple[str, str], float]  # {(phase, part): seconds}, 0 where there is none


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
    """StepTime of one traced rank."""
    rank = _Rank(trace, config, layout, gpu, inference)
    on_cpu = gpu.device == "cpu"

    # Seconds by phase and part: what computes,
    computing = rank.computing(rank.ranks_of_a_node)
    collectives = rank.collectives()
    host = rank.host(collectives)
    table = computing.copy()
    if on_cpu:
        # There the host computes by itself.
        for phase, seconds in host.items():
            table[phase, "launch"] = seconds
    # The update comes once, so micro-batches have no part in it.
    waited = _total(table, but="update")

    # the communication that computation does not hide,
    for (phase, work), hidden_together in rank.by_what_hides_them(collectives).items():
        total = sum(collective["seconds"] for collective in hidden_together)
        left = rank.not_hidden(phase, work, hidden_together, computing)
        for collective in hidden_together:
            part = f"communication {_kind_of(collective['group'])}"
            share = collective["seconds"] / total if total else 0.0
            table[phase, part] += left * share
        if work != "compute":
            waited += left

    # the time in which a GPU waits for its host: a replayed graph hides the gaps between its kernels behind nothing,
    if not on_cpu:
        for phase, seconds in _by_phase(table).items():
            hidden = 0.0 if config.enable_cuda_graphs else seconds
            table[phase, "launch"] = max(0.0, host[phase] - hidden)

    # and the time in which a stage of a pipeline has nothing to do.
    table["backward", "bubble"] = rank.bubble(waited, computing)

    parts = _by_part(table)
    error = MEASURED if gpu.measured else UNCALIBRATED
    return StepTime(
        seconds=sum(parts.values()),
        error=error,
        parts=parts,
        phases=_by_phase(table),
        bound=_bound(parts),
        collectives=collectives,
    )


@dataclass(frozen=True)
class _Rank:
    """What one traced rank does in a step, in seconds of its device."""

    trace: Trace
    config: Config
    layout: Layout
    gpu: Gpu
    inference: bool

    @property
    def ranks_of_a_node(self) -> int:
        return min(self.layout.world_size, self.gpu.gpus_per_node)

    @property
    def late(self) -> float:
        """Time of the slowest rank, in that of the mean one."""
        measured = self.gpu.measured
        return measured.slowest if measured and self.layout.world_size > 1 else 1.0

    @property
    def is_sharded(self) -> bool:
        return self.config.data_parallel in SHARDED

    def computing(self, ranks: int) -> Table:
        """Seconds of operations, while so many ranks of a node compute."""
        measured = self.gpu.measured
        speeds = measured.speeds(ranks) if measured else None
        times = OperationTimes(self.config, self.layout, self.gpu)
        seconds = Table(float)
        for operation, calls in self.trace.operations.items():
            part = operation.kind if operation.flops else "memory"
            # Ranks wait for the slowest one in every step.
            seconds[operation.phase, part] += calls * times.seconds(operation, speeds) * self.late
        return seconds

    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of the step by kind, as StepTime has them."""
        counts = Counter[tuple[str, ...]]()  # {(phase, kind, group): calls}
        sizes = Counter[tuple[str, ...]]()  # {(phase, kind, group): bytes}
        for message, calls in self.trace.messages.items():
            sort = message.phase, message.kind, message.group
            counts[sort] += calls
            sizes[sort] += calls * message.sent

        found: list[dict[str, Any]] = []
        for (phase, kind, group), sent in sizes.items():
            # An extrapolated trace may count below zero.
            count = max(1, round(counts[phase, kind, group]))
            members = self.trace.groups[group]
            shapes = node_shapes(members, self.layout.world_size, self.gpu.gpus_per_node)
            # A message of a pipeline, or of ring attention, goes to one neighbour.
            passes_all = kind != "send" and not self._is_ring_attention(kind, group)
            times = []
            for nodes, fewest in shapes:
                seconds = collective_time(
                    kind,
                    sent,
                    count,
                    size=len(members),
                    nodes=nodes,
                    fewest=fewest,
                    gpu=self.gpu,
                    ring=passes_all,
                )
                times.append(seconds)
            # The group whose place in the nodes is the worst counts, since the others wait for it.
            collective = {
                "phase": phase,
                "kind": kind,
                "group": group,
                "ranks": members,
                "count": count,
                "bytes": round(sent),
                "inside": all(nodes == 1 for nodes, _ in shapes),
                "seconds": max(times),
            }
            found.append(collective)
        return found

    def _is_ring_attention(self, kind: str, group: str) -> bool:
        """Tell whether a collective is an exchange of ring attention: an all-to-all to the next rank alone."""
        methods = {"cp": self.config.cp_method, "domain": self.config.domain_method}
        return kind == "all_to_all" and methods.get(_kind_of(group)) == "ring"

    def by_what_hides_them(
        self,
        collectives: list[dict[str, Any]],
    ) -> dict[tuple[str, str | None], list[Any]]:
        """Collectives by their phase and the work that hides them: "compute", "attention" or None."""
        together = defaultdict[tuple[str, str | None], list[Any]](list)
        for collective in collectives:
            phase = collective["phase"]
            work = self._what_hides(phase, collective["kind"], collective["group"])
            together[phase, work].append(collective)
        return together

    def _what_hides(self, phase: str, kind: str, group: str) -> str | None:
        if self._is_ring_attention(kind, group):
            return ATTENTION
        # Over the ranks of one image, too, where these are all.
        reduces_gradients = phase == "backward" and kind == "all_reduce" and _kind_of(group) in SAME_WEIGHTS
        # On a CPU fully_shard waits for each gather.
        gathers_weights = self.is_sharded and phase != "update" and _kind_of(group) == "dp"
        if reduces_gradients or (gathers_weights and self.gpu.device != "cpu"):
            return "compute"
        return None

    def not_hidden(
        self,
        phase: str,
        work: str | None,
        collectives: list[dict[str, Any]],
        computing: Table,
    ) -> float:
        """Seconds of collectives of a phase that are left when the work that hides them is done."""
        total = sum(collective["seconds"] for collective in collectives)
        left = total
        if work == ATTENTION:
            # The exchange for the last part of the keys is the one that there is not.
            size = len(collectives[0]["ranks"])
            behind_attention = computing[phase, ATTENTION] * (size - 1) / size
            left = max(0, total - behind_attention)
        elif work == "compute":
            # Gradients are reduced with the last micro-batch, parameters are gathered in each.
            batches = 1 if self.is_sharded else self.config.gradient_accumulation
            behind_computing = _by_phase(computing)[phase] / batches
            first_or_last = sum(map(self._bucket, collectives))
            left = min(total, max(0, total - behind_computing) + first_or_last)
        measured = self.gpu.measured
        overlap = measured.overlap if measured else 1
        # A measured machine hides only this share of what computation could hide.
        return total - (total - left) * overlap

    def _bucket(self, collective: dict[str, Any]) -> float:
        """Seconds of the one reduction or gather, the first or the last, that nothing hides."""
        calls = collective["count"]
        if not self.is_sharded:
            # An extrapolated trace has the bytes, but not their buckets.
            size = len(collective["ranks"])
            sent_of_full_bucket = 2 * (size - 1) / size * self.config.bucket_cap_mb * 2**20
            calls = max(calls, collective["bytes"] / sent_of_full_bucket)
        return collective["seconds"] / calls

    def host(
        self,
        collectives: list[dict[str, Any]],
    ) -> dict[str, float]:
        """Seconds in which the host launches operations: a lower bound, on a CPU beside computing."""
        measured = self.gpu.measured
        # Seconds of an operation by phase.
        each = dict.fromkeys(PASSES, self.gpu.launch)
        if measured:
            each = measured.speeds(self.ranks_of_a_node).host
        seconds = dict.fromkeys(PASSES, 0.0)
        if self.gpu.device == "cpu" and measured:
            # What is around a model was measured by itself.
            for name, calls in wrapped(self.trace, collectives, self.config).items():
                around = measured.around.get(name, {})
                for phase, own in around.items():
                    seconds[phase] += calls * own * self.late
        else:
            # The host launches a collective like any operation.
            launch = host_seconds(self.config, fmean(each.values()))
            each = dict.fromkeys(PASSES, launch)
            for collective in collectives:
                seconds[collective["phase"]] += collective["count"] * launch * self.late
        for operation, calls in self.trace.operations.items():
            seconds[operation.phase] += calls * each[operation.phase] * self.late
        if self.inference:
            # What was measured around training steps has other phases too.
            return dict.fromkeys(PASSES, 0.0) | {"forward": seconds["forward"]}
        return seconds

    def bubble(self, waited: float, computing: Table) -> float:
        """Seconds in which a stage idles, while the pipeline fills and drains.

        waited: seconds of a step but for its update, which every micro-batch has its part of.
        """
        stages = self.layout.pp
        # Only some ranks of a node compute then: where they share memory, each is faster.
        gained = 0.0
        if self.gpu.measured and stages <= self.ranks_of_a_node:
            for working in range(1, stages):
                faster = self.computing(self.ranks_of_a_node * working // stages)
                gained += _total(computing, but="update") - _total(faster, but="update")
        chunks = 2 if self.config.pp_schedule == "interleaved" else 1
        passes = self.config.gradient_accumulation * chunks
        # The pipeline fills and drains, so the gain counts twice.
        return ((stages - 1) * waited - 2 * gained) / passes


def _total(table: Table, but: str) -> float:
    """Seconds of all phases but one."""
    return sum(seconds for (phase, _), seconds in table.items() if phase != but)


def _by_phase(table: Table) -> dict[str, float]:
    sums = dict.fromkeys(PASSES, 0.0)
    for (phase, _), seconds in table.items():
        sums[phase] += seconds
    return sums


def _by_part(table: Table) -> dict[str, float]:
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


def host_seconds(config: Config, launch: float) -> float:
    """Seconds of an operation beside its computing: launching it, or what a CUDA graph leaves of that.

    launch: seconds of the host for an operation in eager mode.
    """
    if config.enable_cuda_graphs:
        return GRAPH_GAP
    # Compiled code fuses operations, and launches fewer of them.
    return launch * (COMPILED_LAUNCHES if config.enable_jit else 1)


def wrapped(
    trace: Trace,
    collectives: Sequence[Mapping[str, Any]],
    config: Config,
) -> Counter[str]:
    """Work of the code around a model in a step, by name: the messages of fsdp, tp, cp and pp.

    ddp: once, since its work is for each weight, however many buckets there are. domain: ShardTensor has a rule for
    each operation of the forward pass. full, selective: blocks that are computed again. collectives: of StepTime.
    """
    counted = Counter[str]()
    blocks = config.depth // config.pipeline_parallel
    groups = {_kind_of(collective["group"]) for collective in collectives}
    for collective in collectives:
        name = _kind_of(collective["group"])
        if name == "dp" or (name in SAME_WEIGHTS and collective["kind"] == "all_reduce"):
            name = "fsdp" if config.data_parallel in SHARDED else "ddp"
        counted[name] += collective["count"]
    counted["ddp"] = min(1, counted["ddp"])
    counted["domain"] = 0
    if config.domain_parallel not in (1, "1", "1x1"):
        forward = [calls for operation, calls in trace.operations.items() if operation.phase == "forward"]
        counted["domain"] = round(sum(forward))
    if config.activation_checkpointing in ("full", "selective"):
        passes = config.gradient_accumulation * config.rollout_steps
        counted[config.activation_checkpointing] = blocks // config.checkpointing_interval * passes
    if config.data_parallel in SHARDED and groups & {"cp", "domain", "ens", "image", "sample"}:
        # Parameters travel in the groups of tokens: a gather forward, and a reduction and mostly a gather backward.
        calls_of_a_unit = 2 if config.data_parallel == "zero2" else 3
        counted["fsdp"] = max(counted["fsdp"], (blocks + 1) * calls_of_a_unit)
    return counted


def _kind_of(group: str) -> str:
    return group.partition("_")[0]
