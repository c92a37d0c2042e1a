"""Functions of torch that never ask the class of their arguments, and would see a rank's part of a ShardTensor.

torch has no protocol by which a class could answer for them. Each is replaced, when this module is imported, by a
function that looks for ShardTensors among its arguments first. Everything else passes through unchanged.

A torch.autograd.Function gets ShardTensors in forward() by itself. Its backward() gets ShardTensors too, and must
return them as gradients of ShardTensors; a plain gradient of a plain tensor is this rank's part of a sum.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch.autograd.function import Function, _SingleLevelFunction

from distributed.shard.core.calls import flatten_arguments
from distributed.shard.core.compiled import guard_compiler
from distributed.shard.core.hacks import replace_backward
from distributed.shard.core.operands import gradient_spec
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import (
    AsShardTensors,
    LocalTensors,
    ShardTensor,
    dispatch,
    local,
    rules_apply,
    wrap,
)
from distributed.shard.ops.attributes import as_gradient

# Functions that the fallback must not compute either, because a copy of the whole cannot stand for the tensor.
SEES_PARTS: set[Callable] = set()


def ask(
    owner: Any,
    name: str,
    shown: str = "",
    sees_parts: bool = True,
) -> None:
    """Let owner.name look for ShardTensors first, and refuse them (or go by a rule). shown: its name in messages."""
    # The original stays reachable by this closure alone.
    function = getattr(owner, name)

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if rules_apply() and any(isinstance(a, ShardTensor) for a in flatten_arguments(args, kwargs)):
            # A function that is shown by another name has its rules under that name.
            registered = asking if shown else function
            return dispatch(registered, *args, **kwargs)
        return function(*args, **kwargs)

    if shown:
        asking.__name__ = shown
    if sees_parts:
        SEES_PARTS.add(asking if shown else function)
    setattr(owner, name, asking)


guard_compiler(ShardTensor)
ask(vmap, "_add_batch_dim", "torch.vmap")
ask(eager_transforms, "_wrap_for_grad", "a transform of torch.func")
ask(eager_transforms, "_wrap_functional_tensor", "torch.func.functionalize")
ask(torch.jit, "trace")
ask(torch.autograd.graph, "register_multi_grad_hook")
ask(torch.jit.ScriptFunction, "__call__", "a scripted function", sees_parts=False)
ask(torch, "tensor", sees_parts=False)
ask(torch.Tensor, "new_tensor", sees_parts=False)
torch.jit._builtins._register_builtin(torch.tensor, "aten::tensor")  # for functions that are scripted from now on


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """As Function.apply, with gradients of ShardTensors that are ShardTensors."""
    call = super(_SingleLevelFunction, cls).apply  # torch's own, without the question below
    if not (rules_apply() and torch.is_grad_enabled() and any(isinstance(a, ShardTensor) for a in args)):
        return call(*args, **kwargs)
    entered = [_enter(a) for a in args]
    out = call(*entered, **kwargs)

    # The outputs that have a backward pass: all have the same node, which calls the function's backward.
    outputs = out if isinstance(out, tuple) else (out,)
    made = [y for y in outputs if isinstance(y, ShardTensor) and y.requires_grad]
    if made:
        seen = {y.output_nr: gradient_spec(y.spec) for y in made}
        into = [gradient_spec(a.spec) if isinstance(a, ShardTensor) else None for a in args]
        node: Any = made[0].grad_fn
        user_backward = cls.backward if cls.vjp is Function.vjp else cls.vjp
        backward = functools.partial(_backward, user_backward, seen, into)
        node.register_prehook(lambda grads: _seen(grads, seen))
        replace_backward(node, backward)
    return out


# Function.apply calls that of its base class; torch 2.15 has one of C++ in its place.
_owner = _SingleLevelFunction if isinstance(Function.__dict__["apply"], classmethod) else Function
_owner.apply = classmethod(apply)  # type: ignore[attr-defined]


def _seen(grads, specs):
    """The gradients of a function's outputs, those of ShardTensors as ShardTensors. specs: {number of output: Spec}."""
    seen = []
    for number, grad in enumerate(grads):
        is_split = grad is not None and number in specs
        seen.append(wrap(grad, specs[number]) if is_split else grad)
    return tuple(seen)


def _backward(user, seen, into, ctx, *grads):
    """The backward of a custom function; its results are brought to the specs of the inputs."""
    # The user's code computes with ShardTensors, although autograd runs on local parts.
    with AsShardTensors():
        gradients = user(ctx, *_seen(grads, seen))
    # A function of one input may return its gradient alone.
    if not isinstance(gradients, tuple):
        gradients = (gradients,)
    return tuple(map(as_gradient, gradients, into))


def _enter(x):
    """An argument of a custom function, whose gradient may be a ShardTensor."""
    needs_grad = isinstance(x, Tensor) and x.requires_grad
    if not needs_grad:
        return x
    spec = x.spec if isinstance(x, ShardTensor) else None
    with LocalTensors():
        return _Enter.apply(x, spec)


class _Enter(torch.autograd.Function):
    """Identity, through which a ShardTensor's gradient leaves a custom function as the gradient of a local part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec | None) -> Tensor:
        ctx.spec = spec
        view = x.view_as(x)
        return view if spec is None else wrap(view, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        spec = None if ctx.spec is None else gradient_spec(ctx.spec)
        return local(as_gradient(grad, spec)), None
