"""Data parallelism: every rank computes on its part of the batch. The strategies differ in what a rank stores.

| strategy | parameters | gradients | optimizer state | collectives of a step |
|---|---|---|---|---|
| ddp | all | all | all | all-reduce of the gradients, bucket by bucket during the backward pass |
| zero1 | all | all | 1/N | the same, then each rank broadcasts the parameters that it has updated |
| zero2 | 1/N, gathered from forward to backward | 1/N | 1/N | all-gather and reduce-scatter of every unit |
| fsdp | 1/N, a unit gathered while it computes | 1/N | 1/N | two all-gathers and a reduce-scatter of every unit |
| hsdp | as fsdp inside a group of ranks, copied from group to group | | | also an all-reduce between the groups |

Li et al. 2020 (DDP, arXiv:2006.15704), Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), Zhao et al. 2023 (FSDP,
arXiv:2304.11277). Whatever the strategy, the update is that of one device with the whole batch.
"""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from distributed.checks.options import (
    DataParallelOptions,
    check_recomputation,
    check_types,
    is_sharded,
    naming_gather_dtype,
    why_unused,
)
from distributed.checks.ties import keep_ties
from distributed.checks.usage import Usage
from distributed.checks.watches import LayerWatch, WriteWatch, check_writes
from distributed.parallel_model import ParallelModel
from distributed.sharded_units import GATHER_DTYPES, share_out
from distributed.split import Split
from distributed.weight_shards import fill_weights
from utils import comm
from utils.choices import check_known, choose
from utils.config import SHARDED, STRATEGIES
from utils.device import device_module, on_capture_stream
from utils.errors import LayoutError
from utils.layout import shard_sizes
from utils.torch_private import is_dtensor, is_fsdp_module


def fully_shard_model(
    model: nn.Module,
    options: DataParallelOptions,
    device: torch.device,
    apart: Collection[str],
    usage: Usage,
) -> set[str]:
    """Split the parameters over the data-parallel ranks, with zero2, fsdp or hsdp; other strategies keep them whole.

    apart: names of parameters that are left alone. The model may lie on the meta device: nothing is allocated here.
    Returns the names of further parameters that stay whole, whose gradients nobody reduces yet.
    """
    if not is_sharded(options):
        return set()
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard  # slow

    for parameter in model.parameters():
        if not parameter.is_contiguous():  # a part of it is one piece of memory
            parameter.data = parameter.data.contiguous()
    # Which weights are gathered together, and whether the model can be trained so.
    shared = share_out(model, usage, options.wrap_policy, options.wrap_min_params, apart)
    units = shared.units
    check_recomputation(model, units, usage, options)
    check_writes(usage, shared.whole | set(apart), options.data_parallel)
    names = {parameter: name for name, parameter in model.named_parameters()}
    gathered = {}  # {unit: names of the weights that it gathers}
    for unit in (model, *units):
        gathered[unit] = [names[weight] for weight in shared.weights[unit]]

    # How they are gathered: over which ranks, for how long, and in which dtype.
    dtype = choose("gather_dtype", options.gather_dtype, GATHER_DTYPES)
    pins = device_module(device, "Stream") is not None  # copies from pinned memory go on beside computation
    offload = CPUOffloadPolicy(pin_memory=pins) if options.cpu_offload else OffloadPolicy()
    mesh_name = "hsdp" if options.data_parallel == "hsdp" else "grad_reduce"
    common: dict[str, Any] = {
        "mesh": comm.get_mesh(mesh_name),
        "reshard_after_forward": options.data_parallel != "zero2",  # zero2 keeps a unit until its backward pass
        "offload_policy": offload,
    }
    wide = torch.get_default_dtype()  # float32, or float64
    of_unit = MixedPrecisionPolicy(dtype, reduce_dtype=wide)
    of_root = MixedPrecisionPolicy(dtype, reduce_dtype=wide, output_dtype=wide)
    # The root first: it may take weights that lie in units, where torch would not look for them later.
    for module in (model, *units):
        others = set(module.parameters()) - shared.weights[module]
        policy = of_root if module is model else of_unit
        fully_shard(module, mp_policy=policy, ignored_params=others, **common)
    if usage.varies:
        WriteWatch(model, gathered, options.data_parallel)
    if options.prefetch:
        # Each unit begins to gather the next ones, in the order in which they compute.
        for ahead, direction in ((units, "forward"), (units[::-1], "backward")):
            for i, unit in enumerate(ahead):
                next_units = ahead[i + 1 : i + 1 + options.prefetch]
                prefetch = getattr(unit, f"set_modules_to_{direction}_prefetch")
                prefetch(next_units)
    if dtype is not None:
        model.forward = naming_gather_dtype(model.forward, options)
    return shared.whole


def check_options(model: nn.Module, options: DataParallelOptions) -> None:
    """Raise UsageError for a strategy or a compression that is not here, or that this model does not go with."""
    check_known("data_parallel", options.data_parallel, STRATEGIES)
    check_known("gradient_compression", options.gradient_compression, COMPRESSIONS)
    check_types(model, options)


