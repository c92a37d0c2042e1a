"""Attributes of a ShardTensor, backward, and the operations that return values to the host."""

# mypy: disable-error-code="attr-defined,union-attr"
# (mypy takes Tensor.shape for a value of the class; it is a descriptor)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from distributed.shard.core.operands import gradient_spec, redistribute, replicate, split_alike, to_spec
from distributed.shard.core.spec import Spec
from distributed.shard.core.tensor import AsShardTensors, ShardTensor, local, named, rule, wrap


@rule(
    Tensor.requires_grad.__set__,
    Tensor._backward_hooks.__set__,
    # These ask for what a part and the whole have in common: type, device, place in the graph.
    *named(
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "output_nr",
        "_version",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_meta",
        "is_quantized",
        "is_nested",
        "retains_grad",
        "_backward_hooks",
        "is_mps",
        "is_xpu",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "itemsize",
        "element_size",
        "get_device",
        "requires_grad_",
        "retain_grad",
        "is_inference",
        "register_post_accumulate_grad_hook",
        "data_ptr",
        "is_contiguous",
        "is_pinned",
    ),
)
def of_local(
    func: Callable,
    x: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Properties that the whole tensor shares with the local part."""
    return func(x, *args, **kwargs)


@rule(*named("_base"))
def base(func: Callable, x: ShardTensor) -> None:
    """None, which hides that a ShardTensor is a view of its local part."""
    return None


@rule(*named("shape"))
def shape(func: Callable, x: ShardTensor) -> torch.Size:
    """The global shape."""
    return x.spec.shape


@rule(Tensor.size)
def size(
    func: Callable,
    x: ShardTensor,
    dim: int | None = None,
) -> torch.Size | int:
    """The global shape, or one size of it."""
    shape = x.spec.shape
    return shape if dim is None else shape[dim]


@rule(*named("ndim", "dim", "ndimension"))
def ndim(func: Callable, x: ShardTensor) -> int:
    """The number of dimensions."""
    return len(x.spec.dims)


@rule(*named("numel", "nelement"))
def numel(func: Callable, x: ShardTensor) -> int:
    """The number of elements of the whole tensor."""
    return x.spec.shape.numel()


@rule(torch.is_tensor)
def is_tensor(func: Callable, x: ShardTensor) -> bool:
    """A ShardTensor is a tensor."""
    return True


@rule(Tensor.grad.__set__)
def set_grad(func: Callable, x: ShardTensor, value: Tensor | None) -> None:
    """Give the local part the local part of a gradient."""
    func(x, local(value))


@rule(Tensor.__len__)
def length(func: Callable, x: ShardTensor) -> int:
    """The global size of the first dimension. Raises TypeError for a scalar, as torch does."""
    # The words are torch's.
    if not x.spec.dims:
        raise TypeError("len() of a 0-d tensor")
    return x.spec.shape[0]


@rule(Tensor.grad.__get__)
def grad(func: Callable, x: ShardTensor) -> ShardTensor | None:
    """The gradient, split as x is: each rank has its part of the serial gradient."""
    gradient = func(x)  # autograd's, of the local part
    if gradient is None:
        return None
    return wrap(gradient, gradient_spec(x.spec))


def as_gradient(grad: Tensor | None, spec: Spec | None) -> Tensor | None:
    """A gradient that user code returns, split as `spec` says; None: of a plain tensor, as parts of a sum.

    Raises TypeError for a plain gradient of a ShardTensor, because nobody knows what it is a part of.
    """
    if not isinstance(grad, ShardTensor):
        if grad is None or spec is None:
            return grad
        raise TypeError(f"the gradient of a ShardTensor, {spec}, must be a ShardTensor too, not a plain tensor")
    # A plain input has no split: each rank's gradient is a term of a sum.
    if spec is None:
        mesh_dims = len(grad.spec.mesh.groups)
        return redistribute(grad, [Partial()] * mesh_dims)
    if split_alike(grad.spec, spec):
        return grad
    return to_spec(grad, spec)


@rule(Tensor.register_hook)
def register_hook(
    func: Callable,
    x: ShardTensor,
    hook: Callable[[Tensor], Tensor | None],
) -> Any:
    """Let a hook see, and replace, the gradient as a ShardTensor."""
    spec = gradient_spec(x.spec)

    def on_part(grad: Tensor) -> Tensor | None:
        # Autograd calls the hook with the gradient of the local part, outside of any rule.
        with AsShardTensors():
            replaced = hook(wrap(grad, spec))
        gradient = as_gradient(replaced, spec)
        return local(gradient)

    return func(x, on_part)


@rule(Tensor._is_view)
def is_view(func: Callable, x: ShardTensor) -> bool:
    """Asked by torch.compile alone, of the inputs of a compiled region."""
    raise NotImplementedError(
        "a ShardTensor cannot be the input of a compiled function: compile a function of the local part that wraps it "
        "inside, as distributed.domain_parallel.OnParts does"
    )


@rule(Tensor.backward)
def backward(
    func: Callable,
    x: ShardTensor,
    gradient: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the backward pass. gradient: split as x is."""
    # torch itself would only see that a rank's part has one element.
    is_scalar = x.spec.shape.numel() == 1
    if gradient is None and x.spec.split_dims and not is_scalar:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    with AsShardTensors():  # hooks and recomputation compute with ShardTensors
        local(x).backward(local(gradient), *args, **kwargs)


@rule(torch.autograd.backward)
def backward_of(
    func: Callable,
    tensors: Any,
    grad_tensors: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the backward pass of several tensors, as reentrant checkpointing does. grad_tensors: split as these are."""
    # torch takes one tensor or several.
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if isinstance(grad_tensors, Tensor):
        grad_tensors = [grad_tensors]
    # local() makes a view.
    with torch.enable_grad():  # a view without a graph has no backward pass
        parts = [local(x) for x in tensors]
    own_grads = grad_tensors
    if grad_tensors:
        own_grads = [local(x) for x in grad_tensors]
    with AsShardTensors():
        func(parts, own_grads, *args, **kwargs)


@rule(
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__nonzero__,
    Tensor.__long__,
    Tensor.__complex__,
    Tensor.is_nonzero,
    torch.is_nonzero,
    Tensor.__index__,
    Tensor.__format__,
    Tensor.__contains__,
    Tensor.__array__,
)
def whole_value(
    func: Callable,
    x: ShardTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The value of the whole tensor for the host, on every rank."""
    # Every rank must have the same value, since the host may decide by it.
    whole = replicate(x)
    return func(local(whole), *args, **kwargs)
