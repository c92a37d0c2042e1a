"""Split against whole: a function of ShardTensors and the same function of the whole tensors, on every rank."""

import importlib
import math
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from distributed.shard.core.spec import spec_of
from distributed.shard_tensor import ShardTensor, local, part_of, wrap
from tests.support.parity import error
from tools.instruments.counting import CollectiveCounter

TOLERANCE = 1e-5
_meshes: dict[tuple, Any] = {}


class X(NamedTuple):
    """An input: its global shape, which dimension each mesh dimension splits (None: none), and into which sizes."""

    shape: tuple
    splits: tuple = ()
    sizes: Any = None  # {mesh dimension: sizes}


class Case(NamedTuple):
    """function(*inputs, *weights), or an expression of x, y, z and w, which are the inputs and then the weights.

    A function is at module level, to be sent. keywords: its keywords, or further names of the expression.
    """

    function: Any
    inputs: tuple
    weights: tuple = ()  # shapes of plain tensors
    mesh: tuple = ()  # shape of the mesh; () is one dimension of all ranks
    dtype: Any = torch.float32
    keywords: Any = None


def evaluate(*tensors, code, **names):
    """Value of an expression of x, y, z and w: these tensors."""
    known = {"torch": torch, "F": F, "nn": nn, "math": math}
    return eval(code, known | names | dict(zip("xyzw", tensors, strict=False)))


def domain_mesh(shape=()):
    """A mesh of all ranks of the test, made once for every process group."""
    shape = tuple(shape) or (dist.get_world_size(),)
    key = (dist.group.WORLD, shape)
    if key not in _meshes:
        _meshes.clear()
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"domain_{i}" for i in range(len(shape))))
    return _meshes[key]


def split(full, x, mesh):
    """The ShardTensor of a whole tensor that every rank has, a leaf."""
    splits = x.splits + (None,) * (mesh.ndim - len(x.splits))
    spec = spec_of(mesh, full.shape, [Replicate() if d is None else Shard(d) for d in splits], x.sizes)
    part = wrap(part_of(full, spec).detach().clone(), spec)
    return part.requires_grad_(full.requires_grad)


def draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def function_of(case):
    function = case.function
    if isinstance(function, str):
        function = partial(evaluate, code=function)
    return partial(function, **case.keywords or {})


def errors(case, mean=0.0):
    """Run on every rank: relative errors of whole tensors and of split ones against float64, both in the case's dtype.

    mean: of the inputs, whose deviation is 1.
    Returns [(whole, split)] of the output, and of the gradients of the inputs and of the weights.
    """
    function, mesh, count = function_of(case), domain_mesh(case.mesh), len(case.inputs)
    shapes = [*(x.shape for x in case.inputs), *case.weights]
    tensors = [draw(shape, case.dtype, i).detach() for i, shape in enumerate(shapes)]
    tensors[:count] = [tensor + mean for tensor in tensors[:count]]

    def results(leaves):
        y = function(*leaves)
        (y.float() * draw(y.shape, torch.float32, 9).detach()).sum().backward()
        return [y.detach(), *(t.grad for t in leaves)]

    exact = results([t.double().requires_grad_() for t in tensors])
    plain = results([t.clone().requires_grad_() for t in tensors])
    leaves = [t.clone().requires_grad_() for t in tensors]
    found = results([split(t, x, mesh) for t, x in zip(leaves, case.inputs, strict=False)] + leaves[count:])
    assert all(t.dtype == case.dtype for t in found)
    found[1 + count :] = [gradient.float() for gradient in found[1 + count :]]  # summed without a further rounding
    for gradient in found[1 + count :]:
        dist.all_reduce(gradient)
    found = [ShardTensor.full_tensor(t) if isinstance(t, ShardTensor) else t for t in found]
    return [
        tuple(((t.double() - e).norm() / e.norm()).item() for t in (a, b))
        for a, b, e in zip(plain, found, exact, strict=True)
    ]


