"""One look at a forward pass tells how a model uses its parts; layouts follow it and give one device's numbers."""

import random

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import train
from distributed.checks.usage import watch
from tests.support import usage_models
from tests.support.layout_parity import build, check_chain, check_in_double, check_training, train_steps
from tests.support.marks import slow_but, slow_rows_but
from tests.support.refusals import refusal
from tools.planner.trace import trace_step
from training.models.build import build_model, initial_weights
from training.tasks import build_task


def model(name):
    return f"tests.support.usage_models:{name}"


def look(name):
    with torch.device("meta"):
        built = getattr(usage_models, name)(20, 20)
    return watch(built, torch.empty(1, 20, 16, 32, device="meta"))[1]


def test_containers_that_are_walked_over_are_not_called():
    calls = look("WalkedOver").calls
    assert {"body", "body.pairs", "body.pairs.0"}.isdisjoint(calls)
    assert calls["body.pairs.0.1"] == calls["body.last"] == 1


def test_a_weight_lies_where_all_of_its_uses_are():
    tied, aside = look("TiedAcross").inside, look("Aside").inside
    assert tied["down.weight"] == {""} and tied["inside.0.weight"] == {"", "inside"}
    assert tied["stem.weight"] == {"", "stem"}
    assert aside["mixer.scale"] == aside["table.weight"] == {""}
    assert aside["table.bias"] == {"", "table"} and aside["mixer.layer.weight"] == {"", "mixer.layer"}


def test_weights_that_no_output_depends_on_are_known():
    usage = look("Unused")
    assert usage.reached == {"stem.weight", "stem.bias", "head.weight", "head.bias"}
    assert "aside" in usage.calls and "never" not in usage.calls


def test_a_part_that_the_model_compiles_as_one_graph_is_looked_at_and_planned(tiny_config):
    """The compiler runs under no mode of a look or a trace, and takes that for an error of the model."""
    usage = look("CompiledWhole")
    compiled = {name for name in usage.calls if name.startswith("gate._orig_mod.")}
    assert len(compiled) == 3 and "gate._orig_mod.0.weight" in usage.reached
    config = tiny_config(model=model("CompiledWhole"), model_args={})
    (trace,) = trace_step(config, config.layout(1), "cpu")
    products = {(operation.phase, operation.kind) for operation in trace.operations}
    assert ("backward", "matmul") in products


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("JoinsLater", "its attribute passes changes"),
        ("Drops", "it reads the value of a tensor"),
        ("DropsByPython", "it draws random numbers of Python"),
        ("Unused", ""),
        ("Lazy", ""),
    ],
)
def test_a_pass_that_may_differ_from_the_next_says_why(tiny_config, name, why):
    varies = build_task(tiny_config(model=model(name))).usage.varies
    assert varies.startswith(why) and bool(varies) == bool(why)


def test_a_look_leaves_random_numbers_as_they_were(tiny_config):
    random.seed(3)
    torch.manual_seed(3)
    wanted = random.random(), torch.rand(())
    random.seed(3)
    torch.manual_seed(3)
    looks = [look("DropsByPython").calls, look("Drops").calls]
    assert (random.random(), torch.rand(())) == wanted
    assert [look("DropsByPython").calls, look("Drops").calls] == looks
    assert "layers.3" in looks[0]  # evaluation skips none


SIZES = {"img_size": [11, 14], "patch_size": 1, "clip_grad_norm": 0.1, "optimizer": "AdamW"}
SHARDED = [
    "WalkedOver", "TiedAcross", "Listed", "Aside", "Scalar", "Strided", "Unused", "WritesInput", "WrittenView",
    "ReturnsObject", "Recomputed", "RecomputedNew", "JoinsLater",
]  # fmt: skip


QUICK = ["TiedAcross", "Scalar", "JoinsLater"]


