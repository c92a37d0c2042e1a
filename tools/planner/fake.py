"""One rank of an imagined run: its tensors have shapes but no data, and its messages go nowhere.

The model, its parallel form and the training step are those of a real run; this file replaces what a FakeTensor cannot
do. Only this file of the planner imports PyTorch's private modules, and only it replaces or reads private attributes of
DistributedDataParallel, pipelines and process groups. Checked with torch 2.13.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from distributed import attention, attention_kernels
from distributed.checks.usage import parameters_behind
from distributed.collectives import shard_sizes
from distributed.data_parallel import DataParallelOptions, fully_shard_model
from distributed.pipeline import Pipeline
from distributed.shard.core import constants
from distributed.split import Split, own_window
from tools.planner.fake_kernels import kernels_with_statistics
from utils import comm
from utils.layout import Layout
from utils.schema import Config
from utils.torch_private import storage_id

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import PipelineStage

# How a schedule's method of these messages is called in torch 2.13, and in 2.15; 2.11 has none.
SHAPE_MESSAGES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")
PREPARES_STAGES = ("_initialize_stage", "_initialize_stages")  # of a schedule of one stage a rank, and of several


@contextmanager
def fake_rank(
    layout: Layout,
    rank: int = 0,
    device_type: str = "cuda",
    held_on: str = "cpu",
) -> Iterator[FakeTensorMode]:
    """Inside, this process is a rank of a Layout, as far as utils.comm and torch.distributed can tell.

    device_type: whose kernels are imagined. held_on: type of the device on which its tensors are.
    Yields a context that makes every new tensor a fake one. Build a model on the meta device outside of that context.
    Raises RuntimeError where the process is already part of a run.
    """
    if dist.is_initialized():
        raise RuntimeError("a layout is planned outside of a run: this process has joined one")
    with ExitStack() as stack:
        # Groups of ranks that send nothing.
        if layout.world_size > 1:
            backends = "fake" if held_on == "cpu" else f"cpu:fake,{held_on}:fake"
            # torch writes the rank before each line of a traceback, once more for every group that this process makes.
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=layout.world_size)
            stack.callback(dist.destroy_process_group)
        before = comm.swap_meshes({})
        stack.callback(comm.swap_meshes, before)
        with patch("torch.distributed.device_mesh.new_group", _own_group):
            comm.build_mesh(torch.device(held_on), layout)

        # What needs the data of a tensor is replaced by what needs only its shape.
        stack.enter_context(patch.object(FakeTensor, "as_subclass", _as_subclass, create=True))
        stack.enter_context(patch("distributed.data_parallel.fully_shard_model", _shard_on_meta))
        stack.enter_context(patch("distributed.data_parallel.replicate", Replica))
        if layout.pp > 1:
            stack.enter_context(_pipeline_without_data())
        # A label for a profiler is an operation as well.
        silent: dict[str, Any] = {"__enter__": lambda self: self, "__exit__": lambda *_: None}
        stack.enter_context(patch.multiple(torch.profiler.record_function, **silent))
        forget_other_kernels(device_type)
        kernels = kernels_with_statistics(device_type)
        stack.enter_context(patch.dict(op_implementations_dict, kernels))
        # A decomposition would come before an implementation.
        stack.enter_context(patch.dict(decomposition_table))
        for operation in kernels:
            decomposition_table.pop(operation, None)
        stack.enter_context(patch("torch.optim.adam._get_value", lambda value: 1.0))  # it reads the number of steps
        if device_type != "cpu":
            kernel = partial(_gpu_kernel, attention.kernel)
            stack.enter_context(patch.object(attention, "kernel", kernel))

        # The state of the generators tells which layers draw random numbers.
        mode = FakeMode(allow_non_fake_inputs=True)
        draws_on_host: Any = int  # 0 at any time: the operations of a GPU draw on the GPU
        if device_type == "cpu":
            draws_on_host = partial(getattr, mode, "draws")
        stack.enter_context(patch("distributed.checks.watches.host_generators", draws_on_host))
        yield mode


class FakeMode(FakeTensorMode):
    """Every new tensor is a fake one; `draws` counts the operations that would draw random numbers.

    It stands for the state of a generator, which fake tensors leave as it is.
    """

    draws = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation on fake tensors."""
        # The updates of an optimizer only change numbers, and fake tensors have none.
        if func._opname.startswith("_foreach") and not func._schema.returns:
            return None
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        # Fused attention has this tag, but with dropout a CPU takes the separate operations.
        self.draws += may_draw and "scaled_dot_product" not in func.name()
        return super().dispatch(func, types, args, kwargs)


