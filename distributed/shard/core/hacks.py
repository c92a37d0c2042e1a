"""What PyTorch has no public way for, in one place. Each function says why; nothing runs until a model needs it.

A release of torch may change what these rest on, so tests/test_shard_hacks.py holds each one by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from distributed.shard.core.spec import Spec, part_of
from distributed.shard.core.tensor import ShardTensor, no_rule, wrap
from utils.torch_private import storage_id

ALONE = 2  # users of the storage of a tensor that has no views: the tensor, and the one who asks


def adopt(func: Callable, plain: Tensor, spec: Spec) -> None:
    """Make a plain tensor that is about to receive the values of a split one a ShardTensor itself, in place.

    Models write so: out = torch.zeros(...), then out[...] = part. Each rank keeps its part of what the tensor held.
    Refused for a tensor that has views or a graph, because these would keep the whole.
    """
    own_spec = spec.with_dims(spec.dims, ())
    users = torch._C._storage_Use_Count(storage_id(plain)) if type(plain) is Tensor else 0
    is_free = users == ALONE and not plain.requires_grad
    fits = plain.shape == spec.shape
    if not is_free or not fits or torch.compiler.is_compiling():
        raise no_rule(func, (wrap(plain, spec),), {}, "a plain tensor cannot take the values of a split one")

    # The caller's own object changes its class, since the caller goes on with it.
    plain.data = part_of(plain, own_spec).clone()
    plain.__class__ = ShardTensor
    plain.spec = own_spec  # type: ignore[attr-defined]  # it is a ShardTensor now


@contextmanager
def with_plain_base(part: Tensor) -> Iterator[None]:
    """Inside, the tensor of which a local part is a view is a plain tensor too, and no ShardTensor.

    torch.compile looks at that tensor, although a compiled function never sees it, and cannot take a ShardTensor.
    """
    base = part._base
    if type(base) is not ShardTensor:
        yield
        return
    base.__class__ = Tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        base.__class__ = ShardTensor


def without_dispatch(function: FunctionType) -> FunctionType:
    """A function of torch without its question whether an argument has a __torch_function__.

    Its Python body is made of operations that have rules, and runs as it is. With the question it would ask for a rule
    of the function itself, and so call itself without end.
    """
    asks = (
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
    )
    # A copy with globals of its own: torch's module keeps the real ones.
    names = dict(function.__globals__)
    for name in asks:
        names[name] = lambda *args: False
    copy = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def replace_backward(node: Any, backward: Callable) -> None:
    """Let the node of a custom autograd function call another backward function than that of the user's class.

    Autograd runs on local parts, and the user's backward function is to see ShardTensors. A hook on the node could
    change what goes in and what comes out, but not the saved tensors that the function reads, nor how they dispatch.
    """
    node._forward_cls = SimpleNamespace(vjp=Function.vjp, backward=backward)
