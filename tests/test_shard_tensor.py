"""ShardTensor itself: making one, rearranging it, what it answers, elementwise operations, and what it refuses."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distributed.shard.core.plans import MOST_PLANS
from distributed.shard.core.spec import Spec, as_mesh, part_of, spec_of
from distributed.shard_tensor import ShardTensor, local, scatter_tensor
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, split
from tools.instruments.counting import CollectiveCounter

# How a tensor (6, 7, 5) may lie on a mesh of one dimension of 3 ranks, and on one of 2 x 2.
ONE = [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()], [Partial()]]
TWO = [
    [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(2), Replicate()], [Replicate(), Shard(1)], [Partial(), Shard(0)],
    [Shard(2), Partial()], [Replicate(), Replicate()], [Partial(), Partial()],
]  # fmt: skip


def laid_out(full, mesh, placements, sizes=None):
    """A ShardTensor leaf; a partial one is made of different parts on the ranks."""
    spec = spec_of(mesh, full.shape, placements, sizes)
    part = part_of(full, spec).detach().clone()
    for m in spec.partial:
        group = spec.mesh.groups[m]
        random = torch.Generator().manual_seed(sum(g.rank * 7**i for i, g in enumerate(spec.mesh.groups) if i == m))
        noise = torch.randn(part.shape, generator=random)
        total = noise.clone()
        dist.all_reduce(total, group=mesh.get_group(m))
        part = part / group.size + noise - total / group.size
    return ShardTensor.from_local(part, mesh, placements, sizes).requires_grad_()


def redistributions(mesh_shape, layouts, sizes):
    """From every layout to every other: values, gradients, and the sizes asked for."""
    mesh, full = domain_mesh(mesh_shape), draw((6, 7, 5), torch.float32, 1).detach()
    weight = draw((6, 7, 5), torch.float32, 2).detach()
    for source in layouts:
        for target in layouts:
            x = laid_out(full, mesh, source)
            y = x.redistribute(target, sizes)
            assert y.placements == tuple(target) and y.shape == full.shape
            assert local(y).shape == y.spec.local_shape
            torch.testing.assert_close(y.full_tensor(), full, msg=f"{source} -> {target}")
            (y * weight).sum().backward()
            expected = part_of(weight, Spec(x.spec.mesh, x.spec.dims))
            torch.testing.assert_close(local(x.grad), expected, msg=f"gradient of {source} -> {target}")


@pytest.mark.parametrize("sizes", [None, {0: (5, 0, 0)}], ids=["even", "one rank has all"])
def test_any_split_becomes_any_other(ranks, sizes):
    layouts = ONE if sizes is None else [[Shard(2)], [Replicate()], [Partial()]]
    ranks(3, redistributions, (), layouts, sizes)


def test_any_split_becomes_any_other_on_tiles(ranks):
    ranks(4, redistributions, (2, 2), TWO, None)


def sends_of_means():
    mesh, full = domain_mesh(), draw((2, 3, 7, 5), torch.float32, 1).detach()
    x, y = laid_out(full, mesh, [Shard(2)]), laid_out(full, mesh, [Shard(2)])
    with CollectiveCounter() as counter:
        x.mean((2, 3))  # partial
        assert not counter.calls  # nothing was sent
        (x.mean(2) - 2 * y.mean(2)).abs()  # one all-reduce, before abs
    return dict(counter.calls)


def test_a_partial_mean_sends_nothing_until_it_is_added_up(ranks):
    assert ranks(3, sends_of_means)[0] == {"all_reduce": 1}


def collectives_of(source, target, sizes=None):
    x = laid_out(draw((6, 7, 5), torch.float32, 1).detach(), domain_mesh(), source).detach()
    with CollectiveCounter() as counter:
        x.redistribute(target, sizes)
    return dict(counter.calls)


def test_other_sizes_of_one_dimension_cost_one_all_to_all(ranks):
    assert ranks(3, collectives_of, [Shard(1)], [Shard(1)], {0: (0, 1, 6)}) == [{"all_to_all": 1}] * 3


@pytest.mark.parametrize(
    ("source", "target", "calls"),
    [
        ([Shard(0)], [Shard(1)], {"all_to_all": 1}),
        ([Shard(1)], [Replicate()], {"all_gather": 1}),
        ([Partial()], [Replicate()], {"all_reduce": 1}),
        ([Partial()], [Shard(1)], {"reduce_scatter": 1}),
        ([Replicate()], [Shard(1)], {}),
        ([Replicate()], [Partial()], {}),
    ],
)
def test_a_redistribution_is_one_collective(ranks, source, target, calls):
    assert ranks(3, collectives_of, source, target) == [calls] * 3


def scattered(src, mesh_shape, placements, sizes):
    mesh, full = domain_mesh(mesh_shape), draw((2, 9, 5), torch.float32, 1)
    here = dist.get_rank() == src
    with CollectiveCounter() as counter:
        x = scatter_tensor(full if here else None, src, mesh, placements, sizes)
    assert torch.equal(local(x), part_of(full, x.spec))
    weight = draw((2, 9, 5), torch.float32, 2).detach()
    (x * weight).sum().backward()
    assert (full.grad is None) or not here or torch.allclose(full.grad, weight)
    return counter.bytes.get("all_to_all", 0), x.to_local().numel() * 4


@pytest.mark.parametrize("src", [0, 2])
@pytest.mark.parametrize(
    ("mesh", "placements", "sizes"),
    [((), [Shard(1)], None), ((), [Shard(1)], {0: (0, 4, 5)}), ((2, 2), [Shard(1), Shard(2)], None),
     ((2, 2), [Replicate(), Shard(1)], None)],
)  # fmt: skip
def test_a_scattered_tensor_costs_each_rank_its_part(ranks, src, mesh, placements, sizes):
    results = ranks(4 if mesh else 3, scattered, src, mesh, placements, sizes)
    assert results[src][0] == sum(part for rank, (_, part) in enumerate(results) if rank != src)
    assert all(sent == 0 for rank, (sent, _) in enumerate(results) if rank != src)


def told_apart():
    """Sizes are found out, or checked."""
    mesh, rank = domain_mesh(), dist.get_rank()
    x = ShardTensor.from_local(torch.full((2, rank), float(rank)), mesh, [Shard(1)])
    assert x.shape == (2, 3) and torch.equal(x.full_tensor()[0], torch.tensor([1.0, 2.0, 2.0]))
    with pytest.raises(ValueError, match="a local tensor of"):
        ShardTensor.from_local(torch.zeros(2, rank + 1), mesh, [Shard(1)], {0: (0, 1, 2)})
    with pytest.raises(ValueError, match="do not make up"):
        spec_of(mesh, (4,), [Shard(0)], {0: (1, 1, 1)})
    with pytest.raises(ValueError, match="1 placements for a mesh of 2"):
        spec_of(Mesh2(mesh), (4,), [Shard(0)])


def Mesh2(mesh):
    found = as_mesh(mesh)
    return dataclasses.replace(found, groups=found.groups * 2)


def test_sizes_are_found_out_or_checked(ranks):
    ranks(3, told_apart)


def as_dtensors():
    mesh, full = domain_mesh(), draw((10, 7), torch.float32, 1).detach()
    for dim in (0, 1):
        y = distribute_tensor(full, mesh, [Shard(dim)])
        x = ShardTensor.from_dtensor(y)
        assert torch.equal(x.full_tensor(), full) and torch.equal(local(x), y.to_local())
        uneven = x.redistribute([Shard(dim)], {0: (full.shape[dim] - 1, 1, 0, 0)})
        back = uneven.to_dtensor()
        assert isinstance(back, DTensor) and torch.equal(back.full_tensor(), full)
        assert torch.equal(back.to_local(), y.to_local())


def test_dtensors_become_shard_tensors_and_back(ranks):
    ranks(4, as_dtensors)


def answers():
    x = split(draw((2, 7, 3), torch.float32, 1), X((2, 7, 3), (1,)), domain_mesh())
    assert x.shape == (2, 7, 3) and x.size(1) == 7 and x.ndim == x.dim() == 3 and len(x) == 2 and x.numel() == 42
    assert x.dtype == torch.float32 and x.device.type == "cpu" and x.requires_grad and x.is_leaf
    assert x.is_floating_point() and "Spec((2, 7, 3)" in repr(x)
    assert isinstance(x.to(torch.float64), ShardTensor) and x.double().dtype == torch.float64
    assert type(x.to_local()) is torch.Tensor and x.sum().item() == pytest.approx(x.full_tensor().sum().item(), 1e-5)
    assert float(x.detach().amax()) == x.full_tensor().max().item()
    with pytest.raises(RuntimeError, match="scalar"):
        x.backward()
    with pytest.raises(NotImplementedError, match=r"no rule for linalg_svd of Spec\(\(2, 7, 3\).*register a rule"):
        torch.linalg.svd(x)
    with pytest.raises(NotImplementedError, match="does not keep the ranks' pieces together"):
        x.reshape(7, 6)


def test_it_answers_for_the_whole_and_refuses_what_it_cannot_do(ranks):
    ranks(2, answers)


def in_place(x, y):
    z = x * 1
    z += y
    z.mul_(3).clamp_(-1, 2)
    return z


def mean_head(x, weight, bias):
    """As a classifier ends: a mean over all positions, a linear layer, something that is not linear."""
    return F.linear(x.mean((2, 3)), weight, bias).exp()


def recomputed(x, weight, bias):
    """The backward pass computes with ShardTensors again: its mean is one of all ranks too."""
    return [checkpoint(mean_head, x * 1, weight, bias, use_reentrant=reentrant) for reentrant in (False, True)]


def there_and_back(x):
    """Into tokens, and out of them as the head of the ViT does."""
    t = x.flatten(2).transpose(1, 2)
    y = t.unflatten(2, (2, 2, -1)).unflatten(1, x.shape[2:])
    return y.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], x.shape[1] // 4, 2 * x.shape[2], 2 * x.shape[3])


OF_TWO = [
    "x + y", "(x.exp() * 2 - y / 3).tanh().clamp(-0.4, 0.5).abs() ** 1.5", "torch.where(x > y, x, 2 * y)",
    "x.sum(1, keepdim=True) * 2 + y.sum(1, keepdim=True) - y.mean()",
]  # fmt: skip
OF_ONE = ["x.masked_fill(x > 0, 1.0)", "F.gelu(x, approximate='tanh')", "x.bfloat16().float()", there_and_back]
LINEAR = ["F.linear(x.flatten(2).transpose(1, 2), y, z)", mean_head, recomputed]
BANDS = [X((2, 4, 7, 3), (2,)), X((2, 4, 7, 3), (3,)), X((3, 4, 7, 3), (2,), {0: "first"}), X((1, 4, 7, 3), (0,))]
TILES = [X((2, 4, 7, 5), (2, 3)), X((1, 4, 7, 5), (3, 2)), X((2, 4, 2, 5), (3, None)), X((2, 4, 7, 5), (None, 2))]


def cases(size):
    """Inputs split alike, differently and not at all; weights of each shape that spreads over an image."""
    mesh = (2, 2) if size == 22 else ()
    count = 4 if mesh else size
    for x in TILES if mesh else BANDS:
        if x.sizes:
            x = x._replace(sizes={0: (x.shape[2],) + (0,) * (count - 1)})
        whole, image = X(x.shape), x.shape[2:]
        other = x._replace(splits=(1,), sizes=None)
        found = [(function, (x, y)) for function in OF_TWO for y in (x, other, whole)]
        found += [("x + y", (x, X(image[1:]))), ("x + y", (x, X((4, 1, 1), (0,)))), (in_place, (x, whole))]
        found += [(function, (x,)) for function in OF_ONE]
        for y in (x, whole):  # the gradient of a weight counts once
            found += [("x * y + y", (y,), shape) for shape in (x.shape, image, (image[0], 1), (4, 1, 1), ())]
            found += [(function, (y,), (6, 4), (6,)) for function in LINEAR]
        yield from (Case(function, inputs, weights, mesh) for function, inputs, *weights in found)


@pytest.mark.parametrize("size", [2, 3, 4, 22])
def test_operands_meet_whatever_their_splits(ranks, size):
    ranks(4 if size == 22 else size, check_all, list(cases(size)))


def of_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def dropped(splits):
    """Dropout where ranks hold copies, or parts."""
    torch.manual_seed(0)
    x = split(torch.ones(64, 65, requires_grad=True), X((64, 65), splits), domain_mesh((2, 2)))
    y = checkpoint(F.dropout, x, 0.25, use_reentrant=False)  # the same numbers when computed again
    y.sum().backward()
    z = F.dropout(x.sum(0), 0.5)
    assert len({*of_all_ranks(torch.rand(()).item())}) == 1, "the default generators are not alike any more"
    return y.full_tensor(), ShardTensor.from_local(local(x.grad), x.mesh, x.placements).full_tensor(), z.full_tensor()


@pytest.mark.parametrize("splits", [(1, 0), (None, 1), (None, None)])
def test_dropout_is_the_same_on_copies_and_different_on_parts(ranks, splits):
    results = ranks(4, dropped, splits)
    kept = results[0][0] > 0
    assert 0.7 < kept.float().mean() < 0.8
    for y, grad, z in results:
        assert torch.equal(y, results[0][0]) and torch.equal(z, results[0][2])
        assert torch.equal(grad, y)
    assert not torch.equal(kept[:, :32], kept[:, 33:])


def of_a_number(x, n):
    """Operations whose plan depends on a number that is given as a tensor."""
    t = torch.tensor(n)
    return [x[t:], x[..., :t], x.narrow(1, t, 1), *x.tensor_split(torch.tensor([n, 2]), 2), x.sum(1)[None, t], x[t]]


def tensors_in(key):
    return [x for x in key if isinstance(x, torch.Tensor) or (isinstance(x, tuple) and tensors_in(x))]


def planned_twice():
    """Plans are kept for equal arguments, within a bound; what depends on the values of a tensor is not."""
    mesh, full = domain_mesh(), draw((3, 7, 4), torch.float32, 1).detach()
    x = split(full, X((3, 7, 4), (1,)), mesh)
    for n in (0, 1, 2):
        for found, expected in zip(of_a_number(x, n), of_a_number(full, n), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)
    known = len(x.spec.plans)
    first, second = x[:, 2:], x[:, 2:]
    assert len(x.spec.plans) == known + 1 and first.spec is second.spec
    assert x[:, 2:-1].spec is not first.spec
    with pytest.raises(NotImplementedError):
        x[True]  # although x[1] has a plan
    for i in range(MOST_PLANS + 9):
        x[:, : i + 8]
    assert len(x.spec.plans) <= MOST_PLANS
    assert not any(map(tensors_in, x.spec.plans))


def weights_of_copies():
    """A weight that needs no gradient comes first: the plan of one that does is another."""
    mesh = domain_mesh((2, 2))
    x = split(draw((3, 7, 4), torch.float32, 1).detach(), X((3, 7, 4), (1,)), mesh)
    gradients = []
    for operation in (torch.mul, torch.matmul, F.linear):
        operation(x, torch.ones(4, 4) if operation is not torch.mul else torch.ones(4))
        weight = torch.ones(4, 4) if operation is not torch.mul else torch.ones(4)
        operation(x, weight.requires_grad_()).sum().backward()
        dist.all_reduce(weight.grad)
        gradients.append(weight.grad.sum().item() / weight.numel())
    total = x.full_tensor().sum().item() / 4
    return gradients, [total, total, total]


def test_what_a_rank_does_is_planned_once_and_never_by_values(ranks):
    ranks(2, planned_twice)
    for found, expected in ranks(4, weights_of_copies):
        assert found == pytest.approx(expected, 1e-4)