@lru_cache(maxsize=1)  # of the last type: the same one again has nothing to forget
def forget_other_kernels(device_type: str) -> None:
    """Empty torch's cache of fake results, in which those of norms on another type of device may lie."""
    FakeTensorMode.cache_clear()


def buffers_of_numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that may be constant indices: (rows, ...) of whole numbers."""
    return {name: x for name, x in model.named_buffers() if x.dtype in constants.INTEGERS and x.dim()}


def values_are_known(
    model: nn.Module,
    values: Mapping[str, np.ndarray],
) -> AbstractContextManager[Any]:
    """Inside, constant indices that are fake have their values; others have none. values: {name of a buffer: value}."""
    fakes = buffers_of_numbers(model)
    known = {id(fakes[name]): value for name, value in values.items()}

    def read(index: torch.Tensor) -> np.ndarray | None:
        whole = index if index._base is None else index._base
        array = known.get(id(whole))
        if array is None:
            return None
        start = array.reshape(-1)[index.storage_offset() :]
        strides = [step * array.itemsize for step in index.stride()]
        return np.lib.stride_tricks.as_strided(start, index.shape, strides).astype(np.int64)

    return patch.object(constants, "read", read)


def values_are_zero() -> AbstractContextManager[Any]:
    """Inside, what reads the value of a fake tensor gets 0, or True of a truth value; elsewhere it fails."""
    value = property(lambda self: float(self.dtype == torch.bool), lambda self, value: None)
    return patch.object(FakeTensor, "item_memo", value)


def _shard_on_meta(*arguments: Any) -> Any:
    """fully_shard_model on the plain meta tensors of a model: among fake ones each operation takes longer.

    Where there is an accelerator, fully_shard makes a tensor on it, which must be a fake one.
    """
    plain = nullcontext() if torch.accelerator.is_available() else unset_fake_temporarily()
    with plain:
        return fully_shard_model(*arguments)


def _own_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
    """A group of this rank. Those of other ranks, a thousand in a mesh of a thousand, are not made."""
    if dist.get_rank() not in ranks:
        return None
    return dist.new_group(ranks, **options)


def _gpu_kernel(choose, q, mask):
    """The kernel that ring attention chooses on a GPU: all fused kernels keep the same tensors."""
    fused = choose(q, mask, "cuda")
    return attention_kernels.CpuFlash if fused is not attention_kernels.Plain else fused


@cache
def _fake_class(cls):
    return type(f"Fake{cls.__name__}", (cls, FakeTensor), {})


def _as_subclass(self, cls):
    """A FakeTensor has a Python class already: to be a ShardTensor too, it gets a class that inherits from both."""
    alias = self.view_as(self)
    alias.__class__ = _fake_class(cls)
    return alias


@contextmanager
def _pipeline_without_data():
    """Inside, a pipeline sends no shapes, and its stages have Replicas."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule  # slow to import

    with ExitStack() as stack:
        for name in SHAPE_MESSAGES:
            if hasattr(_PipelineSchedule, name):
                stack.enter_context(patch.object(_PipelineSchedule, name, _shapes_are_known))
        stack.enter_context(patch("torch.distributed.pipelining.stage.DistributedDataParallel", Replica))
        yield


