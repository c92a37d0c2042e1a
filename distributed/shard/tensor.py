"""ShardTensor: one tensor split over the ranks of a mesh, on which unchanged model code computes.

A ShardTensor *is* its local part, a torch.Tensor of another class; its Spec rides along, and `.shape` answers the
global shape. Every torch function called with one is looked up in a registry of rules (`rule`; distributed/shard/rules/
holds them). The rule computes on the local part and communicates what is needed. An operation without a rule raises an
error: never a wrong number. Autograd runs on the local tensors.

Gradients. That of a ShardTensor is split as it is: each rank holds its part of the serial gradient. A plain tensor that
meets a ShardTensor, a weight, counts as a copy on every rank, and each rank's gradient of it is a *part*: the sum over
the mesh is the serial gradient. No rule reduces weights' gradients: data parallelism does it once a step.

torch.Tensor.as_subclass and __torch_function__: PyTorch's notes on extending torch.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distributed.collectives import all_to_all, reduce_from_region
from distributed.shard.redistribute import redistribute, spec_of_dtensor, to_dtensor
from distributed.shard.spec import Axis, Mesh, Pieces, Spec, as_mesh, part_of, spec_of

RULES: dict[Callable, Callable] = {}
LocalTensors = torch._C.DisableTorchFunctionSubclass  # context: ShardTensors count as their local parts
Rule = TypeVar("Rule", bound=Callable)
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)  # None stays None


class ShardTensor(torch.Tensor):
    """See the top of the file. Made by from_local, scatter_tensor and wrap."""

    spec: Spec

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            raise no_rule(func, args, kwargs or {})
        with LocalTensors():
            return rule(func, *args, **kwargs) if kwargs else rule(func, *args)

    @classmethod
    def from_local(
        cls, local: Tensor, mesh: DeviceMesh | Mesh, placements: Sequence[Placement], sizes: Pieces | None = None
    ) -> "ShardTensor":
        """Put the ranks' local tensors together; differentiable.

        mesh: DeviceMesh of one or two dimensions. placements: Shard(dim), Replicate() or Partial() for each of them.
        sizes: {mesh dimension: sizes of its ranks}, for those with Shard; without it the ranks tell each other.
        Raises ValueError where sizes do not fit the local tensor.
        """
        mesh = as_mesh(mesh)
        shape = list(local.shape)
        found: dict[int, Any] = dict(sizes or {})
        for m, (placement, group) in enumerate(zip(placements, mesh.groups, strict=True)):
            if isinstance(placement, Shard):
                dim = placement.dim % local.ndim
                if m not in found:
                    every: list[Any] = [None] * group.size
                    dist.all_gather_object(every, local.shape[dim], group=mesh.device_mesh.get_group(m))
                    found[m] = tuple(every)
                shape[dim] = sum(found[m])
        spec = spec_of(mesh, shape, placements, found)
        if spec.local_shape != local.shape:
            raise ValueError(f"a local tensor of {tuple(local.shape)} is not this rank's part of {spec}")
        return wrap(local, spec)

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> "ShardTensor":
        """The ShardTensor of a DTensor, on the same mesh."""
        return wrap(tensor.to_local(), spec_of_dtensor(tensor))

    def to_dtensor(self) -> DTensor:
        """The DTensor of this tensor; it is rearranged first where the pieces are not those of torch.chunk."""
        return to_dtensor(local(self), self.spec)

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh over which the tensor is split."""
        return self.spec.mesh.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As DTensor's: Shard(dim), Replicate() or Partial() for every dimension of the mesh."""
        return self.spec.placements

    def to_local(self) -> Tensor:
        """This rank's part, a plain tensor; differentiable."""
        return local(self)

    def on_parts(self, function: Callable[..., Tensor], *args: Any) -> "ShardTensor":
        """Let a function that keeps the shape work on the local part: a collective over other ranks."""
        return wrap(function(local(self), *args), self.spec)

    def redistribute(self, placements: Sequence[Placement], sizes: Pieces | None = None) -> "ShardTensor":
        """The same tensor, split as `placements` say (and `sizes`, see from_local); differentiable.

        Split to split is one all-to-all, split to whole an all-gather, partial to whole an all-reduce, partial to split
        a reduce-scatter.
        """
        return redistributed(self, placements, sizes)

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank, a plain one. Every rank's gradient of it must be that of the whole."""
        return local(replicated(self))

    def __repr__(self):
        return f"ShardTensor({self.spec}, local={local(self.detach())})"


def rule(*functions: Callable) -> Callable[[Rule], Rule]:
    """Decorator: what it decorates computes these torch functions.

    Called as rule(function, *args, **kwargs). In a rule ShardTensors count as their local parts, eager as under
    torch.compile, which knows no other way: x.spec has the global shape, and dispatch(function, *args) goes by another
    rule.
    """

    def register(implementation: Rule) -> Rule:
        for function in functions:
            RULES[function] = implementation
            if isinstance(function, FunctionType) and vars(torch.Tensor).get(function.__name__) is function:
                setattr(ShardTensor, function.__name__, _method(implementation, function))
        return implementation

    return register