@pytest.mark.parametrize("name", slow_but(QUICK, SHARDED, "other ways to use parts of a model"))
def test_units_of_fully_shard_give_the_numbers_of_one_device(ranks, tiny_config, name):
    options = SIZES | {"model": model(name), "gradient_accumulation": 2}
    check_in_double(ranks, tiny_config, "dp2,data_parallel=fsdp", options)


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_rows_but(
        [0, 1, 2],
        [
            ("Scalar", "domain2,data_parallel=fsdp"),
            ("TiedAcross", "dp2,data_parallel=fsdp,wrap_policy=size,wrap_min_params=20"),
            ("Turns", "dp2"),
            ("Turns", "dp2,data_parallel=fsdp"),
            ("Scalar", "dp2,data_parallel=zero2,wrap_policy=none"),
            ("Scalar", "dp2,data_parallel=fsdp,cpu_offload=true"),
            ("JoinsLater", "dp2,data_parallel=zero1"),
        ],
        "other strategies and policies for the same models",
    ),
)
def test_other_layouts_follow_the_look_too(ranks, tiny_config, name, layout):
    check_in_double(ranks, tiny_config, layout, SIZES | {"model": model(name)})


UNUSED = ["Unused", "JoinsLater", "Recomputed"]


@pytest.mark.parametrize("name", slow_but(UNUSED[:1], UNUSED, "other reasons why a weight is not used"))
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_micro_batches_of_models_with_unused_weights(ranks, tiny_config, name, strategy):
    options = SIZES | {"model": model(name), "gradient_accumulation": 2}
    check_in_double(ranks, tiny_config, f"dp2,data_parallel={strategy}", options)


def test_a_weight_in_a_type_of_its_own_stays_whole(ranks, tiny_config):
    check_training(ranks, tiny_config, "dp2,data_parallel=fsdp", SIZES | {"model": model("Wide")}, 4)


def losses_of_steps(config):
    return train_steps(build(config), config, 0, 4)


