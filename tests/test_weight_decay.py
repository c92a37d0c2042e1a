"""Weight decay: which weights decay, the numbers of one device in every layout, and what comes of older settings."""

import pytest
import torch

from tests.support.layout_parity import build, check_chain, check_training, ranks_and_options, train_from
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from training.step.optimizer import set_learning_rate

# So large that a weight with a decay that it should not have, or without, is far away after a step.
DECAYING = {
    "global_batch_size": 12, "depth": 2, "num_heads": 4, "optimizer": "AdamW", "num_iters": 50, "weight_decay": 20.0,
}  # fmt: skip
LAYOUTS = [
    "dp2,data_parallel=zero1", "dp3,data_parallel=fsdp", "dp2,data_parallel=zero2", "dp4,data_parallel=hsdp,dp_shard=2",
    "dp2", "tp2", "tp2,sequence_parallel=true", "cp2", "pp2", "domain2", "tp2xdp2,data_parallel=fsdp",
    "tp2,tp_backend=dtensor", "domain2xdp2,data_parallel=zero1",
]  # fmt: skip
QUICK = ["dp2,data_parallel=zero1", "dp3,data_parallel=fsdp", "tp2", "domain2"]


def decays(config):
    """{name of a weight: its decay} of the optimizer that a config leads to."""
    step = build(config)
    names = {parameter: name for name, parameter in step.parallel.model.named_parameters()}
    optimizer, found = step.optimizer, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[names[parameter]] = group["weight_decay"]
    return type(optimizer).__name__, found


def is_matrix(name):
    """Tell whether a weight of the ViT is a matrix or a kernel, and no embedding of positions."""
    return name.endswith(".weight") and "norm" not in name and "pos_embed" not in name


def test_matrices_and_kernels_decay_and_nothing_else_does(ranks, tiny_config):
    kind, found = ranks(1, decays, tiny_config(weight_decay=0.5))[0]
    assert kind == "AdamW"  # decoupled, also where the config says Adam
    assert found == {name: 0.5 if is_matrix(name) else 0.0 for name in found}
    _, found = ranks(1, decays, tiny_config(weight_decay=0.5, weight_decay_all=True))[0]
    assert set(found.values()) == {0.5}


def test_without_the_key_each_optimizer_decays_as_before(ranks, tiny_config):
    for name, decay in ("Adam", 0.0), ("AdamW", 0.01):
        _, found = ranks(1, decays, tiny_config(optimizer=name))[0]
        assert set(found.values()) == {decay}


def test_a_parts_size_decides_nothing(ranks, tiny_config):
    config = {"weight_decay": 0.5, "num_heads": 4, "mlp_ratio": 0.125}  # of four hidden features a rank of tp has one
    expected = ranks(1, decays, tiny_config(**config))[0][1]
    for layout in ("tp4", "domain4", "dp4,data_parallel=fsdp"):
        size, own = ranks_and_options(layout)
        for _, found in ranks(size, decays, tiny_config(**config, **own)):
            assert found == expected


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "weight decay in every layout"))
def test_weights_decay_in_every_layout_as_on_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, DECAYING, steps=4)


@pytest.mark.parametrize("layout", ["dp2,data_parallel=zero1", "tp2"])
def test_a_fused_optimizer_decays_alike(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, DECAYING | {"enable_fused": True}, steps=4)


def test_frozen_weights_do_not_decay_and_averages_follow(ranks, tiny_config):
    options = DECAYING | {"freeze": ["blocks.0.*"], "ema": 0.9}
    check_training(ranks, tiny_config, "dp2,data_parallel=zero1", options, steps=4)


def test_layouts_resume_each_other_with_weight_decay(ranks, tiny_config, tmp_path):
    layouts = ["serial", "dp2,data_parallel=zero1", "tp2"]
    check_chain(ranks, tiny_config, layouts, DECAYING, tmp_path)


def test_moments_from_before_the_key_are_read_into_its_groups(ranks, tiny_config, tmp_path):
    """And back: a checkpoint has moments by the names of weights, whatever the groups are."""
    before = {key: value for key, value in DECAYING.items() if key != "weight_decay"} | {"optimizer": "Adam"}
    size, own = ranks_and_options("dp2,data_parallel=zero1")
    for number, options in enumerate([before, DECAYING, before]):
        config = tiny_config(**options | own)
        losses = ranks(size, train_from, config, tmp_path, number, number + 1)[0]
        assert torch.isfinite(losses).all()


def steps_beside_torch(config):
    """The largest difference from torch's AdamW, with groups made by hand, after three steps."""
    step = build(config)
    model = step.parallel.model
    names = dict(model.named_parameters())
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in names.items()}
    groups = [
        {"params": [copy for name, copy in copies.items() if is_matrix(name)], "weight_decay": config.weight_decay},
        {"params": [copy for name, copy in copies.items() if not is_matrix(name)], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas))

    def update_copies(optimizer, *_):
        set_learning_rate(other, optimizer.param_groups[0]["lr"])
        for name, copy in copies.items():
            copy.grad = names[name].grad.clone()
        other.step()

    step.optimizer.register_step_pre_hook(update_copies)
    batch = torch.randn(2, config.global_batch_size, 20, *config.img_size)
    for i in range(3):
        step(i, *batch)
    return max((copies[name] - parameter).abs().max().item() for name, parameter in names.items())


def test_the_numbers_are_those_of_torch_with_groups_made_by_hand(ranks, tiny_config):
    assert ranks(1, steps_beside_torch, tiny_config(**DECAYING))[0] < 1e-7


def test_weight_decay_all_needs_a_decay(tiny_config):
    with refusal("weight_decay_all belongs to weight_decay, the part of a weight that a step takes away: give both"):
        tiny_config(weight_decay_all=True)
