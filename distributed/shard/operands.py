"""Preparation of a rule's operands: sum up partial ones, prepare weights, bring tensors to one split, scatter them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distributed.collectives import all_to_all, copy_to_region, divide_gradient, reduce_from_region
from distributed.shard.redistribute import recut, sizes_of
from distributed.shard.spec import Axes, Mesh, Pieces, Spec, as_mesh, over, part_of, spec_of, whole
from distributed.shard.tensor import MaybeTensor, ShardTensor, find_libraries, local, no_rule, wrap
from utils.torch_private import group_named

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Operand = TypeVar("Operand")
redistributed = ShardTensor.redistribute
replicated = ShardTensor.replicate


def global_shape(x: Tensor) -> torch.Size:
    """The shape of a ShardTensor or of a plain tensor, for use in rules."""
    return x.spec.shape if isinstance(x, ShardTensor) else x.shape


def gradient_spec(spec: Spec) -> Spec:
    """How the gradient of a tensor is split: as the tensor, and that of a partial tensor is whole on every rank."""
    return spec.derived(("gradient",), lambda: spec.with_dims(spec.dims, ())) if spec.partial else spec


def written(x: ShardTensor) -> ShardTensor:
    """The tensor that an in-place operation has changed. Raises no_rule where another should have changed with it."""
    if x.copied_from:
        raise no_rule(torch.Tensor.copy_, (x,), {}, f"in place on what {x.copied_from} copied from whole tensors")
    return x


def reduced(x: Operand) -> Operand:
    """Sum up a partial ShardTensor, so that nonlinear operations may follow; return anything else unchanged."""
    if not isinstance(x, ShardTensor) or not x.spec.partial:
        return x
    part = local(x)
    for group in x.spec.mesh.groups_of(x.spec.partial):  # over both mesh dimensions in one all-reduce
        part = reduce_from_region(part, group)
    whole_sum: Any = wrap(part, gradient_spec(x.spec))
    return whole_sum


def shared(x: MaybeTensor, spec: Spec) -> MaybeTensor:
    """Prepare a plain tensor, such as a weight, for an operation whose result has this spec.

    If several ranks hold the same result, each of them computes the whole gradient of the weight, not a part. The
    gradient is then divided by the number of copies, so that the sum over the ranks stays right.
    """
    if isinstance(x, torch.Tensor) and not isinstance(x, ShardTensor) and spec.copies > 1 and x.requires_grad:
        return divide_gradient(x, spec.copies)
    return x


def copied(x: Tensor, spec: Spec) -> ShardTensor:
    """A plain tensor as a ShardTensor on the mesh of `spec`, of which every rank holds a copy; others unchanged."""
    if isinstance(x, ShardTensor):
        return x
    spec = spec.with_dims(map(whole, x.shape), ())
    return wrap(shared(x, spec), spec)


def common_spec(tensors: Sequence[Tensor]) -> Spec:
    """The spec of the result of broadcasting: each dimension takes the first split that an operand has there."""
    specs = [x.spec for x in tensors if isinstance(x, ShardTensor)]
    shape = torch.broadcast_shapes(*map(global_shape, tensors))
    sizes = dict(zip(range(-len(shape), 0), shape, strict=True))
    axes = joint_axes([(s, range(-len(s.dims), 0)) for s in specs], sizes, set())
    return Spec(specs[0].mesh, tuple(axes.values()))


def joint_axes(parts: Sequence[tuple[Spec, Sequence]], sizes: Mapping[Any, int], used: set[int]) -> dict[Any, Axes]:
    """{label: axes} of dimensions that tensors share: each takes the first split that a tensor has there.

    parts: (Spec, label of each dimension). sizes: {label: size}; a tensor with another size broadcasts. used: the mesh
    dimensions that split something already; those of the axes are added.
    """
    axes = {name: whole(size) for name, size in sizes.items()}
    for splits in (True, False):  # dimensions that no tensor splits keep the axes of a tensor
        for spec, names in parts:
            for name, size, own in zip(names, spec.shape, spec.dims, strict=True):
                by = over(own)
                if bool(by) == splits and not by & used and size == sizes[name] and not over(axes[name]):
                    axes[name] = own
                    used |= by
    return axes


def split_alike(spec: Spec, other: Spec) -> bool:
    """Tell whether tensors of one shape have the same elements on every rank; axes of unsplit dimensions may differ."""
    return spec.partial == other.partial and all(
        a == b or not (spec.is_split(d) or other.is_split(d))
        for d, (a, b) in enumerate(zip(spec.dims, other.dims, strict=True))
    )


def to_spec(x: ShardTensor, spec: Spec) -> ShardTensor:
    """The tensor redistributed to a spec. If its axes are others and several a dimension, a slice of the whole."""
    if split_alike(x.spec, spec):
        return wrap(local(x), spec)
    axes, wanted = ([a[:2] + a[3:] for d in s.dims for a in d if a.sizes is not None] for s in (x.spec, spec))
    if axes == wanted and x.spec.partial == spec.partial and not any(ahead for _, _, ahead in axes):
        part, new = recut(local(x), x.spec, sizes_of(spec))
        if split_alike(new, spec):
            return wrap(part, spec)
    if all(len(axes) < 2 for axes in spec.dims):
        return redistributed(x, spec.placements, sizes_of(spec))
    return wrap(part_of(used_apart(replicated(x), spec), spec), spec)


def used_apart(x: ShardTensor, spec: Spec) -> Tensor:
    """The local part of x, of which ranks use their copies for other parts of a result: their gradients are summed."""
    part, pairs = local(x), zip(x.spec.placements, spec.placements, strict=True)
    apart = [m for m, (own, other) in enumerate(pairs) if own.is_replicate() and not other.is_replicate()]
    for group in spec.mesh.groups_of(apart):
        part = copy_to_region(part, group)
    return part


def fitted(x: Tensor, spec: Spec, result: Spec | None = None) -> Tensor:
    """The local part of an operand, which broadcasts against a tensor with this spec: by default that of the result."""
    result, ahead = result or spec, len(spec.dims) - x.dim()
    # Dimensions that broadcast are whole, the others are split as in the spec.
    wanted = [
        () if n == 1 and size != 1 else axes
        for n, size, axes in zip(global_shape(x), spec.shape[ahead:], spec.dims[ahead:], strict=True)
    ]
    if not isinstance(x, ShardTensor):
        return part_of(shared(x, result), spec.with_dims(wanted, ()))
    return used_apart(to_spec(x, x.spec.with_dims(wanted)), result)


def scatter_tensor(
    x: Any, src: int, mesh: DeviceMesh | Mesh, placements: Sequence["Placement"], sizes: Pieces | None = None
) -> ShardTensor:
    """A ShardTensor from the data of one rank: every other rank receives only its own part.

    x: the whole tensor on rank `src` of the mesh (counted in row-major order), ignored elsewhere. placements, sizes:
    Shard or Replicate, as for ShardTensor.from_local; sizes are as even as possible by default. Differentiable: src
    receives the gradient. All ranks call this together. Raises ValueError on every rank if sizes do not fit.
    """
    find_libraries()
    mesh = as_mesh(mesh)
    group = mesh.joint
    process_group = group_named(group.name)
    here = group.rank == src
    facts: list[Any] = [(x.shape, x.dtype, x.device.type, x.requires_grad) if here else None]
    dist.broadcast_object_list(facts, src=dist.get_global_rank(process_group, src), group=process_group)
    shape, dtype, device, differentiable = facts[0]
    spec = spec_of(mesh, shape, placements, sizes)
    if spec.partial:
        raise ValueError("scatter_tensor: a tensor cannot be scattered as Partial()")
    if here:
        parts = [part_of(x, spec, rank).contiguous() for rank in range(group.size)]
        flat, sent = torch.cat([part.flatten() for part in parts]), tuple(part.numel() for part in parts)
    else:
        flat, sent = torch.empty(0, dtype=dtype, device=device, requires_grad=differentiable), (0,) * group.size
    received = tuple(spec.local_shape.numel() if rank == src else 0 for rank in range(group.size))
    part = all_to_all(flat, sent, received, group).view(spec.local_shape)
    return wrap(shared(part, spec), spec)
