"""ShardTensor: one tensor that is split over the ranks of a mesh. Unchanged model code computes on it.

A ShardTensor is its local part, with a subclass of torch.Tensor as its type. It carries a Spec as an attribute, and
`.shape` is the global shape. Every torch function that is called with a ShardTensor is looked up in a registry of rules
(see `rule`; the rules are in ops/ and extra/). The rule computes on the local part and communicates as needed.
An operation without a rule raises an error, so that no result is silently wrong. Autograd runs on the local tensors.

Gradients. The gradient of a ShardTensor is split in the same way: each rank holds its part of the serial gradient. A
plain tensor in an operation with a ShardTensor, such as a weight, counts as a copy on every rank. Each rank computes a
*part* of its gradient, and the sum over the mesh is the serial gradient. No rule reduces gradients of weights; data
parallelism does that once per step.

PyTorch's notes on extending torch describe torch.Tensor.as_subclass and __torch_function__.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType, GetSetDescriptorType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling  # one call, where is_compiling takes two
from torch.distributed.device_mesh import DeviceMesh

from distributed.shard.core import compiled
from distributed.shard.core.calls import flatten_arguments, name_of, place_of_call
from distributed.shard.core.redistribute import as_dtensor, chunks, redistribute
from distributed.shard.core.spec import CannotSplit, Mesh, Pieces, Spec, as_mesh, spec_of
from utils.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

RULES: dict[Callable, Callable] = {}
LIBRARIES: list[Callable[[], None]] = []  # each lets the functions of a library go by rules: see find_libraries
# {name: (rule, function inside, function)} of operators that torch has decorated. torch.compile finds no rule by such a
# function.
DECORATED: dict[str, tuple[Callable, Callable, Callable]] = {}
WRAPPER = "wrapped"  # torch's name of what decorates them
COMPOSED = set[Callable]()  # functions whose rules call other operations on ShardTensors
made_whole = Counter[str]()  # bytes of results that every rank has whole, by operation: see _count_whole
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
# Types of arguments that are no ShardTensors, asked first: isinstance of a class of tensors takes five times as long.
NEVER_SPLIT = {NoneType, bool, int, float, Tensor, torch.nn.Parameter}
LocalTensors = torch._C.DisableTorchFunctionSubclass  # in this context ShardTensors behave as their local parts
AsShardTensors = torch._C._EnableTorchFunction  # in this one again as ShardTensors
rules_apply = torch._C._is_torch_function_enabled  # whether they do: not inside a rule
Rule = TypeVar("Rule", bound=Callable)
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)  # None stays None


class ShardTensor(torch.Tensor):
    """A split tensor, described at the top of this file. from_local, scatter_tensor and wrap make one."""

    spec: Spec
    # Of a single row of a split tensor, which is partial: that tensor, and whether this rank holds the row.
    row_of: "ShardTensor | None" = None
    is_own_row = False
    copied_from = ""  # the operation that copied this from whole tensors, where torch's result would be a view

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule, func = traced_rule(func) if is_dynamo_compiling() else (RULES.get(func), func)
        kwargs = kwargs or {}
        if kwargs and not isinstance(func, FunctionType):  # functions written in C have names of numpy's too
            kwargs = {NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
        try:
            if rule is None or (kwargs and kwargs.get("out") is not None):
                raise no_rule(func, args, kwargs, "out= is not supported" if rule else "")
            with LocalTensors():  # in a rule, ShardTensors behave as their local parts
                result = rule(func, *args, **kwargs) if kwargs else rule(func, *args)
        except (NoRule, CannotSplit, AttributeError) as error:
            return _refused(error, func, args, kwargs)  # raises it, or computes on whole tensors
        if type(result) is ShardTensor and not result.spec.split_dims:
            _count_whole(func, args, kwargs, result)
        return result

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        mesh: DeviceMesh | Mesh,
        placements: Sequence["Placement"],
        sizes: Pieces | None = None,
    ) -> "ShardTensor":
        """Make a ShardTensor of the local tensors of all ranks; differentiable.

        mesh: DeviceMesh of one or two dimensions. placements: Shard(dim), Replicate() or Partial() for each of them.
        sizes: {mesh dimension: sizes of its ranks} for the dimensions with Shard; without it the ranks exchange sizes.
        Raises ValueError if sizes do not fit the local tensor.
        """
        from torch.distributed.tensor import Shard  # slow to import

        # A model that makes a ShardTensor has imported its libraries by now.
        find_libraries()
        mesh = as_mesh(mesh)
        shape = list(local.shape)  # of the whole, dimension by dimension
        known_sizes: dict[int, Any] = dict(sizes or {})
        for m, (placement, group) in enumerate(zip(placements, mesh.groups, strict=True)):
            if not isinstance(placement, Shard):
                continue
            dim = placement.dim % local.ndim
            if m not in known_sizes:
                every: list[Any] = [None] * group.size
                process_group = mesh.device_mesh.get_group(m)
                dist.all_gather_object(every, local.shape[dim], group=process_group)
                known_sizes[m] = tuple(every)
            shape[dim] = sum(known_sizes[m])
        spec = spec_of(mesh, shape, placements, known_sizes)
        if spec.local_shape != local.shape:
            raise ValueError(f"a local tensor of {tuple(local.shape)} is not this rank's part of {spec}")
        return wrap(local, spec)

    @classmethod
    def from_dtensor(cls, tensor: "DTensor") -> "ShardTensor":
        """The ShardTensor of a DTensor, on the same mesh."""
        mesh = tensor.device_mesh
        sizes = chunks(tensor.shape, tensor.placements, mesh)
        spec = spec_of(mesh, tensor.shape, tensor.placements, sizes)
        return wrap(tensor.to_local(), spec)

    def to_dtensor(self) -> "DTensor":
        """The DTensor of this tensor, redistributed first if its pieces are not those of torch.chunk."""
        mesh = self.mesh
        shape = self.spec.shape
        placements = self.placements
        sizes = chunks(shape, placements, mesh)
        part, _ = redistribute(local(self), self.spec, placements, sizes)
        return as_dtensor(part, mesh, placements, shape)

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh over which the tensor is split."""
        return self.spec.mesh.device_mesh

    @property
    def placements(self) -> tuple["Placement", ...]:
        """As DTensor's: Shard(dim), Replicate() or Partial() for every dimension of the mesh."""
        return self.spec.placements

    def to_local(self) -> Tensor:
        """This rank's part, a plain tensor; differentiable."""
        return local(self)

    def on_parts(
        self,
        function: Callable[..., Tensor],
        *args: Any,
    ) -> "ShardTensor":
        """Apply a function that keeps the shape, such as a collective over other ranks, to the local part."""
        return wrap(function(local(self), *args), self.spec)

    def redistribute(
        self,
        placements: Sequence["Placement"],
        sizes: Pieces | None = None,
    ) -> "ShardTensor":
        """The same tensor with other `placements` (and `sizes`, see from_local); differentiable.

        Shard to Shard is one all-to-all, Shard to Replicate an all-gather, Partial to Replicate an all-reduce, Partial
        to Shard a reduce-scatter.
        """
        part, spec = redistribute(local(self), self.spec, placements, sizes)
        return wrap(part, spec)

    def replicate(self) -> "ShardTensor":
        """The same tensor as a whole copy on every rank."""
        from torch.distributed.tensor import Replicate  # slow to import

        return self.redistribute([Replicate()] * len(self.spec.mesh.groups))

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank, as a plain tensor. The gradient of it must be the same on every rank."""
        return local(self.replicate())

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return f"ShardTensor({self.spec}, local={local(self.detach())})"


class ReorderedTensor(ShardTensor):
    """A ShardTensor of which a dimension has an Order, such as that of the edges of a graph: see ops/edges.py.

    Only few rules know such a dimension. Any other operation has the rows brought into their global order first.
    """

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        assert in_any_order is not None
        return in_any_order(func, args, kwargs or {})

    def to_local(self) -> Tensor:
        """This rank's part of the rows in order, which is contiguous."""
        return self.in_order().to_local()

    def to_dtensor(self) -> "DTensor":
        """The DTensor of this tensor."""
        return self.in_order().to_dtensor()

    def redistribute(self, placements: Sequence["Placement"], sizes: Pieces | None = None) -> ShardTensor:
        """The same tensor with other placements, its rows in order."""
        return self.in_order().redistribute(placements, sizes)

    def in_order(self) -> ShardTensor:
        """The same tensor with contiguous pieces, as even as possible."""
        assert put_in_order is not None
        return put_in_order(self)


