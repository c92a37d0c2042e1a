"""The time of a training step, from its operations and messages (tools.planner.trace) and a GPU's data sheet.

RankSeconds has what one rank does: computing, collectives, launches by its host, idling in a pipeline. StepTime puts
these together, since parts of them go on at the same time.

Computation: operation by operation; communication: collective by collective (both tools.planner.operation_time). The
pipeline's bubble: Narayanan et al. 2021 (arXiv:2104.04473).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tools.instruments.tracker import ATTENTION, PASSES
from tools.planner.hardware import Gpu
from tools.planner.operation_time import COMPILED_LAUNCHES, OperationTimes, collective_time, node_shapes
from tools.planner.trace import Trace
from utils.config import SHARDED
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
# Seconds between two kernels of a CUDA graph, which is launched once. Measured on an H100, config quick: a step of
# about 300 kernels takes 1.53 ms, 1.29 ms of them in kernels.
GRAPH_GAP = 0.8e-6
SAME_WEIGHTS = "dp", "cp", "domain", "ens", "image", "sample"  # groups whose ranks reduce gradients of the same weights
Table = defaultdict[tuple[str, str], float]  # {(phase, part): seconds}, 0 where there is none


@dataclass(frozen=True)
class RankSeconds:
    """What one traced rank does in a step, in seconds of its device."""

    trace: Trace
    config: Config
    layout: Layout
    gpu: Gpu
    inference: bool

    @property
    def ranks_of_a_node(self) -> int:
        """Ranks of this run on a node."""
        return min(self.layout.world_size, self.gpu.gpus_per_node)

    @property
    def slowest_over_mean(self) -> float:
        """Time of the slowest rank over that of the mean one: each step waits for the slowest."""
        measured = self.gpu.measured
        return measured.slowest if measured and self.layout.world_size > 1 else 1.0

    @property
    def is_sharded(self) -> bool:
        """Whether fully_shard cuts the parameters."""
        return self.config.data_parallel in SHARDED

    def computing(self, ranks: int) -> Table:
        """Seconds of operations by phase and kind, while so many ranks of a node compute."""
        measured = self.gpu.measured
        speeds = measured.speeds(ranks) if measured else None
        times = OperationTimes(self.config, self.layout, self.gpu)
        seconds = Table(float)
        for operation, calls in self.trace.operations.items():
            part = operation.kind if operation.flops else "memory"
            seconds[operation.phase, part] += calls * times.seconds(operation, speeds) * self.slowest_over_mean
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
            collective = {
                "phase": phase,
                "kind": kind,
                "group": group,
                "ranks": members,
                "count": count,
                "bytes": round(sent),
                "inside": all(nodes == 1 for nodes, _ in shapes),
                "seconds": self._seconds_of_worst_group(kind, group, sent, count, shapes),
            }
            found.append(collective)
        return found

    def _seconds_of_worst_group(self, kind, group, sent, count, shapes):
        """Seconds of a collective in the group that lies worst in the nodes, since the others wait for it.

        shapes: {(nodes, fewest ranks on a node)} of all groups of this kind, as node_shapes gives them.
        """
        # A message of a pipeline, or of ring attention, goes to one neighbour.
        passes_all = kind != "send" and not self._is_ring_attention(kind, group)
        times = []
        for nodes, fewest in shapes:
            seconds = collective_time(
                kind,
                sent,
                count,
                size=len(self.trace.groups[group]),
                nodes=nodes,
                fewest=fewest,
                gpu=self.gpu,
                ring=passes_all,
            )
            times.append(seconds)
        return max(times)

    def _is_ring_attention(self, kind: str, group: str) -> bool:
        """Tell whether a collective is an exchange of ring attention: an all-to-all to the next rank alone."""
        methods = {"cp": self.config.cp_method, "domain": self.config.domain_method}
        return kind == "all_to_all" and methods.get(kind_of(group)) == "ring"

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
        """The work that goes on while a collective travels: "compute" for all of a phase; None: the step waits."""
        if self._is_ring_attention(kind, group):
            return ATTENTION
        # Over the ranks of one image, too, where these are all.
        reduces_gradients = phase == "backward" and kind == "all_reduce" and kind_of(group) in SAME_WEIGHTS
        # On a CPU fully_shard waits for each gather.
        gathers_weights = self.is_sharded and phase != "update" and kind_of(group) == "dp"
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
        """Seconds of collectives of a phase that are left when the work that hides them is done.

        work: what hides them, see _what_hides. computing: seconds of operations of the step.
        """
        total = sum(collective["seconds"] for collective in collectives)
        exposed = total
        if work == ATTENTION:
            # Attention to a part of the keys hides the exchange of the next part; to the last part it hides nothing.
            size = len(collectives[0]["ranks"])
            behind_attention = computing[phase, ATTENTION] * (size - 1) / size
            exposed = max(0, total - behind_attention)
        elif work == "compute":
            # Gradients are reduced with the last micro-batch, parameters are gathered in each.
            batches = 1 if self.is_sharded else self.config.gradient_accumulation
            behind_computing = by_phase(computing)[phase] / batches
            first_or_last = sum(map(self._bucket, collectives))
            exposed = min(total, max(0, total - behind_computing) + first_or_last)
        # A measured machine hides only a share of what computation could hide.
        measured = self.gpu.measured
        overlap = measured.overlap if measured else 1
        hidden = (total - exposed) * overlap
        return total - hidden

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
        """{phase: seconds in which the host launches operations}: a lower bound, on a CPU beside computing.

        collectives: of this rank, as `collectives` gives them.
        """
        measured = self.gpu.measured
        # Seconds of an operation by phase.
        of_operation = dict.fromkeys(PASSES, self.gpu.launch)
        if measured:
            of_operation = measured.speeds(self.ranks_of_a_node).host
        seconds = dict.fromkeys(PASSES, 0.0)
        if self.gpu.device == "cpu" and measured:
            # The code around a model was measured by itself.
            for name, calls in calls_around_model(self.trace, collectives, self.config).items():
                around = measured.around.get(name, {})
                for phase, of_call in around.items():
                    seconds[phase] += calls * of_call * self.slowest_over_mean
        else:
            # The host launches a collective like any operation.
            launch = host_seconds(self.config, fmean(of_operation.values()))
            of_operation = dict.fromkeys(PASSES, launch)
            for collective in collectives:
                seconds[collective["phase"]] += collective["count"] * launch * self.slowest_over_mean
        for operation, calls in self.trace.operations.items():
            seconds[operation.phase] += calls * of_operation[operation.phase] * self.slowest_over_mean
        if self.inference:
            # What was measured around training steps has other phases too.
            return dict.fromkeys(PASSES, 0.0) | {"forward": seconds["forward"]}
        return seconds

    def bubble(self, waited: float, computing: Table) -> float:
        """Seconds in which a stage idles, while the pipeline fills and drains; 0 without a pipeline.

        waited: seconds of a step in which micro-batches follow each other, so without its update. computing: seconds
        of operations of the step.
        """
        stages = self.layout.pp
        # While it fills, one stage works, then two, ...; only some ranks of a node compute, so each may be faster.
        gained = 0.0
        if self.gpu.measured and stages <= self.ranks_of_a_node:
            for working in range(1, stages):
                faster = self.computing(self.ranks_of_a_node * working // stages)
                gained += total_but(computing, "update") - total_but(faster, "update")
        # A stage idles for the time of one micro-batch in each other stage: less with more, or smaller, pieces of work.
        chunks = 2 if self.config.pp_schedule == "interleaved" else 1
        passes = self.config.gradient_accumulation * chunks
        # The pipeline fills and drains, so the gain counts twice.
        return ((stages - 1) * waited - 2 * gained) / passes


def total_but(table: Table, left_out: str) -> float:
    """Seconds of all phases but one."""
    return sum(seconds for (phase, _), seconds in table.items() if phase != left_out)


def by_phase(table: Table) -> dict[str, float]:
    """{phase: seconds of all its parts}."""
    sums = dict.fromkeys(PASSES, 0.0)
    for (phase, _), seconds in table.items():
        sums[phase] += seconds
    return sums


def host_seconds(config: Config, launch: float) -> float:
    """Seconds of an operation beside its computing: launching it, or what a CUDA graph leaves of that.

    launch: seconds of the host for an operation in eager mode.
    """
    if config.enable_cuda_graphs:
        return GRAPH_GAP
    # Compiled code fuses operations, and launches fewer of them.
    return launch * (COMPILED_LAUNCHES if config.enable_jit else 1)


def calls_around_model(
    trace: Trace,
    collectives: Sequence[Mapping[str, Any]],
    config: Config,
) -> Counter[str]:
    """{what is around a model: how often it works in a step}, as Measured.around has the seconds of each time.

    fsdp, tp, cp, pp: their messages. ddp: once, since its work is for each weight, however many buckets there are.
    domain: ShardTensor has a rule for each operation of the forward pass. full, selective: blocks that are computed
    again. collectives: of StepTime.
    """
    counted = Counter[str]()
    blocks = config.depth // config.pipeline_parallel
    groups = {kind_of(collective["group"]) for collective in collectives}
    for collective in collectives:
        name = kind_of(collective["group"])
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


def kind_of(group: str) -> str:
    """The dimension of the mesh along which a group lies, by its name: dp_shard -> dp."""
    return group.partition("_")[0]


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
