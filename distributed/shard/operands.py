"""What rules do with their operands: sum up partial ones, prepare weights, bring tensors to one split."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from distributed.collectives import copy_to_region, reduce_from_region
from distributed.shard.redistribute import recut, redistribute, sizes_over
from distributed.shard.spec import Axes, Axis, Pieces, Spec, part_of, whole
from distributed.shard.tensor import MaybeTensor, ShardTensor, local, no_rule, wrap


def global_shape(x: Tensor) -> torch.Size:
    """The shape of a ShardTensor or of a plain tensor, for use in rules."""
    return x.spec.shape if isinstance(x, ShardTensor) else x.shape


def one_axis(func: Callable, x: ShardTensor, dim: int) -> Axis:
    """The only axis of a split dimension. Raises no_rule for a dimension of several axes."""
    if len(x.spec.dims[dim]) > 1:
        raise no_rule(func, (x,), {}, f"dimension {dim} is not in one piece")
    return x.spec.dims[dim][0]


def gradient_spec(spec: Spec) -> Spec:
    """How the gradient of a tensor is split: as the tensor, and that of a partial tensor is whole on every rank."""
    return spec.derived(("gradient",), lambda: spec.with_dims(spec.dims, ())) if spec.partial else spec


def written(x: ShardTensor) -> ShardTensor:
    """The tensor that an in-place operation has changed. Raises no_rule where another should have changed with it."""
    if x.copied_from:
        raise no_rule(torch.Tensor.copy_, (x,), {}, f"in place on what {x.copied_from} copied from whole tensors")
    return x


def redistributed(x: ShardTensor, placements: Sequence[Placement], sizes: Pieces | None = None) -> ShardTensor:
    """The ShardTensor with other `placements`; sizes: {mesh dimension: sizes of its ranks}, see redistribute."""
    return wrap(*redistribute(local(x), x.spec, placements, sizes))


def replicated(x: ShardTensor) -> ShardTensor:
    """The ShardTensor as a whole copy on every rank."""
    return redistributed(x, [Replicate()] * len(x.spec.mesh.groups))


def reduced(x: ShardTensor) -> ShardTensor:
    """Sum up a partial ShardTensor, so that nonlinear operations may follow; return others unchanged."""
    if not x.spec.partial:
        return x
    if len(x.spec.partial) == len(x.spec.mesh.groups):  # over both mesh dimensions in one all-reduce
        return wrap(reduce_from_region(local(x), x.spec.mesh.joint), x.spec.with_dims(x.spec.dims, ()))
    return redistributed(x, [Replicate() if p.is_partial() else p for p in x.spec.placements])


def shared(x: MaybeTensor, spec: Spec) -> MaybeTensor:
    """Prepare a plain tensor, such as a weight, for an operation whose result has this spec.

    If several ranks hold the same result, each of them computes the whole gradient of the weight, not a part. The
    gradient is then divided by the number of copies, so that the sum over the ranks stays right.
    """
    if isinstance(x, torch.Tensor) and not isinstance(x, ShardTensor) and spec.copies > 1 and x.requires_grad:
        return _Share.apply(x, spec.copies)
    return x


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.copies, None


def copied(x: Tensor, spec: Spec) -> ShardTensor:
    """A plain tensor as a ShardTensor on the mesh of `spec`, of which every rank holds a copy; others unchanged."""
    if isinstance(x, ShardTensor):
        return x
    spec = spec.with_dims(map(whole, x.shape), ())
    return wrap(shared(x, spec), spec)


def common_spec(tensors: Sequence[Tensor]) -> Spec:
    """The spec of the result of broadcasting: each dimension takes the first split that an operand has there."""
    specs = [x.spec for x in tensors if isinstance(x, ShardTensor)]
    shape = torch.broadcast_shapes(*(x.spec.shape if isinstance(x, ShardTensor) else x.shape for x in tensors))
    used: set[int] = set()
    found: list[Axes | None] = [None] * len(shape)
    for spec in specs:
        for dim, axes in enumerate(spec.dims, len(shape) - len(spec.dims)):
            over = {a.mesh_dim for a in axes if a.sizes is not None}
            if found[dim] is None and over and not over & used and spec.shape[dim - len(shape)] == shape[dim]:
                found[dim] = axes
                used |= over
    for spec in specs:  # dimensions that no operand splits keep the axes of an operand
        for dim, axes in enumerate(spec.dims, len(shape) - len(spec.dims)):
            if found[dim] is None and spec.shape[dim - len(shape)] == shape[dim] and not any(a.sizes for a in axes):
                found[dim] = axes
    dims = [whole(n) if axes is None else axes for n, axes in zip(shape, found, strict=True)]
    partial = specs[0].partial if all(s.partial == specs[0].partial for s in specs) else ()
    return Spec(specs[0].mesh, tuple(dims), partial)


def split_alike(spec: Spec, other: Spec) -> bool:
    """Whether two tensors of one shape have the same elements on every rank; axes of whole dimensions may differ."""
    return spec.partial == other.partial and all(
        a == b or not (spec.is_split(d) or other.is_split(d))
        for d, (a, b) in enumerate(zip(spec.dims, other.dims, strict=True))
    )


def to_spec(x: ShardTensor, spec: Spec) -> ShardTensor:
    """The tensor redistributed to a spec. If its axes are others and several a dimension, a slice of the whole."""
    axes, wanted = ([a[:2] + a[3:] for d in s.dims for a in d if a.sizes is not None] for s in (x.spec, spec))
    if axes == wanted and x.spec.partial == spec.partial and not any(ahead for _, _, ahead in axes):
        cut = {m: sizes_over(spec, m) for m, placement in enumerate(spec.placements) if placement.is_shard()}
        part, new = recut(local(x), x.spec, cut)
        if split_alike(new, spec):
            return wrap(part, spec)
    if all(len(axes) < 2 for axes in spec.dims):
        sizes = {m: sizes_over(spec, m) for m in range(len(spec.placements))}
        return redistributed(x, spec.placements, sizes)
    part = local(replicated(x))
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            part = copy_to_region(part, spec.mesh.groups[mesh_dim])
    return wrap(part_of(part, spec), spec)


def fitted(x: Tensor, spec: Spec) -> Tensor:
    """The local part of an operand, which broadcasts against the local part of the result."""
    ahead = len(spec.dims) - x.dim()
    aligned = spec.with_dims(spec.dims[ahead:])
    if not isinstance(x, ShardTensor):
        return part_of(shared(x, spec), aligned) if x.dim() else shared(x, spec)
    # Dimensions that broadcast are whole, the others are split as in the result.
    wanted = aligned.with_dims(
        [
            () if n == 1 and size != 1 else a
            for n, size, a in zip(x.spec.shape, aligned.shape, aligned.dims, strict=True)
        ]
    )
    part = local(x if split_alike(x.spec, wanted) else to_spec(x, wanted))
    for mesh_dim, (p, q) in enumerate(zip(wanted.placements, spec.placements, strict=True)):
        if p.is_replicate() and not q.is_replicate():  # each rank uses its copy with another part
            part = copy_to_region(part, spec.mesh.groups[mesh_dim])
    return part
