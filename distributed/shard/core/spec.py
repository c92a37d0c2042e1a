"""Spec: how a tensor is split over the ranks of a mesh. Nothing is communicated here.

A Spec has the mesh and, for every dimension of the tensor, the axes that it is made of (axes.py).
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from distributed.collectives import Group, Sizes, as_group, shard_sizes
from distributed.shard.core.axes import Axes, Axis, check_order, has_order, mesh_dims_of, unsplit_axes
from distributed.shard.core.given import Hooks
from utils.torch_private import flattened

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class CannotSplit(ValueError):
    """A dimension that is split in a way in which it cannot be used."""


Shares = tuple[Sizes, Group] | None  # elements on each rank of a group among which they are split; None: not split
Pieces = Mapping[int, Sizes | None]  # {mesh dimension: sizes of its ranks, None: as even as possible}


@dataclass(frozen=True)
class Mesh:
    """The properties of a DeviceMesh that a Spec needs, as plain values that torch.compile can trace."""

    device_mesh: DeviceMesh
    groups: tuple[Group, ...]  # a Group for each dimension
    joint: Group  # of all ranks, in row-major order

    def groups_of(self, mesh_dims: Collection[int]) -> list[Group]:
        """The groups of some dimensions. All dimensions together have one, the joint group."""
        if len(mesh_dims) == len(self.groups):
            return [self.joint]
        return [self.groups[m] for m in mesh_dims]


# Each Mesh is known by the id of its DeviceMesh, as long as a Spec uses it: a process group that outlives
# destroy_process_group aborts the process at its end, or lets it wait.
_meshes: dict[int, weakref.ref[Mesh]] = {}


def as_mesh(device_mesh: DeviceMesh | Mesh) -> Mesh:
    """The Mesh of a DeviceMesh. The first call for a mesh of two dimensions is collective."""
    if isinstance(device_mesh, Mesh):
        return device_mesh
    known = _meshes.get(id(device_mesh))
    # The reference is weak: it is empty once no Spec uses the Mesh.
    mesh = known() if known else None
    if mesh is not None:
        return mesh
    process_groups = [device_mesh.get_group(i) for i in range(device_mesh.ndim)]
    groups = tuple([as_group(group) for group in process_groups])
    joint = groups[0]
    if device_mesh.ndim > 1:
        # All ranks of the mesh together need a group of their own, which torch makes here.
        group = flattened(device_mesh).get_group()
        Hooks.prepare_group(group)
        joint = as_group(group)
    mesh = Mesh(device_mesh, groups, joint)
    _meshes[id(device_mesh)] = weakref.ref(mesh)
    return mesh


_structures: dict[tuple, object] = {}
MOST_STRUCTURES = 4096  # then the table begins anew


def structure_of(dims: tuple[Axes, ...], partial: tuple[int, ...]) -> object:
    """An object that stands for these axes in keys: the same for equal ones, and faster to compare."""
    key = (dims, partial)
    found = _structures.get(key)
    if found is None:
        if len(_structures) >= MOST_STRUCTURES:
            _structures.clear()
        found = _structures[key] = object()
    return found


class Spec:
    """The mesh, the axes of every dimension of the tensor, and the mesh dimensions over which the tensor is partial.

    Partial means that the tensor is the sum of the ranks' local tensors. Along a mesh dimension over which the tensor
    is neither split nor partial, all ranks hold the same copy. Specs are immutable.
    """

    def __init__(
        self,
        mesh: Mesh,
        dims: tuple[Axes, ...],
        partial: tuple[int, ...] = (),
    ):
        self.mesh = mesh
        self.dims = dims
        self.partial = partial
        self.plans: dict[tuple, Any] = {}  # see plans.py
        self.has_order = any(has_order(axes) for axes in dims)
        # Equal for tensors that are split alike. A compiled step is traced once, so that plans would serve nothing. An
        # Order is large, and no table keeps it.
        self.structure: object = None
        if not is_dynamo_compiling():
            self.structure = object() if self.has_order else structure_of(dims, partial)
        shape = []
        for axes in dims:
            prefix = axes[0].prefix if axes else 0
            sizes = [axis.size for axis in axes]
            shape.append(prefix + math.prod(sizes))
        self.shape = torch.Size(shape)
        local_lengths = [self.local_length(axes) for axes in dims]
        self.local_shape = torch.Size(local_lengths)  # of this rank
        self.split_dims = tuple([dim for dim, axes in enumerate(dims) if mesh_dims_of(axes)])
        # Ranks along mesh dimensions that neither split the tensor nor hold a term of it have the same local tensor.
        used = mesh_dims_of(*dims).union(partial)
        unused_sizes = [group.size for m, group in enumerate(mesh.groups) if m not in used]
        self.copies = math.prod(unused_sizes)

    def __eq__(self, other: Any) -> bool:
        # Most specs that are compared are one object, because plans keep them.
        if self is other:
            return True
        same_split = self.dims == other.dims and self.partial == other.partial
        return same_split and self.mesh.groups == other.mesh.groups

    @property
    def placements(self) -> tuple["Placement", ...]:
        """As DTensor's: Shard(dim), Replicate() or Partial() for every dimension of the mesh."""
        from torch.distributed.tensor import Partial, Replicate, Shard  # slow to import

        result: list[Placement] = []
        count = len(self.mesh.groups)
        for m in range(count):
            placement = Partial() if m in self.partial else Replicate()
            result.append(placement)
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                if axis.mesh_dim is not None:
                    result[axis.mesh_dim] = Shard(dim)
        return tuple(result)

    def is_split(self, dim: int) -> bool:
        """Tell whether ranks hold different parts of a dimension, by any of its axes."""
        return dim % len(self.dims) in self.split_dims

    def is_first(self, axes: Axes, rank: int | None = None) -> bool:
        """Tell whether a rank (by default this one) is the first of those among which axes are split."""
        split_axes = [axis for axis in axes if axis.sizes is not None]
        return all(self.coordinate(axis.mesh_dim, rank) == 0 for axis in split_axes)

    def local_axes(
        self,
        axes: Iterable[Axis],
        rank: int | None = None,
    ) -> list[int]:
        """The sizes of axes on a rank, by default this one."""
        sizes = []
        for axis in axes:
            check_order((axis,))
            if axis.sizes is None:
                sizes.append(axis.size)
            else:
                coordinate = self.coordinate(axis.mesh_dim, rank)
                sizes.append(axis.sizes[coordinate])
        return sizes

    def coordinate(self, mesh_dim: int, rank: int | None = None) -> int:
        """The coordinate along a mesh dimension of this rank, or of a rank counted in row-major order."""
        if rank is None:
            return self.mesh.groups[mesh_dim].rank
        # Ranks are numbered as elements of a tensor are: the last mesh dimension is the innermost.
        inner_sizes = [group.size for group in self.mesh.groups[mesh_dim + 1 :]]
        size = self.mesh.groups[mesh_dim].size
        return rank // math.prod(inner_sizes) % size

    def offset(self, axis: Axis) -> int:
        """The index of the first element of this rank's piece of an axis."""
        check_order((axis,))
        if axis.sizes is None:
            return 0
        rank = self.mesh.groups[axis.mesh_dim].rank
        return sum(axis.sizes[:rank])

    def split(self, dim: int) -> Shares:
        """(sizes of all ranks, Group) of a dimension that is split along its only axis; None if it is whole.

        Raises CannotSplit for a split dimension of several axes, because a rank's part of it is not contiguous.
        """
        axes = self.dims[dim]
        check_order(axes)
        if len(axes) == 1:
            (axis,) = axes
            if axis.sizes is not None:
                return axis.sizes, self.mesh.groups[axis.mesh_dim]
        if mesh_dims_of(axes):
            factors = [axis.size for axis in axes]
            raise CannotSplit(f"dimension {dim} is a product of axes {factors} and not in one piece")
        return None

    def with_dims(
        self,
        dims: Iterable[Axes],
        partial: tuple[int, ...] | None = None,
    ) -> "Spec":
        """The spec of a tensor with these axes on the same mesh. partial: by default that of this spec."""
        if partial is None:
            partial = self.partial
        return Spec(self.mesh, tuple(dims), partial)

    def with_axes(self, dim: int, axes: Axes) -> "Spec":
        """The spec with other axes for one dimension (not negative)."""
        before = self.dims[:dim]
        behind = self.dims[dim + 1 :]
        return self.with_dims((*before, axes, *behind))

    def kept(self, key: tuple, make: Callable[[], "Spec"]) -> "Spec":
        """The spec that make() gives, kept with the plans."""
        if is_dynamo_compiling():
            return make()
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = make()
        return found

    def resized(self, sizes: Mapping[int, int | Sizes]) -> "Spec":
        """The spec with other sizes of some dimensions: {dim: one size, or the sizes of all ranks}."""
        # Only dimensions with one axis have new sizes of their ranks.
        dims = list(self.dims)
        for dim, size in sizes.items():
            check_order(dims[dim])
            if isinstance(size, int):
                dims[dim] = unsplit_axes(size)
            else:
                axis = dims[dim][0]
                dims[dim] = (axis._replace(size=sum(size), sizes=size),)
        return self.with_dims(dims)

    def shares(self, *dims: int) -> Shares:
        """(elements of dims on each rank, Group) of the ranks among which dims are split; None if all are whole."""
        axes_of_dims = [self.dims[dim] for dim in dims]
        split = mesh_dims_of(*axes_of_dims)
        # Every rank has whole dimensions.
        if not split:
            return None
        (group,) = self.mesh.groups_of(split)
        elements = []
        for rank in self.ranks(*dims):
            lengths = [self.local_length(axes, rank) for axes in axes_of_dims]
            elements.append(math.prod(lengths))
        return tuple(elements), group

    def ranks(self, *dims: int) -> list[int]:
        """The ranks among which dims are split, counted in row-major order; [0] if they are whole."""
        axes_of_dims = [self.dims[dim] for dim in dims]
        split = mesh_dims_of(*axes_of_dims)
        count = len(self.mesh.groups)
        others = [m for m in range(count) if m not in split]
        # The order is that of the pieces in the whole.
        ranks = []
        for rank in range(self.mesh.joint.size):
            # The first rank along all other mesh dimensions stands for those that hold the same piece.
            is_first = not any(self.coordinate(m, rank) for m in others)
            if is_first:
                ranks.append(rank)
        return ranks

    def local_length(self, axes: Axes, rank: int | None = None) -> int:
        """How many elements of a dimension with these axes a rank holds, by default this one."""
        if has_order(axes):
            return len(axes[0].order.rows[self.place(axes, rank)])
        prefix = axes[0].prefix if axes and self.is_first(axes, rank) else 0
        return prefix + math.prod(self.local_axes(axes, rank))

    def place(self, axes: Axes, rank: int | None = None) -> int:
        """The number of a rank, by default this one, among those that share the rows of a dimension with an Order."""
        place = 0
        for axis in axes:
            place = place * self.mesh.groups[axis.mesh_dim].size + self.coordinate(axis.mesh_dim, rank)
        return place

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {', '.join(map(str, self.placements))})"


