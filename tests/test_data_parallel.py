"""Every data-parallel strategy trains as one device does with the whole batch."""

import copy
import itertools

import pytest
import torch

from tests.support.compilation import TRACED
from tests.support.layout_parity import (
    CPU,
    assert_serial,
    build,
    check_training,
    collectives_of_a_step,
    local,
    overflow_on_the_last_rank,
    ranks_and_options,
    train,
    train_serially,
)
from tests.support.marks import slow_but, slow_rows_but
from tests.support.refusals import refusal
from training.assembly import random_batch
from training.checkpoints.state import collect_state, restore_state
from training.models.build import build_model, initial_weights
from training.tasks import build_task
from utils import comm

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp"]


def assert_nearly_same_training(results, serial, config, tolerance):
    """The losses, and all that the weights have moved: half precision rounds differently when a batch is split."""
    start = torch.cat([value.flatten() for _, value in initial_weights(config)])
    expected = torch.cat([serial[1][name].flatten() for name, _ in initial_weights(config)])
    for losses, weights, *_ in results:
        torch.testing.assert_close(losses, serial[0], rtol=1e-3, atol=0)
        found = torch.cat([weights[name][0].flatten() for name, _ in initial_weights(config)])
        error = (found - expected).norm() / (expected - start).norm()
        assert error < tolerance, error


# Adam divides by the root of a gradient's square: where a gradient is rounding noise alone, its sign decides.
PARITY = {"global_batch_size": 12, "depth": 2, "optimizer": "AdamW", "num_iters": 50}
VARIANTS = {
    "plain": {},
    "accumulation": {"gradient_accumulation": 3},
    "clipping": {"clip_grad_norm": 0.01},
    "recomputation": {"activation_checkpointing": "full"},
    "selective recomputation of every 2nd block": {
        "activation_checkpointing": "selective",
        "checkpointing_interval": 2,
    },
}


def layout(strategy, size):
    """The name of a layout; hsdp shares parameters out in two groups."""
    groups = f",dp_shard={size // 2}" if strategy == "hsdp" else ""
    return f"dp{size},data_parallel={strategy}{groups}"


# Quick is accumulation, which has all that the plain one has, with every strategy; the other variants with sharded
# parameters. hsdp has four ranks, in groups of two.
CASES = list(itertools.product(STRATEGIES, (2, 4), VARIANTS))
QUICK = [
    *itertools.product(("ddp", "zero1", "zero2", "fsdp"), (2,), ("accumulation",)),
    *itertools.product(("fsdp",), (2,), list(VARIANTS)[2:]),
    ("hsdp", 4, "accumulation"),
]


@pytest.mark.parametrize(
    "case", slow_but(QUICK, CASES, "all strategies, sizes and variants"), ids=lambda case: "-".join(map(str, case))
)
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, case):
    strategy, size, variant = case
    check_training(ranks, tiny_config, layout(strategy, size), PARITY | VARIANTS[variant])


SHARDED_OPTIONS = {
    "offload": {"cpu_offload": True},
    "prefetch": {"prefetch": 2},
    "one unit": {"wrap_policy": "none"},
    "units by size": {"wrap_policy": "size", "wrap_min_params": 5000},
}
COMPILED_OPTIONS = {
    "compiled blocks": {"enable_jit": True},
    "compiled, recomputed": {"enable_jit": True, "activation_checkpointing": "selective"},
}
SHARDED = slow_rows_but(
    [0], [("fsdp", 2), ("zero2", 2), ("fsdp", 4), ("hsdp", 4)], "other strategies that share out parameters, four ranks"
)


@pytest.mark.parametrize(
    "variant", slow_but(["offload", "units by size"], SHARDED_OPTIONS, "other options of sharded parameters")
)
@pytest.mark.parametrize(("strategy", "size"), SHARDED)
def test_options_of_sharded_parameters_change_no_number(ranks, tiny_config, strategy, size, variant):
    check_training(ranks, tiny_config, layout(strategy, size), PARITY, **SHARDED_OPTIONS[variant])


@pytest.mark.slow("compiled blocks whose parameters are gathered, by every strategy that shards them")
@pytest.mark.parametrize("variant", COMPILED_OPTIONS)
@pytest.mark.parametrize(("strategy", "size"), SHARDED)
def test_compiled_blocks_with_sharded_parameters_change_no_number(ranks, tiny_config, strategy, size, variant):
    check_training(ranks, tiny_config, layout(strategy, size), PARITY, backend=TRACED, **COMPILED_OPTIONS[variant])


@pytest.mark.slow("the code that is generated for layers that are gathered and recomputed")
def test_generated_code_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, layout("fsdp", 2), PARITY, **COMPILED_OPTIONS["compiled, recomputed"])


@pytest.mark.parametrize("strategy", slow_but(["ddp"], ["ddp", "zero1"], "sharded moments"))
def test_a_fused_optimizer_finds_weights_and_gradients_in_one_memory_format(ranks, tiny_config, strategy):
    options = PARITY | {"enable_fused": True, "enable_channels_last": True}
    check_training(ranks, tiny_config, layout(strategy, 2), options, steps=4)


