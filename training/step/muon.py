"""Muon: the momentum of each matrix, made orthogonal, is its step; all other weights are trained by AdamW.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). The numbers are those of torch.optim.Muon with
adjust_lr_fn "match_rms_adamw". That one takes whole matrices; here a rank may hold a piece of each. Momentum is updated
piece by piece, but a piece of an orthogonal matrix is not what orthogonalising the piece would give: it depends on all
rows and columns (training/step/whole_matrices.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from training.step.whole_matrices import Cuts, on_whole_matrices
from utils.torch_private import is_dtensor

# The polynomial of an iteration, a x + b x^3 + c x^5 of the singular values, and how often it is applied.
LINEAR = 3.4445
CUBIC = -4.7750
QUINTIC = 2.0315
ITERATIONS = 5
LEAST_NORM = 1e-7
# An orthogonal matrix of R x C has numbers of 1/sqrt(max(R, C)), a step of Adam has 0.2 to 0.4: with this factor both
# go as far with the same learning rate. Liu et al. 2025 (arXiv:2502.16982), section 2.2.
SIZE_OF_ADAM = 0.2


class MatrixPart(NamedTuple):
    """A parameter as a part of a matrix: its whole shape (R, C), and the cuts of which the part is the result."""

    shape: torch.Size
    cuts: Cuts


class Muon(Optimizer):
    """Muon for the groups with `muon`: True, AdamW for the others. All have `lr` and `weight_decay` (decoupled).

    matrices: {parameter: MatrixPart} of all parameters of Muon. momentum: of the gradients, Nesterov's. dtype: in which
    matrices are sent and made orthogonal, None for their own. device: where that is done. build_adam: makes the AdamW.
    State: `momentum_buffer` for each matrix, in pieces as its parameter, and AdamW's for the others.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        matrices: Mapping[nn.Parameter, MatrixPart],
        momentum: float,
        dtype: torch.dtype | None,
        device: torch.device,
        build_adam: Callable[..., Optimizer],
    ):
        # AdamW trains the other groups, and keeps its state beside ours.
        others = [group for group in groups if not group["muon"]]
        self.adam = build_adam(others or [{"params": []}], lr=lr)
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        # One state for both, so that a checkpoint finds all of it in one place.
        self.adam.state = self.state
        self.matrices = matrices
        self.momentum = momentum
        self.dtype = dtype
        self.device = device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ranks that share matrices do so together."""
        # The two optimizers hold different weights, so their order does not matter.
        self.adam.step()
        updated: list[tuple[nn.Parameter, dict[str, Any]]] = []
        directions: list[Tensor] = []
        for group in self._groups():
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = part(parameter.grad)
                momentum = part(self.momentum_of(parameter))
                # momentum = m momentum + (1 - m) gradient, and Nesterov's look ahead from there.
                momentum.lerp_(gradient, 1 - self.momentum)
                direction = gradient.lerp(momentum, self.momentum)
                directions.append(direction.to(self.device, self.dtype))
                updated.append((parameter, group))
        # Pieces are put together, made orthogonal, and cut again.
        cuts = [self.matrices[parameter].cuts for parameter, _ in updated]
        results = on_whole_matrices(directions, cuts, orthogonalize)
        for (parameter, group), result in zip(updated, results, strict=True):
            lr = group["lr"]
            size = SIZE_OF_ADAM * math.sqrt(max(self.matrices[parameter].shape))
            weight = part(parameter)
            # Decay is decoupled from the direction, as in AdamW.
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(result.to(weight.device), alpha=-lr * size)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"]]

    def momentum_of(self, parameter: nn.Parameter) -> Tensor:
        """The momentum of a parameter: zero before its first step."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    def make_momentum(self) -> None:
        """Let every matrix have a momentum, also those that no step has used."""
        for group in self._groups():
            for parameter in group["params"]:
                self.momentum_of(parameter)


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, a gradient or a momentum, as a plain tensor of the same memory."""
    plain = tensor.detach()
    return plain.to_local() if is_dtensor(plain) else plain


def orthogonalize(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, nearly: (R, C) -> (R, C), singular values 0.7 to 1.2.

    An iteration of Newton and Schulz, products of matrices alone: each step applies a polynomial to the singular
    values, which lets small ones grow fastest. Jordan et al. 2024.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # (m, n), m <= n
    # All singular values are at most 1 now, where the iteration converges.
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T  # (m, m)
        polynomial = torch.addmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
        x = torch.addmm(x, polynomial, x, beta=LINEAR)
    return x.T if is_tall else x
