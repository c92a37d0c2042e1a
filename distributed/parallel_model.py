"""The model as the training step calls it, whatever it is split over."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.collectives import as_group, gather_from_region
from distributed.split import Split
from distributed.tensor_parallel import reduce_partial_gradients
from utils import comm
from utils.errors import UsageError
from utils.torch_private import is_dtensor, is_fsdp_module

if TYPE_CHECKING:  # slow to import, and only rung 3 has one
    from distributed.pipeline import Pipeline


def check_output(output: Any, who: str) -> None:
    """Raise UsageError where a model's output is no tensor of numbers that can be trained. who: how errors call it."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return
    kind = type(output).__name__
    if isinstance(output, Tensor):
        dtype = str(output.dtype).removeprefix("torch.")
        found = f"a tensor of {dtype}"
    elif isinstance(output, Mapping):
        keys = ", ".join(map(repr, output))
        found = f"a {kind} of {keys}"
    elif isinstance(output, Sequence) and not isinstance(output, str):
        part_kinds = [type(part).__name__ for part in output]
        found = f"a {kind} of {', '.join(part_kinds)}"
    else:
        found = "None" if output is None else f"a {kind}"
    raise UsageError(
        f"{who} returns {found}: training needs one tensor of real numbers, (B, C, ...); return that alone, or give a "
        "class of your own that calls this one and returns it"
    )


