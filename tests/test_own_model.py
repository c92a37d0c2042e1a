"""A model of one's own, which knows nothing of this repository, trains as its author meant on rungs 1, 2 and 4."""

import pytest
import torch

import train_mp
from networks import MODELS
from tests.support import own_models
from tests.support.layout_parity import build, check_in_double, ranks_and_options, train_in_double, train_steps
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tools.planner.trace import trace_step
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import collect_state, restore_state
from training.models.build import build_model, initial_weights
from training.tasks import build_task

WHOLE = ["BatchNormNet", "Reinitialized", "Replaced", "Scaled", "ReadsNumbers", "HoldsATensor"]


def own(name):
    return f"tests.support.own_models:{name}"


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_is_not_ours_begins_as_its_author_meant(tiny_config, name):
    config = tiny_config(model=own(name), seed=5)
    weights = dict(initial_weights(config))
    torch.manual_seed(5)
    meant = getattr(own_models, name)(20, 20)
    for key, value in [*meant.named_parameters(), *meant.named_buffers()]:
        torch.testing.assert_close(weights.pop(key), value, rtol=0, atol=0)
    assert not weights
    x = torch.randn(2, 20, 8, 8)
    torch.testing.assert_close(build_model(config, "cpu")(x), meant(x))


def test_our_models_draw_their_weights_from_the_seed_and_the_names_of_their_modules(tiny_config):
    weights = dict(initial_weights(tiny_config(model="unet")))
    torch.manual_seed(99)  # the program's own random numbers do not matter
    again, other = (dict(initial_weights(tiny_config(model="unet", seed=seed))) for seed in (0, 1))
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    drawn = [name for name, value in weights.items() if value.ndim == 4 and value.std() > 0]
    assert len(drawn) > 1 and not any(torch.equal(weights[name], other[name]) for name in drawn)
    first, last = (weights[name].flatten()[:6] for name in (drawn[0], drawn[-1]))
    assert not torch.allclose(first / first.norm(), last / last.norm())


LAYOUTS = ["dp2", "dp2,data_parallel=fsdp", "domain2x2", "domain3"]
TRAINED = ["BatchNormNet", "Scaled", "HoldsATensor"]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[::3], LAYOUTS, "sharded weights, and tiles"))
@pytest.mark.parametrize("name", slow_but(TRAINED[:1], TRAINED, "other models of one's own"))
def test_it_trains_as_on_one_device(ranks, tiny_config, name, layout):
    options = {"model": own(name), "img_size": [11, 14], "patch_size": 1, "sync_batchnorm": True}
    check_in_double(ranks, tiny_config, layout, options)


COPIED = ["domain2xdp2", "dp2", "dp2,data_parallel=zero1"]


@pytest.mark.parametrize("layout", slow_but(COPIED[:1], COPIED, "whole images"))
def test_a_micro_batch_normalizes_over_the_samples_of_one_device(ranks, tiny_config, layout):
    options = {
        "model": own("BatchNormNet"), "img_size": [11, 14], "patch_size": 1, "sync_batchnorm": True,
        "global_batch_size": 8, "gradient_accumulation": 2,
    }  # fmt: skip
    check_in_double(ranks, tiny_config, layout, options)


@pytest.mark.parametrize("layout", slow_but(["domain3"], ["domain2x2", "domain3"], "tiles"))
@pytest.mark.parametrize("name", ["Coarse", "Whole"])
def test_an_output_is_cut_as_the_target_is_whatever_the_model_makes_of_the_cuts(ranks, tiny_config, name, layout):
    options = {"model": own(name), "img_size": [20, 24], "patch_size": 1, "sync_batchnorm": True}
    check_in_double(ranks, tiny_config, layout, options)


@pytest.mark.parametrize("layout", slow_but(["domain3"], ["dp2", "domain2x2", "domain3"], "whole images, and tiles"))
def test_complex_weights_train_as_on_one_device(ranks, tiny_config, layout):
    options = {"model": own("Spectral"), "img_size": [11, 14], "patch_size": 1, "clip_grad_norm": 0.1}
    check_in_double(ranks, tiny_config, layout, options)


SPHERICAL = {"model": own("Spherical"), "img_size": [22, 44], "patch_size": 1}


@pytest.mark.parametrize("layout", slow_but(["domain3"], ["domain2x2", "domain3"], "tiles"))
def test_spherical_harmonics_train_as_on_one_device(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, SPHERICAL)