def _method(implementation, function):
    """The rule as a method: torch.compile does not find those methods of torch.Tensor that are written in Python."""

    def method(self, *args, **kwargs):
        with LocalTensors():
            return implementation(function, self, *args, **kwargs)

    return method


def dispatch(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A torch function by its rule, for use in rules."""
    return ShardTensor.__torch_function__(func, (), args, kwargs)


def global_shape(x: Tensor) -> torch.Size:
    """The shape of a ShardTensor or of a plain tensor, for use in rules."""
    return x.spec.shape if isinstance(x, ShardTensor) else x.shape


def named(*names: str) -> list[Callable]:
    """All torch functions of these names: of torch, torch.Tensor, torch.nn.functional and torch.linalg."""
    homes = (torch, torch.Tensor, torch._C.TensorBase, torch.nn.functional, torch._C._nn, torch.linalg, torch.special)
    return [f for name in names for home in homes if (f := getattr(home, name, None)) is not None]


def wrap(tensor: Tensor, spec: Spec) -> ShardTensor:
    """A local tensor as the part of a ShardTensor; nothing is checked or communicated."""
    tensor = tensor.as_subclass(ShardTensor)
    tensor.spec = spec
    return tensor


def local(x: MaybeTensor) -> MaybeTensor:
    """The local part of a ShardTensor, anything else as it is."""
    if isinstance(x, ShardTensor):
        with LocalTensors():
            return x.view_as(x)
    return x


def redistributed(x: ShardTensor, placements: Sequence[Placement], sizes: Pieces | None = None) -> ShardTensor:
    """x, split as `placements` say; sizes: {mesh dimension: sizes of its ranks}, see redistribute."""
    return wrap(*redistribute(local(x), x.spec, placements, sizes))


def replicated(x: ShardTensor) -> ShardTensor:
    """The ShardTensor as a whole copy on every rank."""
    return redistributed(x, [Replicate()] * len(x.spec.mesh.groups))


def reduced(x: ShardTensor) -> ShardTensor:
    """A partial ShardTensor summed up, so that operations that are not linear may follow; others as they are."""
    if not x.spec.partial:
        return x
    if len(x.spec.partial) == len(x.spec.mesh.groups):  # over both dimensions of the mesh in one go
        return wrap(reduce_from_region(local(x), x.spec.mesh.joint), x.spec.with_dims(x.spec.dims, ()))
    return redistributed(x, [Replicate() if p.is_partial() else p for p in x.spec.placements])


def shared(x: MaybeTensor, spec: Spec) -> MaybeTensor:
    """A plain tensor on its way into an operation whose result has this spec.

    Where the result is the same on several ranks, each of them has the whole gradient of a weight, not a part of it:
    it is divided, so that the sum over the ranks stays right.
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


def no_rule(func: Callable, args: Sequence[Any], kwargs: dict[str, Any], why: str = "") -> NotImplementedError:
    """The error for what no rule computes."""
    name = getattr(func, "__name__", str(func))
    found = [a.spec for a in _flat(args, kwargs) if isinstance(a, ShardTensor)]
    return NotImplementedError(
        f"ShardTensor: no rule for {name} of {', '.join(map(str, found))}{why and ': ' + why}. Either bring the tensor "
        "into a form that has one (x.redistribute([Replicate()]), x.full_tensor()), or register a rule with "
        "@distributed.shard_tensor.rule (docs/domain_parallel.md shows how)"
    )


def one_axis(func: Callable, x: ShardTensor, dim: int) -> Axis:
    """The axis of a split dimension that is one piece on every rank; no_rule for a product of several."""
    if len(x.spec.dims[dim]) > 1:
        raise no_rule(func, (x,), {}, f"dimension {dim} is not in one piece")
    return x.spec.dims[dim][0]


def _flat(args, kwargs):
    for a in (*args, *kwargs.values()):
        if isinstance(a, list | tuple):
            yield from _flat(a, {})
        else:
            yield a


def scatter_tensor(
    x: Any, src: int, mesh: DeviceMesh | Mesh, placements: Sequence[Placement], sizes: Pieces | None = None
) -> ShardTensor:
    """A ShardTensor from one rank's data: every other rank receives its own part of it and nothing else.

    x: the whole tensor on rank `src` of the mesh (counted in row-major order), anything elsewhere. placements, sizes:
    Shard or Replicate, as of ShardTensor.from_local, as even as can be without sizes. Differentiable: the gradient
    arrives at src. Every rank calls it. Raises ValueError, on every rank, where sizes do not fit.
    """
    mesh = as_mesh(mesh)
    group = mesh.joint
    process_group = dist.distributed_c10d._resolve_process_group(dist.GroupName(group.name))
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
