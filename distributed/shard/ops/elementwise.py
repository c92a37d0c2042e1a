"""Elementwise operations: operands are redistributed to one common split, then each rank computes its own part.

Random numbers: each part of a split tensor has a stream of its own, and copies have the same numbers. The default
generators must be alike on all ranks that share an image; they are alike afterwards too. What a model draws into plain
tensors is therefore the same on all of them. Compiled code cannot change generators: there every part draws from the
default one, so that parts of one size have the same numbers.
"""

# mypy: disable-error-code="attr-defined"
# (mypy takes Tensor.real for a value of the class, and a plain tensor for what it was before it became a ShardTensor)

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.shard.core.given import Hooks
from distributed.shard.core.hacks import adopt
from distributed.shard.core.operands import check_writable, common_spec, gradient_spec, sum_partial
from distributed.shard.core.plans import Plan, fit_of, fitted, planned_else
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import ShardTensor, local, named, no_rule, rule, wrap, wrap_result


def pointwise_names() -> set[str]:
    """The names of the functions that torch marks as pointwise."""
    pointwise = set()
    for name in torch._C._dispatch_get_all_op_names():  # "aten::add.Tensor"
        library, _, function = name.partition("::")
        function, _, overload = function.partition(".")
        if library != "aten":
            continue
        operation = getattr(torch.ops.aten, function)
        variant = getattr(operation, overload or "default")
        if torch.Tag.pointwise in variant.tags:
            pointwise.add(function.removeprefix("special_"))
    # These are random, or do not give one tensor of the same shape.
    exceptions = {"rrelu", "equal", "frexp", "max", "min"}
    return pointwise - exceptions


def changes_in_place(func: Callable) -> bool:
    """Tell whether the name of a function says that it changes its first argument: add_, __iadd__."""
    name = func.__name__
    if name.startswith("__i"):
        return name != "__invert__"
    return name.endswith("_") and not name.endswith("__")