def test_spherical_harmonics_stay_split(tiny_config):
    """The sums over split rows are scattered at once: a rank sends half of them, and keeps its share of activations."""
    config, one = tiny_config(**SPHERICAL, domain_parallel=2), tiny_config(**SPHERICAL)
    (split,), (whole,) = (trace_step(c, c.layout(n), "cpu") for c, n in ((config, 2), (one, 1)))
    assert split.held["activations"] < 0.6 * whole.held["activations"]
    part = 4 * config.global_batch_size * 16 * 22 * 22  # bytes of the real or the imaginary part of all harmonics
    sums = {(m.phase, m.sent): n for m, n in split.messages.items() if m.kind in ("reduce_scatter", "all_gather")}
    assert sums == {("forward", part // 2): 4, ("backward", part // 2): 4}


IMAGES = [[33, 64], [64, 128], [128, 256]]


@pytest.mark.parametrize("scale", slow_but([1], [1, 2], "more channels"))
@pytest.mark.parametrize("img_size", slow_but(IMAGES[:1], IMAGES, "larger tables still"))
def test_spherical_harmonics_stay_split_beside_larger_tables(tiny_config, img_size, scale):
    """The table of polynomials is larger than a rank's part of the image, and tells nothing of the result."""
    options = SPHERICAL | {"img_size": img_size, "model_args": {"scale": scale}}
    config, one = tiny_config(**options, domain_parallel=2), tiny_config(**options)
    (split,), (whole,) = (trace_step(c, c.layout(n), "cpu") for c, n in ((config, 2), (one, 1)))
    assert split.held["activations"] < 0.6 * whole.held["activations"]


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_complex_weights_are_not_sharded(ranks, tiny_config, strategy):
    config = tiny_config(model=own("Spectral"), data_parallel=strategy)
    with pytest.raises(
        AssertionError, match=f"LayoutError: {strategy} cannot share out the complex weight 'waves': use ddp"
    ):
        ranks(2, build, config)


@pytest.mark.parametrize("layout", slow_but(["domain3"], ["dp2", "domain3"], "whole images"))
def test_two_layers_with_one_weight_keep_it(ranks, tiny_config, layout):
    options, (size, split) = {"model": own("Tied"), "img_size": [11, 14], "patch_size": 1}, ranks_and_options(layout)
    check_in_double(ranks, tiny_config, layout, options)
    for _, state in ranks(size, train_in_double, tiny_config(**options, **split), steps=1):
        assert "first.weight" in state and "second.weight" not in state  # which is the same


PROTOCOL = ["tp2", "cp3", "pp2", "domain2xtp2"]


@pytest.mark.parametrize("layout", slow_but(PROTOCOL[2:], PROTOCOL, "tensor and context parallelism of rung 3"))
def test_a_model_with_the_names_of_the_protocol_is_split_by_rungs_3_and_4(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, {"model": own("OwnTransformer"), "img_size": [20, 24]})


def train_and_stop(config, folder, stops):
    """Train to each of the stops, resume from the checkpoint at each; the scores of a validation at the end."""
    for start, stop in zip([0, *stops], stops, strict=False):
        step = build(config)
        checkpoints = CheckpointFolder(folder, keep=9)
        tensors = collect_state(step.parallel.model, step.optimizer)
        if start:
            checkpoints.load_newest(tensors)
            restore_state(tensors | {"random": {}}, step.parallel.model, step.optimizer)
            step.warm_up_ddp_buckets(*torch.randn(2, 2, 20, *config.img_size))
        train_steps(step, config, start, stop)
        step.parallel.share_buffers()
        checkpoints.save(stop, collect_state(step.parallel.model, step.optimizer), {}, wait=True)
    _, valid = build_task(config).loaders(torch.device("cpu"))
    scores = build_task(config).build_validator(valid).run(step.parallel)
    valid.close()
    return scores["val_loss"], {name: b.clone() for name, b in step.parallel.model.named_buffers()}


@pytest.mark.parametrize("strategy", slow_but(["ddp"], ["ddp", "fsdp"], "sharded weights"))
def test_running_statistics_resume_bit_for_bit_and_are_those_of_the_first_rank(ranks, tiny_config, tmp_path, strategy):
    config = tiny_config(model=own("BatchNormNet"), data_parallel=strategy)
    whole = ranks(2, train_and_stop, config, tmp_path / "whole", [6])
    parts = ranks(2, train_and_stop, config, tmp_path / "parts", [2, 6])
    assert whole[0][0] == parts[0][0] == whole[1][0]
    for _, buffers in [*whole, *parts]:
        for name, value in whole[0][1].items():
            assert torch.equal(buffers[name], value), name
    assert whole[0][1]["1.num_batches_tracked"] == 6


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (own("not_a_model"), "makes a int, not an nn.Module"),
        (own("Halves"), r"needs a model whose output is \[1, 20, 16, 32\] .*; that of model .* is \[1, 20, 16, 16\]"),
        (own("Fails"), r"fails on an input of \[1, 20, 16, 32\]: KeyError: 'no such channel' \(.*own_models.py, line"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(tiny_options, model, line):
    with refusal(line):
        train_mp.main(["--yaml_config=config/ViT.yaml", *tiny_options(model=model)])


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"classifier"}))
def test_models_that_ship_are_drawn_by_their_modules(tiny_config, monkeypatch, model):
    options = {"model_args": {"kernel_size": 3}} if model == "neighborhood" else {}
    monkeypatch.setattr("training.models.build.build_whole", None)
    weights = dict(initial_weights(tiny_config(model=model, **options)))
    assert all(value.isfinite().all() for value in weights.values())
