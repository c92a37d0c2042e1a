"""Normalization layers of ShardTensors against those of the whole tensors."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.batch_norm import EQUAL, batch_norm
from distributed.collectives import as_group
from distributed.shard.ops.moments import moments
from distributed.shard_tensor import ShardTensor, local
from tests.support.marks import slow_but
from tests.support.parity import error
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, errors, evaluate, refused, split

LAYER, GROUPS, CHANNELS = "F.layer_norm(x * 2 + 3, {}, y, z)", "F.group_norm(x * 2 + 3, {}, y, z)", ((6,), (6,))
BATCH = "F.batch_norm(x * 2 + 3, None, None, y, z, training=True)"
EVALUATED = "F.batch_norm(x, torch.linspace(-1, 2, 6).to(x), torch.linspace(0.5, 2, 6).to(x), y, z)"
NORMS = {  # of x (B, 6, 5, 4): shapes of the weights
    **{LAYER.format(shape): (shape, shape) for shape in ((4,), (5, 4), (6, 5, 4))},
    "F.layer_norm(x * 2 + 3, (4,), eps=1e-3)": (),
    "F.rms_norm(x * 2 + 3, (5, 4), y)": ((5, 4),),
    "F.rms_norm(x * 2 + 3, (4,))": (),
    GROUPS.format(3): CHANNELS,
    GROUPS.format(6): CHANNELS,
    BATCH: CHANNELS,
    EVALUATED: CHANNELS,
    "F.instance_norm(x * 2 + 3, None, None, y, z)": CHANNELS,
    "F.normalize(x, dim=1)": (),
}
LONG = {
    LAYER.format((33, 4)): ((33, 4),) * 2,
    "F.rms_norm(x * 2 + 3, (33, 4), y)": ((33, 4),),
    **dict.fromkeys((GROUPS.format(3), BATCH, EVALUATED), CHANNELS),
}


def cuts(size, ranks):
    """Even, uneven and with an empty shard."""
    uneven = [1] * (ranks - 1) + [size - ranks + 1]
    return [None, {0: tuple(uneven)}, {0: (0, *uneven[:-2], uneven[-1] + uneven[-2])}]


def cases(ranks):
    images = [X((3, 6, 5, 4))]
    for shape in ((1, 6, 5, 4), (3, 6, 5, 4)):
        for dim in (dim for dim in range(4) if shape[dim] >= ranks):
            images += [X(shape, (dim,), sizes) for sizes in cuts(shape[dim], ranks)]
    found = [Case(code, (x,), weights) for x in images for code, weights in NORMS.items()]
    long = X((2, 6, 33, 4), (2,), {0: (*[10] * (ranks - 1), 33 - 10 * (ranks - 1))})
    for dtype in (torch.bfloat16, torch.float64):
        found += [Case(code, (long,), weights, dtype=dtype) for code, weights in LONG.items()]
    return found


@pytest.mark.parametrize("size", slow_but([3], [2, 3, 4], "other numbers of ranks"))
def test_norms_are_those_of_the_whole(ranks, size):
    """Only groups of channels that are broken up are refused."""
    assert ranks(size, refused, cases(size))[0] <= {GROUPS.format(3)}


def test_norms_on_a_plane_of_ranks_are_those_of_the_whole(ranks):
    splits = [((2, 3), None), ((2, 3), {0: (4, 1), 1: (0, 4)}), ((3, None), None), ((0, 3), None),
              ((None, 2), {1: (5, 0)})]  # fmt: skip
    images = [X((2, 6, 5, 4), *split) for split in splits]
    found = [Case(code, (x,), weights, (2, 2)) for x in images for code, weights in NORMS.items()]
    assert ranks(4, refused, found)[0] == set()


FAR = {  # of x (B, 6, 200, 8), of which some ranks hold few rows and one none
    "F.group_norm(x, 3, y, z)": CHANNELS,
    "F.layer_norm(x, (200, 8), y, z)": ((200, 8), (200, 8)),
    "F.batch_norm(x, None, None, y, z, training=True)": CHANNELS,
    "F.instance_norm(x, None, None, y, z)": CHANNELS,
    "x.var((2, 3))": (),
    "x.std()": (),
    "x.var(2, correction=0)": (),
}


def far_cases():
    x = X((2, 6, 200, 8), (2,), {0: (150, 0, 50)})
    return [Case(code, (x,), weights) for code, weights in FAR.items()]


def all_errors(cases, mean):
    return [errors(case, mean) for case in cases]


def test_statistics_of_a_mean_far_from_zero_lose_no_more_digits_than_whole(ranks):
    """A float32 near 10,000 is known to 0.0005, so this is the error of a deviation of 1 that no method avoids."""
    for case, found in zip(far_cases(), ranks(3, all_errors, far_cases(), 1e4)[0], strict=True):
        for whole, parts in found:
            assert parts < max(1e-3, 1.5 * whole), f"{case.function}: {found}"


def test_statistics_of_half_precision_are_those_of_float32(ranks):
    """The result alone is rounded to bfloat16, which has 8 digits, so 1/256."""
    cases = [case._replace(dtype=torch.bfloat16) for case in far_cases()]
    for case, found in zip(cases, ranks(3, all_errors, cases, 2.0)[0], strict=True):
        for whole, parts in found:
            assert parts < max(4e-3, 1.1 * whole), f"{case.function}: {found}"


class NewBuffers(TorchDispatchMode):
    """Collects the operations that give a new tensor of some size, and those that compute a variance."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made, self.variances = size, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        is_new = isinstance(out, torch.Tensor) and not any(a.alias_info for a in func._schema.returns)
        if is_new and out.numel() == self.size and out.device.type != "meta":  # that has no memory
            self.made.append(name)
        if name.startswith("var"):
            self.variances.append(name)
        return out