def test_units_that_all_micro_batches_but_one_skip_train_as_copies_do(ranks, tiny_config):
    """A micro-batch of a rank has other samples than one of one device: the layouts are compared with one another."""
    options = SIZES | {"model": model("Turns"), "gradient_accumulation": 2}
    copied, sharded = (ranks(2, losses_of_steps, tiny_config(**options, data_parallel=s))[0] for s in ("ddp", "fsdp"))
    torch.testing.assert_close(sharded, copied, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", slow_but(["Scalar"], ["Scalar", "WalkedOver"], "containers that are walked over"))
def test_a_checkpoint_of_such_a_model_goes_on_in_other_layouts(ranks, tiny_config, tmp_path, name):
    layouts = ["dp2,data_parallel=fsdp", "serial", "dp2,data_parallel=zero2", "dp2"]
    check_chain(ranks, tiny_config, layouts, SIZES | {"model": model(name)}, tmp_path)


def test_lazy_modules_learn_their_shapes_before_they_are_split(ranks, tiny_config):
    options = SIZES | {"model": model("Lazy"), "sync_batchnorm": True}
    check_in_double(ranks, tiny_config, "dp2,data_parallel=fsdp", options)
    drawn, again = (dict(initial_weights(tiny_config(**options))) for _ in range(2))
    assert drawn["layers.0.weight"].shape == (6, 6, 3, 3)
    assert all(torch.equal(value, again[name]) for name, value in drawn.items())


def units_of(config):
    """Names of the units, the root first, and of the parameters that stay whole."""
    parallel = build(config).parallel
    units = [name for name, module in parallel.model.named_modules() if isinstance(module, FSDPModule)]
    return units, parallel.whole


LAYERS = ["body.pairs.0.0", "body.pairs.0.1", "body.pairs.1.0", "body.pairs.1.1", "body.last"]


@pytest.mark.parametrize(
    ("name", "units", "whole"),
    [
        ("WalkedOver", ["", "stem", *LAYERS, "head"], set()),
        ("TiedAcross", ["", "stem", "inside", "head"], set()),
        ("Listed", ["", "stem", "head"], set()),
        ("Aside", ["", "stem", "mixer.layer", "table", "head"], set()),
        ("Scalar", ["", "stem", "norm", "head"], {"gate", "norm.gain"}),
    ],
)
def test_units_are_modules_that_are_called(ranks, tiny_config, name, units, whole):
    found = ranks(2, units_of, tiny_config(model=model(name), data_parallel="fsdp"))[0]
    assert sorted(found[0]) == sorted(units) and found[1] == whole


def test_blocks_are_units_as_they_are(ranks, tiny_config):
    found, _ = ranks(2, units_of, tiny_config(data_parallel="fsdp"))[0]
    assert found == ["", "blocks.0", "blocks.1"]


def skip_by_chance(config):
    """Losses of steps of a model that skips layers on each rank by chance."""
    step = build(config)
    assert "looks for unused weights" in step.parallel.notes[0]
    return train_steps(step, config, 0, 4)


def test_skipped_layers_train_data_parallel_and_the_price_is_said(ranks, tiny_config):
    first, second = ranks(2, skip_by_chance, tiny_config(model=model("Drops")))
    assert torch.equal(first, second) and first.isfinite().all()


REFUSED = [
    ({"data_parallel": "fsdp", "model": "Recomputed", "rollout_steps": 2}, "'layers.0' .* in 2 steps .*wrap_policy"),
    ({"data_parallel": "zero2", "model": "RecomputedTwice"}, "'layers.0' .* several times, .*use_reentrant=False"),
    ({"gradient_accumulation": 2, "model": "RecomputedTwice"}, "ddp: 'layers.0.0' .*gradient_accumulation 1"),
    ({"data_parallel": "zero1", "model": "Wide"}, "'fine' is in float64, 'stem.weight' in float32: use ddp or fsdp"),
    ({"data_parallel": "fsdp", "model": "Scalar", "amp_mode": "fp16"}, "amp_mode fp16 cannot share out 'gate'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_would_lose_gradients_is_one_line(ranks, tiny_config, options, line):
    options = options | {"model": model(options["model"])}
    with pytest.raises(AssertionError, match=f"LayoutError: .*{line}"):
        ranks(2, build, tiny_config(**options))


REENTRANT = ["dp2,data_parallel=fsdp,wrap_policy=none", "dp2"]


@pytest.mark.parametrize("layout", slow_but(REENTRANT[:1], REENTRANT, "copied weights"))
def test_reentrant_checkpoints_that_are_right_train(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, SIZES | {"model": model("RecomputedTwice"), "rollout_steps": 2})


def forward_once(config):
    step = build(config)
    step(0, torch.randn(2, 20, *config.img_size), torch.randn(2, 20, *config.img_size))


def test_a_kernel_in_another_dtype_than_gathered_weights_names_the_option(ranks, tiny_config):
    options = {"model": model("Smooths"), "data_parallel": "fsdp", "gather_dtype": "bf16"}
    with pytest.raises(AssertionError, match="UsageError: gather_dtype bf16: .* give --amp_mode bf16"):
        ranks(2, forward_once, tiny_config(**options))
    ranks(2, forward_once, tiny_config(**options, amp_mode="bf16"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": model("ReturnsDict")}, "returns a dict of 'forecast', 'scale': training needs one tensor"),
        ({"model": model("ReturnsPairInTraining")}, "returns a tuple of Tensor, list: training needs one tensor"),
        ({"model": model("ReturnsNothing")}, "returns None: training needs one tensor"),
        ({"model": model("ReturnsClasses")}, "returns a tensor of int64: training needs"),
        ({"model": model("LazyAside")}, "the shape of 'never.weight' is still unknown"),
        ({"model": model("Unused"), "freeze": ["*", "!never.*"]}, "depends on no weight that is trained.*freeze"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(tiny_options, options, line):
    with refusal(line):
        train.main(["--yaml_config=config/ViT.yaml", *tiny_options(**options)])


def test_an_output_of_evaluation_that_is_no_tensor_is_one_line(tiny_config):
    config = tiny_config(model=model("ReturnsPairInEvaluation"))
    parallel = build(config).parallel
    parallel.model.eval()
    with refusal("in evaluation, model ReturnsPairInEvaluation returns a tuple of Tensor, Tensor"):
        parallel.predict(torch.zeros(1, 20, *config.img_size), 20)


@pytest.mark.parametrize("name", ["PassesOn", "FixesOne"])
def test_a_class_that_passes_arguments_on_gets_those_of_its_base(tiny_config, name):
    built = build_model(tiny_config(model=model(name)))
    assert built.stem.weight.shape == (4, 20, 3, 3)
    with refusal("takes no 'widht' .did you mean 'width'"):
        build_model(tiny_config(model=model(name), model_args={"widht": 3}))
