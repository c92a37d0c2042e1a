"""The plan of a layout: memory, communication and time on a GPU, and whether it fits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.planner.hardware import Gpu
from tools.planner.step_time import StepTime, step_time
from tools.planner.trace import Trace, trace_step
from utils.layout import Layout
from utils.schema import Config

FRAGMENTATION = 0.15  # of allocated memory, lost by torch's allocator (5 to 15 % in published runs)
DALI_BYTES = 5 * 2**30  # the pipelines of NVIDIA DALI, which decode and prefetch on the GPU, outside the allocator
FITS, MARGINAL = 0.85, 0.95  # largest share of the reported memory that a layout may need
# Keys of the config that say how work is shared, and how much of it there is.
OF_THE_LAYOUT = (
    "data_parallel",
    "sequence_parallel",
    "cp_method",
    "domain_method",
    "pp_schedule",
    "gradient_accumulation",
    "activation_checkpointing",
    "amp_mode",
    "global_batch_size",
)
VERDICTS = {"fits": "fits", "marginal": "is marginal: it may run out of memory", "no": "does not fit"}  # best first
# Texts and pictures show memory in this order.
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "buffers")


@dataclass(frozen=True)
class Plan:
    """A layout on a GPU, of the rank that holds most; sizes in bytes.

    memory: {category: its own largest size}; "activations" includes the batch and the batch that is fetched ahead.
    peak: allocated at once in a training step, as torch.cuda.max_memory_allocated tells.
    flops: of a step on all devices, including what checkpointing computes again. curve: of a point of a scaling curve,
    scaling: strong or weak, and efficiency: samples/s per GPU, relative to the first. inference: it is the plan of a
    forward pass without gradients, and `time` is its latency.
    """

    config: Config
    layout: Layout
    gpu: Gpu
    memory: dict[str, float]
    peak: float
    flops: float
    time: StepTime
    curve: dict[str, Any] = field(default_factory=dict)
    inference: bool = False

    @property
    def overhead(self) -> float:
        """Memory outside the allocator (context, NCCL, DALI), and what the allocator loses between its blocks."""
        dali = DALI_BYTES if self.config.data_loader_config == "dali" else 0
        return int(self.gpu.overhead_gib * 2**30) + FRAGMENTATION * self.peak + dali

    @property
    def needed(self) -> float:
        """Memory of the device that the layout needs."""
        return self.peak + self.overhead

    @property
    def fits(self) -> str:
        """fits, marginal or no: see docs/plan.md for the thresholds."""
        share = self.needed / self.gpu.memory
        if share <= FITS:
            return "fits"
        return "marginal" if share <= MARGINAL else "no"

    @property
    def samples_per_sec(self) -> float:
        """Samples of all GPUs together."""
        return self.config.global_batch_size / self.time.seconds

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.layout.world_size // self.gpu.gpus_per_node)  # rounded up

    @property
    def node_hours(self) -> float:
        """Node-hours of the whole run."""
        return self.config.num_iters * self.time.seconds / 3600 * self.nodes

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        memory = {name: round(size) for name, size in self.memory.items()}
        memory["overhead"] = round(self.overhead)
        return self.curve | {
            "layout": self._layout_to_json(),
            "gpu": self.gpu.name,
            "inference": self.inference,
            "memory_bytes": memory,
            "peak_allocated_bytes": round(self.peak),
            "gpu_memory_bytes": self.gpu.memory,
            "fits": self.fits,
            "collectives": self.time.collectives,
            "flops_per_step": self.flops,
            "step_time_s": self.time.seconds,
            "step_time_error": self.time.error,
            "step_time_parts_s": self.time.parts,
            "bound": self.time.bound,
            "samples_per_sec": self.samples_per_sec,
            "nodes": self.nodes,
            "node_hours": self.node_hours,
        }

    def _layout_to_json(self):
        """Sizes of the mesh, and the keys of the config that belong to a layout."""
        layout = self.layout
        rows, columns = layout.domain
        sizes = {
            "gpus": layout.world_size,
            "dp": layout.dp,
            "tp": layout.tp,
            "cp": layout.cp,
            "pp": layout.pp,
            "ens": layout.ens,
            "domain": rows * columns if columns == 1 else f"{rows}x{columns}",
            "dp_shard": layout.shard,
            "local_batch_size": self.config.global_batch_size // layout.dp,
        }
        keys = {key: getattr(self.config, key) for key in OF_THE_LAYOUT}
        return sizes | keys


def plan_layout(
    config: Config,
    layout: Layout,
    gpu: Gpu,
    traces: Sequence[Trace] | None = None,
    inference: bool = False,
) -> Plan:
    """The Plan of a layout. traces: by default those of trace_step. inference: of a forward pass without gradients.

    Raises ValueError where the model cannot be split so.
    """
    traces = traces or trace_step(config, layout, gpu.device, inference)

    # Memory, of the rank that holds most.
    memory = {}
    for name in CATEGORIES:
        # Each category may have its most on another rank.
        memory[name] = max(trace.memory[name] for trace in traces)
    batch = max(trace.memory["batch"] for trace in traces)
    # Training copies the next batch to the device while it computes.
    fetched_ahead = 0 if inference else batch
    memory["activations"] += batch + fetched_ahead
    # Of cuBLAS: the threads of the forward and of the backward pass have their own.
    workspaces = 1 if inference else 2
    # A trace has neither the batch that is fetched ahead nor the workspaces, so both are added.
    peak = max(trace.memory["peak"] for trace in traces)
    peak = peak + fetched_ahead + workspaces * gpu.workspace_mib * 2**20

    # Operations, of the mean rank.
    flops = [operation.flops * calls for trace in traces for operation, calls in trace.operations.items()]
    flops_of_a_rank = sum(flops) / len(traces)
    # The rank that is traced has the most members of a sample.
    most_members = -(-config.ensemble_size // layout.ens)  # rounded up
    flops_of_a_rank *= config.ensemble_size / (most_members * layout.ens)

    return Plan(
        config=config,
        layout=layout,
        gpu=gpu,
        memory=memory,
        peak=peak,
        flops=flops_of_a_rank * layout.world_size,
        time=step_time(traces, config, layout, gpu, inference),
        inference=inference,
    )