def buffers(code, weights):
    """Run on every rank: NewBuffers of the forward and of the backward pass of one rank of a norm."""
    x = X((2, 6, 40, 8), (2,))
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh())
    scaling = [draw(shape, torch.float32, 1) for shape in weights]
    with NewBuffers(local(part).numel()) as forward:
        y = evaluate(part, *scaling, code=code)
    y = local(y)
    grad = torch.ones_like(y)
    with NewBuffers(local(part).numel()) as backward:
        y.backward(grad)
    return [(found.made, found.variances) for found in (forward, backward)]


@pytest.mark.parametrize("code", ["F.group_norm(x, 3, y, z)", BATCH.replace("x * 2 + 3", "x")])
def test_a_split_norm_makes_two_buffers_of_the_size_of_its_input_in_each_pass(ranks, code):
    """Each further one is a pass over memory. torch.var_mean takes ten times as long as mean and deviations."""
    for made, variances in ranks(2, buffers, code, CHANNELS)[0]:
        assert len(made) <= 2, made
        assert not variances


def test_moments_have_second_derivatives():
    x = draw((3, 4, 2), torch.float64, 0)
    assert torch.autograd.gradgradcheck(lambda x: moments(x, (1, 2), None)[:2], x)


def synchronized(x, weight, bias, is_whole=True):
    """Batch norm with statistics of the whole batch, of which a rank may have its own samples: is_whole."""
    if is_whole and not isinstance(x, ShardTensor):
        return F.batch_norm(x, None, None, weight, bias, training=True)
    return batch_norm(as_group(dist.group.WORLD), EQUAL, x, None, None, weight, bias, training=True)


def force(norm, x, *weights):
    (found,) = torch.autograd.grad(norm(x, *weights).sin().sum(), x, create_graph=True)
    return found


SYNCHRONIZED = {"synchronized": synchronized, "force": force}
OF_GROUP = [  # x (3, 6, 5, 4), y and z plain (6,): images, what every rank has whole, weights of the image
    "synchronized(x, y, z)", "x * synchronized(x.mean((2, 3), keepdim=True), y, z)",
    "synchronized(x, x.mean((0, 2, 3)), z.tanh())", "force(synchronized, x, y, z)",
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_a_norm_of_a_group_and_its_second_derivative_are_those_of_the_whole(ranks, size):
    images = [X((3, 6, 5, 4), (2,), cut) for cut in cuts(5, size)] + [X((3, 6, 5, 4))]
    ranks(size, check_all, [Case(code, (x,), ((6,), (6,)), (), torch.float64, SYNCHRONIZED)
                            for x in images for code in OF_GROUP])  # fmt: skip


def own_samples():
    """Errors of the second derivatives where each rank has samples of its own."""
    rank, count = dist.get_rank(), dist.get_world_size()
    x = draw((2 * count, 6, 5, 4), torch.float64, 0)
    weights = [draw((6,), torch.float64, i) for i in (1, 2)]
    force(synchronized, x, *weights).square().sum().backward()
    mine = x.detach().chunk(count)[rank].requires_grad_()
    own = [w.detach().requires_grad_() for w in weights]
    force(partial(synchronized, is_whole=False), mine, *own).square().sum().backward()
    dist.all_reduce(own[0].grad)
    return [error(mine.grad, x.grad.chunk(count)[rank]), error(own[0].grad, weights[0].grad)]


def test_a_norm_of_a_group_has_second_derivatives_over_samples_of_other_ranks(ranks):
    assert max(max(found) for found in ranks(2, own_samples)) < 1e-10
