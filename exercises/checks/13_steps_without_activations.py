"""The gradients must be those of all steps, and what autograd keeps at one time that of one step: counted in bytes."""

import weakref
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exercises.checks.common import Draw, expect, expect_tensor, ratio, same

WORLD_SIZES = (1,)


class Kept:
    """Bytes that autograd keeps for backward passes, parameters aside: now, and at most."""

    def __init__(self, network: nn.Module):
        self.parameters = {p.data_ptr() for p in network.parameters()}
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> "_Box":
        """A tensor is kept from here on."""
        box = _Box(tensor)
        if tensor.data_ptr() not in self.parameters:
            self.now += tensor.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(box, self._release, tensor.nbytes)
        return box

    def counting(self) -> AbstractContextManager[None]:
        """Context: what autograd keeps is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)

    def _release(self, size: int) -> None:
        self.now -= size


class _Box:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `backward_over_steps`: loss, gradients, calls of the network, bytes. Raises Wrong."""
    for steps in (1, draw.integer(2, 3), draw.integer(6, 9)):
        width = draw.integer(5, 9)
        network = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
        for parameter in network.parameters():
            parameter.data.copy_(draw.tensor(*parameter.shape) / 4)
        x = draw.tensor(3, width)
        targets = [draw.tensor(3, width) for _ in range(steps)]
        want, loss, one = wanted(network, x, targets)
        calls = 0

        def counted(*_: object) -> None:
            nonlocal calls
            calls += 1

        network.register_forward_hook(counted)
        kept = Kept(network)
        with kept.counting():
            found = expect_tensor(exercise.backward_over_steps(network, x.clone(), targets), (), "the loss")
        where = f"{steps} step{'s' * (steps > 1)}"
        expect(same(found, loss), f"{where}: the loss is {found.item():.5f}, should be {loss.item():.5f}")
        expect(not found.requires_grad, f"{where}: the loss still has a graph, and so all that it keeps: detach it")
        pairs = zip(network.parameters(), want, strict=True)
        for number, (parameter, gradient) in enumerate(pairs):
            compare(parameter.grad, gradient, f"{where}: the gradient of parameter {number}", steps)
        expect(calls <= 2 * steps, f"{where}: the network was called {calls} times: twice for each step is enough")
        expect(
            kept.most <= 1.5 * one,
            f"{where}: autograd kept {kept.most / one:.1f} times what one step needs: is a step's graph gone before "
            "the next is made?",
        )


def wanted(network: nn.Module, x: Tensor, targets: list[Tensor]) -> tuple[list[Tensor], Tensor, int]:
    """(gradients, loss, bytes that autograd keeps of one step)."""
    kept = Kept(network)
    with kept.counting():
        alone = F.mse_loss(network(x.clone().requires_grad_()), targets[0])
    del alone

    # All steps with all activations: the plain way.
    state = x
    losses = []
    for target in targets:
        state = network(state)
        losses.append(F.mse_loss(state, target))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    return gradients, loss.detach(), kept.most


def compare(got: Tensor | None, want: Tensor, what: str, steps: int) -> None:
    """Expect a gradient; the message tells the common mistakes."""
    expect(got is not None, f"{what} is None: does backward() reach the parameters?")
    assert got is not None
    hint = "does the gradient that comes back from the step after go in too, and does it go on to the step before?"
    scale = ratio(got, want)
    if scale is not None and abs(scale / steps - 1) < 1e-3:
        hint = f"it is {steps} times that: the loss is the mean over the steps"
    expect(same(got, want), f"{what} is not that of all steps: {hint}")
