"""Functions of torch that never ask the class of their arguments, and would see a rank's part of a ShardTensor.

torch has no protocol by which a class could answer for them. Each is replaced, when this module is imported, by a
function that looks for ShardTensors among its arguments first. Everything else passes through unchanged.

A torch.autograd.Function gets ShardTensors in forward() by itself. Its backward() gets ShardTensors too, and must
return them as gradients of ShardTensors; a plain gradient of a plain tensor is this rank's part of a sum.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch.autograd.function import Function, _SingleLevelFunction

from distributed.shard.operands import gradient_spec
from distributed.shard.rules.attributes import as_gradient
from distributed.shard.spec import Spec
from distributed.shard.tensor import AsShardTensors, LocalTensors, ShardTensor, dispatch, flat, local, rules_apply, wrap

SEES_PARTS: set[Callable] = set()  # for which no copy can stand either


def ask(
    owner: Any,
    name: str,
    shown: str = "",
    sees_parts: bool = True,
) -> None:
    """Let owner.name look for ShardTensors first, and refuse them (or go by a rule). shown: its name in messages."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if rules_apply() and any(isinstance(a, ShardTensor) for a in flat(args, kwargs)):
            return dispatch(function if not shown else asking, *args, **kwargs)
        return function(*args, **kwargs)

    if shown:
        asking.__name__ = shown
    if sees_parts:
        SEES_PARTS.add(asking if shown else function)
    setattr(owner, name, asking)


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
    call = super(_SingleLevelFunction, cls).apply
    if not (rules_apply() and torch.is_grad_enabled() and any(isinstance(a, ShardTensor) for a in args)):
        return call(*args, **kwargs)
    out = call(*(_enter(a) for a in args), **kwargs)
    made = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, ShardTensor) and y.requires_grad]
    if made:
        seen = {y.output_nr: gradient_spec(y.spec) for y in made}
        node: Any = made[0].grad_fn
        user = cls.backward if cls.vjp is Function.vjp else cls.vjp
        node.register_prehook(lambda grads: _seen(grads, seen))
        into = [gradient_spec(a.spec) if isinstance(a, ShardTensor) else None for a in args]
        node._forward_cls = SimpleNamespace(vjp=Function.vjp, backward=functools.partial(_backward, user, seen, into))
    return out


# Function.apply calls that of its base class; torch 2.15 has one of C++ in its place.
_owner = _SingleLevelFunction if isinstance(Function.__dict__["apply"], classmethod) else Function
_owner.apply = classmethod(apply)  # type: ignore[attr-defined]


def _seen(grads, specs):
    """The gradients of a function's outputs, those of ShardTensors as ShardTensors."""
    return tuple(g if g is None or i not in specs else wrap(g, specs[i]) for i, g in enumerate(grads))


def _backward(user, seen, into, ctx, *grads):
    """The backward of a custom function; its results are brought to the specs of the inputs."""
    with AsShardTensors():
        gradients = user(ctx, *_seen(grads, seen))
    return tuple(map(as_gradient, gradients if isinstance(gradients, tuple) else (gradients,), into))


def _enter(x):
    """An argument of a custom function, whose gradient may be a ShardTensor."""
    if not (isinstance(x, Tensor) and x.requires_grad):
        return x
    with LocalTensors():
        return _Enter.apply(x, x.spec if isinstance(x, ShardTensor) else None)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec | None) -> Tensor:
        ctx.spec = spec
        return x.view_as(x) if spec is None else wrap(x.view_as(x), spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return local(as_gradient(grad, ctx.spec and gradient_spec(ctx.spec))), None
