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
        n = draw.integer(2, 6)
        d = draw.integer(3, 7)
        hidden = size * draw.integer(2, 5)
        shapes = ((n, d), (hidden, d), (hidden,), (d, hidden), (d,))
        whole = [draw.tensor(*shape).requires_grad_() for shape in shapes]
        reference = plain_mlp(*whole)
        weights = draw.tensor(n, d)
        whole_grads = torch.autograd.grad((reference * weights).sum(), whole)

        # The learner's MLP on this rank's parts of the same tensors.
        split_dims = (None, 0, 0, 1, None)
        mine = []
        for tensor, dim in zip(whole, split_dims, strict=True):
            part = own(tensor.detach(), dim, rank, size)
            mine.append(part.clone().requires_grad_())
        with Recorder() as forward:
            out = expect_tensor(exercise.mlp(*mine), (n, d), "the output")
        x, w1, b1, w2, b2 = mine
        summand = plain_mlp(x, w1, b1, w2, None)
        compare_output(out.detach(), reference.detach(), summand, b2, size)
        with Recorder() as backward:
            (out * weights).sum().backward()

        names = ("x", "this rank's part of w1", "this rank's part of b1", "this rank's part of w2", "b2")
        for name, tensor, grad, dim in zip(names, mine, whole_grads, split_dims, strict=True):
            compare_gradient(name, tensor.grad, own(grad, dim, rank, size), size)
        for way, record in (("forward", forward), ("backward", backward)):
            kinds = record.kinds()
            expect(kinds == ["all_reduce"], f"{way} calls {kinds}, one all_reduce is all that is needed")


def plain_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor | None) -> Tensor:
    """The MLP without a split, (N, D) -> (N, D)."""
    h = F.gelu(F.linear(x, w1, b1))  # (N, H)
    return F.linear(h, w2, b2)


def own(t: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """This rank's part of a tensor that is split along `dim`; all of it for None."""
    return t if dim is None else t.chunk(size, dim)[rank]


def compare_output(out: Tensor, reference: Tensor, part: Tensor, b2: Tensor, size: int) -> None:
    """out: to be `reference`. part: what this rank's weights give, without b2."""
    b2_of_each_rank = (reference + (size - 1) * b2).detach()
    hints = {
        "it is this rank's summand: does g add up the ranks' in the forward pass?": (part + b2).detach(),
        f"b2 was added {size} times, once by each rank: add it after the sum": b2_of_each_rank,
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
