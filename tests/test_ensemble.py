"""Members of an ensemble: the same in every layout, whoever computes them, and trained as on one device."""

from contextlib import contextmanager

import pytest
import torch

from tests.support.layout_parity import (
    build,
    check_chain,
    check_in_double,
    compare_in_double,
    ranks_and_options,
    record_in_double,
    train,
    train_serially,
)
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from training.assembly import random_batch
from training.forecasting import crps
from training.forecasting.ensemble import FORECAST, draw_noise, own_members
from training.models.build import build_model
from training.tasks import build_task
from utils import comm
from utils.config import SPLITS, load_config
from utils.layout import Layout

ENSEMBLE = {"loss": "crps", "ensemble_size": 4, "noise_features": 5}
ROLLOUT = {"rollout_steps": 2, "gradient_accumulation": 2, "forcings": ["hour"], "predict": "state"}
WORDS = ["--loss=crps", "--ensemble_size=4"]
UNET = {"model": "unet", "model_args": {"width": 4, "levels": 1}, "sync_batchnorm": True}


LAYOUTS = ["ens2", "ens3", "ens2,data_parallel=fsdp", "ens2,data_parallel=zero1"]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[1:3], LAYOUTS, "members on two ranks, and with zero1"))
def test_members_over_ranks_train_as_on_one_device(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, ENSEMBLE)


@pytest.mark.parametrize("layout", ["ens2", "ens3,activation_checkpointing=step"])
def test_a_rollout_in_micro_batches_trains_as_on_one_device(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, ENSEMBLE | ROLLOUT | {"pressure_weights": True})


@pytest.mark.slow("noise in other models")
@pytest.mark.parametrize(("layout", "options"), [("ens3", UNET), ("ens2", {"model": "afno"})], ids=["unet", "afno"])
def test_other_models_take_noise(ranks, tiny_config, layout, options):
    """Statistics of BatchNorm are those of all members, however many a rank has."""
    check_in_double(ranks, tiny_config, layout, ENSEMBLE | options)


@pytest.mark.slow("four ranks")
@pytest.mark.parametrize(
    "layout",
    [
        "ens2xdomain2",
        "ens2xdomain1x2",
        "ens2xtp2",
        "ens2xtp2,sequence_parallel",
        "ens2xcp2",
        "ens2xdp2,parallel_order=dp-ens",
        "ens2xdp2,data_parallel=hsdp,dp_shard=1",
        "ens2xdomain2,data_parallel=fsdp",
    ],
)
def test_members_beside_another_split_train_as_on_one_device(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, ENSEMBLE)


@pytest.mark.slow("four ranks")
def test_a_unet_of_tiles_takes_the_same_noise(ranks, tiny_config):
    check_in_double(ranks, tiny_config, "ens2xdomain1x2", ENSEMBLE | UNET)


@pytest.mark.parametrize("missing", ["all_to_all", "sum_over_ranks"])
def test_without_its_collectives_an_ensemble_is_another_training(ranks, tiny_config, tmp_path, missing):
    record_in_double(tiny_config(**ENSEMBLE), tmp_path / "one.pt")
    size, own = ranks_and_options("ens2")
    config = tiny_config(**ENSEMBLE, **own)
    result = ranks(size, compare_in_double, config, tmp_path / "one.pt", without[missing])[0]
    assert not result.equal and result.stage in ("loss", "gradient")


@contextmanager
def no_exchange():
    """Each rank takes its own points for those of the others."""

    def stays_here(x, sent, received, group):
        return x.repeat(2)[: sum(received)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crps, "all_to_all", stays_here)
        yield


