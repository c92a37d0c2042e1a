"""Rules under torch.compile against whole tensors: cases of the tables in tests/test_shard_*.py, a few in a graph."""

import ast
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional as F

from distributed.shard.core.compiled import refusal_of
from distributed.shard_tensor import ShardTensor, part_of, wrap
from tests.support.shard_parity import close, domain_mesh, draw, outputs, split, tolerance

MOST = 4  # cases of a graph: the time to trace one grows faster than it


class Constants(ast.NodeTransformer):
    """Calls of functions that are marked as constant, in an expression, replaced by names of their results."""

    def __init__(self, names):
        self.names = names

    def visit_Call(self, node):
        self.generic_visit(node)
        function = self.names.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if not hasattr(function, "is_constant"):
            return node
        name = f"constant_{len(self.names)}"
        self.names[name] = eval(ast.unparse(node), self.names)
        return ast.Name(name, ast.Load())


def traceable(case):
    """The function of a case; of an expression one that torch.compile can trace, as it cannot eval()."""
    if not isinstance(case.function, str):
        return partial(case.function, **case.keywords or {})
    names = {"torch": torch, "F": F, "nn": nn, "math": math} | (case.keywords or {})
    code = ast.unparse(Constants(names).visit(ast.parse(case.function)))
    count = len(case.inputs) + len(case.weights)
    return eval(f"lambda {', '.join('xyzw'[:count])}: {code}", names)


def graph_of(cases, specs, backend):
    """A compiled function: the local parts of inputs, and weights -> the whole results of all cases."""
    functions = [traceable(case) for case in cases]
    count = len(specs)

    def region(*tensors):
        parts = [wrap(part, spec) for part, spec in zip(tensors, specs, strict=False)]
        results = []
        for function in functions:
            found = outputs(function(*parts, *tensors[count:]))
            for y in found:
                assert isinstance(y, ShardTensor)
                assert y.to_local().shape == y.spec.local_shape
            results.append([y.full_tensor() for y in found])
        return results

    torch._dynamo.reset()  # else what was compiled before counts against the limit
    return torch.compile(region, backend=backend, fullgraph=True)


def check_graph(cases, backend):
    """Values and gradients of some cases, of the same inputs and weights, in one graph."""
    case = cases[0]
    mesh = domain_mesh(case.mesh)
    wholes = [draw(x.shape, case.dtype, i) for i, x in enumerate(case.inputs)]
    weights = [draw(shape, case.dtype, 50 + i) for i, shape in enumerate(case.weights)]
    specs = [split(full, x, mesh).spec for full, x in zip(wholes, case.inputs, strict=True)]
    parts = [part_of(full, spec).detach().clone().requires_grad_() for full, spec in zip(wholes, specs, strict=True)]
    own = [weight.detach().clone().requires_grad_() for weight in weights]
    founds = graph_of(cases, specs, backend)(*parts, *own)
    total, total_found = 0, 0
    for case, of_case in zip(cases, founds, strict=True):
        expected = outputs(traceable(case)(*wholes, *weights))
        assert len(of_case) == len(expected), f"{case}: number of outputs"
        for i, (y, found) in enumerate(zip(expected, of_case, strict=True)):
            what = f"{case}: output {i}"
            assert found.shape == y.shape and found.dtype == y.dtype, what
            close(found, y, case, what)
            if y.requires_grad:
                weight = draw(y.shape, case.dtype, 90 + i).detach()
                total = total + (y * weight).sum()
                total_found = total_found + (found * weight).sum()
    if not isinstance(total, torch.Tensor):  # nothing to differentiate
        return
    total.backward()
    total_found.backward()
    what = f"{[case.function for case in cases]}: gradient of "
    for i, (full, part, spec) in enumerate(zip(wholes, parts, specs, strict=True)):
        grad = torch.zeros_like(full) if full.grad is None else full.grad
        expected = part_of(grad, spec)
        found = torch.zeros_like(expected) if part.grad is None else part.grad
        limit = tolerance(case) * (grad.abs().max().item() or 1.0)
        assert not found.numel() or (found - expected).abs().max().item() <= limit, f"{what}input {i}"
    for i, (weight, mine) in enumerate(zip(weights, own, strict=True)):
        grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        dist.all_reduce(grad)
        close(grad, torch.zeros_like(weight) if weight.grad is None else weight.grad, case, f"{what}weight {i}")


def check_compiled(cases, backend="eager"):
    """Run on every rank: all cases, many in a graph; returns {case's function: why it is refused} of those that are."""
    groups = {}
    for case in cases:
        key = str((case.inputs, case.weights, case.mesh, case.dtype))
        groups.setdefault(key, []).append(case)
    refused = {}
    for group in groups.values():
        for first in range(0, len(group), MOST):
            refused |= check_or_name(group[first : first + MOST], backend)
    return refused


def check_or_name(cases, backend):
    """As check_graph; returns {function: why} of the cases that are refused, each of which is then tried by itself."""
    try:
        check_graph(cases, backend)
    except TorchDynamoException as error:
        if len(cases) == 1:
            return {str(cases[0].function): refusal_of(error)}
        middle = len(cases) // 2
        return check_or_name(cases[:middle], backend) | check_or_name(cases[middle:], backend)
    return {}