def _shapes_are_known(schedule, stages, *_):
    """Replaces the messages in which stages tell each other the shapes that they will send."""
    from torch.distributed.pipelining.stage import InferenceMode  # torch 2.11 has none

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextmanager
def pipeline_shapes(config: Config, layout: Layout) -> Iterator[None]:
    """Inside, stages of a pipeline take and give micro-batches: images (B, C, H, W) at its ends, (B, N, D) between."""
    if layout.pp == 1:
        yield
        return
    from torch.distributed.pipelining.stage import PipelineStage  # slow to import

    samples = config.global_batch_size // layout.dp // config.gradient_accumulation
    window = own_window(config.img_size, config.patch_size)
    size = [side.stop - side.start for side in window]  # of this rank's part
    inputs = (samples, config.model_in_channels, *size)
    outputs = (samples, config.n_out_channels, *size)
    number_of_tokens = math.prod(size) // config.patch_size ** len(size)
    if config.sequence_parallel:
        sizes = shard_sizes(number_of_tokens, layout.tp)
        number_of_tokens = sizes[comm.get_rank("tp")]
    tokens = (samples, number_of_tokens, config.embed_dim)

    like = partial(torch.empty, device="meta")

    def stage(module, number, count, device, group):
        is_first = number == 0
        is_last = number == count - 1
        taken = inputs if is_first else tokens
        given = outputs if is_last else tokens
        # No gradient goes to the images, and the loss has none from a next stage.
        shapes: dict[str, Any] = {
            "input_args": (like(taken, requires_grad=not is_first),),
            "input_grads": None if is_first else (like(taken),),
            "output_args": (like(given, requires_grad=not is_last),),
            "output_grads": None if is_last else (like(given),),
        }
        known = inspect.signature(PipelineStage).parameters  # torch 2.11 takes no shapes of gradients
        shapes = {name: shape for name, shape in shapes.items() if name in known}
        return PipelineStage(module, number, count, device, group=group, **shapes)

    with (
        patch("torch.distributed.pipelining.PipelineStage", stage),
        # Torch 2.11 sends a number as a run begins, so that neighbours connect: no message of a step.
        patch.object(PipelineStage, "_get_init_p2p_neighbors_ops", lambda _: [], create=True),
        # Torch 2.11 compares the outputs with the shapes above, and their types too, which autocast decides.
        patch.object(PipelineStage, "_validate_fwd_outputs", lambda *_: None, create=True),
    ):
        yield


class _Prepared(BaseException):
    """The stages of a pipeline have their buffers. It is no Exception, which a schedule of torch would log."""


