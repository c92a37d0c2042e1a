"""Collectives of model parallelism as autograd functions: one collective runs forward, its transpose runs backward.

An activation is either *replicated* (the same on every rank of the group), *sharded* along a dimension, or *partial*
(each rank holds one term of a sum). Each function below converts one into another:

    function            forward                      backward
    copy_to_region      identity                     all-reduce         replicated -> replicated, used differently
    reduce_from_region  all-reduce                   identity           partial -> replicated
    scatter_to_region   own slice                    all-gather         replicated -> sharded
    gather_from_region  all-gather                   own slice          sharded -> replicated
    all_gather          all-gather                   reduce-scatter     sharded -> replicated, used differently
    reduce_scatter      reduce-scatter               all-gather         partial -> sharded
    all_to_all          all-to-all                   all-to-all back    sharded -> sharded along another dimension

"Used differently" means that every rank computes something else with the tensor, so each holds a part of its gradient.
The first two are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053). The dtype is kept. A group of one rank
communicates nothing. All functions use torch's functional collectives, which torch.compile traces without graph breaks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from utils.layout import Sizes, shard_sizes

ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group as plain values, so that a model that holds it can be copied and traced."""

    name: str
    rank: int
    size: int


AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None


def as_group(group: AnyGroup) -> Group:
    """The Group of a ProcessGroup, of a DeviceMesh with one dimension, or of None (this process alone)."""
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return Group(group.group_name, dist.get_rank(group), group.size()) if group is not None else Group("", 0, 1)


def tensor_on(device: torch.device, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """A small tensor of host values on a device; unlike torch.tensor(values, device=device) the host does not wait."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, because they have too few digits for sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def shard(full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """View of the piece of a tensor for a rank of a group: (..., n, ...) -> (..., n_rank, ...)."""
    sizes = shard_sizes(full.shape[dim], size)
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Return the same tensor; backward adds up the gradients of the ranks."""
    return _apply(_identity, _all_reduce, x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors; backward passes on the gradient, which is the same on every rank."""
    return _apply(_all_reduce, _identity, x, group)


def scatter_to_region(x: Tensor, dim: int, sizes: Sizes, group: Group) -> Tensor:
    """This rank's slice of a replicated tensor: (..., N, ...) -> (..., sizes[rank], ...)."""
    return _apply(_own_slice, _all_gather, x, group, dim, sizes)


def gather_from_region(x: Tensor, dim: int, sizes: Sizes, group: Group) -> Tensor:
    """The joined slices of all ranks, which all use them alike: (..., sizes[rank], ...) -> (..., N, ...)."""
    return _apply(_all_gather, _own_slice, x, group, dim, sizes)


def all_gather(x: Tensor, dim: int, sizes: Sizes, group: Group) -> Tensor:
    """The joined slices of all ranks, which use them differently: (..., sizes[rank], ...) -> (..., N, ...)."""
    return _apply(_all_gather, _reduce_scatter, x, group, dim, sizes)


def reduce_scatter(x: Tensor, dim: int, sizes: Sizes, group: Group) -> Tensor:
    """This rank's slice of the sum of the ranks' tensors: (..., N, ...) -> (..., sizes[rank], ...)."""
    return _apply(_reduce_scatter, _all_gather, x, group, dim, sizes)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send sent[i] rows to rank i, receive received[i] rows from it: (sum(sent), ...) -> (sum(received), ...)."""
    return _apply(_all_to_all, _all_to_all_back, x, group, sent, received)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, for a loss that every rank computes alike, when the *mean* loss is minimized.

    Backward multiplies the gradient by the number of ranks, because the transpose of the sum adds up equal gradients
    from the losses of all ranks. Data parallelism removes the factor: it averages gradients of weights over the ranks.
    """
    return _apply(_all_reduce, _times_size, x, group)


def replicated_loss(x: Tensor, group: Group) -> Tensor:
    """Return the same number: a loss that every rank of the group computes alike, when the *mean* loss is minimized.

    Backward multiplies the gradient by the number of ranks. Each rank then computes a part of the gradients of the
    weights, and the mean over the ranks must equal the sum of the parts.
    """
    return _apply(_identity, _times_size, x, group)


def divided(x: Tensor, n: int) -> Tensor:
    """Return x / n; backward passes on the gradient. The sum over n ranks is x: replicated -> partial."""
    return _Pair.apply(x, _over, _identity, n)


def divide_gradient(x: Tensor, n: int) -> Tensor:
    """Return the same tensor; backward divides by n, because n ranks compute the whole gradient and not a part."""
    return _Pair.apply(x, _identity, _over, n)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable, backward: Callable, *args: Any) -> Tensor:
        ctx.transpose, ctx.args = backward, args
        return forward(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transpose(grad, *ctx.args), None, None, *(None for _ in ctx.args)


def _apply(forward, backward, x, group, *args):
    if group.size == 1:
        return x
    if hasattr(x, "on_parts"):  # a ShardTensor, split over other ranks
        return x.on_parts(_Pair.apply, forward, backward, group, *args)
    return _Pair.apply(x, forward, backward, group, *args)


def _identity(x, _):
    return x.view_as(x)


def _over(x, n):
    return x / n


def _times_size(x, group):
    return x * group.size


def _own_slice(x, group, dim, sizes):
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def _all_reduce(x, group):
    return _finished(ops.all_reduce, x.contiguous(), "sum", group.name)


def _all_gather(x, group, dim, sizes):
    # The collective needs equal sizes, so shorter slices are padded.
    x = _pad(x, dim, max(sizes)).contiguous()
    joined = _finished(ops.all_gather_into_tensor, x, group.size, group.name)  # (size * n_0, n_1, ...)
    joined = joined.unflatten(0, (group.size, x.shape[0]))
    if min(sizes) == max(sizes):
        return joined.movedim(0, dim).flatten(dim, dim + 1)  # no copy if dim is the first dimension
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(joined.unbind(), sizes, strict=True)], dim)


