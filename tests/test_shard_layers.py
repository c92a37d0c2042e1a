"""Layers and losses as models use them: running statistics, number of collectives, torch.compile, einops."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from distributed.shard.core.spec import part_of
from distributed.shard_tensor import ShardTensor, local
from tests.support.marks import needs_torch
from tests.support.parity import error
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, evaluate, messages, split
from training.forecasting.losses import relative_l2

SPLITS = [X((3, 6, 5, 4), (2,)), X((3, 6, 5, 4), (2,), {0: (5, 0)}), X((3, 6, 5, 4), (1,)), X((3, 6, 5, 4), (0,)),
          X((1, 6, 5, 4), (3,), {0: (1, 3)}), X((3, 6, 5, 4))]  # fmt: skip


def train_with_running_statistics(x, mesh, make):
    """A layer with running statistics and its copy that sees split images: two steps, and one in evaluation mode."""
    whole = make(6)
    nn.init.normal_(whole.weight)
    mine = copy.deepcopy(whole)
    for step in range(3):
        full = draw(x.shape, torch.float32, step)
        if step == 2:
            whole.eval(), mine.eval()
        expected, found = whole(full * 2 + 1), mine(split(full, x, mesh) * 2 + 1)
        assert error(found.full_tensor(), expected) < 1e-5
    for name, buffer in mine.named_buffers():
        every = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(every, buffer)
        assert all(torch.equal(other, buffer) for other in every), f"{name} differs between ranks"
        assert error(buffer.float(), whole.get_buffer(name).float()) < 1e-5, name


def running_statistics():
    instances = partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)
    for x in SPLITS:
        train_with_running_statistics(x, domain_mesh(), nn.BatchNorm2d)
        train_with_running_statistics(x, domain_mesh(), instances)


def test_running_statistics_are_those_of_the_whole_batch_on_every_rank(ranks):
    ranks(2, running_statistics)


def gradients_on_empty_ranks(x):
    """A rank without elements has a gradient of every weight, of zeros: data parallelism waits for it."""
    for module in (nn.LayerNorm((5, 4)), nn.GroupNorm(3, 6), nn.BatchNorm2d(6), nn.BatchNorm2d(6).eval(),
                   nn.RMSNorm((5, 4))):  # fmt: skip
        part = split(draw(x.shape, torch.float32, 0), x, domain_mesh())
        module(part).square().sum().backward()
        assert all(p.grad is not None for p in module.parameters()), module
        assert part.grad is not None


def test_weights_have_a_gradient_on_ranks_without_elements(ranks):
    for x in (X((3, 6, 5, 4), (2,), {0: (5, 0)}), X((1, 6, 5, 4), (0,))):
        ranks(2, gradients_on_empty_ranks, x)


LOSS = {"relative_l2": relative_l2}


def test_relative_l2_loss_is_that_of_the_whole(ranks):
    image, one = (3, 2, 5, 7), X((1, 2, 5, 7), (3,))
    pairs = [(X(image, (2,)), X(image, (2,))), (X(image, (3,), {0: (0, 7)}), X(image)), (one, one)]
    pairs += [(X(image, (2,)), X(image, (3,))), (X(image, (0,)), X(image, (0,)))]
    cases = [Case("relative_l2(x, y).mean()", pair, keywords=LOSS) for pair in pairs]
    cases.append(Case("relative_l2(x, y).mean()", (X(image, (2,)),), (image,), keywords=LOSS))
    ranks(2, check_all, cases)
    ranks(4, check_all, [Case("relative_l2(x, y).mean()", (X(image, (2, 3)),) * 2, mesh=(2, 2), keywords=LOSS)])


def counted(code, x, mesh):
    """Calls of the forward and of the backward pass, and bytes of the forward pass."""
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh(mesh))
    forward, sent, backward, _ = messages(partial(evaluate, code=code, **LOSS), part)
    return forward, backward, sum(sent.values())


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_few_collectives(ranks, mesh):
    x, size = X((3, 4, 6, 8), (3, 2)[: len(mesh)]), 2 * len(mesh)
    reduced, gathered = {"all_reduce": 1}, {"all_gather": 1}
    norms = 2 * 2 * 3 * 4 * (size - 1) // size  # bytes
    assert ranks(size, counted, "relative_l2(x, x.detach() * 0.5).mean()", x, mesh)[0] == (reduced, {}, norms)
    for code, forward in (
        ("F.layer_norm(x, x.shape[1:])", gathered),
        ("F.group_norm(x, 2)", gathered),
        ("F.batch_norm(x, None, None, training=True)", gathered),
        ("F.rms_norm(x, x.shape[1:])", reduced),
        ("x.softmax(-1)", gathered),
    ):
        assert ranks(size, counted, code, x, mesh)[0][:2] == (forward, reduced), code
    means = "(2 * x.mean((1, 2, 3)) - x.sum((1, 2, 3)) + x.mean((1, 2, 3))).square()"
    assert ranks(size, counted, means, x, mesh)[0][:2] == (reduced, {})


def zero_error():
    x = split(draw((2, 8), torch.float32, 0), X((2, 8), (1,)), domain_mesh())
    relative_l2(x, x.detach() * 1).mean().backward()
    return local(x.grad).abs().max().item()


def test_a_perfect_prediction_has_a_gradient_of_zero(ranks):
    assert ranks(2, zero_error) == [0.0, 0.0]


def einsum(x, y):
    return torch.einsum("bchw,bchk->bk", x, y).sum()


def of_any_rule(x, weight, bias):
    y = F.layer_norm(x.softmax(-1), x.shape[-1:], weight, bias)
    y = y + x.std((-1, -2), keepdim=True) + F.group_norm(y, 2) * x.amax(-1, keepdim=True)
    y = y + F.batch_norm(y, None, None, training=True) + F.normalize(x, dim=-1).cumsum(-1) * x[..., 2:3]
    y = torch.cat([y[..., 1:], y[..., :1]], -1).roll(2, -1) @ x.mT
    y = y + F.cross_entropy(x, x.detach().argmax(1) * 0) * F.mse_loss(x, x.flip(1), weight=x.detach().square())
    y = y + sum(part.norm() for part in x.chunk(2, -1)) + einsum(x, y)
    return y.mean() + F.mse_loss(x, x.flip(-2)) + relative_l2(x, y[..., :1] * 2 - x).mean()


def of_images(x, weight, bias):
    x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)
    x = F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear")
    x = F.conv_transpose2d(F.interpolate(x, size=(7, 5)), weight, stride=2)
    return F.avg_pool2d(x, 3, 2, padding=1).square().mean().sqrt()  # of all ranks


def compiled(function, x, shapes):
    """A compiled region takes local tensors, makes ShardTensors of them and computes over split dimensions."""
    full, mesh = draw(x.shape, torch.float32, 0), domain_mesh()
    spec = split(full, x, mesh).spec
    weights = [draw(shape, torch.float32, seed) for seed, shape in enumerate(shapes, 1)]

    def region(part, *weights):
        return local(function(ShardTensor.from_local(part, mesh, spec.placements, x.sizes), *weights))

    expected = function(full, *weights)
    whole, *gradients = torch.autograd.grad(expected, [full, *weights])
    part = part_of(full, spec).detach().clone().requires_grad_()
    found = torch.compile(region, fullgraph=True, backend="aot_eager")(part, *weights)
    found.backward()
    assert error(found, expected) < 1e-5
    assert error(part.grad, part_of(whole, spec)) < 1e-5
    for w, gradient in zip(weights, gradients, strict=True):
        dist.all_reduce(w.grad)
        assert error(w.grad, gradient) < 1e-5


@needs_torch((2, 13), "cannot trace the rules of ShardTensor")
@pytest.mark.slow("what the compiler makes of the rules")
def test_rules_compile_in_one_graph(ranks):
    ranks(2, compiled, of_any_rule, X((2, 4, 6, 7), (3,), {0: (3, 4)}), [(7,), (7,)])
    ranks(2, compiled, of_images, X((1, 4, 9, 6), (2,), {0: (5, 4)}), [(4, 4, 3, 3), (4,)])


EINOPS = [
    "rearrange(x, 'b c h w -> b (h w) c')", "rearrange(x, 'b c (h p) (w q) -> b (h w) (c p q)', p=2, q=3)",
    "rearrange(x, 'b c h w -> (b c) h w')", "reduce(x, 'b c h w -> b c', 'mean')",
    "reduce(x, 'b c (h p) (w q) -> b c h w', 'max', p=2, q=2)", "repeat(x, 'b c h w -> b c (h r) w', r=2)",
    "einsum(x, x, 'b c h w, b d h w -> b c d')",
]  # fmt: skip


def test_einops_works_on_them(ranks):
    einops = pytest.importorskip("einops")
    names = {name: getattr(einops, name) for name in ("rearrange", "reduce", "repeat", "einsum")}
    ranks(2, check_all, [Case(code, (X((2, 3, 8, 6), (2,), {0: (2, 6)}),), keywords=names) for code in EINOPS])