@contextmanager
def ends_before_computing(pipeline: Pipeline) -> Iterator[None]:
    """Inside, the first step of a pipeline ends once its stages have what they keep for all steps.

    Where torch has these methods no more, the step runs to its end, which takes longer and leaves the same.
    """

    def prepare_and_stop(prepare: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        raise _Prepared

    with ExitStack() as stack:
        for name in PREPARES_STAGES:
            prepare = getattr(pipeline.schedule, name, None)
            if prepare:
                stack.enter_context(patch.object(pipeline.schedule, name, partial(prepare_and_stop, prepare)))
        stack.enter_context(suppress(_Prepared))
        yield


def receive_buffers(stages: Iterable["PipelineStage"]) -> list[Any]:
    """The buffers into which stages of a pipeline receive: one for each micro-batch, for the whole run; and None."""
    infos = tree_leaves([(stage.args_recv_info, stage.grad_recv_info) for stage in stages])
    return [getattr(info, "buffer", None) for info in infos]


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced in one message."""

    flat: torch.Tensor  # (elements of all its gradients,)
    parameters: list[nn.Parameter]
    missing: int  # gradients that are not ready yet in this step


class Replica(nn.Module):
    """A stand-in for DistributedDataParallel with the same memory and messages: the reducer in C++ needs data.

    Gradients are views into buckets, which stay allocated. A bucket is reduced when its last gradient is ready. After
    the first step the buckets hold the parameters in the order in which their gradients became ready, and then those
    that had none: a parameter without use is ready as soon as a backward pass begins. find_unused: each forward pass
    tells which those are.
    """

    def __init__(
        self,
        module: nn.Module,
        options: DataParallelOptions,
        device: torch.device,
        split: Split,
        find_unused: bool,
    ):
        super().__init__()
        self.module = module
        self.device = device
        self.syncs = True  # no_sync() turns it off
        self.reducer = SimpleNamespace(prepare_for_backward=lambda outputs: None)  # which a pipeline calls
        self.group = comm.get_group("grad_reduce")
        self.is_compressed = options.gradient_compression == "bf16"
        self.looks_at_graph = find_unused
        self.finds_unused = bool(split.stages) or find_unused  # in every step, and the buckets stay as they are
        self.limit = int(options.bucket_cap_mb * 2**20)

        # Frozen parameters, and those that are split over ranks, have no gradients to reduce.
        reduced = []
        for name, parameter in module.named_parameters():
            if name not in split.specs and parameter.requires_grad:
                reduced.append(parameter)
        self.order: list[nn.Parameter] = []  # whose gradients are ready in this step
        self.unused: list[nn.Parameter] = []  # known after the first step
        self.is_first_step = True
        self._make_buckets(reduced)
        for parameter in reduced:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _make_buckets(self, parameters):
        self.parameters_in_buckets = parameters
        self.buckets = []
        self.bucket_of = {}
        self.gradient_in = {}  # {parameter: its gradient, a view into its bucket}
        # torch's own rule assigns parameters to buckets, so that messages have the sizes of a real run.
        are_sparse = [False] * len(parameters)
        grouped, _ = dist._compute_bucket_assignment_by_size(parameters, [self.limit], are_sparse)
        for numbers in grouped:
            members = [parameters[i] for i in numbers]
            elements = sum(p.numel() for p in members)
            bucket = Bucket(members[0].new_empty(elements), members, missing=len(members))
            views = torch._utils._unflatten_dense_tensors(bucket.flat, members)
            self.buckets.append(bucket)
            for parameter, view in zip(members, views, strict=True):
                self.bucket_of[parameter] = bucket
                self.gradient_in[parameter] = view

    def forward(self, *args: Any) -> Any:
        """The output of the module."""
        # The last step is over where some parameters had no gradient in it.
        if self.order:
            self._end_step()
        output = self.module(*args)
        if self.looks_at_graph and output.requires_grad:
            used = parameters_behind([output])
            self.unused = [parameter for parameter in self.parameters_in_buckets if parameter not in used]
        return output

    def no_sync(self) -> AbstractContextManager[Any]:
        """Inside, gradients are added up without a reduction."""
        return patch.object(self, "syncs", False)

    @torch.no_grad()
    def _collect(self, parameter):
        """After the gradient of a parameter is there: put it into its bucket, and reduce the bucket once it is full."""
        view = self.gradient_in[parameter]
        is_in_bucket = storage_id(parameter.grad) == storage_id(view)
        if not is_in_bucket:
            parameter.grad = view.copy_(parameter.grad)
        if not self.syncs:
            return
        # The first gradient of a step: parameters without use are ready by then.
        if not self.order:
            for unused in self.unused:
                self._mark_ready(unused)
        self.order.append(parameter)
        self._mark_ready(parameter)

        are_all_ready = len(self.order) + len(self.unused) == len(self.parameters_in_buckets)
        if not are_all_ready:
            return
        if self.finds_unused:  # the ranks tell each other which parameters they used
            used = torch.zeros(len(self.parameters_in_buckets), dtype=torch.int32, device=self.device)
            dist.all_reduce(used, group=self.group)
        self._end_step()

    def _mark_ready(self, parameter):
        bucket = self.bucket_of[parameter]
        bucket.missing -= 1
        if not bucket.missing:
            bucket.missing = len(bucket.parameters)  # of the next step
            self._reduce(bucket)

    @torch.no_grad()
    def _end_step(self):
        """After the first step make the buckets again, in the order of that step."""
        order = self.order
        self.order = []
        is_settled = self.finds_unused or not self.is_first_step
        self.is_first_step = False
        if is_settled:
            return
        ready = set(order)
        self.unused = [parameter for parameter in self.parameters_in_buckets if parameter not in ready]
        parameters = [*order, *self.unused]
        is_same_order = list(map(id, parameters)) == list(map(id, self.parameters_in_buckets))
        if is_same_order:
            return
        # The gradients of this step move into the new buckets.
        old_gradients = self.gradient_in
        self._make_buckets(parameters)
        for parameter in order:
            if parameter.grad is not None:
                parameter.grad = self.gradient_in[parameter].copy_(old_gradients[parameter])

    def _reduce(self, bucket):
        sent = bucket.flat.bfloat16() if self.is_compressed else bucket.flat
        dist.all_reduce(sent, group=self.group)
        if self.is_compressed:
            bucket.flat.copy_(sent)
