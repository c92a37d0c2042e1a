"""Plans: what a rank does for an operation, worked out once and kept on the Spec of its first ShardTensor.

A training step repeats its operations. How the result is split, and what this rank computes, depends on the function,
on how tensors are split, on shapes, and on numbers such as dimensions. These make the key of a plan. No plan depends on
the values of a tensor, and no key holds a tensor.
"""

import functools
from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from distributed.shard.core.operands import axes_of_operand, local_operand, split_alike, used_apart, whole_weight
from distributed.shard.core.spec import Spec, part_of
from distributed.shard.core.tensor import ReorderedTensor, ShardTensor, wrap_result

MOST_PLANS = 512  # on a Spec; then it forgets them, and begins anew
UNKNOWN: Any = object()  # stands for a plan that was not made yet
IS_PART_OF_KEY = {int, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.memory_format, torch.layout}
SPLIT = {ShardTensor, ReorderedTensor}
IS_PLAIN = {Tensor, torch.nn.Parameter}
ONLY_BY_TYPE = {float, complex}  # no split depends on their values
SEQUENCES = {tuple, list, torch.Size}


class Plan(NamedTuple):
    """compute(*arguments of the function) gives this rank's part of the result, or parts.

    spec: a Spec, or one of each part; None where compute gives the ShardTensor itself.
    """

    compute: Callable[..., Any]
    spec: Any


def planned(
    make: Callable[..., Plan | None],
    otherwise: Callable | None = None,
    takes_tensors: bool = False,
) -> Callable:
    """Decorator: the rule that does what the decorated make(function, *arguments) plans.

    make: looks at how tensors are split, at their shapes, and whether they need a gradient, and at no values of them.
    otherwise: the rule where it gives None. takes_tensors: whether the function combines tensors. Of others only the
    first argument is one: a number may be given as a tensor, and a plan that depends on it is not kept.
    """

    @functools.wraps(otherwise or make)
    def by_plan(func: Callable, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # it traces a step once
            plan = make(func, *args, **kwargs)
        else:
            key: list[Any] = [func]
            spec = add_to_key(key, args, takes_tensors)
            if kwargs and spec is not UNKNOWN:
                of_kwargs = add_to_key(key, tuple(kwargs.items()), takes_tensors)
                spec = of_kwargs if spec is None or of_kwargs is UNKNOWN else spec
            if spec is None or spec is UNKNOWN:
                plan = make(func, *args, **kwargs)
            else:
                plans = spec.plans
                parts = tuple(key)
                plan = plans.get(parts, UNKNOWN)
                if plan is UNKNOWN:
                    plan = make(func, *args, **kwargs)
                    keep(plans, parts, plan)
        if plan is None:
            return otherwise(func, *args, **kwargs)  # type: ignore[misc]  # None is planned with another rule beside
        compute, new = plan
        result = compute(*args, **kwargs)
        if isinstance(new, Spec):
            return wrap_result(result, new)
        if new is None:
            return result
        return tuple([wrap_result(part, spec_of_part) for part, spec_of_part in zip(result, new, strict=True)])

    return by_plan


def planned_else(make: Callable[..., Plan | None], takes_tensors: bool = False) -> Callable[[Callable], Callable]:
    """Decorator of a rule: make(function, *arguments) plans it, and the rule computes what has no plan, None."""
    return functools.partial(planned, make, takes_tensors=takes_tensors)


planned_of_tensors = functools.partial(planned, takes_tensors=True)


def keep(plans: dict[tuple, Any], key: tuple, plan: Any) -> None:
    """Keep a plan; the plans have a bound."""
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan


def add_to_key(key: list[Any], values: Sequence[Any], takes_tensors: bool) -> Spec | None:
    """Add to a key what a plan may depend on. Returns the Spec of the first ShardTensor, UNKNOWN for other values."""
    first = None
    for x in values:
        kind = type(x)
        if kind in SPLIT:
            spec = x.spec
            key.append(spec.structure)
            if first is None:
                first = spec
            elif not takes_tensors:
                return UNKNOWN
        elif kind in IS_PART_OF_KEY:
            key.append(x)
        elif kind in IS_PLAIN and takes_tensors:
            key.append((x.shape, x.requires_grad))
        elif kind in ONLY_BY_TYPE:
            key.append(kind)
        elif kind is bool:
            key.append("True" if x else "False")  # True == 1
        else:
            # Of a sequence its kind counts too: x[[0, 1]] is not x[0, 1].
            if kind is slice:
                inner = (x.start, x.stop, x.step)
            elif kind in SEQUENCES:
                inner = x
            else:
                return UNKNOWN
            key.append(kind)
            spec = add_to_key(key, inner, takes_tensors)
            key.append(UNKNOWN)  # the end of it
            if spec is UNKNOWN or (spec is not None and kind is slice):
                return UNKNOWN
            if first is None:
                first = spec
            elif spec is not None and not takes_tensors:
                return UNKNOWN
    return first


def as_it_is(x: Tensor) -> Tensor:
    """The operand that needs no preparation."""
    return x


def fit_of(x: Any, spec: Spec, result: Spec | None = None) -> Callable[[Any], Any]:
    """The preparation of an operand as local_operand does it, with what can be known before; of a number too."""
    if not isinstance(x, Tensor):
        return as_it_is
    result = result or spec
    wanted = axes_of_operand(x, spec)
    if isinstance(x, ShardTensor):
        is_sum_alone = not set(x.spec.partial) <= set(spec.partial)
        stays = not is_sum_alone and split_alike(x.spec, x.spec.with_dims(wanted))
        if stays and not used_apart(x.spec, result):
            return as_it_is
        return lambda x: local_operand(x, spec, result)

    # A plain tensor, of which this rank takes its part.
    own = spec.with_dims(wanted, ())
    if own.split_dims:
        return lambda x: part_of(whole_weight(x, result), own)
    is_scaled = result.copies > 1 and x.requires_grad
    return (lambda x: whole_weight(x, result)) if is_scaled else as_it_is


def fitted(compute: Callable, *fits: Callable, **named_fits: Callable) -> Callable:
    """compute(*operands), each prepared by its fit; further arguments stay as they are."""
    if all(fit is as_it_is for fit in (*fits, *named_fits.values())):
        return compute

    def on_fitted(*operands: Any, **named: Any) -> Any:
        own = [fit(x) for fit, x in zip(fits, operands, strict=False)]
        own_named = {name: named_fits[name](x) for name, x in named.items()}
        return compute(*own, *operands[len(fits) :], **own_named)

    return on_fitted
