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
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distributed.data_parallel import DataParallelOptions, data_parallel
from distributed.parallel_model import transform_forward
from networks import neighborhood
from networks.vit import Attention
from tools.instruments.tracker import Message, Operation, Tracker, phases_of
from tools.planner.cuda_autocast import CudaAutocast
from tools.planner.fake import Replica, fake_rank, pipeline_shapes, receive_buffers, values_are_zero
from training.assembly import random_batch, split_as_configured
from training.model import build_model
from training.optimizer import build_optimizer
from training.speed_options import apply_speed_options
from training.step import AMP_DTYPES, TrainingStep
from training.tasks import build_task
from utils import comm
from utils.layout import Layout
from utils.schema import Config
from utils.torch_private import storage_id

MOST, MOST_OF_DDP = 4, 16  # deepest stages that are traced in full; how DDP cuts buckets is not linear

# Dimensions of the mesh and combined ones. A group that lies along several is named after the first.
GROUPS = (
    "tp", "cp", "pp", "domain", "domain_lat", "domain_lon", "dp", "dp_shard", "dp_replicate", "image", "dp_image",
    "dp_shard_image", "tp_pp",
)  # fmt: skip

STATES = "parameters", "gradients", "optimizer"  # what ZeRO shares out, and cpu_offload keeps in host memory
HELD = *STATES, "activations"


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


def trace_step(config: Config, layout: Layout, device_type: str = "cuda", inference: bool = False) -> list[Trace]:
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
    stages = layout.pp * (2 if layout.pp > 1 and config.pp_schedule == "interleaved" else 1)
    unit = stages * (config.checkpointing_interval if config.activation_checkpointing != "none" else 1)
    blocks, left = divmod(config.depth, unit)
    most = MOST
    if layout.dp * layout.cp * math.prod(layout.domain) > 1 and not config.noddp:
        most = {"ddp": MOST_OF_DDP, "zero1": blocks}.get(config.data_parallel, MOST)  # zero1 shares whole parameters
    if config.optimizer == "Muon":  # ranks share whole matrices
        most = blocks
    if left or blocks <= most:
        return _trace(config, layout, rank, device_type, inference)
    few, more = (
        _trace(config.model_copy(update={"depth": n * unit}), layout, rank, device_type, inference) for n in (2, 3)
    )
    times = blocks - 2
    counts = [{key: a[key] + (b[key] - a[key]) * times for key in a | b} for a, b in zip(few[:-1], more, strict=False)]
    return Trace(*map(Counter, counts), more.groups)


def _trace(config, layout, rank, device_type, inference):
    # Compiled code and DTensor are not traced: the mathematics is the same without them. What fp8 keeps for the
    # backward pass is in bf16.
    mode = "bf16" if config.amp_mode == "fp8" else config.amp_mode
    plain = {"enable_jit": False, "enable_cuda_graphs": False, "tp_backend": "native", "amp_mode": mode}
    config = config.model_copy(update=plain)
    device = torch.device("cpu")  # the only one whose fake tensors have a backward pass
    autocast = CudaAutocast(AMP_DTYPES.get(config.amp_mode)) if device_type != "cpu" else None
    with fake_rank(layout, rank, device_type) as fake, values_are_zero(), ExitStack() as stack:
        # A run keeps these indices from the first block that needs them on, but not those of tensors without data.
        stack.enter_context(patch.object(neighborhood, "_tiles", cache(neighborhood._tiles)))
        if autocast:  # one context of all stages: copies of parameters in low precision are made once
            stack.enter_context(autocast.ahead_of_collectives())
            stack.enter_context(patch.object(TrainingStep, "autocast", lambda _: autocast))
        model = build_model(config)
        for block in getattr(model, "blocks", [model]) if autocast else ():
            if isinstance(getattr(block, "attn", None), Attention):
                block.attn.dropout = 0.0  # in the fused kernels of a GPU it keeps nothing
            transform_forward(block, autocast)
        split = split_as_configured(model, config)
        if autocast and config.activation_checkpointing == "step":
            model.forward = autocast(model.forward)
        apply_speed_options(config, device, model)
        task = build_task(config)  # out here: it tries the model on the meta device
        with fake, torch.random.fork_rng(), pipeline_shapes(config, layout):
            parallel = data_parallel(model, config.options(DataParallelOptions), device, [], task.usage, split)
            optimizer = build_optimizer(config, parallel, device)
            for group in optimizer.param_groups:
                if device_type != "cpu" and not group["muon"]:
                    group["foreach"] = not group["fused"]  # torch's choice on a GPU
            step = TrainingStep(config, device, parallel, optimizer, task)
            x, y = random_batch(step.task, device)
            if inference:
                return measured_inference(step, x)
            with Tracker():  # in it a fake ShardTensor is its local part
                step(0, x, y)  # from now on the optimizer has a state
            return measured(step, x, y)


