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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed.agreed_layers import LayerWatch
from distributed.parallel_model import ParallelModel
from distributed.split import Split
from distributed.ties import keep_ties
from distributed.weight_shards import fill_weights
from utils import comm
from utils.device import library, on_capture_stream
from utils.errors import LayoutError

CONTAINERS = nn.ModuleList | nn.ModuleDict  # they have no forward function
SHARDED = ("zero2", "fsdp", "hsdp")
DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DataParallelOptions:
    """Settings of data parallelism: what ranks share, and how. Its fields are keys of the config (utils/schema.py)."""

    data_parallel: str = "ddp"
    noddp: bool = False
    bucket_cap_mb: float = 25
    gradient_compression: str = "none"
    wrap_policy: str = "block"
    wrap_min_params: int = 1_000_000
    prefetch: int = 0
    gather_dtype: str = "none"
    cpu_offload: bool = False
    sync_batchnorm: bool = False
    gradient_accumulation: int = 1
    enable_cuda_graphs: bool = False


def fully_shard_model(
    model: nn.Module, options: DataParallelOptions, device: torch.device, apart: Collection[str]
) -> None:
    """Split the parameters over the data-parallel ranks, with zero2, fsdp or hsdp; other strategies keep them whole.

    apart: names of parameters that are left alone. The model may lie on the meta device: nothing is allocated here.
    """
    if options.data_parallel not in SHARDED or comm.get_size("dp_image") == 1:
        return
    hsdp = ("dp_replicate", "dp_shard" if comm.get_size("image") == 1 else "dp_shard_image")
    dtype = DTYPES[options.gather_dtype]
    pins = library(device, "Stream") is not None  # copies from pinned memory go on beside computation
    offload = CPUOffloadPolicy(pin_memory=pins) if options.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": comm.get_mesh(*hsdp) if options.data_parallel == "hsdp" else comm.get_mesh("dp_image"),
        "reshard_after_forward": options.data_parallel != "zero2",  # zero2 keeps a unit until its backward pass
        "offload_policy": offload,
        "ignored_params": {p for name, p in model.named_parameters() if name in apart},
    }
    units = sharded_units(model, options.wrap_policy, options.wrap_min_params)
    wide = torch.get_default_dtype()  # float32, or float64
    for unit in units:
        fully_shard(unit, **common, mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=wide))
    rest = MixedPrecisionPolicy(dtype, reduce_dtype=wide, output_dtype=wide)
    fully_shard(model, **common, mp_policy=rest)  # what no unit holds
    if options.prefetch:
        for ahead, direction in ((units, "forward"), (units[::-1], "backward")):
            for i, unit in enumerate(ahead):
                getattr(unit, f"set_modules_to_{direction}_prefetch")(ahead[i + 1 : i + 1 + options.prefetch])


def sharded_units(model: nn.Module, policy: str, min_params: int) -> list[nn.Module]:
    """Modules whose parameters are gathered together, in the order in which they compute.

    block: each of the model's `blocks`, or each of its direct children where it has none, those of a list one by one.
    size: the smallest modules that hold min_params parameters. none: the whole model is one unit, gathered at once.
    """
    if policy == "none":
        return []
    if policy == "block":
        return list(_callable_children(getattr(model, "blocks", model)))
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Parameters of the module that no unit holds."""
        left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if left < min_params or isinstance(module, CONTAINERS) or module is model:
            return left
        units.append(module)
        return 0

    visit(model)
    return units


def _callable_children(module):
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _callable_children(child)
        else:
            yield child


def data_parallel(
    model: nn.Module,
    options: DataParallelOptions,
    device: torch.device,
    weights: Iterable[tuple[str, Tensor]],
    split: Split | None = None,
) -> ParallelModel:
    """Distribute a model that lies on the meta device; returns it as a ParallelModel, in memory and initialised.

    weights: (name, full tensor) of every parameter and buffer of the whole model, the same on every rank. split: the
    result of model parallelism, applied before.
    """
    split = split or Split()
    if options.data_parallel != "ddp" and comm.get_size("dp_image") > 1:
        for name, parameter in model.named_parameters():
            if parameter.is_complex():  # torch shares out tensors of one dtype alone
                raise LayoutError(f"{options.data_parallel} cannot share out the complex weight '{name}': use ddp")
    modules: Sequence[nn.Module] = split.stages or [model]
    if options.sync_batchnorm:
        from distributed.batch_norm import synchronize_batch_norm

        synchronize_batch_norm(model, comm.get_group("dp_image"))
    for module in modules:
        fully_shard_model(module, options, device, split.specs)
        with keep_ties(module):
            allocate(module, device, options.cpu_offload)
        group = comm.get_group("dp_image")
        if group and options.data_parallel in SHARDED and comm.get_size("dp") > 1:
            LayerWatch(module, group, device, options.data_parallel)
    fill_weights(model, weights, split)
    replicated = options.data_parallel not in SHARDED and comm.get_size("dp_image") > 1 and not options.noddp
    if replicated:
        modules = [replicate(module, options, device, split) for module in modules]
    pipeline = None
    if split.stages:
        from distributed.pipeline import Pipeline  # slow to import, and only rung 3 has stages

        pipeline = Pipeline(modules, comm.get_group("pp"), split.schedule, options.gradient_accumulation, device)
    return ParallelModel(model, modules[0], split, replicated, pipeline)


def allocate(module: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Give a module on the meta device memory; with cpu_offload in host memory for what fully_shard has split."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu" if cpu_offload and isinstance(tensor, DTensor) else device)

    module._apply(empty)  # as to_empty, which knows one device for all tensors


def replicate(
    module: nn.Module, options: DataParallelOptions, device: torch.device, split: Split
) -> DistributedDataParallel:
    """DistributedDataParallel: it averages gradients, bucket by bucket, while the backward pass still runs."""
    ignored = [*split.specs, *(name for name, _ in module.named_buffers())]  # ParallelModel.share_buffers shares these
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    with on_capture_stream() if options.enable_cuda_graphs else contextlib.nullcontext():
        ddp = DistributedDataParallel(
            module,
            device_ids=[device] if device.type != "cpu" else None,
            process_group=comm.get_group("dp_image"),
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=options.gradient_accumulation == 1 and not split.stages,
            # The pipeline calls forward and backward apart, from which DDP cannot learn the order of its buckets.
            find_unused_parameters=bool(split.stages),
        )
    if options.gradient_compression == "bf16":
        ddp.register_comm_hook(comm.get_group("dp_image"), reduce_in_bf16)
    return ddp


def reduce_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of torch, which DDP itself accepts with NCCL only; gloo reduces bfloat16 too."""
    return bf16_compress_hook(group, bucket)


def build_zero1_optimizer(
    optimizer_class: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer whose state is shared out: each rank updates its share of the parameters and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    parameters = list(parameters)
    strides = [parameter.stride() for parameter in parameters]
    optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class, process_group=comm.get_group("dp_image"), parameters_as_bucket_view=True, **options
    )
    for parameter, stride in zip(parameters, strides, strict=True):
        set_strides(parameter, stride)
    return optimizer


@torch.no_grad()
def set_strides(parameter: nn.Parameter, stride: Sequence[int]) -> None:
    """Arrange the elements of a parameter in the memory that it has, which is contiguous, by other strides.

    ZeroRedundancyOptimizer makes parameters contiguous in its buckets; gradients keep the strides of before. A fused
    optimizer reads both element by element as they lie in memory.
    """
    if parameter.stride() == stride:
        return
    value = parameter.clone()
    parameter.data = parameter.as_strided(parameter.shape, stride)
    parameter.copy_(value)