BINARY = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
OPERATORS = [f"__{kind}{name}__" for kind in ("", "r", "i") for name in BINARY]
NOT_MARKED = (  # other names of marked functions, and functions that copy or fill
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "expit",
    "fix",
    "gammainc",
    "gammaincc",
    "gammaln",
    "greater",
    "greater_equal",
    "isreal",
    "less",
    "less_equal",
    "multigammaln",
    "ndtr",
    "not_equal",
    "psi",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__invert__",
    "absolute",
    "negative",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "isclose",
    "complex",
    "polar",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "hardswish",
    "conj",
    "resolve_conj",
    "resolve_neg",
    "real",
    "imag",
    "angle",
    "clone",
    "detach",
    "alias",
    "contiguous",
    "cpu",
    "cuda",
    "pin_memory",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "zero_",
    "fill_",
    "copy_",
    "masked_fill_",
)
NAMES = (*pointwise_names(), *OPERATORS, *NOT_MARKED)
ALL_POINTWISE = named(*NAMES, *[f"{name}_" for name in NAMES])  # add_ changes its first argument in place
POINTWISE = [func for func in ALL_POINTWISE if func not in named("where")]  # `where` has a rule of its own
DROPOUT = set(named("dropout", "dropout_", "alpha_dropout"))
DRAWING = named("rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_")
IN_PLACE = {func for func in (*POINTWISE, *DROPOUT, *DRAWING) if changes_in_place(func)}
CASTS = named("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "byte", "char")
CASTS += named("short", "cfloat", "cdouble", "chalf")
# Linear functions, f(a + b) = f(a) + f(b), keep a partial tensor partial.
LINEAR = set(named("neg", "__neg__", "positive", "clone", "contiguous", "detach", "alias", "cpu", "cuda"))
SCALING = set(named("mul", "multiply", "div", "true_divide", "divide", "__mul__", "__rmul__", "__truediv__"))
ADDING = set(named("add", "sub", "subtract", "__add__", "__sub__"))


@rule(*named("where"))
def where(func: Callable, *args: Any, **kwargs: Any) -> ShardTensor:
    """Choose between two operands. Of a condition alone the result is indices, as of nonzero, which has no rule."""
    # The ranks would find different numbers of places.
    if len(args) + len(kwargs) == 1:
        raise no_rule(func, args, kwargs, "the number of its results depends on values")
    return elementwise(func, *args, **kwargs)


@rule(*POINTWISE)
def elementwise(func: Callable, *args: Any, **kwargs: Any) -> ShardTensor:
    """Combine ShardTensors, plain tensors and numbers with broadcasting; in-place functions too."""
    # In the common case all operands are numbers, or split in the same way. This loop runs for every operation.
    spec = None
    for x in args:
        if type(x) is float or type(x) is int:
            continue
        if isinstance(x, ShardTensor):
            own = x.spec
            if spec is None:
                spec = own
            elif own is not spec and own != spec:
                break
        elif isinstance(x, Tensor):
            break
    else:
        has_tensor_options = kwargs and any(isinstance(x, Tensor) for x in kwargs.values())
        if spec is not None and not has_tensor_options:
            stays_valid = not spec.partial or (not kwargs and keeps_sums(func, args))
            if stays_valid:
                first = args[0]
                out = func(*args, **kwargs)
                return wrap_result(out, spec) if out is not first else check_writable(first)
    return broadcast(func, *args, **kwargs)


def keeps_sums(func: Callable, args: Sequence[Any]) -> bool:
    """Tell whether func is linear: of one tensor alone, of a tensor and a number, or the sum of two tensors."""
    if func in LINEAR:
        return True
    # The product of two sums is not the sum of the products.
    tensors = [isinstance(x, ShardTensor) for x in args]
    if func in SCALING:
        return tensors == [True, False]
    return func in ADDING and all(tensors)


def plan_of_operands(func: Callable, *args: Any, **kwargs: Any) -> Plan | None:
    """Bring all operands to their common split, in which terms of sums are added up; None for a change in place."""
    if func in IN_PLACE:
        return None
    spec = common_spec([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
    fits = [fit_of(x, spec) for x in args]
    named_fits = {name: fit_of(x, spec) for name, x in kwargs.items()}
    return Plan(fitted(func, *fits, **named_fits), spec)


@planned_else(plan_of_operands, takes_tensors=True)
def broadcast(
    func: Callable,
    first: Any,
    *others: Any,
    **kwargs: Any,
) -> ShardTensor:
    """Operands of any split. In place the first one decides on the split."""
    # A plain tensor can only take split values if it becomes split itself.
    if not isinstance(first, ShardTensor):
        operands = (first, *others)
        spec = common_spec([x for x in (*operands, *kwargs.values()) if isinstance(x, Tensor)])
        if is_for_all(spec, operands):  # running statistics
            wholes = [local(sum_partial(x)) for x in operands]
            return func(*wholes, **kwargs)
        adopt(func, first, spec)
    if first.spec.partial:
        if getattr(first, "row_of", None) is None:  # compiled code does not know it
            raise no_rule(func, (first, *others), kwargs, "in place on a partial tensor")
        return change_row(func, first, others, kwargs)

    own_others = [fit_of(x, first.spec)(x) for x in others]
    own_kwargs = {name: fit_of(x, first.spec)(x) for name, x in kwargs.items()}
    func(first, *own_others, **own_kwargs)
    return check_writable(first)


def is_for_all(spec: Spec, operands: Sequence[Any]) -> bool:
    """Tell whether every rank holds the whole of a tensor without a gradient, so that a plain tensor may take it."""
    if spec.split_dims:
        return False
    tensors = [x for x in operands if isinstance(x, Tensor)]
    return not any(x.requires_grad for x in tensors)


@rule(*CASTS)
def cast(
    func: Callable,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Convert to another dtype or device."""
    if not isinstance(x, ShardTensor):  # type_as a ShardTensor
        own_args = [local(a) for a in args]
        return func(x, *own_args, **kwargs)
    out = func(x, *args, **kwargs)
    if not isinstance(out, Tensor):  # type() gives a name
        return out
    if x.spec.partial and not out.is_floating_point():  # parts of a sum must not be rounded
        return cast(func, sum_partial(x), *args, **kwargs)
    return wrap(out, x.spec)


def own_stream(spec: Spec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context in which the default generators draw this rank's part of a tensor."""
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    # The number of the part in row-major order of the mesh: ranks with copies have the same one.
    part = 0
    for placement, group in zip(spec.placements, spec.mesh.groups, strict=True):
        coordinate = group.rank if placement.is_shard() else 0
        part = part * group.size + coordinate
    return Hooks.random_stream(device, part)


@rule(*DROPOUT, *DRAWING)
def drawn(
    func: Callable,
    x: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> ShardTensor:
    """Draw this rank's part, with parameters that are numbers."""
    # Dropout that drops nothing draws nothing either. torch.dropout calls `training` `train`.
    settings = dict(zip(("p", "training", "inplace"), args, strict=False))
    settings |= kwargs
    is_training = settings.get("training", True) and settings.get("train", True)
    drops = settings.get("p", 0.5) and is_training
    if func in DROPOUT and not drops:
        out = func(x, *args, **kwargs)
        return wrap(out, x.spec) if out is not x else x
    has_tensors = any(isinstance(a, Tensor) for a in args)
    if has_tensors or kwargs.get("generator") is not None:
        raise no_rule(func, (x, *args), kwargs, "with a generator, or a tensor of parameters")
    in_place = func in IN_PLACE or kwargs.get("inplace") or args[2:] == (True,)
    if in_place and x.spec.partial:
        raise no_rule(func, (x, *args), kwargs, "in place on a partial tensor")
    # Each term of a sum would be drawn by itself, so the sum comes first.
    x = sum_partial(x)
    with own_stream(x.spec, x.device):
        out = func(x, *args, **kwargs)
    return check_writable(x) if out is x else wrap(out, x.spec)


def change_row(
    func: Callable,
    row: ShardTensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ShardTensor:
    """Call func(row, *args, **kwargs), an elementwise function that changes the row in place, and the tensor with it.

    row: as indexing gives it, of which row_of is the tensor and is_own_row tells whether this rank holds it.
    """
    spec = gradient_spec(row.spec)

    # All ranks prepare the operands, because that may communicate, and the one that holds the row uses its copies.
    own_args = [fit_of(x, spec, row.spec)(x) for x in args]
    own_kwargs = {name: fit_of(x, spec, row.spec)(x) for name, x in kwargs.items()}
    if row.is_own_row:
        func(row, *own_args, **own_kwargs)
        return check_writable(row)
    assert row.row_of is not None
    operands = [*own_args, *own_kwargs.values()]
    # The ranks without the row stand in its backward pass all the same.
    take_part(row.row_of, operands)
    take_part(row, operands)
    return check_writable(row)


def take_part(x: Tensor, operands: Sequence[Any]) -> None:
    """Give operands that this rank does not use a place in the backward pass of x, with a gradient of zero."""
    flat = x.reshape(1) if x.dim() == 0 else x
    for operand in operands:
        if isinstance(operand, Tensor) and operand.requires_grad:
            # The sum over no elements is 0, also where the operand is not finite.
            nothing = operand.reshape(-1)[:0].sum()
            flat[:0].add_(nothing)