def spec_of(
    mesh: DeviceMesh | Mesh,
    shape: Sequence[int],
    placements: Sequence["Placement"],
    sizes: Pieces | None = None,
) -> Spec:
    """The Spec of a tensor with a global shape.

    placements: Shard(dim), Replicate() or Partial() for each dimension of the mesh. sizes: {mesh dimension: sizes of
    its ranks}; by default as even as possible, the longer pieces first. Raises ValueError if sizes do not add up, or if
    a dimension is split twice.
    """
    from torch.distributed.tensor import Shard  # slow to import

    mesh = as_mesh(mesh)
    sizes = sizes or {}
    dims = [unsplit_axes(n) for n in shape]
    partial = []
    if len(placements) != len(mesh.groups):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(mesh.groups)} dimensions")
    for m, placement in enumerate(placements):
        if placement.is_partial():
            partial.append(m)
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim % len(shape)
        is_split_already = any(axis.sizes for axis in dims[dim])
        if is_split_already:
            raise ValueError(f"dimension {dim} cannot be split over two dimensions of the mesh")
        dims[dim] = cut_over(mesh, m, shape[dim], sizes.get(m))
    return Spec(mesh, tuple(dims), tuple(partial))


def cut_over(
    mesh: Mesh,
    m: int,
    size: int,
    sizes: Sizes | None = None,
) -> Axes:
    """The axes of a dimension of `size` elements that mesh dimension m splits, by default as evenly as possible.

    Raises ValueError if the sizes do not add up, or are not one for each rank.
    """
    # Sizes may come from a user or a checkpoint.
    ranks = mesh.groups[m].size
    sizes = tuple(sizes or shard_sizes(size, ranks))
    if len(sizes) != ranks or sum(sizes) != size:
        raise ValueError(f"sizes {sizes} of {ranks} ranks do not make up a dimension of {size}")
    return (Axis(size, m, sizes),)