def data_parallel(
    model: nn.Module,
    options: DataParallelOptions,
    device: torch.device,
    weights: Iterable[tuple[str, Tensor]],
    usage: Usage,
    split: Split | None = None,
) -> ParallelModel:
    """Distribute a model that lies on the meta device; returns it as a ParallelModel, in memory and initialised.

    weights: (name, full tensor) of every parameter and buffer of the whole model, the same on every rank. usage: of the
    whole model, seen before it was split. split: the result of model parallelism, applied before.
    """
    check_options(model, options)
    split = split or Split()
    modules: Sequence[nn.Module] = split.stages or [model]
    if options.sync_batchnorm:
        from distributed.batch_norm import synchronize_batch_norm

        members = shard_sizes(options.ensemble_size, comm.get_size("ens"))
        own_members = members[comm.get_rank("ens")]
        share = Fraction(options.ensemble_size, own_members * len(members))
        synchronize_batch_norm(model, comm.get_group("grad_reduce"), share)
    whole: set[str] = set()
    for module in modules:
        whole |= _share_out_and_allocate(module, options, device, split, usage)
    if whole and options.amp_mode == "fp16":  # torch's gradient scaler takes no mixture of DTensors and plain tensors
        raise LayoutError(
            f"{options.data_parallel} with amp_mode fp16 cannot share out '{min(whole)}': use bf16, or ddp"
        )
    fill_weights(model, weights, split)
    if is_sharded(options) and usage.varies:
        gather_once(model)
    # DistributedDataParallel reduces the gradients of what is left. It wants something to do.
    trained = [name for name, p in model.named_parameters() if p.requires_grad and name not in split.specs]
    keeps_whole = options.data_parallel not in SHARDED
    is_reduced = keeps_whole and comm.get_size("grad_reduce") > 1 and not options.noddp
    replicated = is_reduced and bool(trained)
    notes = []
    if replicated:
        if options.gradient_accumulation > 1:  # otherwise the first step tells what each one has
            with_weights = []
            for module in model.modules():
                own_weights = list(module.parameters(recurse=False))
                if own_weights:
                    with_weights.append(module)
            check_recomputation(model, with_weights, usage, options)
        unused = why_unused(trained, usage, options, bool(split.stages))
        if unused:
            notes.append(
                f"DistributedDataParallel looks for unused weights in every step, since {unused}: "
                "a walk over the graph and a small all-reduce more"
            )
        modules = [replicate(module, options, device, split, bool(unused)) for module in modules]
    pipeline = None
    if split.stages:
        from distributed.pipeline import Pipeline  # slow to import, and only rung 3 has stages

        pipeline = Pipeline(modules, comm.get_group("pp"), split.schedule, options.gradient_accumulation, device)
    return ParallelModel(model, modules[0], split, replicated, pipeline, whole, notes)


def _share_out_and_allocate(
    module: nn.Module,
    options: DataParallelOptions,
    device: torch.device,
    split: Split,
    usage: Usage,
) -> set[str]:
    """Give a module memory for what this rank keeps of it. Returns the names of parameters that stay whole."""
    whole = fully_shard_model(module, options, device, split.specs, usage)
    with keep_ties(module):
        allocate(module, device, options.cpu_offload)
    # Ranks with other samples may draw other layers.
    group = comm.get_group("grad_reduce")
    shares_parameters = options.data_parallel in SHARDED and comm.get_size("dp") > 1
    if group and shares_parameters:
        LayerWatch(module, group, device, options.data_parallel)
    return whole


def gather_once(model: nn.Module) -> None:
    """Gather each unit once: one that the model skips in all micro-batches of a step lacks what torch expects of it."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.unshard()
            module.reshard()


def allocate(module: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Give a module on the meta device memory; with cpu_offload in host memory for what fully_shard has split."""

    def empty(tensor: Tensor) -> Tensor:
        is_offloaded = cpu_offload and is_dtensor(tensor)
        return torch.empty_like(tensor, device="cpu" if is_offloaded else device)

    module._apply(empty)  # as to_empty, which knows one device for all tensors


def replicate(
    module: nn.Module,
    options: DataParallelOptions,
    device: torch.device,
    split: Split,
    find_unused: bool = False,
) -> DistributedDataParallel:
    """DistributedDataParallel: it averages gradients, bucket by bucket, while the backward pass still runs.

    find_unused: it looks in each step for weights that get no gradient. Otherwise all steps are like the first.
    """
    # Parameters that are split over domain ranks are reduced by finish_gradients, buffers by share_buffers.
    buffers = [name for name, _ in module.named_buffers()]
    ignored = [*split.specs, *buffers]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    device_ids = [device] if device.type != "cpu" else None
    is_same_each_step = options.gradient_accumulation == 1 and not split.stages and not find_unused
    stream = on_capture_stream() if options.enable_cuda_graphs else contextlib.nullcontext()
    with stream:
        ddp = DistributedDataParallel(
            module,
            device_ids=device_ids,
            process_group=comm.get_group("grad_reduce"),
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=is_same_each_step,
            # The pipeline calls forward and backward apart, from which DDP cannot learn the order of its buckets.
            find_unused_parameters=bool(split.stages) or find_unused,
        )
    compress = COMPRESSIONS[options.gradient_compression]
    if compress is not None:
        ddp.register_comm_hook(comm.get_group("grad_reduce"), compress)
    return ddp


def reduce_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of torch, which DDP itself accepts with NCCL only; gloo reduces bfloat16 too."""
    return bf16_compress_hook(group, bucket)


COMPRESSIONS = {"none": None, "bf16": reduce_in_bf16}