def _reduce_scatter(x, group, dim, sizes):
    if dim > 0 or min(sizes) < max(sizes):  # otherwise the slices are already contiguous
        x = torch.cat([_pad(part, dim, max(sizes)) for part in x.split(sizes, dim)])
    summed = _finished(ops.reduce_scatter_tensor, x.contiguous(), "sum", group.size, group.name)
    return summed.narrow(dim, 0, sizes[group.rank])


def _pad(x, dim, length):
    return x if x.shape[dim] == length else F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, length - x.shape[dim]])


def _all_to_all(x, group, sent, received):
    return _finished(ops.all_to_all_single, x.contiguous(), received, sent, group.name)


def _finished(collective, x, *args):
    if x.is_complex():
        return torch.view_as_complex(_finished(collective, torch.view_as_real(x.resolve_conj()), *args))
    args = (x, *args)
    if torch.compiler.is_compiling():
        return ops.wait_tensor(collective(*args))
    with torch._C._AutoDispatchBelowAutograd():  # skips torch's slow autograd wrapper; _Pair is ours
        return ops.wait_tensor(collective(*args))


def _all_to_all_back(grad, group, sent, received):
    return _all_to_all(grad, group, received, sent)


def start_shift(x: Tensor, shape: Sequence[int], group: Group) -> Callable[[], Tensor]:
    """Send x to the next rank of the ring. Call the result to get the previous rank's tensor, of `shape`.

    Computation between these two calls overlaps with the exchange. Not differentiable: for use in autograd functions.
    """
    sent, received = [0] * group.size, [0] * group.size
    sent[(group.rank + 1) % group.size] = x.numel()
    received[(group.rank - 1) % group.size] = torch.Size(shape).numel()
    coming = start_all_to_all(x.reshape(-1), sent, received, group)
    return lambda: wait(coming).view(shape)


def start_all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """As all_to_all, which it only begins: what it returns is there after `wait`. Not differentiable."""
    if x.is_complex():
        return torch.view_as_complex(start_all_to_all(torch.view_as_real(x.resolve_conj()), sent, received, group))
    return ops.all_to_all_single(x, received, sent, group.name)


def wait(coming: Tensor) -> Tensor:
    """The result of a collective that was begun, when it is complete."""
    return ops.wait_tensor(coming)