IN_BUCKETS = pytest.mark.slow("compiled layers whose gradients are reduced in buckets")


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.01},
        pytest.param({"enable_jit": True}, marks=IN_BUCKETS),
        pytest.param({"enable_jit": True, "bucket_cap_mb": 0.01}, marks=IN_BUCKETS),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", slow_but(["ddp"], ["ddp", "zero1"], "sharded moments"))
def test_options_of_replicated_parameters_change_no_number(ranks, tiny_config, strategy, options):
    check_training(ranks, tiny_config, layout(strategy, 2), PARITY, backend=TRACED, **options)


@pytest.mark.parametrize("strategy", slow_but(["zero1", "fsdp"], STRATEGIES[:4], "uneven parts of other strategies"))
def test_three_ranks_split_parameters_unevenly(ranks, tiny_config, strategy):
    options = PARITY | {"embed_dim": 34, "seed": 3}  # with 0 a gradient of one bias is rounding noise for a step
    check_training(ranks, tiny_config, layout(strategy, 3), options)


@pytest.mark.parametrize("amp_mode", slow_but(["fp16"], ["bf16", "fp16"], "the other half precision"))
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow("half precision on four ranks"))])
@pytest.mark.parametrize("strategy", slow_but(["ddp", "fsdp"], STRATEGIES, "half precision in other strategies"))
def test_mixed_precision_equals_mixed_precision_on_one_device(ranks, tiny_config, size, strategy, amp_mode):
    options = PARITY | {"amp_mode": amp_mode, "clip_grad_norm": 0.01}
    _, own = ranks_and_options(layout(strategy, size))
    serial, config = train_serially(tiny_config, options, 10), tiny_config(**options, **own)
    assert_nearly_same_training(ranks(size, train, config), serial, config, tolerance=0.02)


@pytest.mark.parametrize(
    "options", [{"data_parallel": "fsdp", "gather_dtype": "bf16"}, {"gradient_compression": "bf16"}]
)
def test_halved_messages_train_nearly_the_same(ranks, tiny_config, options):
    serial = train_serially(tiny_config, PARITY, 10)
    config = tiny_config(**PARITY, **options)
    results = ranks(2, train, config)
    assert_nearly_same_training(results, serial, config, tolerance=0.05)
    with pytest.raises(AssertionError):  # they are halved
        assert_serial(results, serial)


@pytest.mark.parametrize(
    ("layout", "options"),
    slow_rows_but(
        [0],
        [
            ("domain2,data_parallel=fsdp,wrap_policy=none", {}),
            ("domain2,data_parallel=fsdp,wrap_policy=size,wrap_min_params=500", {}),
            ("dp2,data_parallel=fsdp", {"model": "afno", "model_args": {"num_blocks": 4}}),
        ],
        "other units, and another model",
    ),
)
def test_weights_gathered_in_half_precision_meet_no_other(ranks, tiny_config, layout, options):
    size, own = ranks_and_options(layout)
    serial, _ = train_serially(tiny_config, PARITY | options, 3)
    for losses, *_ in ranks(size, train, tiny_config(**PARITY, **options, **own, gather_dtype="bf16"), steps=3):
        torch.testing.assert_close(losses, serial, rtol=5e-3, atol=0)


@pytest.mark.parametrize(("amp_mode", "gather_dtype"), [("fp16", "bf16"), ("bf16", "fp16"), ("fp8", "fp16")])
def test_two_half_precisions_are_not_mixed(tiny_config, amp_mode, gather_dtype):
    with refusal(f"gather_dtype {gather_dtype} with amp_mode {amp_mode} mixes two half precisions: give gather_dtype"):
        tiny_config(data_parallel="fsdp", amp_mode=amp_mode, gather_dtype=gather_dtype)


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], ["ddp", "fsdp"], "copied weights"))
def test_only_weights_that_data_parallelism_leaves_alone_are_trained(ranks, tiny_config, strategy):
    options = PARITY | {"freeze": ["*", "!pos_embed*"], "clip_grad_norm": 0.01}
    check_training(ranks, tiny_config, "domain2", options, 4, data_parallel=strategy)


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], ["zero2", "fsdp"], "weights that stay gathered"))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, tiny_config, strategy):
    config = tiny_config(**PARITY, amp_mode="fp16", data_parallel=strategy)
    for unchanged, scale in ranks(2, overflow_on_the_last_rank, config):
        assert unchanged and scale == 2**15


def test_without_the_reduction_ranks_train_apart(ranks, tiny_config):
    results = ranks(2, train, tiny_config(**PARITY, noddp=True))
    with pytest.raises(AssertionError):
        assert_serial(results, train_serially(tiny_config, PARITY, 10))