class ParallelModel:
    """A model on all its ranks.

    model: this rank's part; its parameters have the names of the whole model. module: what a step calls, the model or
    the DistributedDataParallel around it. split: how model parallelism has split the model. replicated: gradients are
    reduced by DistributedDataParallel. pipeline: runs the stages of the model instead of `module`, or None. whole:
    names of parameters that fully_shard leaves whole. notes: for the log of a run.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        split: Split,
        replicated: bool,
        pipeline: "Pipeline | None" = None,
        whole: Collection[str] = (),
        notes: Sequence[str] = (),
    ):
        self.model = model
        self.module = module
        self.split = split
        self.replicated = replicated
        self.pipeline = pipeline
        self.whole = whole
        self.notes = notes

    def micro_batches(
        self,
        count: int,
        *batch: Tensor,
    ) -> Iterator[tuple[Tensor, ...]]:
        """Equal parts of a batch, one after the other; only the backward pass of the last one reduces gradients.

        batch: input, target and whatever else belongs to the samples, (B, ...), B a multiple of count. Yields as many
        tensors, of B / count samples each.
        """
        chunks = [tensor.chunk(count) for tensor in batch]
        parts = list(zip(*chunks, strict=True))
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            if is_fsdp_module(self.module):
                self.module.set_requires_gradient_sync(last)
            if self.replicated and not last:
                with cast(DistributedDataParallel, self.module).no_sync():
                    yield part
            else:
                yield part

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """After the last backward pass of a step: reduce the gradients that data parallelism leaves to other ranks."""
        reduce_partial_gradients(self.model, comm.get_group("tp"))
        # Data parallelism ignores parameters that are split over the domain ranks. Here their gradients become the mean
        # over dp. The loss was multiplied by the number of ranks that share a sample (distributed/domain_parallel.py).
        # Members of a sample are summed over their ranks, as the parts of an image are.
        replicas = comm.get_size("dp_ens")
        summed = comm.get_size("domain")
        for name, parameter in self.model.named_parameters():
            if name in self.split.specs and parameter.grad is not None:
                parameter.grad /= summed * replicas
                if replicas > 1:
                    dist.all_reduce(parameter.grad, group=comm.get_group("dp_ens"))
        self._reduce_whole()

    def _reduce_whole(self) -> None:
        """Let the gradients of parameters that fully_shard leaves whole become their mean over the ranks.

        Those of a kind travel together, each with a number: how many ranks have a gradient. Where no rank has one,
        there is none afterwards.
        """
        group = comm.get_group("grad_reduce")
        size = comm.get_size("grad_reduce")
        kinds = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            if name in self.whole and parameter.requires_grad:
                kinds[parameter.device, parameter.dtype].append(parameter)
        for parameters in kinds.values():
            # The gradient and its number, one parameter after the other, in one message.
            parts = []
            for parameter in parameters:
                grad = parameter.grad
                own = torch.zeros_like(parameter) if grad is None else grad
                has_grad = own.new_full((1,), float(grad is not None))
                parts += [own.flatten(), has_grad]
            packed = torch.cat(parts)
            dist.all_reduce(packed, group=group)
            lengths = [len(part) for part in parts]
            sums = iter(packed.split(lengths))
            for parameter in parameters:
                total = next(sums)
                ranks = next(sums)
                # The number is read only where this rank has none.
                if parameter.grad is not None or ranks.item() > 0:
                    parameter.grad = (total / size).view_as(parameter)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the square of the gradients' global L2 norm: the shares of all ranks add up to it.

        Every rank sums the squares that it holds, each divided by the number of ranks that hold the same gradient. A
        scalar, at least float32, on the device of the gradients; nothing is communicated.
        """
        squares = []
        for (_, parts), grads in self._gradients().items():
            dtypes = [grad.dtype for grad in grads]
            wide = reduce(torch.promote_types, dtypes, torch.float32)
            norms = torch._foreach_norm(grads, dtype=wide)
            square = torch.stack(norms).square().sum()
            # world_size / parts ranks hold the same gradients.
            squares.append(square * (parts / comm.world_size()))
        total = squares[0]
        for square in squares[1:]:
            total = total + square.to(total.device)
        return total

    @torch.no_grad()
    def clip_gradients(self, square: Tensor, max_norm: float) -> None:
        """Scale all gradients so that their L2 norm, over all ranks, is at most max_norm. square: of squared_norm."""
        is_split = comm.get_size("tp_pp") > 1 or self.split.specs
        if is_split or is_fsdp_module(self.module):
            square = comm.all_reduce(square.clone())
        else:  # every rank has all gradients
            square = square * comm.world_size()
        scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for (device, _), grads in self._gradients().items():
            torch._foreach_mul_(grads, scale.to(device))

    def _gradients(self) -> dict[tuple[torch.device, int], list[Tensor]]:
        """This rank's gradients, by device and by the number of ranks that hold different parts of one."""
        held = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if grad is None:
                continue
            # Each way in which the parameter is split multiplies the number of parts.
            parts = comm.get_size("pp")
            if name in self.split.dims:
                parts *= comm.get_size("tp")
            if name in self.split.specs:
                parts *= comm.get_size("domain")
            if is_dtensor(grad):
                for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                    is_split = hasattr(placement, "dim")  # also torch's _StridedShard, which is no Shard
                    if is_split:
                        parts *= size
                grad = grad.to_local()
            if grad.is_complex():
                grad = torch.view_as_real(grad)
            held[grad.device, parts].append(grad)
        return held

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Give all data-parallel ranks the buffers of the first one, as DistributedDataParallel does in every step.

        In training each rank's BatchNorm has running statistics of its own, of its samples. They are used in
        evaluation and kept in checkpoints: call this before both. A buffer that a model has filled with a part of a
        split image becomes whole, as a resumed run has it.
        """
        if comm.get_size("domain") > 1:
            make_buffers_whole(self.model)
        if comm.get_size("dp_ens") > 1:
            for buffer in self.model.buffers():
                broadcast_bytes(buffer, comm.get_group("dp_ens"))

    @torch.no_grad()
    def predict(self, x: Tensor, out_channels: int, *noise: Tensor) -> Tensor:
        """The model's output on every rank that shares these samples, this rank's part of it: (B, C_out, h, w).

        x: this rank's part of the input, (B, C_in, h, w). noise: (B, K), where the model takes any.
        """
        if not self.pipeline:
            output = self.model(x, *noise)
            check_output(output, f"in evaluation, model {type(self.model).__name__}")
            return output
        return self.pipeline.forecast(x, (len(x), out_channels, *x.shape[2:]))

    def whole_images(self, part: Tensor) -> Tensor:
        """Whole images from the parts of all ranks that share them: (B, C, h, w) -> (B, C, H, W)."""
        for cut in self.split.cuts:
            group = as_group(comm.get_group(cut.mesh_dim))
            dim = 2 + cut.axis  # behind batch and channels
            part = gather_from_region(part, dim, cut.sizes, group)
        return part


def make_buffers_whole(model: nn.Module) -> None:
    """Replace each buffer that is a ShardTensor by the whole tensor, in place. Its ranks call this together."""
    from distributed.shard.core.tensor import ShardTensor  # only rung 4 needs it

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, ShardTensor):
                whole = cast(ShardTensor, buffer.detach()).full_tensor()
                module._buffers[name] = whole.clone(memory_format=torch.contiguous_format)  # memory of its own


def broadcast_bytes(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the tensor of the first one, of any type: not every backend knows every type."""
    packed = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)  # contiguous
    packed.copy_(tensor)
    if packed.numel():
        flat_bytes = packed.view(-1).view(torch.uint8)  # the same memory
        dist.broadcast(flat_bytes, group=group, group_src=0)
    tensor.copy_(packed)


def transform_forward(module: nn.Module, transform: Callable[[Callable], Callable]) -> None:
    """module.forward = transform(module.forward), for a module that may be called with ShardTensors."""
    if comm.get_size("domain") == 1:
        module.forward = transform(module.forward)
        return
    from distributed.domain_parallel import OnParts  # brings the rules of ShardTensor, which only rung 4 needs

    if not isinstance(module.forward, OnParts):
        module.forward = OnParts(module.forward)
    module.forward.transforms.append(transform)
