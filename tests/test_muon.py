"""Muon trains in every layout as on one device: whole matrices are made orthogonal, whatever part a rank holds."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.collectives import shard
from tests.support.layout_parity import (
    build,
    collectives_of_a_step,
    overflow_on_the_last_rank,
    ranks_and_options,
    train,
    train_from,
    train_steps,
)
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from training.models.build import build_model
from training.step.muon import MatrixPart, Muon, orthogonalize
from training.step.whole_matrices import share_out_work
from utils import comm

# Widths that no number of ranks here divides evenly, but for the heads and hidden features of tensor parallelism.
MUON = {
    "global_batch_size": 12, "depth": 2, "num_heads": 4, "embed_dim": 44, "mlp_ratio": 2, "optimizer": "Muon",
    "lr": 1e-2, "num_iters": 50, "clip_grad_norm": 0.5, "weight_decay": 0.1,
}  # fmt: skip
LAYOUTS = [
    "dp2", "dp2,data_parallel=zero1", "dp3,data_parallel=zero1", "dp2,data_parallel=zero2", "dp3,data_parallel=fsdp",
    "dp4,data_parallel=fsdp", "dp4,data_parallel=hsdp,dp_shard=2", "tp2", "tp4", "tp2,sequence_parallel=true",
    "tp2xdp2", "tp2xdp2,data_parallel=zero1", "tp2xdp2,data_parallel=fsdp", "tp2,tp_backend=dtensor",
    "tp2xdp2,data_parallel=fsdp,tp_backend=dtensor", "cp2", "cp2xdp2,data_parallel=fsdp", "pp2",
    "pp2xdp2,gradient_accumulation=2", "pp2xdp2,data_parallel=fsdp,gradient_accumulation=2", "domain2",
    "domain2,data_parallel=fsdp", "domain2x2", "domain2,data_parallel=zero1", "tp2xdomain2", "tp2xpp2",
    "dp3,data_parallel=fsdp,cpu_offload=true", "dp2,gradient_accumulation=3",
]  # fmt: skip
QUICK = [
    "dp2,data_parallel=zero1", "dp3,data_parallel=fsdp", "tp2", "domain2",
]  # fmt: skip
SPLIT = ["dp2,data_parallel=fsdp", "tp2"]
_one_device = {}  # {options: losses, weights}


def train_in_double(config, steps=3):
    """Losses, {name: (this rank's part of a weight, or all of it, dim that is cut over tp)}, tp rank and size."""
    torch.set_default_dtype(torch.float64)
    try:
        step = build(config)
        losses, weights = train_steps(step, config, 0, steps), {}
        for name, parameter in step.parallel.model.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if name in step.parallel.split.specs:
                value = None  # positions of a part of the image: AdamW's, which other tests compare
            weights[name] = value, step.parallel.split.dims.get(name)
        return losses, weights, comm.get_rank("tp"), comm.get_size("tp")
    finally:
        torch.set_default_dtype(torch.float32)


def check(ranks, tiny_config, layout, options):
    """Losses and weights after three steps in float64 are those of one device."""
    key = repr(sorted(options.items()))
    if key not in _one_device:
        _one_device[key] = ranks(1, train_in_double, tiny_config(**options))[0]
    losses, expected, *_ = _one_device[key]
    size, own = ranks_and_options(layout)
    seen = set()
    for found, weights, rank, tp in ranks(size, train_in_double, tiny_config(**options | own)):
        seen |= set(weights)
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=0)
        for name, (value, dim) in weights.items():
            whole = expected[name][0]
            if value is not None and not name.endswith("qkv.bias"):  # that of k has a gradient of rounding alone
                piece = whole if dim is None else shard(whole, dim, rank, tp)
                torch.testing.assert_close(value, piece, rtol=1e-8, atol=1e-9)
    assert seen == set(expected)


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "Muon in every layout"))
def test_three_steps_in_double_precision_are_those_of_one_device(ranks, tiny_config, layout):
    check(ranks, tiny_config, layout, MUON)


def train_apart(config):
    """As train_in_double, but each rank makes its own pieces orthogonal."""

    def apart(pieces, cuts, compute):
        return [compute(piece) for piece in pieces]

    with patch("training.step.muon.on_whole_matrices", apart):
        return train_in_double(config)


@pytest.mark.parametrize("layout", slow_but(SPLIT[1:], SPLIT, "sharded weights"))
def test_orthogonal_pieces_are_not_pieces_of_an_orthogonal_matrix(ranks, tiny_config, layout):
    def on_pieces(size, _, config):
        return ranks(size, train_in_double if size == 1 else train_apart, config)

    with pytest.raises(AssertionError, match="close"):
        check(on_pieces, tiny_config, layout, MUON)


MODELS = {
    "tied weights": {"model": "tests.support.own_models:TiedMatrices"},
    "unused weights": {"model": "tests.support.own_models:Unused"},
    "frozen weights": {"freeze": ["blocks.0.*", "*fc1*"]},
    "an average": {"ema": 0.9},
    "only the MLP": {"muon_weights": ["*mlp*"], "weight_decay_all": True},
    "AFNO": {"model": "afno", "embed_dim": 32, "model_args": {"num_blocks": 4}},
}


SHARDED = ["dp2,data_parallel=zero1", "dp2,data_parallel=fsdp"]


@pytest.mark.parametrize("layout", slow_but(SHARDED[1:], SHARDED, "sharded moments"))
@pytest.mark.parametrize("options", slow_but(list(MODELS.values())[:2], MODELS.values(), "other weights"), ids=MODELS)
def test_weights_of_all_kinds_are_trained_as_on_one_device(ranks, tiny_config, layout, options):
    check(ranks, tiny_config, layout, MUON | options)


