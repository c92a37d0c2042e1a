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
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from distributed.agreed_layers import LayerWatch
from distributed.parallel_model import ParallelModel
from distributed.sharded_units import GATHER_DTYPES, share_out
from distributed.split import Split
from distributed.ties import keep_ties
from distributed.usage import Usage
from distributed.weight_shards import fill_weights
from distributed.written_weights import WriteWatch, check_writes
from utils import comm
from utils.config import SHARDED
from utils.device import device_module, on_capture_stream
from utils.errors import LayoutError, UsageError, first_line
from utils.layout import shard_sizes
from utils.sharded import is_dtensor, is_fsdp_module

OF_DTYPES = re.compile(r"\btypes?\b|dtype|BFloat16|Half")  # in messages of torch


@dataclass(frozen=True)
class DataParallelOptions:
    """Settings of data parallelism: what ranks share, and how. Its fields are named in the config (utils/schema.py)."""

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
    amp_mode: str = "none"
    longest_rollout: int = 1
    ensemble_size: int = 1


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
    dtype = GATHER_DTYPES[options.gather_dtype]
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


def is_sharded(options: DataParallelOptions) -> bool:
    """Tell whether fully_shard cuts the parameters."""
    return options.data_parallel in SHARDED and comm.get_size("grad_reduce") > 1


def check_recomputation(
    model: nn.Module,
    modules: Iterable[nn.Module],
    usage: Usage,
    options: DataParallelOptions,
) -> None:
    """Raise LayoutError for modules that a reentrant checkpoint runs several times before gradients are reduced.

    fully_shard reduces a unit's gradient for one of these calls and loses that of the others, unless the first call, of
    which the gradient comes last, was a plain one. DistributedDataParallel takes a second gradient for an error.
    """
    names = {module: name for name, module in model.named_modules()}
    sharded = is_sharded(options)
    for module in modules:
        name = names[module]
        concerns = usage.recomputed.get(name, False) if sharded else name in usage.recomputed
        is_repeated = usage.calls.get(name, 0) > 1 or options.longest_rollout > 1
        if concerns and is_repeated:
            steps = options.longest_rollout
            how = f"in {steps} steps of a forecast" if steps > 1 else "several times"
            instead = "--wrap_policy none" if sharded else "--gradient_accumulation 1"
            raise LayoutError(
                f"{options.data_parallel}: '{name}' runs in a reentrant checkpoint {how}, whose gradients cannot be "
                "reduced: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or give " + instead
            )


def naming_gather_dtype(forward: Callable[..., Any], options: DataParallelOptions) -> Callable[..., Any]:
    """A forward function that raises UsageError, naming the option, where dtypes of tensors do not go together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if not OF_DTYPES.search(str(error)):
                raise
            raise UsageError(
                f"gather_dtype {options.gather_dtype}: {first_line(error)}: weights and inputs of modules are in "
                f"{options.gather_dtype}, and the model mixes them with others: give --amp_mode "
                f"{options.gather_dtype}, which chooses the type of each operation, or --gather_dtype none"
            ) from error

    return call


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
    split = split or Split()
    check_types(model, options)
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
        unused = why_unused(trained, usage, options, split)
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


def check_types(model: nn.Module, options: DataParallelOptions) -> None:
    """Raise LayoutError, naming a weight, where a strategy cannot share out weights of its type, or empty ones."""
    if options.data_parallel == "ddp" or comm.get_size("grad_reduce") == 1:
        return
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        if parameter.is_complex():
            raise LayoutError(f"{options.data_parallel} cannot share out the complex weight '{name}': use ddp")
        if options.data_parallel != "zero1" and not parameter.numel():
            raise LayoutError(f"{options.data_parallel} cannot share out '{name}', which has no elements: use ddp")
        first, other = trained[0]
        if options.data_parallel == "zero1" and parameter.dtype != other.dtype:
            first_type = str(other.dtype).removeprefix("torch.")
            other_type = str(parameter.dtype).removeprefix("torch.")
            raise LayoutError(
                f"zero1 shares out weights of one type: '{first}' is in {first_type}, '{name}' in {other_type}: "
                "use ddp or fsdp"
            )


def gather_once(model: nn.Module) -> None:
    """Gather each unit once: one that the model skips in all micro-batches of a step lacks what torch expects of it."""
    for module in model.modules():
        if is_fsdp_module(module):
            module.unshard()
            module.reshard()


def why_unused(trained: Collection[str], usage: Usage, options: DataParallelOptions, split: Split) -> str:
    """Why DistributedDataParallel must look for weights without a gradient, in words; "" where it need not.

    trained: names of weights. In a reentrant checkpoint it cannot find them, nor in a captured graph or a pipeline's.
    """
    if split.stages or usage.recomputed or options.enable_cuda_graphs:
        return ""
    if usage.varies:
        return f"another pass may skip some: {usage.varies}"
    unused = [name for name in trained if name not in usage.reached]
    if unused and options.gradient_accumulation > 1:  # otherwise the first step tells
        return f"'{unused[0]}' gets no gradient"
    return ""


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
    if options.gradient_compression == "bf16":
        ddp.register_comm_hook(comm.get_group("grad_reduce"), reduce_in_bf16)
    return ddp


def reduce_in_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of torch, which DDP itself accepts with NCCL only; gloo reduces bfloat16 too."""
    return bf16_compress_hook(group, bucket)


def build_zero1_optimizer(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer whose state is shared out: each rank updates its share of the parameters and broadcasts them.

    groups: of parameters, as any optimizer takes them, each shared out by itself.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    parameters = [parameter for group in groups for parameter in group["params"]]
    strides = [parameter.stride() for parameter in parameters]
    optimizer = ZeroRedundancyOptimizer(
        groups,
        optimizer_class,  # type: ignore[arg-type]  # or a function that makes one
        process_group=comm.get_group("grad_reduce"),
        parameters_as_bucket_view=True,
        **options,
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