def measured(step: TrainingStep, x: Tensor, y: Tensor, curve: list[tuple[str, int]] | None = None) -> Trace:
    """The Trace of one more step of a TrainingStep that has made one; of a real step too.

    curve: a list that is filled with Tracker.curve.
    """
    parallel, optimizer = step.parallel, getattr(step.optimizer, "optim", step.optimizer)  # of ZeroRedundancyOptimizer
    own = [p for group in step.optimizer.param_groups for p in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    weights = [*parallel.model.parameters(), *parallel.model.buffers()]
    stages = parallel.pipeline.stages if parallel.pipeline else []
    called: list[nn.Module] = [stage.submod for stage in stages] or [parallel.module]
    buckets = [bucket["flat"] for module in called if isinstance(module, Replica) for bucket in module.buckets]
    received = receive_buffers(stages)
    tracker = Tracker([*weights, *states, *buckets, *received, x, y])
    tracker.label("parameters", weights)
    tracker.label("gradients", buckets)
    tracker.label("batch", [x, y])
    tracker.label("buffers", received)
    held = Counter({"optimizer": tracker.nbytes(tracker.label("optimizer", states))})

    def note(name, numbers):
        held[name] = max(held[name], tracker.nbytes(numbers))

    def parameters():
        return tracker.note([*own, *parallel.model.parameters()])

    def changes(before, phase):
        if before == "forward":
            note("parameters", parameters())
            note("parameters at most", parameters())
            note("activations", tracker.saved)
        if phase == "update":
            note("gradients", tracker.label("gradients", [p.grad for p in own]))

    def gathered(unit, *_):
        tracker.label("buffers", unit.parameters())
        note("parameters at most", parameters())

    def saved(tensor):
        # Weights and tables that the backward pass reads are held anyway.
        kept_anyway = [*parallel.model.parameters(), *parallel.model.buffers()]
        if storage_id(tensor) not in set(map(storage_id, kept_anyway)):
            tracker.save([tensor])
        return tensor

    with phases_of(step, tracker, changes), ExitStack() as stack:
        for unit in [unit for module in called for unit in module.modules() if isinstance(unit, FSDPModule)]:
            # First in line, so before the unit is resharded.
            stack.callback(unit.register_forward_hook(gathered, prepend=True).remove)
        stack.enter_context(warnings.catch_warnings())  # torch says that selective checkpointing passes the hooks by
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor))
        stack.enter_context(tracker)
        step(0, x, y)
    if curve is not None:
        curve += tracker.curve()
    messages, groups = _named_messages(tracker)
    return Trace(tracker.memory(step.config.cpu_offload * STATES), held, tracker.operations, messages, groups)


def measured_inference(step: TrainingStep, x: Tensor) -> Trace:
    """The Trace of a forward pass without gradients, as a validation or a forecast makes it; of a real step too.

    x: a batch of inputs, (B, C, h, w) or with forcings behind its channels. Held are the weights alone: a process that
    forecasts has no gradients and no state of an optimizer, and whatever there is of them is not counted.
    """
    parallel, config = step.parallel, step.config
    stages = parallel.pipeline.stages if parallel.pipeline else []
    weights = [*parallel.model.parameters(), *parallel.model.buffers()]
    received = receive_buffers(stages)
    images = x[:, : config.model_in_channels]
    tracker = Tracker([*weights, *received, images])
    tracker.label("parameters", weights)
    tracker.label("batch", [images])
    tracker.label("buffers", received)
    held = Counter({"parameters": tracker.nbytes(tracker.note(weights))})

    was_training = parallel.model.training
    parallel.model.eval()
    with tracker, torch.no_grad(), step.autocast():
        parallel.predict(images, config.n_out_channels)
    parallel.model.train(was_training)
    messages, groups = _named_messages(tracker)
    return Trace(tracker.memory(), held, tracker.operations, messages, groups)


def _named_messages(tracker):
    """(messages with groups by name, {name: ranks of the group}) of what a tracker has seen."""
    dimensions, messages = _dimensions(), Counter[Message]()
    for message, calls in tracker.messages.items():
        messages[message._replace(group=dimensions[message.group])] += calls
    groups = {dimensions[message.group]: message.group for message in tracker.messages}
    return messages, groups


def _dimensions():
    """{ranks of a group that this rank is in: the dimension of the mesh along which it lies}."""
    names = {}
    if dist.is_initialized():
        for dimension in GROUPS:
            names.setdefault(tuple(dist.get_process_group_ranks(comm.get_group(dimension))), dimension)
        names.setdefault(tuple(range(dist.get_world_size())), "world")
    return names
