"""torch.autograd.grad inside a model: first and second derivatives of split tensors are those of the whole."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.shard_parity import Case, X, check_all, draw, without


def force(energy, *inputs, **options):
    """The gradients of an energy, which a loss differentiates again: (B, ...) of each input."""
    return torch.autograd.grad(energy.sin().sum(), inputs, create_graph=True, **options)


def of_leaf(x, y):
    """As models do that start from a copy, in evaluation too."""
    with torch.no_grad(), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(F.conv2d(leaf, y, padding=1).tanh().square().sum(), leaf)
    return found * x


def seeded(x, y):
    """Gradients that begin with ShardTensors of another split, and with plain tensors."""
    u, v = x.sin().mT, (x * y).sum((1, 2))
    return torch.autograd.grad([u, v, x.sum()], [x, y], [x.mT.detach() * 2, draw(v.shape, x.dtype, 5), None])


def twice(x, y):
    """A graph that is used twice, and an input that is not used."""
    energy = F.conv2d(x, y, padding=1).square().sum()
    first, unused = torch.autograd.grad(energy, [x, x * 1], retain_graph=True, allow_unused=True)
    assert unused is None
    (second,) = torch.autograd.grad(energy, [x], create_graph=True, materialize_grads=True)
    return first + second.square()


DERIVED = {
    "force": force, "of_leaf": of_leaf, "seeded": seeded, "twice": twice,
}  # fmt: skip
ENERGIES = [  # x (2, 4, 9, 8), y plain (4, 4, 3, 3), z plain (4,)
    "force(F.softplus(F.conv2d(x, y, padding=1)), x)", "force(F.conv2d(x, y, padding=1), x, y)",
    "force(F.layer_norm(F.conv2d(x, y, padding=1), (9, 8)), x, z, materialize_grads=True)",
    "force(F.layer_norm(x, (4, 9, 8), y.mean((2, 3))[..., None, None].expand(4, 4, 9, 8)[0].clone()), x)",
    "force(F.group_norm(x, 2, z, z.sin()), x, z)", "force(F.batch_norm(x, None, None, z, training=True), x, z)",
    "force(x.var((2, 3)) * x.amax(2).mean(2), x)", "force(x.max(2).values, x)",
    "force(x.mean().square() * x[:, :, 3], x)",
    "force(x.softmax(2) + x.logsumexp((2, 3), True), x)", "force(F.interpolate(x, (18, 16), mode='bilinear'), x)",
    "force(F.conv_transpose2d(x, y, stride=2), x, y)", "force(F.max_pool2d(x, 3, 1, 1) * F.avg_pool2d(x, 3, 1, 1), x)",
    "force(x.roll(2, 2) * x.diff(dim=2, prepend=x[:, :, :1]), x)", "force(torch.fft.fft2(x).abs(), x)",
    "force(x.flatten(2).mT @ x.flatten(2), x)", "of_leaf(x, y)", "twice(x, y)",
]  # fmt: skip
FOURIER = "force(torch.fft.fft2(x).abs(), x)"
SEEDS = ["seeded(x, y)"]  # x (3, 7, 4), y plain (7, 4)


@pytest.mark.slow("second derivatives of many functions")
@pytest.mark.nightly
def test_derivatives_of_derivatives_are_those_of_the_whole(ranks):
    weights = (4, 4, 3, 3), (4,)
    images = [X((2, 4, 9, 8), (2,), {0: (5, 4)}), X((2, 4, 9, 8), (3,))]
    cases = [Case(code, (x,), weights, (), torch.float64, DERIVED) for x in images for code in ENERGIES]
    rows = X((3, 7, 4), (1,), {0: (5, 2)})
    cases += [Case(code, (rows,), ((7, 4),), (), torch.float64, DERIVED) for code in SEEDS]
    ranks(2, check_all, cases)


@pytest.mark.slow("a rank without rows")
def test_a_rank_without_rows_takes_part_in_second_derivatives(ranks):
    x = X((2, 4, 9, 8), (2,), {0: (5, 0, 4)})
    cases = [Case(code, (x,), ((4, 4, 3, 3),), (), torch.float64, DERIVED) for code in (*ENERGIES[:2], FOURIER)]
    ranks(3, check_all, cases)


def test_a_layer_may_be_the_gradient_of_an_energy(ranks):
    x = X((2, 4, 9, 8), (2,), {0: (5, 4)})
    cases = [Case(code, (x,), ((4, 4, 3, 3),), (), torch.float64, DERIVED) for code in (*ENERGIES[:2], "of_leaf(x, y)")]
    ranks(2, check_all, cases)


def never():
    return False


def nothing_back(grad, group, sent, received):
    return grad.new_zeros(sum(sent), *grad.shape[1:])


@pytest.mark.parametrize(
    ("collective", "instead", "code"),
    [
        ("distributed.collectives.differentiated_again", never, "force(x.mean().square() * x[:, :, 3], x)"),
        ("distributed.collectives._all_to_all_back", nothing_back, "force(F.conv2d(x, y, padding=1), x)"),
    ],
)
def test_a_missing_collective_of_the_second_derivative_is_noticed(ranks, collective, instead, code):
    case = Case(code, (X((2, 4, 9, 8), (2,), {0: (5, 4)}),), ((4, 4, 3, 3),), (), torch.float64, DERIVED)
    for found in ranks(2, without, collective, instead, case):
        assert "gradient of input 0" in found