def train_from_in_double(config, *args):
    torch.set_default_dtype(torch.float64)
    try:
        return train_from(config, *args)
    finally:
        torch.set_default_dtype(torch.float32)


CHAINS = [
    ["dp2,data_parallel=fsdp", "tp2"],
    ["dp3,data_parallel=fsdp", "serial", "tp2xdp2,data_parallel=fsdp", "dp2,data_parallel=zero1", "domain2"],
]


@pytest.mark.parametrize("layouts", slow_but(CHAINS[:1], CHAINS, "more layouts, one after the other"), ids=len)
def test_layouts_resume_each_other(ranks, tiny_config, tmp_path, layouts):
    losses = []
    for number, layout in enumerate(layouts):
        size, own = ranks_and_options(layout)
        losses.append(ranks(size, train_from_in_double, tiny_config(**MUON | own), tmp_path, number, number + 1)[0])
    expected = ranks(1, train_in_double, tiny_config(**MUON), len(layouts))[0][0]
    torch.testing.assert_close(torch.cat(losses), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("amp_mode", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", slow_but(SPLIT[1:], SPLIT, "sharded weights"))
def test_mixed_precision_trains_as_on_one_device(ranks, tiny_config, layout, amp_mode):
    size, own = ranks_and_options(layout)
    options = MUON | {"amp_mode": amp_mode}
    losses, *_ = ranks(1, train, tiny_config(**options), 4)[0]
    for found, *_ in ranks(size, train, tiny_config(**options | own), 4):
        torch.testing.assert_close(found, losses, rtol=1e-3, atol=0)


@pytest.mark.parametrize("own", [{"data_parallel": "fsdp"}, {"tensor_parallel": 2}], ids=["fsdp", "tp"])
def test_a_step_that_overflows_is_skipped(ranks, tiny_config, own):
    config = tiny_config(**MUON, amp_mode="fp16", enable_fused=True, **own)
    for unchanged, scale in ranks(2, overflow_on_the_last_rank, config):
        assert unchanged and scale == 2**15


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["in bfloat16", "in float64"])
def test_one_device_has_the_numbers_of_torch(dtype, monkeypatch):
    wide = torch.float32 if dtype else torch.float64
    if dtype is None:  # torch's products are always in bfloat16, by the method or, from 2.15 on, by the type
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        monkeypatch.setattr(torch, "bfloat16", torch.float64)
    shapes = (5, 9), (9, 5), (7, 7)
    ours = [nn.Parameter(torch.randn(shape, dtype=wide)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    parts = {parameter: MatrixPart(parameter.shape, ()) for parameter in ours}
    group = {"params": ours, "muon": True, "weight_decay": 0.1}
    muon = Muon([group], 0.02, parts, 0.9, dtype, torch.device("cpu"), torch.optim.AdamW)
    reference = torch.optim.Muon(theirs, 0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        muon.step()
        reference.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0 if dtype else 1e-14)


def test_singular_values_become_nearly_one():
    matrix = orthogonalize(torch.randn(6, 40, dtype=torch.float64))
    values = torch.linalg.svdvals(matrix)
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_dearest_matrices_are_shared_out_first():
    assert share_out_work([(2, 2), (8, 8), (2, 2), (8, 4), (8, 4)], 2) == [1, 0, 1, 1, 1]
    assert share_out_work([(4, 4)] * 5, 3) == [0, 1, 2, 0, 1]
    assert share_out_work([], 2) == []


@pytest.mark.slow("bytes of pieces")
def test_pieces_travel_to_their_owners_and_back(ranks, tiny_config):
    """Two all-to-alls a step, in each of which two ranks send half of what they hold; none where a rank has it all."""
    config = MUON | {"embed_dim": 32, "depth": 2}
    held = 4 * config["depth"] * (4 + 2 * config["mlp_ratio"]) * config["embed_dim"] ** 2 / 2
    for layout in ("dp2,data_parallel=fsdp", "tp2"):
        size, own = ranks_and_options(layout)
        for calls, sent in ranks(size, collectives_of_a_step, tiny_config(**config | own)):
            assert calls["all_to_all"] == 2 and sent["all_to_all"] == held
    for strategy in ("ddp", "zero1"):
        calls, _ = ranks(2, collectives_of_a_step, tiny_config(**config, data_parallel=strategy))[0]
        assert "all_to_all" not in calls


REFUSED = {
    "muon_momentum belongs to optimizer Muon, not to Adam": {"muon_momentum": 0.9},
    "muon_weights belongs to optimizer Muon, not to Adam": {"muon_weights": ["*mlp*"]},
    "enable_cuda_graphs goes without optimizer Muon, whose learning rate": {
        "optimizer": "Muon", "enable_cuda_graphs": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=REFUSED)
def test_what_muon_does_not_go_with_is_refused(tiny_config, message, options):
    with refusal(message):
        tiny_config(**options)


def test_a_model_without_matrices_is_refused(tiny_config):
    for options in {"model": "unet", "model_args": {"levels": 1}}, {"muon_weights": ["*nowhere*"]}:
        with refusal("optimizer Muon trains matrices of hidden layers, and model"):
            build_model(tiny_config(optimizer="Muon", **options))


def test_an_optimizer_may_be_written_small(tiny_config):
    assert tiny_config(optimizer="muon").optimizer == "Muon" and tiny_config(optimizer="adamw").optimizer == "AdamW"
