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
    if group is None:
        return Group("", 0, 1)
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    rank = dist.get_rank(group)
    return Group(group.group_name, rank, group.size())


def tensor_on(
    device: torch.device,
    values: Sequence[float],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A small tensor of host values on a device; unlike torch.tensor(values, device=device) the host does not wait."""
    on_host = torch.tensor(values, dtype=dtype)
    return on_host.to(device, non_blocking=True)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, because they have too few digits for sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def shard(full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """View of the piece of a tensor for a rank of a group: (..., n, ...) -> (..., n_rank, ...)."""
    sizes = shard_sizes(full.shape[dim], size)
    start = sum(sizes[:rank])
    return full.narrow(dim, start, sizes[rank])


def concatenated(parts: list[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, whose backward pass goes on from parts without elements, too: other ranks may wait there.

    Of an empty vector the derivative of torch.cat is a constant. A compiler computes what depends on a constant, such
    as a collective of the backward pass, in the forward pass.
    """
    if parts[0].dim() > 1:
        return torch.cat(parts, dim)
    columns = [part.unsqueeze(1) for part in parts]
    return torch.cat(columns).squeeze(1)


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


def all_to_all(
    x: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Group,
) -> Tensor:
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
    return _Pair.apply(x, _over, _pass_on, n)


def divide_gradient(x: Tensor, n: int) -> Tensor:
    """Return the same tensor; backward divides by n, because n ranks compute the whole gradient and not a part."""
    return _Pair.apply(x, _identity, _over, n)


class _Pair(torch.autograd.Function):
    """A collective forward, and its transpose backward. Both are called with the same further arguments.

    The transpose of the transpose is the collective itself, so that second derivatives (create_graph=True) communicate
    as well. Where the backward function is one of LOCAL, its derivative is that of the plain operation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable,
        backward: Callable,
        *args: Any,
    ) -> Tensor:
        ctx.forward_function = forward
        ctx.transpose = backward
        ctx.args = args
        return forward(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_graph = differentiated_again() and ctx.transpose not in LOCAL
        if needs_graph:
            grad_x = _Pair.apply(grad, ctx.transpose, ctx.forward_function, *ctx.args)
        else:
            grad_x = ctx.transpose(grad, *ctx.args)
        # The two functions and their arguments have no gradient.
        none_each = [None] * (2 + len(ctx.args))
        return grad_x, *none_each


def _apply(forward, backward, x, group, *args):
    if group.size == 1:
        return x
    if hasattr(x, "on_parts"):  # a ShardTensor, split over other ranks
        return x.on_parts(_Pair.apply, forward, backward, group, *args)
    return _Pair.apply(x, forward, backward, group, *args)


def _identity(x, _):
    # Autograd needs another tensor than the input; a view costs no memory.
    return x.view_as(x)


def _over(x, n):
    return x / n


def _pass_on(x, _):
    return x.view_as(x)


def _times_size(x, group):
    return x * group.size


LOCAL = _pass_on, _times_size


def differentiated_again() -> bool:
    """Tell, in a backward function, whether the gradient may be differentiated in its turn (create_graph=True)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _own_slice(x, group, dim, sizes):
    start = sum(sizes[: group.rank])
    return x.narrow(dim, start, sizes[group.rank])  # (..., sizes[rank], ...)


def _all_reduce(x, group):
    return _finished(ops.all_reduce, x.contiguous(), "sum", group.name)


def _all_gather(x, group, dim, sizes):
    # The collective needs equal sizes, so shorter slices are padded.
    longest = max(sizes)
    x = _pad(x, dim, longest).contiguous()  # (n_0, ..., longest, ...)
    joined = _finished(ops.all_gather_into_tensor, x, group.size, group.name)  # (size * n_0, ..., longest, ...)
    joined = torch.unflatten(joined, 0, (group.size, x.shape[0]))  # (size, n_0, ..., longest, ...)
    if min(sizes) == longest:
        # The ranks' axis moves in front of dim. Nothing is copied if dim is the first dimension.
        return joined.movedim(0, dim).flatten(dim, dim + 1)  # (n_0, ..., size * longest, ...)
    slices = []
    for part, length in zip(joined.unbind(), sizes, strict=True):
        slices.append(part.narrow(dim, 0, length))
    return torch.cat(slices, dim)  # (n_0, ..., sum(sizes), ...)


def _reduce_scatter(x, group, dim, sizes):
    longest = max(sizes)
    has_uneven_slices = min(sizes) < longest
    # The collective cuts equal pieces off the first dimension, so the slices must lie there, padded.
    if dim > 0 or has_uneven_slices:
        slices = [_pad(part, dim, longest) for part in x.split(sizes, dim)]
        x = torch.cat(slices)  # (size * n_0, ..., longest, ...)
    summed = _finished(ops.reduce_scatter_tensor, x.contiguous(), "sum", group.size, group.name)
    return summed.narrow(dim, 0, sizes[group.rank])  # (n_0, ..., sizes[rank], ...)


def _pad(x, dim, length):
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    # F.pad takes a pair (before, after) for each dimension, the last dimension first.
    later_dims = [0, 0] * (x.ndim - 1 - dim)
    return F.pad(x, [*later_dims, 0, missing])


def _all_to_all(x, group, sent, received):
    return _finished(ops.all_to_all_single, x.contiguous(), received, sent, group.name)


def _finished(collective, x, *args):
    """Run a functional collective and wait for its result."""
    if x.is_complex():
        # Complex numbers travel as pairs, the real and the imaginary part: (...) -> (..., 2).
        pairs = torch.view_as_real(x.resolve_conj())
        result = _finished(collective, pairs, *args)
        return torch.view_as_complex(result)
    if torch.compiler.is_compiling():
        return ops.wait_tensor(collective(x, *args))
    with torch._C._AutoDispatchBelowAutograd():  # skips torch's slow autograd wrapper; _Pair is ours
        return ops.wait_tensor(collective(x, *args))


def _all_to_all_back(grad, group, sent, received):
    return _all_to_all(grad, group, received, sent)


def start_shift(
    x: Tensor,
    shape: Sequence[int],
    group: Group,
) -> Callable[[], Tensor]:
    """Send x to the next rank of the ring. Call the result to get the previous rank's tensor, of `shape`.

    Computation between these two calls overlaps with the exchange. Not differentiable: for use in autograd functions.
    """
    # A step of the ring is an all-to-all in which each rank sends to the next one only.
    next_rank = (group.rank + 1) % group.size
    previous_rank = (group.rank - 1) % group.size
    sent = [0] * group.size
    received = [0] * group.size
    sent[next_rank] = x.numel()
    received[previous_rank] = torch.Size(shape).numel()
    pending = start_all_to_all(x.reshape(-1), sent, received, group)
    return lambda: wait(pending).view(shape)


def start_all_to_all(
    x: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Group,
) -> Tensor:
    """As all_to_all, which it only begins: what it returns is there after `wait`. Not differentiable."""
    if x.is_complex():
        pairs = torch.view_as_real(x.resolve_conj())  # (..., 2)
        pending = start_all_to_all(pairs, sent, received, group)
        return torch.view_as_complex(pending)
    return ops.all_to_all_single(x, received, sent, group.name)


def wait(coming: Tensor) -> Tensor:
    """The result of a collective that was begun, when it is complete."""
    return ops.wait_tensor(coming)


def to_compute_dtype(x: Tensor) -> Tensor:
    """Apply the cast of autocast before the collective instead of after it: the collective sends half the bytes."""
    device = x.device.type
    needs_cast = torch.is_autocast_enabled(device) and x.dtype == torch.float32
    if not needs_cast:
        return x
    return x.to(torch.get_autocast_dtype(device))