@contextmanager
def no_sum():
    """Each rank takes the loss of its own points for the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.tasks.forecast.sum_over_ranks", lambda x, group: x)
        yield


without = {"all_to_all": no_exchange, "sum_over_ranks": no_sum}


def test_a_stopped_ensemble_goes_on_in_any_layout(ranks, tiny_config, tmp_path):
    check_chain(ranks, tiny_config, ["ens2", "serial", "ens3"], ENSEMBLE, tmp_path)


def test_half_precision_and_averaged_weights(ranks, tiny_config):
    options = ENSEMBLE | {"amp_mode": "bf16", "ema": 0.9}
    size, own = ranks_and_options("ens2")
    serial, _ = train_serially(tiny_config, options, 4)
    for losses, *_ in ranks(size, train, tiny_config(**options, **own), steps=4):
        torch.testing.assert_close(losses, serial, rtol=2e-3, atol=0)


def test_noise_is_named_by_sample_and_member(tiny_config):
    config = tiny_config(**ENSEMBLE, seed=3)
    moments = [(FORECAST, 7), (FORECAST, 8)]
    whole = draw_noise(config, moments, range(5), 2)
    assert whole.shape == (2, 5, 2, 5) and whole.unique().numel() == whole.numel()
    assert torch.equal(draw_noise(config, moments[1:], range(2, 4), 1), whole[1:, 2:4, :1])
    assert not torch.equal(draw_noise(tiny_config(**ENSEMBLE, seed=4), moments, range(5), 2), whole)
    assert abs(draw_noise(config, moments, range(500), 2).std().item() - 1) < 0.02


@pytest.mark.parametrize("correlation", [0, 0.5, 1])
def test_noise_is_as_alike_from_step_to_step_as_the_key_says(tiny_config, correlation):
    config = tiny_config(**ENSEMBLE, noise_correlation=correlation)
    moments = [(FORECAST, 7), (FORECAST, 8)]
    noise = draw_noise(config, moments, range(500), 3)
    first, second, third = noise.unbind(2)  # (2, 500, 5)
    assert abs((first * second).mean().item() - correlation) < 0.05
    assert abs((first * third).mean().item() - correlation**2) < 0.05
    assert abs(third.std().item() - 1) < 0.03
    # A forecast that is longer begins as a shorter one.
    assert torch.equal(draw_noise(config, moments, range(2), 2), noise[:, :2, :2])


def test_noise_is_copied_from_pinned_memory_so_that_the_host_goes_on(tiny_config, monkeypatch):
    """A device with streams, for which pinned memory is asked."""
    step = build(tiny_config(**ENSEMBLE))
    x, y = random_batch(step.task, torch.device("cpu"))
    pinned = []
    monkeypatch.setattr("utils.device.device_module", lambda device, name: name == "Stream")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda noise: pinned.append(noise) or noise)
    (noise,) = step.noise(0, x, y)
    assert noise.shape == (len(x), 4, 1, 5) and len(pinned) == 1 and torch.equal(pinned[0], noise)


def test_members_are_shared_out_unevenly(ranks, tiny_config):
    config = tiny_config(**ENSEMBLE, ensemble_parallel=3)
    assert ranks(3, members_here, config) == [[0, 1], [2], [3]]


def members_here(config):
    comm.build_mesh(torch.device("cpu"), config.layout(comm.world_size()))
    return list(own_members(config))


def test_a_layout_places_members_anywhere():
    layout = Layout(8, tp=2, ens=2, order="tp-ens-dp")
    assert layout.groups("ens").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Layout(8, tp=2, ens=2, order="ens-tp-dp").groups("ens").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.dp == 2 and "ens          4 x 2  inside a node" in layout.table(4)


@pytest.mark.parametrize(
    ("ranks", "words", "line"),
    [
        (1, ["--loss=crps"], "loss crps scores the members of an ensemble: give an ensemble_size of 2 or more"),
        (2, ["--ensemble_parallel=2"], "ensemble_parallel 2 shares out the members of a sample: give ensemble_size"),
        (1, ["--ensemble_size=4"], "ensemble_size 4: members are trained by loss crps, not relative_l2"),
        (1, ["--crps_alpha=1"], "crps_alpha belongs to an ensemble"),
        (1, ["--noise_correlation=1"], "noise_correlation belongs to an ensemble"),
        (5, [*WORDS, "--ensemble_parallel=5", "--global_batch_size=5"], "5: more ranks than the 4 members of"),
        (2, [*WORDS, "--pipeline_parallel=2", "--gradient_accumulation=2"], "ensemble_size goes without pipeline"),
        (4, [*WORDS, "--ensemble_parallel=3"], "4 ranks cannot be split as ens 3 x dp: 4 is not a multiple of 3"),
        (1, [*WORDS, "--model=neighborhood", "--model_args", "{kernel_size: 3}"], "takes no noise, so the 4 members"),
        (1, [*WORDS, "--task=classify", "--model=classifier", "--num_classes=3"], "belongs to task forecast"),
    ],
)  # fmt: skip
def test_ensembles_that_cannot_be_are_refused_in_one_line(ranks, words, line):
    with refusal(line):
        config = load_config(["--config=quick", *words], world_size=ranks, splits=SPLITS)
        build_task(config)


def test_a_model_alone_has_no_weights_for_noise(tiny_config):
    plain = {name for name, _ in build_model(tiny_config()).named_parameters()}
    with_noise = {name for name, _ in build_model(tiny_config(**ENSEMBLE)).named_parameters()}
    assert {name.partition(".")[0] for name in with_noise - plain} == {"noise_embed"} and plain < with_noise


@pytest.mark.parametrize("layout", ["ens2", "ens3"])
def test_validation_scores_all_members_whoever_has_them(ranks, tiny_config, layout):
    options = ENSEMBLE | {"rollout_steps": 2, "limit_nsamples_val": 6}
    size, own = ranks_and_options(layout)
    expected = validated(tiny_config(**options))
    assert set(expected) >= {"val_loss", "rmse", "acc", "crps", "spread", "spread_skill", "climatology_rmse"}
    for scores in ranks(size, validated, tiny_config(**options, **own)):
        for name, score in expected.items():
            assert scores[name] == pytest.approx(score, rel=1e-5), name
    for channel, crps_of_channel in expected["crps"].items():
        assert 0 < crps_of_channel < expected["rmse"][channel]


def validated(config):
    step = build(config)
    loader = step.task.build_loaders(torch.device("cpu"))[1]
    return step.task.build_validator(loader).run(step.parallel)
