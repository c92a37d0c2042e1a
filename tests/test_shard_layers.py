"""Layers and losses as models use them: running statistics, number of collectives, torch.compile, einops."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from distributed.shard.spec import part_of
from distributed.shard_tensor import ShardTensor, local
from tests.support.parity import error
from tests.support.shard_parity import Case, X, check_all, close, domain_mesh, draw, split
from tools.instruments.counting import CollectiveCounter
from training.losses import relative_l2

SPLITS = [X((3, 6, 5, 4), (2,)), X((3, 6, 5, 4), (2,), {0: (5, 0)}), X((3, 6, 5, 4), (1,)), X((3, 6, 5, 4), (0,)),
          X((1, 6, 5, 4), (3,), {0: (1, 3)}), X((3, 6, 5, 4))]  # fmt: skip


def train_with_running_statistics(x, mesh):
    """A layer with running statistics and its copy that sees split images: two steps, and one in evaluation mode."""
    whole = nn.BatchNorm2d(6)
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
    for x in SPLITS:
        train_with_running_statistics(x, domain_mesh())


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


def loss(prediction, target):
    return relative_l2(prediction, target).mean()


def test_relative_l2_loss_is_that_of_the_whole(ranks):
    image = (3, 2, 5, 7)
    cases = [Case(loss, (X(image, (2,)), X(image, (2,)))), Case(loss, (X(image, (3,), {0: (0, 7)}), X(image)))]
    cases += [Case(loss, (X(image, (2,)),), (image,)), Case(loss, (X(image, (2,)), X(image, (3,))))]
    cases += [Case(loss, (X((1, *image[1:]), (3,)),) * 2), Case(loss, (X(image, (0,)), X(image, (0,))))]
    ranks(2, check_all, cases)
    ranks(4, check_all, [Case(loss, (X(image, (2, 3)), X(image, (2, 3))), mesh=(2, 2))])


def counted(function, x, mesh=(), **keywords):
    """(calls, bytes of the forward pass) and calls of the backward pass."""
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh(mesh))
    with CollectiveCounter() as forward:
        out = function(part, **keywords)
        out = out.sum() if out.dim() else out
    with CollectiveCounter() as backward:
        local(out).backward()
    return dict(forward.calls), dict(backward.calls), sum(forward.bytes.values())


def loss_of_itself(x):
    return relative_l2(x, x.detach() * 0.5).mean()


def normalized(x, name):
    if name == "group":
        return F.group_norm(x, 2)
    if name == "batch":
        return F.batch_norm(x, None, None, training=True)
    return getattr(F, name)(x, x.shape[1:])


def softmax(x):
    return x.softmax(-1)


def two_means(x):
    return (2 * x.mean((1, 2, 3)) - x.sum((1, 2, 3)) + x.mean((1, 2, 3))).square()


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_few_collectives(ranks, mesh):
    x, size = X((3, 4, 6, 8), (3, 2)[: len(mesh)]), 2 * len(mesh)
    one = {"all_reduce": 1}
    assert ranks(size, counted, loss_of_itself, x, mesh)[0] == (one, {}, 2 * 2 * 3 * 4 * (size - 1) // size)
    for name in ("layer_norm", "group", "batch"):
        assert ranks(size, counted, normalized, x, mesh, name=name)[0][:2] == ({"all_gather": 1}, one)
    assert ranks(size, counted, normalized, x, mesh, name="rms_norm")[0][:2] == (one, one)
    assert ranks(size, counted, softmax, x, mesh)[0][:2] == ({"all_gather": 1}, one)
    assert ranks(size, counted, two_means, x, mesh)[0][:2] == (one, {})


def zero_error():
    x = split(draw((2, 8), torch.float32, 0), X((2, 8), (1,)), domain_mesh())
    relative_l2(x, x.detach() * 1).mean().backward()
    return local(x.grad).abs().max().item()


def test_a_perfect_prediction_has_a_gradient_of_zero(ranks):
    assert ranks(2, zero_error) == [0.0, 0.0]


def compiled(x, sizes, mesh=()):
    """A compiled region takes local tensors, makes ShardTensors of them and computes over split dimensions."""
    full, mesh = draw(x.shape, torch.float32, 0), domain_mesh(mesh)
    spec = split(full, x, mesh).spec
    weights = [draw(x.shape[-1:], torch.float32, seed).detach().requires_grad_() for seed in (1, 2)]

    def einsum(x, y):
        return torch.einsum("bchw,bchk->bk", x, y).sum()

    def work(x, weight, bias):
        y = F.layer_norm(x.softmax(-1), x.shape[-1:], weight, bias)
        y = y + x.std((-1, -2), keepdim=True) + F.group_norm(y, 2) * x.amax(-1, keepdim=True)
        y = y + F.batch_norm(y, None, None, training=True) + F.normalize(x, dim=-1).cumsum(-1) * x[..., 2:3]
        y = torch.cat([y[..., 1:], y[..., :1]], -1).roll(2, -1) @ x.mT
        y = y + F.cross_entropy(x, x.detach().argmax(1) * 0) * F.mse_loss(x, x.flip(1), weight=x.detach().square())
        y = y + sum(part.norm() for part in x.chunk(2, -1)) + einsum(x, y)
        return y.mean() + F.mse_loss(x, x.flip(-2)) + relative_l2(x, y[..., :1] * 2 - x).mean()

    def region(part, *weights):
        return local(work(ShardTensor.from_local(part, mesh, spec.placements, sizes), *weights))

    expected = work(full, *weights)
    expected.backward()
    whole = [w.grad for w in (full, *weights)]
    for w in weights:
        w.grad = None
    part = part_of(full, spec).detach().clone().requires_grad_()
    found = torch.compile(region, fullgraph=True, backend="aot_eager")(part, *weights)
    found.backward()
    assert error(found, expected) < 1e-5
    assert error(part.grad, part_of(whole[0], spec)) < 1e-5
    for w, grad in zip(weights, whole[1:], strict=True):
        dist.all_reduce(w.grad)
        assert error(w.grad, grad) < 1e-5


@pytest.mark.slow("what the compiler makes of the rules")
def test_rules_compile_in_one_graph(ranks):
    ranks(2, compiled, X((2, 4, 6, 7), (3,), {0: (3, 4)}), {0: (3, 4)})


def rearranged():
    einops = pytest.importorskip("einops")
    full, x = draw((2, 3, 8, 6), torch.float32, 0), X((2, 3, 8, 6), (2,), {0: (2, 6)})
    part = split(full, x, domain_mesh())
    for function, pattern, sizes in [
        ("rearrange", "b c h w -> b (h w) c", {}),
        ("rearrange", "b c (h p) (w q) -> b (h w) (c p q)", {"p": 2, "q": 3}),
        ("rearrange", "b c h w -> (b c) h w", {}),
        ("reduce", "b c h w -> b c", {"reduction": "mean"}),
        ("reduce", "b c (h p) (w q) -> b c h w", {"reduction": "max", "p": 2, "q": 2}),
        ("repeat", "b c h w -> b c (h r) w", {"r": 2}),
        ("einsum", "b c h w, b d h w -> b c d", {}),
    ]:
        if function == "einsum":
            found, expected = einops.einsum(part, part, pattern), einops.einsum(full, full, pattern)
        else:
            found, expected = (getattr(einops, function)(y, pattern, **sizes) for y in (part, full))
        close(found.full_tensor(), expected, Case(None, ()), pattern)
    return True


def test_einops_works_on_them(ranks):
    pytest.importorskip("einops")
    assert ranks(2, rearranged) == [True, True]