# Set by ops/edges.py: what computes a function of ReorderedTensors, and what brings the rows of one into order.
in_any_order: Callable[[Callable, tuple, dict[str, Any]], Any] | None = None
put_in_order: Callable[[ShardTensor], ShardTensor] | None = None


def rule(*functions: Callable) -> Callable[[Rule], Rule]:
    """Decorator: register the decorated function as the rule for these torch functions.

    A rule is called as rule(function, *args, **kwargs). Inside a rule, ShardTensors behave as their local parts (the
    only way that torch.compile supports). x.spec has the global shape, and dispatch(function, *args) uses another rule.
    """

    def register(implementation: Rule) -> Rule:
        for function in functions:
            # A later rule for the same function replaces the earlier one.
            RULES[function] = implementation
            if not isinstance(function, FunctionType):
                continue
            inside = getattr(function, "__wrapped__", None)
            if inside is not None:
                DECORATED[function.__name__] = implementation, inside, function
            is_python_method = vars(torch.Tensor).get(function.__name__) is function
            if is_python_method:
                method = _method(implementation, function)
                setattr(ShardTensor, function.__name__, method)
        return implementation

    return register


def traced_rule(func: Callable) -> tuple[Callable | None, Callable]:
    """The rule that torch.compile is to trace for a function, and the function that the rule is to call."""
    if not isinstance(func, FunctionType):
        return RULES.get(func), func
    name = getattr(func, "__name__", "")
    if name == WRAPPER:  # torch 2.15 tells the tracer this name in place of the method's
        names = [name for name, (*_, function) in DECORATED.items() if func is function]
        name = names[0] if names else WRAPPER
    if name in DECORATED:
        implementation, inside, _ = DECORATED[name]
        return implementation, inside
    return RULES.get(func), func


