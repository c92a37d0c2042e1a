"""What distributed/shard/core/hacks.py rests on in torch, each thing by itself."""

import pytest
import torch
from torch.autograd import Function
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from distributed.shard.core import hacks
from distributed.shard.core.spec import spec_of
from distributed.shard.core.tensor import NoRule, ShardTensor
from tests.support.shard_parity import domain_mesh
from utils.torch_private import storage_id


def adopted():
    """On a rank of two: a tensor (5, 2) that became this rank's part of itself, and which tensors were refused."""
    spec = spec_of(domain_mesh(), (5, 2), [Shard(0)])
    plain = torch.arange(10.0).view(5, 2).clone()
    hacks.adopt(torch.Tensor.copy_, plain, spec)

    viewed = torch.zeros(5, 2)
    view = viewed[1:]
    tensors = {
        "has a view": viewed,
        "has a gradient": torch.zeros(5, 2, requires_grad=True),
        "has another shape": torch.zeros(4, 2),
    }
    refused = []
    for name, tensor in tensors.items():
        try:
            hacks.adopt(torch.Tensor.copy_, tensor, spec)
        except NoRule:
            refused.append(name)
    assert view.shape == (4, 2)
    return type(plain) is ShardTensor, plain.as_subclass(torch.Tensor).tolist(), refused


def test_a_plain_tensor_becomes_the_part_of_its_rank(ranks):
    first, second = ranks(2, adopted)
    assert first[0] and second[0]
    assert first[1] + second[1] == torch.arange(10.0).view(5, 2).tolist() and len(first[1]) == 3
    assert first[2] == second[2] == ["has a view", "has a gradient", "has another shape"]


def test_torch_counts_a_tensor_without_views_as_two_users_of_its_memory():
    tensor = torch.zeros(3)
    assert torch._C._storage_Use_Count(storage_id(tensor)) == hacks.ALONE
    view = tensor[1:]
    assert torch._C._storage_Use_Count(storage_id(tensor)) == hacks.ALONE + 1
    del view


class Asking(torch.Tensor):
    """A tensor that must not be asked for the function itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is not F.cosine_embedding_loss
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_body_of_a_function_of_torch_runs_as_it_is():
    x = torch.rand(3, 4)
    y = torch.rand(3, 4)
    target = torch.ones(3)
    with pytest.raises(AssertionError):
        F.cosine_embedding_loss(x.as_subclass(Asking), y, target)
    bare = hacks.without_dispatch(F.cosine_embedding_loss)
    loss = bare(x.as_subclass(Asking), y, target, margin=0.25)
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), F.cosine_embedding_loss(x, y, target, margin=0.25))
    # torch's own function asks as before.
    with pytest.raises(AssertionError):
        F.cosine_embedding_loss(x.as_subclass(Asking), y, target)


class Doubled(Function):
    """2 x, whose gradient is 2 g."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_node_calls_the_backward_function_that_it_is_given():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.saved_tensors)
        return 10 * Doubled.backward(ctx, grad)

    y = Doubled.apply(x)
    hacks.replace_backward(y.grad_fn, backward)
    y.sum().backward()
    assert x.grad.tolist() == [20.0] * 3
    assert torch.equal(seen[0][0], x)
    # Another call of the same function has a node of its own.
    z = Doubled.apply(x)
    x.grad = None
    z.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