@pytest.mark.parametrize("accumulation", slow_but([3], [1, 3], "whole batches at once"))
def test_gradients_are_reduced_once_a_step(ranks, tiny_config, accumulation):
    options = PARITY | {"gradient_accumulation": accumulation}
    size = 4 * sum(p.numel() for p in build_model(tiny_config(**options)).parameters())
    units = options["depth"] + 1  # the blocks, and what is left

    def counted(strategy):
        return ranks(2, collectives_of_a_step, tiny_config(**options, data_parallel=strategy))[0]

    assert counted("ddp") == ({"all_reduce": 1}, {"all_reduce": size})
    assert counted("zero1") == ({"all_reduce": 1, "broadcast": 2}, {"all_reduce": size, "broadcast": size})
    calls, sent = counted("fsdp")
    assert calls == {"all_gather": 2 * units * accumulation, "reduce_scatter": units}
    assert sent == {"all_gather": size * accumulation, "reduce_scatter": size // 2}
    calls, sent = counted("zero2")
    assert calls == {"all_gather": units * (1 if accumulation == 1 else accumulation), "reduce_scatter": units}


def random_batch_of_rank(config):
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    return random_batch(build_task(config), CPU)[0]


def test_ranks_share_every_micro_batch_of_a_random_batch_as_their_loaders_do(ranks, tiny_config):
    config = tiny_config(**PARITY | {"gradient_accumulation": 3})
    whole, _ = build_task(config).random_batch(torch.Generator().manual_seed(config.seed))
    of_ranks = [x.chunk(3) for x in ranks(2, random_batch_of_rank, config)]
    for micro_batch, parts in zip(whole.chunk(3), zip(*of_ranks, strict=True), strict=True):
        assert torch.equal(micro_batch, torch.cat(parts))


def test_smaller_buckets_are_more_reductions_of_the_same_bytes(ranks, tiny_config):
    one, many = (ranks(2, collectives_of_a_step, tiny_config(**PARITY, bucket_cap_mb=mib))[0] for mib in (25, 0.05))
    assert many[0]["all_reduce"] > one[0]["all_reduce"] == 1
    assert many[1] == one[1]


def test_hsdp_reduces_inside_a_group_then_between_groups(ranks, tiny_config):
    config = tiny_config(**PARITY, data_parallel="hsdp", dp_shard=2)
    units = PARITY["depth"] + 1
    calls, _ = ranks(4, collectives_of_a_step, config)[0]
    assert calls == {"all_gather": 2 * units, "reduce_scatter": units, "all_reduce": units}


def weights_after_a_resume(config, warm_up):
    """Tell whether weights after 6 steps are the same without and with a stop after 3."""
    batch = torch.Generator().manual_seed(comm.rank())
    batches = torch.randn(6, 2, 1, 20, *config.img_size, generator=batch)

    def trained(step, numbers):
        for i in numbers:
            step(i, *batches[i])
        return [local(p).clone() for p in step.parallel.model.parameters()]

    step = build(config)
    trained(step, range(3))
    kept = copy.deepcopy(collect_state(step.parallel.model, step.optimizer))
    expected = trained(step, range(3, 6))
    step = build(config)
    restore_state(kept, step.parallel.model, step.optimizer)
    if warm_up:
        step.warm_up_ddp_buckets(*batches[3])
    return all(map(torch.equal, trained(step, range(3, 6)), expected))


@pytest.mark.parametrize("strategy", slow_but(["ddp"], ["ddp", "zero1", "fsdp"], "sharded moments and weights"))
def test_a_resumed_run_of_four_ranks_goes_on_bit_for_bit(ranks, tiny_config, strategy):
    config = tiny_config(**PARITY | {"global_batch_size": 4, "depth": 2}, data_parallel=strategy)
    assert ranks(4, weights_after_a_resume, config, warm_up=True) == [True] * 4
    if strategy == "ddp":  # what it is for
        assert ranks(4, weights_after_a_resume, config, warm_up=False) == [False] * 4


def validate(config):
    parallel, task = build(config).parallel, build_task(config)
    train_loader, valid_loader = task.build_loaders(CPU)
    result = task.build_validator(valid_loader).run(parallel)
    train_loader.close()
    valid_loader.close()
    return result


@pytest.mark.parametrize("samples", slow_but([3], [3, 10], "an uneven tail behind full batches"))
def test_validation_is_exact_with_uneven_tails_and_ranks_without_a_sample(ranks, tiny_config, samples):
    serial = validate(tiny_config(limit_nsamples_val=samples, global_batch_size=8))
    for strategy in ("ddp", "fsdp"):
        config = tiny_config(limit_nsamples_val=samples, global_batch_size=8, data_parallel=strategy)
        for result in ranks(4, validate, config):
            assert result["val_loss"] == pytest.approx(serial["val_loss"], rel=1e-6)
            assert result["rmse"] == pytest.approx(serial["rmse"], rel=1e-6)
            assert result["acc"] == pytest.approx(serial["acc"], rel=1e-5, abs=1e-6)
