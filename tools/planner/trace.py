"""One training step of the real code on fake tensors: what a rank holds, computes and sends.

The cost does not depend on the number of ranks. Deep models are traced with few blocks and extrapolated: every count is
linear in the number of blocks of a stage.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from itertools import chain
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checks.usage import uncompiled
from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.parallel_model import transform_forward
from networks import neighborhood
from networks.vit import Attention
from tools.instruments.counting import Watch
from tools.instruments.step_phases import phases_of
from tools.instruments.tracker import Message, Operation, Tracker
from tools.planner.fake import (
    Replica,
    buffers_of_numbers,
    ends_before_computing,
    fake_rank,
    pipeline_shapes,
    receive_buffers,
    values_are_known,
    values_are_zero,
)
from tools.planner.fake_kernels import CudaAutocast
from training.assembly import random_batch, split_as_configured
from training.forecasting.ensemble import one_member
from training.models.build import build_model, initial_weights
from training.models.info import ModelInfo, inspect_model
from training.step.optimizer import build_optimizer
from training.step.speed_options import apply_speed_options
from training.step.step import AMP_DTYPES, TrainingStep
from training.tasks import task_of
from utils import comm
from utils.layout import Layout
from utils.schema import Config, keys_that_affect
from utils.torch_private import is_fsdp_module, storage_id

# The deepest stages that are traced in full. How DDP cuts buckets is not linear in the number of blocks.
MOST = 4
MOST_OF_DDP = 16

# Keys on which facts about a model may depend, and those facts by their values.
DECISIVE = set(keys_that_affect("model", "result", "training"))
FACTS: dict[str, ModelInfo] = {}

# Dimensions of the mesh and combined ones. A group that lies along several is named after the first.
GROUPS = (
    "tp",
    "cp",
    "pp",
    "domain",
    "domain_lat",
    "domain_lon",
    "ens",
    "dp",
    "dp_shard",
    "dp_replicate",
    "image",
    "sample",
    "grad_reduce",
    "dp_ens",
    "dp_shard_sample",
    "tp_pp",
    "same_data",
)

STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shares out, and cpu_offload keeps in host memory
HELD = (*STATES, "activations")


class Trace(NamedTuple):
    """A step of one rank.

    memory: {label: bytes at most} of tools.instruments.tracker, and "peak". held: bytes at some moments. parameters:
    between forward and backward pass, whole ones that lie beside a rank's part included. parameters at most: in the
    forward pass, while the unit that computes is gathered. gradients: before the update. optimizer: its state.
    activations: what the backward pass needs of the forward pass, of a pipeline the most of its micro-batches.
    operations, messages: Counters of Operation and Message. groups: {dimension of the mesh, or combined ones: the ranks
    in this rank's group}.
    """

    memory: Mapping[str, float]
    held: Mapping[str, float]
    operations: Counter[Operation]
    messages: Counter[Message]
    groups: dict[str, tuple[int, ...]]


def trace_step(
    config: Config,
    layout: Layout,
    device_type: str = "cuda",
    inference: bool = False,
) -> list[Trace]:
    """Traces of the ranks that may hold or do most: the ends of a pipeline, else rank 0.

    config: of this layout. device_type: whose kernels and mixed precision are traced. inference: of a forward pass
    without gradients, in place of a training step.
    Raises ValueError where the model cannot be split so.
    """
    if config.data_parallel == "zero1":
        import torch.distributed.optim  # noqa: F401  it compiles code that reads what fake_rank replaces
    ranks = sorted({0, int(layout.groups("pp")[0][-1])})
    return [_deep(config, layout, rank, device_type, inference) for rank in ranks]


def is_exact(config: Config) -> bool:
    """Tell whether a trace has all operations of a run: compiled code and 8-bit products have others, see _trace."""
    return not config.enable_jit and not config.enable_cuda_graphs and config.amp_mode != "fp8"


def _deep(config, layout, rank, device_type, inference):
    """The Trace of a model of any depth. A deep one is extrapolated from traces of two and of three units of depth."""
    # The unit by which depth grows: a block, or an interval of checkpointing, in each stage.
    unit = layout.pp
    if layout.pp > 1 and config.pp_schedule == "interleaved":
        unit *= 2
    if config.activation_checkpointing != "none":
        unit *= config.checkpointing_interval
    units, left = divmod(config.depth, unit)

    # The most units that are traced in full: of some options counts are not linear in the depth.
    most = MOST
    replicas = layout.dp * layout.cp * layout.ens * math.prod(layout.domain)
    if replicas > 1 and not config.noddp:
        # zero1 shares out whole parameters.
        most = {"ddp": MOST_OF_DDP, "zero1": units}.get(config.data_parallel, MOST)
    if config.optimizer_kind.trains_matrices:
        # Ranks share out whole matrices.
        most = units
    if left or units <= most:
        return _trace(config, layout, rank, device_type, inference)

    two_units, three_units = (config.model_copy(update={"depth": n * unit}) for n in (2, 3))
    of_two = _trace(two_units, layout, rank, device_type, inference)
    of_three = _trace(three_units, layout, rank, device_type, inference)
    further = units - 2  # units beyond the first two
    return Trace(
        Counter(_extrapolated(of_two.memory, of_three.memory, further)),
        Counter(_extrapolated(of_two.held, of_three.held, further)),
        Counter(_extrapolated(of_two.operations, of_three.operations, further)),
        Counter(_extrapolated(of_two.messages, of_three.messages, further)),
        of_three.groups,
    )


def _extrapolated(of_two, of_three, further):
    """Counts of a deeper model, of those of two and of three units: each grows by the same number with every unit."""
    counts = {}
    for key in of_two | of_three:
        growth = of_three[key] - of_two[key]
        counts[key] = of_two[key] + growth * further
    return counts


def _trace(config, layout, rank, device_type, inference):
    """The Trace of one rank: the real step on fake tensors, observed once its state is settled."""
    # Compiled code and DTensor are not traced: the mathematics is the same without them. What fp8 keeps for the
    # backward pass is in bf16.
    mode = "bf16" if config.amp_mode == "fp8" else config.amp_mode
    plain = {"enable_jit": False, "enable_cuda_graphs": False, "tp_backend": "native", "amp_mode": mode}
    config = config.model_copy(update=plain)
    device = torch.device("cpu")  # the only one whose fake tensors have a backward pass
    autocast = CudaAutocast(AMP_DTYPES[config.amp_mode]) if device_type != "cpu" else None
    with fake_rank(layout, rank, device_type) as fake, values_are_zero(), ExitStack() as stack:
        # A run keeps these indices from the first block that needs them on, but not those of tensors without data.
        stack.enter_context(patch.object(neighborhood, "_tiles", cache(neighborhood._tiles)))
        if autocast:  # one context of all stages: copies of parameters in low precision are made once
            stack.enter_context(autocast.ahead_of_collectives())
            stack.enter_context(patch.object(TrainingStep, "autocast", lambda _: autocast))

        # The model, split as in a run.
        model = build_model(config)
        blocks = getattr(model, "blocks", [model]) if autocast else ()
        for block in blocks:
            if isinstance(getattr(block, "attn", None), Attention):
                block.attn.dropout = 0.0  # in the fused kernels of a GPU it keeps nothing
            assert autocast is not None
            transform_forward(block, autocast)
        # Constant indices tell which rows ranks send each other.
        names = buffers_of_numbers(model) if layout.domain != (1, 1) else {}
        weights = initial_weights(config) if names else ()
        numbers = {name: value.numpy() for name, value in weights if name in names}
        split = split_as_configured(model, config)
        if autocast and config.activation_checkpointing == "step":
            model.forward = autocast(model.forward)
        apply_speed_options(config, device, model)
        task = task_of(config)
        task.facts = _facts_of(config)  # out here: it tries the model on the meta device
        task.check_model()

        # The step, on fake tensors.
        with fake, torch.random.fork_rng(), uncompiled(), pipeline_shapes(config, layout):
            options = config.options(DataParallelOptions)
            parallel = data_parallel(model, options, device, [], task.usage, split)
            stack.enter_context(values_are_known(parallel.model, numbers))
            optimizer = build_optimizer(config, parallel, device)
            for group in optimizer.param_groups:
                if device_type != "cpu" and not group["muon"]:
                    group["foreach"] = not group.get("fused")  # torch's choice on a GPU
            step = TrainingStep(config, device, parallel, optimizer, task)
            x, y = random_batch(step.task, device)
            if inference:
                return measured_inference(step, x)
            _settle(step, x, y)  # from now on the optimizer has a state
            return observe_step(step, x, y)


def _facts_of(config):
    """Facts about the model of a config, looked for once for all its layouts."""
    settings = config.model_dump_json(include=DECISIVE)
    if settings not in FACTS:
        FACTS[settings] = inspect_model(config)
    return FACTS[settings]


def _settle(step, x, y):
    """Give the optimizer its state, and DDP and a pipeline what they learn in their first step.

    With fully_shard, in a pipeline, or alone, all later steps are as the first: there an update makes the state.
    """
    parallel = step.parallel
    trained = {name: p for name, p in parallel.model.named_parameters() if p.requires_grad}
    learns = parallel.replicated and not parallel.pipeline
    if learns or not trained.keys() <= step.task.usage.reached:
        with Watch():  # in it a fake ShardTensor is its local part
            step(0, x, y)
        return
    if parallel.pipeline:
        with Watch(), ends_before_computing(parallel.pipeline):
            step(0, x, y)
    for parameter in trained.values():
        parameter.grad = torch.empty_like(parameter)
    with Watch():
        step.update(log_norm=False)


def observe_step(
    step: TrainingStep,
    x: Tensor,
    y: Tensor,
    curve: list[tuple[str, int]] | None = None,
) -> Trace:
    """The Trace of one more step of a TrainingStep that has made one; of a real step too.

    curve: a list that is filled with Tracker.curve.
    """
    observer = _StepObserver(step, x, y)
    tracker = observer.tracker
    with phases_of(step, tracker, observer.change_phase), ExitStack() as stack:
        for unit in observer.fsdp_units():
            # First in line, so before the unit is resharded.
            hook = unit.register_forward_hook(observer.gathered, prepend=True)
            stack.callback(hook.remove)
        # Torch says that selective checkpointing passes the hooks by.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        hooks = torch.autograd.graph.saved_tensors_hooks(observer.saved, lambda tensor: tensor)
        stack.enter_context(hooks)
        stack.enter_context(tracker)
        step(0, x, y)
    if curve is not None:
        curve += tracker.curve()
    in_host_memory = STATES if step.config.cpu_offload else ()
    messages, groups = _named_messages(tracker)
    return Trace(tracker.memory(in_host_memory), observer.held, tracker.operations, messages, groups)


class _StepObserver:
    """Labels the memory of a training step for a Tracker, and notes what is held at some moments, see Trace."""

    def __init__(self, step: TrainingStep, x: Tensor, y: Tensor):
        self.model = step.parallel.model
        self.own = [p for group in step.optimizer.param_groups for p in group["params"]]  # this rank's parameters
        stages = step.parallel.pipeline.stages if step.parallel.pipeline else []
        self.called: list[nn.Module] = [stage.submod for stage in stages]
        if not stages:
            self.called = [step.parallel.module]

        # Memory that exists before the step.
        weights = [*self.model.parameters(), *self.model.buffers()]
        states = self._optimizer_states(step)
        buckets = self._ddp_buckets()
        received = receive_buffers(stages)
        self.tracker = Tracker([*weights, *states, *buckets, *received, x, y])
        self.tracker.label("parameters", weights)
        self.tracker.label("gradients", buckets)
        self.tracker.label("batch", [x, y])
        self.tracker.label("buffers", received)
        numbers = self.tracker.label("optimizer", states)
        self.held = Counter({"optimizer": self.tracker.nbytes(numbers)})

    def _optimizer_states(self, step):
        """Values of the optimizer's state."""
        optimizer = getattr(step.optimizer, "optim", step.optimizer)  # the one inside a ZeroRedundancyOptimizer
        values = []
        for state in optimizer.state.values():
            values += state.values()
        return values

    def _ddp_buckets(self):
        """The tensors of the buckets of DDP."""
        flat = []
        for module in self.called:
            if isinstance(module, Replica):
                flat += [bucket.flat for bucket in module.buckets]
        return flat

    def fsdp_units(self) -> list[nn.Module]:
        """Modules whose parameters fully_shard gathers together."""
        units: list[nn.Module] = []
        for module in self.called:
            units += filter(is_fsdp_module, module.modules())
        return units

    def _note(self, name, numbers):
        """Hold the most bytes so far of these storages under a name."""
        self.held[name] = max(self.held[name], self.tracker.nbytes(numbers))

    def _parameters(self):
        return self.tracker.note([*self.own, *self.model.parameters()])

    def change_phase(self, before: str, phase: str) -> None:
        """Called when a phase of the step ends and another begins."""
        if before == "forward":
            self._note("parameters", self._parameters())
            self._note("parameters at most", self._parameters())
            self._note("activations", self.tracker.saved)
        if phase == "update":
            gradients = [p.grad for p in self.own]
            self._note("gradients", self.tracker.label("gradients", gradients))

    def gathered(self, unit: nn.Module, *_: object) -> None:
        """Called after the forward pass of a unit of fully_shard, while its parameters are whole."""
        self.tracker.label("buffers", unit.parameters())
        self._note("parameters at most", self._parameters())

    def saved(self, tensor: Tensor) -> Tensor:
        """Called with each tensor that autograd saves. Weights and tables that the backward pass reads stay anyway."""
        kept_anyway = chain(self.model.parameters(), self.model.buffers())
        if storage_id(tensor) not in map(storage_id, kept_anyway):
            self.tracker.save([tensor])
        return tensor


def measured_inference(step: TrainingStep, x: Tensor) -> Trace:
    """The Trace of a forward pass without gradients, as a validation or a forecast makes it; of a real step too.

    x: a batch of inputs, (B, C, h, w) or with forcings behind its channels. Held are the weights alone: a process that
    forecasts has no gradients and no state of an optimizer, and whatever there is of them is not counted.
    """
    parallel, config = step.parallel, step.config
    stages = parallel.pipeline.stages if parallel.pipeline else []
    weights = [*parallel.model.parameters(), *parallel.model.buffers()]
    received = receive_buffers(stages)
    images, *noise = one_member(config, x)
    tracker = Tracker([*weights, *received, images, *noise])
    tracker.label("parameters", weights)
    tracker.label("batch", [images, *noise])
    tracker.label("buffers", received)
    held = Counter({"parameters": tracker.nbytes(tracker.note(weights))})

    was_training = parallel.model.training
    parallel.model.eval()
    with tracker, torch.no_grad(), step.autocast():
        parallel.predict(images, config.n_out_channels, *noise)
    parallel.model.train(was_training)
    messages, groups = _named_messages(tracker)
    return Trace(tracker.memory(), held, tracker.operations, messages, groups)


def _named_messages(tracker):
    """(messages with groups by name, {name: ranks of the group}) of what a tracker has seen."""
    dimensions = _dimensions()
    messages = Counter[Message]()
    for message, calls in tracker.messages.items():
        messages[message._replace(group=dimensions[message.group])] += calls
    groups = {dimensions[message.group]: message.group for message in tracker.messages}
    return messages, groups


def _dimensions():
    """{ranks of a group that this rank is in: the dimension of the mesh along which it lies}."""
    names: dict[tuple[int, ...], str] = {}
    if dist.is_initialized():
        for dimension in GROUPS:
            ranks = dist.get_process_group_ranks(comm.get_group(dimension))
            names.setdefault(tuple(ranks), dimension)
        everyone = tuple(range(dist.get_world_size()))
        names.setdefault(everyone, "world")
    return names
