"""Training over several steps: the numbers of every layout are those of one device, and those of plain formulas."""

import pytest
import torch

from tests.support.layout_parity import build, check_training, collectives_of_a_step, own_part, ranks_and_options
from tests.support.marks import slow_but
from training.forecasting.rollout import Rollout
from training.step.averaged_weights import AveragedWeights
from training.tasks import build_task

STEPS = {
    "global_batch_size": 8, "depth": 2, "num_heads": 4, "optimizer": "AdamW", "num_iters": 50, "rollout_steps": 3,
    "forcings": ["hour", "latitude", "day"], "predict": "change", "input_frames": 2,
}  # fmt: skip
QUICK = [
    "dp2", "dp2,data_parallel=fsdp,activation_checkpointing=step", "tp2,sequence_parallel", "domain3",
]  # fmt: skip
LAYOUTS = [
    *QUICK, "cp3", "dp2,data_parallel=zero2", "dp2,gradient_accumulation=2", "dp2,data_parallel=zero1",
    "dp2,data_parallel=fsdp",
    "dp4,data_parallel=hsdp,dp_shard=2", "tp2", "cp2,cp_method=ring", "tp2xcp2", "domain2x2",
    "domain2xdp2,data_parallel=fsdp", "domain2,activation_checkpointing=step",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other combinations of the same"))
def test_ten_steps_over_three_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, STEPS)


@pytest.mark.parametrize("layout", slow_but(["cp3"], ["cp3", "domain3", "dp2"], "other kinds of parts"))
def test_weighted_squared_error_equals_that_of_one_device(ranks, tiny_config, layout):
    weighted = {"loss": "squared_error", "pressure_weights": True, "channel_weights": {"u10": 0.1}}
    check_training(ranks, tiny_config, layout, STEPS | weighted, steps=4)


COUNTED = ["dp2", "dp2,data_parallel=zero2", "dp2,data_parallel=fsdp", "tp2", "cp2,cp_method=ring"]


@pytest.mark.parametrize("layout", slow_but(COUNTED[2:4], COUNTED, "messages of other layouts"))
def test_messages_of_the_model_come_once_a_step_and_those_of_the_loss_once(ranks, tiny_config, layout):
    size, own = ranks_and_options(layout)
    configs = [tiny_config(**STEPS | own | {"rollout_steps": steps}) for steps in (1, 3)]
    one, three = (ranks(size, collectives_of_a_step, config)[0][0] for config in configs)
    units = STEPS["depth"] + 1
    if layout == "dp2":
        assert one == three == {"all_reduce": 1}
    elif "dp2" in layout:  # gradients of all steps are added up before they are reduced
        gathers = units * (1 if "zero2" in layout else 2)
        assert one == {"all_gather": gathers, "reduce_scatter": units}
        assert three == {"all_gather": 3 * gathers, "reduce_scatter": units}
    elif "cp2" in layout:  # norms of the loss, and gradients: once
        assert three["all_reduce"] == one["all_reduce"] == 2
        assert three["all_to_all"] == 3 * one["all_to_all"]
    else:
        assert three == {kind: 3 * calls for kind, calls in one.items()}


def test_a_step_takes_the_state_of_the_one_before_and_the_forcings_of_its_date(tiny_config):
    config = tiny_config(**STEPS)
    rollout = Rollout(config, change_scale=torch.full((20, 1, 1), 0.1))
    x, taken = torch.randn(2, 2 * 20 + 1 + 3 * 4, 4, 8), []

    def network(inputs):
        taken.append(inputs)
        return inputs[:, :20] * inputs[:, 40:41] + inputs[:, 41:42]

    forecast = rollout.forecast(network, x, 3)
    state, earlier = x[:, :20], x[:, 20:40]
    for step in range(3):
        timed = x[:, 41 + 4 * step : 45 + 4 * step]
        torch.testing.assert_close(taken[step], torch.cat([state, earlier, x[:, 40:41], timed], 1))
        state, earlier = state + 0.1 * (state * x[:, 40:41] + timed[:, :1]), state
        torch.testing.assert_close(forecast[:, 20 * step : 20 * (step + 1)], state)


def averaged(config):
    """The averaged weights after four steps, whole, and what the average of the weights of each step should be."""
    step = build(config)
    x, y = (own_part(part, config) for part in build_task(config).random_batch(torch.Generator().manual_seed(1)))
    whole = {name: p.detach().clone() for name, p in full(step.parallel.model).items()}
    for i in range(4):
        step(i, x, y)
        for name, p in full(step.parallel.model).items():
            whole[name].lerp_(p, 1 - min(config.ema, (1 + i) / (10 + i)))
    with step.best_weights():
        used = {name: p.clone() for name, p in full(step.parallel.model).items()}
    after = full(step.parallel.model)
    with step.best_weights():
        pass
    assert all(torch.equal(after[name], p) for name, p in full(step.parallel.model).items())
    return used, whole


def full(model):
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_the_average_of_the_weights_is_exact_under_every_strategy(ranks, tiny_config, strategy):
    for used, whole in ranks(2, averaged, tiny_config(**STEPS, data_parallel=strategy, ema=0.3)):
        for name, value in whole.items():
            torch.testing.assert_close(used[name], value, rtol=1e-6, atol=1e-7)


def validated_between_steps(config, average):
    """The losses of four steps, with a forward pass of other weights between them."""
    step = build(config)
    other = AveragedWeights(step.parallel.model, 0.5)
    x, y = (own_part(part, config) for part in build_task(config).random_batch(torch.Generator().manual_seed(1)))
    losses = []
    for i in range(4):
        losses.append(step(i, x, y).loss)
        if average:
            with torch.no_grad(), other.in_use():
                step.parallel.predict(x[:, : config.model_in_channels], 20)
    return torch.stack(losses)


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], ["zero2", "fsdp"], "weights that stay whole"))
def test_a_validation_with_averaged_weights_leaves_training_as_it_was(ranks, tiny_config, strategy):
    config = tiny_config(**STEPS, data_parallel=strategy)
    assert torch.equal(*(ranks(2, validated_between_steps, config, average)[0] for average in (False, True)))