def composed(*functions: Callable) -> Callable[[Rule], Rule]:
    """Decorator: as `rule`, but ShardTensors are ShardTensors inside, so that it is written as on whole tensors."""

    def register(implementation: Rule) -> Rule:
        def enabled(func: Callable, *args: Any, **kwargs: Any) -> Any:
            return on_shard_tensors(implementation, func, *args, **kwargs)

        rule(*functions)(enabled)
        COMPOSED.update(functions)
        return implementation

    return register


def composed_as(function: Callable, *functions: Callable) -> None:
    """Let functions of torch be computed, as by `composed`, by one that takes the same arguments."""

    def implementation(func: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    composed(*functions)(implementation)


def on_shard_tensors(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function from within a rule, in which ShardTensors are ShardTensors, not their local parts."""
    if is_dynamo_compiling():  # it cannot trace AsShardTensors
        before = compiled.let_rules_apply(True)
        result = function(*args, **kwargs)
        compiled.let_rules_apply(before)
        return result
    with AsShardTensors():
        return function(*args, **kwargs)


def _method(implementation, function):
    """The rule as a method, because torch.compile does not dispatch methods of torch.Tensor written in Python."""

    def method(self, *args, **kwargs):
        if not rules_apply():  # in a rule it is its local part
            return function(self, *args, **kwargs)
        if self.spec.has_order:
            return dispatch(function, self, *args, **kwargs)
        try:
            with LocalTensors():
                return implementation(function, self, *args, **kwargs)
        except (NoRule, CannotSplit, AttributeError) as error:
            return _refused(error, function, (self, *args), kwargs)

    return method


def _count_whole(func, args, kwargs, result):
    """Count a result that every rank has whole, although an operand is split, if it is no smaller than a part of that.

    Composed operations are counted by their parts, and what a rule uses inside is not counted.
    """
    # Inside a rule no rules apply: what it computes there is not counted.
    if torch.compiler.is_compiling() or func in COMPOSED or not rules_apply():
        return
    with LocalTensors():
        # Inside, numel is that of a rank's part.
        parts = []
        for x in flatten_arguments(args, kwargs):
            if isinstance(x, ShardTensor) and x.spec.split_dims:
                parts.append(x.numel())
        if parts and result.numel() >= max(parts):
            made_whole[name_of(func)] += result.nbytes


def find_libraries() -> None:
    """Let functions of libraries go by rules, of those libraries that the program has imported by now."""
    for find in LIBRARIES:
        find()


def dispatch(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a torch function by its rule, from within a rule."""
    if any(isinstance(x, ReorderedTensor) for x in flatten_arguments(args, kwargs)):
        return ReorderedTensor.__torch_function__(func, (), args, kwargs)
    return ShardTensor.__torch_function__(func, (), args, kwargs)


def named(*names: str) -> list[Callable]:
    """All torch functions with these names, in torch, torch.Tensor, torch.nn.functional and torch.linalg.

    Of an attribute of tensors, such as shape, it is the function that gets it.
    """
    homes = (
        torch,
        torch.Tensor,
        torch._C.TensorBase,
        torch.nn.functional,
        torch._C._nn,
        torch.linalg,
        torch.special,
    )
    found = []
    for name in names:
        for home in homes:
            function = getattr(home, name, None)
            if isinstance(function, GetSetDescriptorType):
                function = function.__get__
            if function is not None:
                found.append(function)
    return found


def wrap(tensor: Tensor, spec: Spec) -> ShardTensor:
    """Make a ShardTensor of a local tensor and its spec. Nothing is checked or communicated."""
    if is_dynamo_compiling() and not compiled.is_guarded:
        raise NoRule(f"torch {torch.__version__} cannot compile ShardTensors: it has other names than we know")
    # The result is another Python object on the same memory, in the same graph.
    tensor = tensor.as_subclass(ReorderedTensor if spec.has_order else ShardTensor)
    tensor.spec = spec
    return tensor


def wrap_result(tensor: Tensor, spec: Spec) -> Any:
    """As `wrap`, for the result of one of torch's operations: nobody else has it, and it becomes a ShardTensor."""
    if is_dynamo_compiling() or type(tensor) is not Tensor:
        return wrap(tensor, spec)
    # The tensor changes its class: as_subclass would make another one, at a cost in every operation.
    tensor.__class__ = ReorderedTensor if spec.has_order else ShardTensor
    tensor.spec = spec  # type: ignore[attr-defined]
    return tensor


def local(x: MaybeTensor) -> MaybeTensor:
    """The local part of a ShardTensor, anything else as it is."""
    if isinstance(x, ShardTensor):
        with LocalTensors():
            return x.view_as(x)
    return x


class NoRule(UsageError, NotImplementedError):
    """An operation that no rule computes."""


def no_rule(
    func: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    why: str = "",
) -> NoRule:
    """The error for an operation that no rule computes."""
    specs = [_described(a.spec) for a in flatten_arguments(args, kwargs) if isinstance(a, ShardTensor)]
    operands = ", ".join(specs)
    reason = f": {why}" if why else ""
    what = f"ShardTensor: no rule for {name_of(func)} of {operands}{place_of_call()}{reason}"
    form = "bring the tensor into a form that has one (x.redistribute([Replicate()]), x.full_tensor())"
    own = "register a rule with @distributed.shard_tensor.rule (docs/reference/domain_parallel.md shows how)"
    is_compiling = is_dynamo_compiling()
    # Where that was chosen already, the reason says why it does not help.
    if computes_on_whole and not is_compiling:
        return NoRule(f"{what}. Either {form}, or {own}")
    without_jit = ", without --enable_jit" if is_compiling else ""
    whole = f"compute what has none on whole tensors{without_jit}: --domain_fallback gather, set_fallback('gather')"
    return NoRule(f"{what}. Either {form}, {own}, or {whole}")


def _described(spec):
    """A Spec for messages. torch.compile cannot call str() of one that it has traced."""
    if is_dynamo_compiling():
        return f"Spec({tuple(spec.shape)}, split dimensions {spec.split_dims})"
    return str(spec)


computes_on_whole = False  # set_fallback("gather") was called
# Set by shard/fallback.py: what computes an operation that no rule computes.
on_refusal: Callable[[Callable, Sequence[Any], dict[str, Any], Exception], Any] | None = None


def _refused(error, func, args, kwargs):
    """Raise the error of a rule, or let on_refusal compute what it refuses."""
    if isinstance(error, AttributeError):
        why = "a plain tensor in the place of a ShardTensor"
        if is_dynamo_compiling():  # its errors have no name
            why += ", or an attribute that compiled code does not know"
        elif error.name != "spec":  # an error of another kind
            raise error
        error = no_rule(func, args, kwargs, why)
    elif isinstance(error, CannotSplit):
        error = no_rule(func, args, kwargs, str(error))
    # Nobody has set it while the modules of rules are imported.
    if on_refusal is None:
        raise error
    return on_refusal(func, args, kwargs, error)
