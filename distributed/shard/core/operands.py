"""Preparation of a rule's operands: sum up partial ones, prepare weights, bring tensors to one split, scatter them."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distributed.collectives import all_to_all, copy_to_region, divide_gradient, reduce_from_region
from distributed.shard.core.axes import Axes, has_order, mesh_dims_of, unsplit_axes
from distributed.shard.core.order import in_global_order, moved, ordered_dim
from distributed.shard.core.redistribute import recut, sizes_of
from distributed.shard.core.spec import Mesh, Pieces, Spec, as_mesh, part_of, spec_of
from distributed.shard.core.tensor import MaybeTensor, ShardTensor, find_libraries, local, no_rule, wrap
from utils.torch_private import group_named

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Operand = TypeVar("Operand")
redistribute = ShardTensor.redistribute
replicate = ShardTensor.replicate


def global_shape(x: Tensor) -> torch.Size:
    """The shape of a ShardTensor or of a plain tensor, for use in rules."""
    return x.spec.shape if isinstance(x, ShardTensor) else x.shape


def gradient_spec(spec: Spec) -> Spec:
    """How the gradient of a tensor is split: as the tensor, and that of a partial tensor is whole on every rank."""
    if not spec.partial:
        return spec
    return spec.kept(("gradient",), lambda: spec.with_dims(spec.dims, ()))


def check_writable(x: ShardTensor) -> ShardTensor:
    """The tensor that an in-place operation has changed. Raises no_rule where another should have changed with it."""
    # torch's result would be a view, whose base would change too.
    if getattr(x, "copied_from", ""):
        why = f"in place on what {x.copied_from} copied from whole tensors"
        raise no_rule(torch.Tensor.copy_, (x,), {}, why)
    return x


def sum_partial(x: Operand) -> Operand:
    """Sum up a partial ShardTensor, so that nonlinear operations may follow; return anything else unchanged."""
    if not isinstance(x, ShardTensor) or not x.spec.partial:
        return x
    part = local(x)
    for group in x.spec.mesh.groups_of(x.spec.partial):  # over both mesh dimensions in one all-reduce
        part = reduce_from_region(part, group)
    whole_sum: Any = wrap(part, gradient_spec(x.spec))
    return whole_sum


def whole_weight(x: MaybeTensor, spec: Spec) -> MaybeTensor:
    """Prepare a weight, whole on this rank, for an operation whose result has this spec; anything else is unchanged.

    x: plain, or a ShardTensor, such as a kernel that the model computes from the image: it is summed and gathered, and
    its gradient is the sum of those that the ranks compute. If several ranks hold the same result, each of them
    computes the whole gradient of a plain weight, not a part. It is then divided by the number of copies, so that the
    sum over the ranks stays right.
    """
    if isinstance(x, ShardTensor):
        return sum_grad_over_replicas(replicate(x), spec)
    if isinstance(x, torch.Tensor) and spec.copies > 1 and x.requires_grad:
        return divide_gradient(x, spec.copies)
    return x


def as_replicated(x: Tensor, spec: Spec) -> ShardTensor:
    """A plain tensor as a ShardTensor on the mesh of `spec`, of which every rank holds a copy; others unchanged."""
    if isinstance(x, ShardTensor):
        return x
    spec = spec.with_dims(map(unsplit_axes, x.shape), ())
    return wrap(whole_weight(x, spec), spec)


def common_spec(tensors: Sequence[Tensor]) -> Spec:
    """The spec of the result of broadcasting: each dimension takes the first split that an operand has there.

    tensors: ShardTensors, at least one, and plain tensors. Raises RuntimeError where they do not broadcast.
    """
    specs = [x.spec for x in tensors if isinstance(x, ShardTensor)]
    shape = torch.broadcast_shapes(*map(global_shape, tensors))  # of the result
    # Dimensions are counted from the end, as broadcasting does: the labels are ..., -2, -1.
    count = len(shape)
    sizes = dict(zip(range(-count, 0), shape, strict=True))
    labelled = []
    for spec in specs:
        own_count = len(spec.dims)
        labelled.append((spec, range(-own_count, 0)))
    axes = joint_axes(labelled, sizes, set())
    return Spec(specs[0].mesh, tuple(axes.values()))


def joint_axes(
    parts: Sequence[tuple[Spec, Sequence]],
    sizes: Mapping[Any, int],
    used: set[int],
) -> dict[Any, Axes]:
    """{label: axes} of dimensions that tensors share: each takes the first split that a tensor has there.

    parts: (Spec, label of each dimension) of each tensor. sizes: {label: size}; a tensor with another size broadcasts.
    used: the mesh dimensions that split something already, and so nothing here; those of the axes are added.
    """
    axes = {label: unsplit_axes(size) for label, size in sizes.items()}
    # Splits come first. Then dimensions that no tensor splits take the axes of a tensor, which may be a product.
    for wants_split in (True, False):
        for spec, labels in parts:
            for label, size, own_axes in zip(labels, spec.shape, spec.dims, strict=True):
                split_by = mesh_dims_of(own_axes)
                broadcasts = size != sizes[label]
                is_taken = split_by & used or mesh_dims_of(axes[label])
                has_turn = bool(split_by) == wants_split
                if has_turn and not broadcasts and not is_taken:
                    axes[label] = own_axes
                    used |= split_by
    return axes


def split_alike(spec: Spec, other: Spec) -> bool:
    """Tell whether tensors of one shape have the same elements on every rank; axes of unsplit dimensions may differ."""
    # A sum has other elements on each rank than what it is the sum of.
    if spec.partial != other.partial:
        return False
    for d, (axes, other_axes) in enumerate(zip(spec.dims, other.dims, strict=True)):
        is_split = spec.is_split(d) or other.is_split(d)
        if is_split and axes != other_axes:
            return False
    return True


def to_spec(x: ShardTensor, spec: Spec) -> ShardTensor:
    """Redistribute x to a spec of the same shape, in the cheapest of four ways."""
    # 1. Every rank has the same elements in both specs: nothing moves.
    if split_alike(x.spec, spec):
        return wrap(local(x), spec)

    # Rows in an Order move to the ranks of another one, or into pieces first.
    if x.spec.has_order:
        dim = ordered_dim(x.spec)
        axes = spec.dims[dim]
        same_ranks = has_order(axes) and mesh_dims_of(axes) == mesh_dims_of(x.spec.dims[dim])
        if same_ranks and split_alike(x.spec.with_axes(dim, axes), spec):
            return moved(x, spec)
        return to_spec(in_global_order(x), spec)

    # 2. The same axes in other pieces are only cut again, so that a product of axes need not become whole.
    axes = _split_axes(x.spec)
    has_no_prefix = not any(axis.prefix for axis in axes)
    old_axes = [_without_sizes(axis) for axis in axes]
    new_axes = [_without_sizes(axis) for axis in _split_axes(spec)]
    same_axes = old_axes == new_axes and x.spec.partial == spec.partial
    if same_axes and has_no_prefix and not spec.has_order:
        part, new = recut(local(x), x.spec, sizes_of(spec))
        if split_alike(new, spec):
            return wrap(part, spec)

    # 3. Placements say where each element belongs, as long as no dimension is a product of axes.
    has_products = any(len(axes_of_dim) > 1 for axes_of_dim in spec.dims)
    if not has_products and not spec.has_order:
        return redistribute(x, spec.placements, sizes_of(spec))

    # 4. Placements cannot describe a product of axes or an Order: each rank gathers the whole and keeps its part.
    full = sum_grad_over_replicas(replicate(x), spec)
    return wrap(part_of(full, spec), spec)


def _split_axes(spec):
    """The axes of all dimensions that are split."""
    every_axis = chain.from_iterable(spec.dims)
    return [axis for axis in every_axis if axis.sizes is not None]


def _without_sizes(axis):
    """What two axes must have in common to be the same axis in other pieces."""
    return axis.size, axis.mesh_dim, axis.prefix


def used_apart(own: Spec, result: Spec) -> list[int]:
    """The mesh dimensions whose ranks use their copies of an operand for different parts of the result.

    own: of the operand, which is replicated over these; the result is not.
    """
    of_parts = zip(own.placements, result.placements, strict=True)
    return [m for m, (before, after) in enumerate(of_parts) if before.is_replicate() and not after.is_replicate()]


def sum_grad_over_replicas(x: ShardTensor, spec: Spec) -> Tensor:
    """The local part of x, in whose backward pass the gradients of copies are summed where that is needed.

    spec: of the result. Where ranks use their copies for different parts of it, the gradient of x is the sum of the
    gradients of these copies.
    """
    part = local(x)
    # Backward sums the gradients over the ranks of each group.
    for group in spec.mesh.groups_of(used_apart(x.spec, spec)):
        part = copy_to_region(part, group)
    return part


def axes_of_operand(x: Tensor, spec: Spec) -> list[Axes]:
    """The axes of an operand that broadcasts against a tensor with this spec.

    Dimensions that broadcast are whole, the others are split as in the spec.
    """
    shape = global_shape(x)
    missing = len(spec.dims) - len(shape)  # dimensions in front that the operand does not have
    axes_of_dims: list[Axes] = []
    for n, size, axes in zip(shape, spec.shape[missing:], spec.dims[missing:], strict=True):
        broadcasts = n == 1 and size != 1
        axes_of_dims.append(() if broadcasts else axes)
    return axes_of_dims


def local_operand(
    x: Tensor,
    spec: Spec,
    result: Spec | None = None,
) -> Tensor:
    """The local part of an operand that broadcasts against a tensor with this spec, ready for a plain operation.

    x: plain, or a ShardTensor of any split, which is brought to that of the spec. result: spec of the result of the
    operation, by default `spec`. Its copies and parts decide how gradients of x are scaled or summed.
    """
    result = result or spec
    wanted = axes_of_operand(x, spec)
    if not isinstance(x, ShardTensor):
        full = whole_weight(x, result)
        return part_of(full, spec.with_dims(wanted, ()))
    # A sum goes with a tensor that is a sum itself. Beside any other, its terms must be added up first.
    if not set(x.spec.partial) <= set(spec.partial):
        x = sum_partial(x)
    split = to_spec(x, x.spec.with_dims(wanted))
    return sum_grad_over_replicas(split, result)


def scatter_tensor(
    x: Any,
    src: int,
    mesh: DeviceMesh | Mesh,
    placements: Sequence["Placement"],
    sizes: Pieces | None = None,
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

    # Every rank learns the shape and the type of the tensor.
    metadata: list[Any] = [None]
    if here:
        metadata = [(x.shape, x.dtype, x.device.type, x.requires_grad)]
    global_src = dist.get_global_rank(process_group, src)
    dist.broadcast_object_list(metadata, src=global_src, group=process_group)
    shape, dtype, device, differentiable = metadata[0]
    spec = spec_of(mesh, shape, placements, sizes)
    if spec.partial:
        raise ValueError("scatter_tensor: a tensor cannot be scattered as Partial()")

    # Only src sends in this all-to-all, whose backward pass brings the gradients to src.
    if here:
        parts = [part_of(x, spec, rank).contiguous() for rank in range(group.size)]
        flat = torch.cat([part.flatten() for part in parts])
        sent = tuple([part.numel() for part in parts])
    else:
        flat = torch.empty(0, dtype=dtype, device=device, requires_grad=differentiable)
        sent = (0,) * group.size
    received = [0] * group.size
    received[src] = spec.local_shape.numel()
    # Parts travel flat, because they differ in shape.
    own = all_to_all(flat, sent, tuple(received), group)  # (elements of this rank,)
    part = own.view(spec.local_shape)
    return wrap(whole_weight(part, spec), spec)
