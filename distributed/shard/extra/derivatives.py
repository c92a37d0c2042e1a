"""torch.autograd.grad inside a model: energies, gradient penalties, residuals of differential equations.

Autograd runs on the local parts, and the backward pass of each rule communicates. What comes out on each rank is its
part of the gradient of the whole: the gradient of a partial sum, an energy, is 1 on every rank. With create_graph=True
the backward passes of the collectives have a graph too (see collectives.py), so that results are differentiated again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distributed.shard.core.axes import unsplit_axes
from distributed.shard.core.operands import as_replicated, gradient_spec, sum_partial, to_spec
from distributed.shard.core.spec import Mesh, Spec
from distributed.shard.core.tensor import AsShardTensors, ShardTensor, local, rule, wrap
from utils.errors import UsageError


@rule(torch.autograd.grad)
def grad(
    func: Callable,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of ShardTensors, each split as its input; that of a plain input is partial, a term on each rank.

    grad_outputs: ShardTensors of any split, or plain tensors of global shapes, which are the same on every rank.
    Raises UsageError for batched gradients, and for plain inputs where an output is plain; RuntimeError as torch does.
    """
    outputs = _as_list(outputs)
    inputs = _as_list(inputs)
    seeds = [None] * len(outputs) if grad_outputs is None else _as_list(grad_outputs)
    mesh = _mesh_of([*outputs, *inputs])
    _check(outputs, inputs, is_grads_batched)

    # Each rank begins with its part of the gradients of the outputs.
    own_seeds = []
    for y, seed in zip(outputs, seeds, strict=True):
        own_seed = _own_seed(y, seed) if isinstance(y, ShardTensor) else seed
        own_seeds.append(own_seed)
    # Hooks and recomputation compute with ShardTensors. Edges of the graph stand for the tensors, which torch would ask
    # for a rule again.
    starts = [_edge(y) for y in outputs]
    ends = [_edge(x) for x in inputs]
    if allow_unused is None:
        allow_unused = materialize_grads
    with AsShardTensors():
        found = func(
            starts,
            ends,
            own_seeds,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
        )

    gradients = []
    for x, gradient in zip(inputs, found, strict=True):
        if gradient is None and materialize_grads:
            gradient = torch.zeros_like(local(x), requires_grad=create_graph)
        if gradient is not None:
            gradient = wrap(gradient, _spec_of_gradient(x, mesh))
        gradients.append(gradient)
    return tuple(gradients)


def _as_list(tensors):
    """Torch takes one tensor or several."""
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    return [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)


def _mesh_of(tensors: Sequence[Any]) -> Mesh:
    """The mesh of the first ShardTensor."""
    return next(x.spec.mesh for x in tensors if isinstance(x, ShardTensor))


def _check(outputs, inputs, is_grads_batched):
    """Raise UsageError for what has no gradient that is known to be right."""
    has_edges = any(isinstance(x, GradientEdge) for x in (*outputs, *inputs))
    has_plain_output = not all(isinstance(y, ShardTensor) for y in outputs)
    has_plain_input = not all(isinstance(x, ShardTensor) for x in inputs)
    if has_edges:
        why = "an edge of the graph does not say how its tensor is split: give the tensors"
    elif is_grads_batched:
        why = "is_grads_batched=True has no rule: ask for one gradient after the other"
    elif has_plain_output and has_plain_input:
        why = (
            "of a plain output with respect to a plain input, nobody knows whether each rank has all of the gradient "
            "or a term of it: call it once for the ShardTensors and once for the plain tensors"
        )
    else:
        return
    raise UsageError(f"torch.autograd.grad of ShardTensors: {why}")


def _own_seed(y: ShardTensor, seed: Tensor | None) -> Tensor:
    """This rank's part of the gradient of an output; 1 for a single number without one."""
    spec = gradient_spec(y.spec)
    if seed is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(y)  # of the local part
    whole_seed = as_replicated(seed, spec)
    if whole_seed.spec.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output has a shape of {whole_seed.spec.shape} and output a shape of {spec.shape}"
        )
    return local(to_spec(sum_partial(whole_seed), spec))


def _edge(x: Tensor) -> GradientEdge:
    """The place of a tensor in the graph."""
    if not x.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    return get_gradient_edge(x)


def _spec_of_gradient(x: Tensor, mesh: Any) -> Spec:
    """How the gradient of an input is split. Ranks hold terms of that of a plain tensor."""
    if isinstance(x, ShardTensor):
        return gradient_spec(x.spec)
    every_mesh_dim = tuple(range(len(mesh.groups)))
    return Spec(mesh, tuple(map(unsplit_axes, x.shape)), every_mesh_dim)
