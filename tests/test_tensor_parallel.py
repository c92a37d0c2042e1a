"""Tensor and sequence parallelism against the serial model: numbers, counts, compilation, dropout, bad input."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from distributed.collectives import shard_sizes
from tests.support import parity

SERIAL = {"all_reduce": 2}
SEQUENCE = {"all_gather": 2, "reduce_scatter": 2}


BY_COMPILER = pytest.mark.slow("what the compiler makes of the collectives of tensor parallelism")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=BY_COMPILER)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_collectives_a_pair_forward_and_backward_compiled_or_not(ranks, sequence_parallel, compiled):
    options = {"sequence_parallel": sequence_parallel, "compiled": compiled, "grid": parity.UNEVEN}
    forward, backward, *_ = ranks(2, parity.count_block, 2, **options)[0]
    expected = SEQUENCE if sequence_parallel else SERIAL
    assert (forward.calls, backward.calls) == (expected, expected)


def test_sequence_parallelism_sends_the_same_bytes(ranks):
    plain, split = (ranks(2, parity.count_block, 2, sequence_parallel=sequence)[0] for sequence in (False, True))
    tensor = 2 * 48 * 32 * 4  # (B, N, D) of float32
    for ours, theirs in zip(plain[:2], split[:2], strict=True):
        assert ours.bytes.total() == theirs.bytes.total() == 2 * tensor  # 2 all-reduces, each 2 (tp - 1) / tp tensors


def test_half_precision_stays_half_also_on_the_way(ranks):
    full = ranks(2, parity.count_block, 2)[0][0].bytes.total()
    for sequence_parallel in (False, True):
        count = {"sequence_parallel": sequence_parallel}
        forward, backward, *dtypes = ranks(2, parity.count_block, 2, **count, dtype=torch.bfloat16)[0]
        assert dtypes == [torch.bfloat16, torch.bfloat16]
        assert forward.bytes.total() == backward.bytes.total() == full / 2
        forward, backward, *dtypes = ranks(2, parity.count_block, 2, **count, autocast=True)[0]
        assert dtypes == [torch.float32, torch.float32]  # of the residual
        assert forward.bytes.total() == backward.bytes.total() == full / 2


def dropout_masks(sequence_parallel):
    mesh = parity.make_mesh(tp=2)
    model = parity.split_vit(mesh, sequence_parallel=sequence_parallel, dropout=0.5)
    if sequence_parallel:
        torch.manual_seed(mesh["tp"].get_local_rank())
    block, ones = model.blocks[0], torch.ones(100, 1000)
    q = torch.ones(1, 2, 50, 50)
    masks = {
        "hidden": block.mlp.drop(ones),
        "residual": block.drop(ones),
        "heads": block.attn.attend(q, q, torch.eye(50).expand_as(q), dropout_p=0.5),
        "hidden again": block.mlp.drop(ones),
        "embedding": model.pos_drop.forward(ones),
    }
    model.eval()
    assert torch.equal(block.mlp.drop(ones), ones)
    return {name: mask > 0 for name, mask in masks.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_where_activations_are_split_and_agrees_where_they_are_whole(ranks, sequence_parallel):
    first, second = ranks(2, dropout_masks, sequence_parallel)
    for name in first:
        if not sequence_parallel and name in ("residual", "embedding"):
            assert torch.equal(first[name], second[name]), name
        else:  # two fair coins a pair: each combination a quarter of the time, within 5 standard deviations
            pairs = torch.bincount((2 * first[name] + second[name]).flatten(), minlength=4) / first[name].numel()
            assert ((pairs - 0.25).abs() < 5 * (3 / 16 / first[name].numel()) ** 0.5).all(), name
    assert not torch.equal(first["hidden"], first["hidden again"])


def replayed_dropout(sequence_parallel):
    mesh = parity.make_mesh(tp=2)
    model = parity.split_vit(mesh, sequence_parallel=sequence_parallel, dropout=0.5)
    block, results = model.blocks[0], []
    n = shard_sizes(90, 2)[mesh["tp"].get_local_rank()] if sequence_parallel else 90
    for recompute in (False, True):
        torch.manual_seed(7 + sequence_parallel * mesh["tp"].get_local_rank())
        x = torch.ones(2, n, 32, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        torch.rand(3)  # numbers drawn between forward and backward do not matter
        y.sum().backward()
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())])
        block.zero_grad()
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)
    if not sequence_parallel:  # what is whole is the same on both ranks
        outputs = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(outputs, y.detach())
        assert torch.equal(*outputs)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activation_checkpointing_replays_dropout(ranks, sequence_parallel):
    ranks(2, replayed_dropout, sequence_parallel)
