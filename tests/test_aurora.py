"""Microsoft's Aurora, shrunken, with random weights: every layout of rungs 1, 2 and 4 trains it as one device does."""

import importlib.util
from functools import cache

import numpy as np
import pytest
import torch

from distributed.shard_tensor import local
from tests.support.layout_parity import CPU, build, ranks_and_options, train, train_from
from tests.support.marks import slow_but, slow_rows_but
from tests.test_fine_tuning import assert_equal, taken_by
from tests.test_library_models import library
from tools.planner.trace import observe_step, trace_step
from tools.planner.validate import differ
from training.assembly import random_batch
from training.models.build import build_model
from utils.config import check_config, read_named_config
from weather.years.forcings import time_fractions

pytestmark = pytest.mark.skipif(importlib.util.find_spec("aurora") is None, reason="microsoft-aurora is not installed")
LAYOUTS = ["domain2", "domain3", "domain2x2", "dp2,data_parallel=fsdp", "domain2xdp2,data_parallel=fsdp"]
LORA = {"freeze": ["*", "!*lora*", "!aurora.decoder.*"]}
STEPS = 8


@pytest.fixture(scope="module")
def aurora_config():
    library("timm")  # Aurora imports it

    def make(**changes):
        settings = read_named_config("config/aurora.yaml", "aurora_quick") | {"device": "cpu", "global_batch_size": 4}
        return check_config(settings | changes, "aurora_quick", "test")

    return make


def with_library(function, *args):
    """On a rank: a function that builds Aurora."""
    library("timm")
    return function(*args)


@pytest.fixture(scope="module")
def serial(aurora_config):
    """Call for the losses of one device: of all weights, or with LoRA and a trained decoder alone. Computed once."""
    options = {"all": {}, "lora": LORA}
    return cache(lambda trained: train(aurora_config(**options[trained]), STEPS)[0])


@pytest.mark.parametrize("trained", slow_but(["all"], ["all", "lora"], "losses of LoRA and a decoder alone"))
@pytest.mark.parametrize("layout", slow_but(LAYOUTS[:1], LAYOUTS, "other kinds of parts of Aurora", nightly=True))
def test_losses_of_eight_steps_are_those_of_one_device(ranks, aurora_config, serial, layout, trained):
    size, options = ranks_and_options(layout)
    config = aurora_config(**options, **(LORA if trained == "lora" else {}))
    for losses, *_ in ranks(size, with_library, train, config, STEPS):
        torch.testing.assert_close(losses, serial(trained), rtol=1e-5, atol=0)


@pytest.mark.nightly
@pytest.mark.slow("a chain of layouts")
def test_it_stops_on_tiles_and_goes_on_on_one_device(ranks, aurora_config, serial, tmp_path):
    losses = []
    for part, layout in enumerate(("domain2x2", "serial", "dp2,data_parallel=fsdp", "domain3")):
        size, options = ranks_and_options(layout)
        steps = tmp_path, 2 * part, 2 * part + 2
        losses.append(ranks(size, with_library, train_from, aurora_config(**options), *steps)[0])
    torch.testing.assert_close(torch.cat(losses), serial("all"), rtol=1e-5, atol=0)


def trace_of(config):
    step = build(config)
    x, y = random_batch(step.task, CPU)
    step(0, x, y)
    return observe_step(step, x, y)


@pytest.fixture(scope="module")
def alone(aurora_config):
    """The trace of one device that trains all weights."""
    config = aurora_config()
    (trace,) = trace_step(config, config.layout(1), "cpu")
    return trace


SHARES = slow_rows_but([0], [("domain2", 0.56), ("domain2x2", 0.34)], "a tile of Aurora, on four ranks")


@pytest.mark.parametrize(("layout", "most"), SHARES)
def test_a_rank_keeps_its_share_of_the_activations_as_planned(ranks, aurora_config, alone, layout, most):
    size, options = ranks_and_options(layout)
    config = aurora_config(**options)
    (planned,) = trace_step(config, config.layout(size), "cpu")
    assert planned.held["activations"] < most * alone.held["activations"]
    assert differ(ranks(size, with_library, trace_of, config)[:1], [planned]) == "equal"


def test_lora_alone_has_gradients_and_optimizer_state(aurora_config, alone):
    config = aurora_config(**LORA)
    trained = {name for name, p in build_model(config).named_parameters() if p.requires_grad}
    assert trained and all("lora" in name or ".decoder." in name for name in trained)
    (trace,) = trace_step(config, config.layout(1), "cpu")
    size = sum(p.numel() for p in build_model(config).parameters() if p.requires_grad)
    assert trace.held["gradients"] == 4 * size and alone.held["gradients"] > 4 * size
    assert 8 * size <= trace.held["optimizer"] <= 8 * size + 8 * len(trained)  # two moments, and a count of steps


@pytest.mark.slow("Aurora on three ranks")
def test_three_ranks_take_the_weights_that_one_process_saved(ranks, aurora_config, tmp_path):
    weights = build_model(aurora_config(seed=5), "cpu").state_dict()
    torch.save({"state_dict": {f"net.{name}": value for name, value in weights.items()}}, tmp_path / "aurora.ckpt")
    (tmp_path / "map.yaml").write_text("'^net\\.': ''")
    told = {"init_from": str(tmp_path / "aurora.ckpt"), "init_map": str(tmp_path / "map.yaml")}
    for found in ranks(3, with_library, taken_by, aurora_config(domain_parallel=3, **told)):
        assert_equal({name: local(value) for name, value in found.items()}, weights)


def test_a_sample_has_the_day_and_hour_of_its_forcing(aurora_config):
    from docs.examples.aurora import Forecaster, date_of

    dates = np.array([["2017-02-05T18"], ["1999-12-31T06"]], "datetime64[s]")
    angles = torch.from_numpy(2 * np.pi * time_fractions(dates)[:, 0, 1])
    times = torch.stack([angles.cos(), angles.sin()], 1)  # (2, 2)
    assert [str(date_of(time))[5:16] for time in times] == ["02-05 18:00", "12-30 06:00"]  # 2020 is a leap year
    model = build_model(aurora_config(), "cpu")
    assert isinstance(model, Forecaster)
    x = torch.randn(1, 43, 32, 64)
    first, second = (model(torch.cat([x[:, :41], time[None, :, None, None].expand(1, 2, 32, 64)], 1)) for time in times)
    assert not torch.equal(first, second)