def check(case):
    """Output, gradients of the inputs and the sum of the ranks' weight gradients are those of the whole."""
    mesh, function = domain_mesh(case.mesh), function_of(case)
    xs = [draw(x.shape, case.dtype, i) for i, x in enumerate(case.inputs)]
    weights = [draw(shape, case.dtype, 50 + i) for i, shape in enumerate(case.weights)]
    parts = [split(x, how, mesh) for x, how in zip(xs, case.inputs, strict=True)]
    own = [w.detach().clone().requires_grad_() for w in weights]
    wholes, founds = outputs(function(*xs, *weights)), outputs(function(*parts, *own))
    what = f"{case}: "
    assert len(wholes) == len(founds), what + "number of outputs"
    total, total_found = 0, 0
    for i, (y, z) in enumerate(zip(wholes, founds, strict=True)):
        assert isinstance(z, ShardTensor), what + f"output {i} is no ShardTensor"
        assert z.shape == y.shape and z.dtype == y.dtype, what + f"output {i}: {z.shape} {z.dtype}, not {y.shape}"
        assert local(z).shape == z.spec.local_shape, what + f"output {i}: local {local(z).shape}, spec {z.spec}"
        close(z.full_tensor(), y, case, what + f"output {i}")
        if y.requires_grad:
            weight = draw(y.shape, case.dtype, 90 + i).detach()
            total = total + (y * weight).sum()
            total_found = total_found + (z * weight).sum()
    if not isinstance(total, torch.Tensor):  # nothing to differentiate
        return
    total.backward()
    total_found.backward()
    for x in (*xs, *weights):
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad
    for i, (x, part) in enumerate(zip(xs, parts, strict=True)):
        expected = part_of(x.grad, part.spec)
        got = local(part.grad) if part.grad is not None else torch.zeros_like(expected)
        scale = expected.new_full((), x.grad.abs().max().item() or 1.0)  # a part may have a gradient near 0
        assert (got - expected).abs().max().item() <= tolerance(case) * scale if got.numel() else True, (
            what + f"gradient of input {i}"
        )
    for i, (w, mine) in enumerate(zip(weights, own, strict=True)):
        grad = mine.grad if mine.grad is not None else torch.zeros_like(mine)
        dist.all_reduce(grad)
        close(grad, w.grad, case, what + f"gradient of weight {i}")


def outputs(y):
    """The tensors of a result; complex ones as pairs of real numbers."""
    ys = y if isinstance(y, list | tuple) else [y]
    return [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in ys]


def tolerance(case):
    return {torch.float32: TOLERANCE, torch.float64: 1e-10}.get(case.dtype, 5e-2)


def close(found, expected, case, what):
    if expected.numel() and expected.is_floating_point():
        assert error(found, expected) < tolerance(case), f"{what}: error {error(found, expected):.1e}"
    else:
        assert torch.equal(found, expected), what


def messages(function, *args):
    """Calls and bytes, by kind, of this rank's collectives in function(*args), then in its backward pass."""
    with CollectiveCounter() as forward:
        y = function(*args)
    with CollectiveCounter() as backward:
        local(y).sum().backward()
    return [dict(found) for counter in (forward, backward) for found in (counter.calls, counter.bytes)]


def check_all(cases):
    """Run on every rank: all cases, one after the other."""
    for case in cases:
        check(case)


def refused(cases):
    """Run on every rank: check all cases; returns those functions or expressions that no rule computes."""
    found = set()
    for case in cases:
        try:
            check(case)
        except NotImplementedError as error:
            assert "no rule for" in str(error), case
            found.add(case.function)
    return found


def hand_on(x, *_):
    """A collective that does not communicate."""
    return x


def without(collective, instead, case):
    """The result of comparing a case while a collective is replaced by another function. collective: "module.name"."""
    module, _, name = collective.rpartition(".")
    with mock.patch.object(importlib.import_module(module), name, instead):
        try:
            check(case)
        except AssertionError as error:
            return str(error)
