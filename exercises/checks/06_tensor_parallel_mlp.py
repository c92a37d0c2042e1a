"""Output and all gradients must be those of the whole MLP, with one all-reduce each way."""

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from exercises.checks.common import Draw, Recorder, Wrong, expect, expect_same, expect_tensor, factor, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `mlp`: output, gradients, one message each way. Raises Wrong."""
    for _ in range(2):
        n, d, hidden = draw.integer(2, 6), draw.integer(3, 7), size * draw.integer(2, 5)
        shapes = (n, d), (hidden, d), (hidden,), (d, hidden), (d,)
        whole = [draw.tensor(*shape).requires_grad_() for shape in shapes]
        x, w1, b1, w2, b2 = whole
        reference, weights = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2), draw.tensor(n, d)
        whole_grads = torch.autograd.grad((reference * weights).sum(), whole)
        cut = (None, 0, 0, 1, None)
        mine = [own(t.detach(), dim, rank, size).clone().requires_grad_() for t, dim in zip(whole, cut, strict=True)]
        x, w1, b1, w2, b2 = mine
        with Recorder() as forward:
            out = expect_tensor(exercise.mlp(*mine), (n, d), "the output")
        compare_output(out.detach(), reference.detach(), F.linear(F.gelu(F.linear(x, w1, b1)), w2), b2, size)
        with Recorder() as backward:
            (out * weights).sum().backward()
        grads = [own(grad, dim, rank, size) for grad, dim in zip(whole_grads, cut, strict=True)]
        names = "x", "this rank's part of w1", "this rank's part of b1", "this rank's part of w2", "b2"
        for name, t, grad in zip(names, mine, grads, strict=True):
            compare_gradient(name, t.grad, grad, size)
        for record, way in ((forward, "forward"), (backward, "backward")):
            expect(
                record.kinds() == ["all_reduce"], f"{way} calls {record.kinds()}, one all_reduce is all that is needed"
            )


def own(t: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """This rank's part of a tensor that is split along `dim`; all of it for None."""
    return t if dim is None else t.chunk(size, dim)[rank]


def compare_output(out: Tensor, reference: Tensor, part: Tensor, b2: Tensor, size: int) -> None:
    """out: to be `reference`. part: what this rank's weights give, without b2."""
    hints = {
        "it is this rank's summand: does g add up the ranks' in the forward pass?": (part + b2).detach(),
        f"b2 was added {size} times, once by each rank: add it after the sum": (reference + (size - 1) * b2).detach(),
        "b2 is missing": (reference - b2).detach(),
    }
    hint = "neither whole nor this rank's part of it"
    expect_same(out.detach(), reference.detach(), "the output is not that of the whole MLP", hint, hints)


def compare_gradient(name: str, grad: Tensor | None, wanted: Tensor, size: int) -> None:
    """grad: of the tensor `name` on this rank, to be `wanted`."""
    if grad is None:
        raise Wrong(f"{name} has no gradient: autograd does not see through dist.all_reduce, g's backward does")
    if same(grad, wanted):
        return
    found = factor(grad, wanted, size)
    if found == f"{size} times":
        hint = f"{found} what it should be: g has added up the gradient, which was whole on every rank already"
    elif name == "x":
        hint = "is it only what this rank's features give? f adds up the ranks' in the backward pass"
    else:
        hint = f"{found} what it should be" if found else "is the gradient of the output passed on as it is by g?"
    raise Wrong(f"the gradient of {name} is wrong: {hint}")