def part_of(
    full: Tensor,
    spec: Spec,
    rank: int | None = None,
) -> Tensor:
    """The part of a whole tensor that a rank of the mesh (by default this rank) holds; differentiable.

    full: in the shape of the spec. A dimension of size 1 stays whole if the spec has a larger size for it, because it
    broadcasts.
    """
    for dim, axes in enumerate(spec.dims):
        if dim not in spec.split_dims:
            continue
        broadcasts = full.shape[dim] == 1 and spec.shape[dim] != 1
        if broadcasts:
            continue
        if has_order(axes):
            rows = axes[0].order.on(full.device, spec.place(axes, rank))
            full = full.index_select(dim, rows)
            continue
        # Take the prefix off, the elements ahead of the product of axes.
        prefix = axes[0].prefix
        with_prefix = full
        full = full.narrow(dim, prefix, full.shape[dim] - prefix)

        # Each split axis is cut by itself, as a dimension of its own.
        is_product = len(axes) > 1
        if is_product:
            axis_sizes = [axis.size for axis in axes]
            full = torch.unflatten(full, dim, axis_sizes)  # (..., each axis, ...)
        for place, axis in enumerate(axes):
            if axis.sizes is not None:
                at = spec.coordinate(axis.mesh_dim, rank)
                start = sum(axis.sizes[:at])
                full = full.narrow(dim + place, start, axis.sizes[at])
        if is_product:
            last = dim + len(axes) - 1
            full = full.flatten(dim, last)
        # The first rank has the prefix.
        if prefix and spec.is_first(axes, rank):
            head = with_prefix.narrow(dim, 0, prefix)
            full = torch.cat([head, full], dim)
    return full
