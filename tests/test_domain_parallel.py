"""Every layout of rung 4 trains as one device does with the whole batch."""

import pytest
import torch

from tests.support.compilation import TRACED
from tests.support.layout_parity import (
    COMPILED,
    CPU,
    RECOMPUTED,
    build,
    check_chain,
    check_in_double,
    check_mixed_precision,
    check_training,
    ranks_and_options,
)
from tests.support.marks import needs_torch, slow_but, slow_rows_but
from training.tasks import build_task, task_of
from training.tasks.waves import WaveLoader
from utils import comm

# 9 x 10 patches: rows that no number of ranks divides.
SIZES = {
    "img_size": [36, 40],
    "num_heads": 4,
    "depth": 2,
    "global_batch_size": 4,
    "optimizer": "AdamW",
    "num_iters": 50,
}


LAYOUTS = [
    "domain2", "domain3", "domain4", "domain1x3", "domain2x2", "domain3,domain_method=ring",
    "domain2x2,domain_method=ring", "domain2,domain_method=all_to_all", "domain2x2,domain_method=all_to_all",
    "domain2xdp2", "domain2xdp2,data_parallel=zero1", "domain2xdp2,data_parallel=zero2",
    "domain2xdp2,data_parallel=fsdp", "domain2x2,data_parallel=fsdp", "domain2xdp2,data_parallel=hsdp,dp_shard=1",
    "domain2xtp2", "domain2xtp2,parallel_order=domain-tp", "domain2xdp2xtp2", "domain2xdp2xtp2,data_parallel=fsdp",
]  # fmt: skip


# Bands and tiles, each method, each kind of parallelism beside the domain's.
QUICK = [
    "domain2x2", "domain3,domain_method=ring", "domain2,domain_method=all_to_all", "domain2xdp2,data_parallel=fsdp",
    "domain2xtp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other combinations of the same, up to eight ranks"))
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, SIZES)


SEVERAL = ["domain2x2", "domain3,domain_method=ring", "domain2xtp2", "domain2xdp2,data_parallel=fsdp"]


@pytest.mark.parametrize("layout", slow_but(SEVERAL[1:2], SEVERAL, "recomputation in other layouts"))
def test_recomputed_activations_change_no_number(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, SIZES, **RECOMPUTED)


@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a block")
@pytest.mark.slow("a compiled layer of split images, which is traced for a minute")
def test_a_compiled_block_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, "domain2", SIZES | {"depth": 1}, 4, TRACED, **COMPILED)


@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a block")
@pytest.mark.nightly
@pytest.mark.slow("compiled layers in other layouts: tiles, the ring, tensor parallelism and sharded weights")
@pytest.mark.parametrize("extra", [COMPILED, RECOMPUTED | COMPILED], ids=["compiled", "recomputed, compiled"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_compiled_layers_change_no_number(ranks, tiny_config, layout, extra):
    check_training(ranks, tiny_config, layout, SIZES, backend=TRACED, **extra)


@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a block")
@pytest.mark.slow("the code that is generated for layers of split images")
def test_generated_code_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, "domain2", SIZES | {"depth": 1}, **COMPILED)


def test_a_fused_optimizer_takes_split_and_sharded_parameters(ranks, tiny_config):
    check_training(ranks, tiny_config, "domain2xdp2,data_parallel=fsdp", SIZES, enable_fused=True)


MIXED = ["domain3", "domain2xdp2,data_parallel=fsdp", "domain2x2,domain_method=ring", "domain2xtp2"]


@pytest.mark.parametrize("amp_mode", slow_but(["fp16"], ["bf16", "fp16"], "the other half precision"))
@pytest.mark.parametrize("layout", slow_but(MIXED[:1], MIXED, "half precision in other layouts"))
def test_mixed_precision_trains_as_on_one_device(ranks, tiny_config, layout, amp_mode):
    check_mixed_precision(ranks, tiny_config, layout, SIZES, amp_mode)


CLIPPED = ["domain2x2", "domain2xdp2,data_parallel=fsdp", "domain3", "domain2xtp2", "domain2xdp2,data_parallel=zero1"]


@pytest.mark.parametrize("layout", slow_but(CLIPPED[:1], CLIPPED, "the norm in other layouts"))
def test_clipping_is_by_the_norm_of_the_whole_gradient(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, SIZES | {"clip_grad_norm": 0.01})


CHAINS = [
    "serial -> domain3 -> domain2xdp2,data_parallel=fsdp -> tp2",
    "domain2x2 -> dp4 -> domain2xtp2 -> serial",
    "domain2xdp2,data_parallel=zero1 -> cp3 -> domain2x2,data_parallel=fsdp -> serial",
]


@pytest.mark.parametrize("chain", slow_but(CHAINS[:1], CHAINS, "other layouts before and after a checkpoint"))
def test_a_checkpoint_goes_on_under_any_other_layout(ranks, tiny_config, tmp_path, chain):
    check_chain(ranks, tiny_config, chain.split(" -> "), SIZES, tmp_path)


CLASSES = {
    "task": "classify", "model": "classifier", "num_classes": 7, "img_size": [36, 40], "n_in_channels": 3,
    "num_heads": 4, "depth": 2, "global_batch_size": 4, "optimizer": "AdamW", "num_iters": 50, "patch_size": 4,
}  # fmt: skip


def train_and_validate(config, steps=6):
    """Losses of a model, on its own images, and the scores of a validation."""
    step, task = build(config), build_task(config)
    train_loader, valid_loader = task.build_loaders(CPU)
    losses = torch.stack([step(i, x, y).loss for i, (x, y) in enumerate(train_loader.train(0, 0, steps))])
    return comm.all_reduce(losses) / comm.world_size(), task.build_validator(valid_loader).run(step.parallel)


VOLUMES = CLASSES | {
    "task": "transport", "model": "vit", "img_size": [20, 12, 8], "n_in_channels": 2, "n_out_channels": 2,
}  # fmt: skip
TASKS = [
    (CLASSES | {"limit_nsamples_val": 5}, "domain3,domain_method=ring"),
    (VOLUMES, "domain3,domain_method=ring"),
    (CLASSES, "domain2"),
    (CLASSES, "domain2x2,data_parallel=fsdp"),
    (CLASSES | {"amp_mode": "bf16"}, "domain2xdp2"),
    (CLASSES, "domain2xtp2"),
    (CLASSES | {"img_size": [8, 12, 8]}, "domain1x2,data_parallel=zero1"),
    (VOLUMES, "dp2,data_parallel=fsdp"),
    (VOLUMES, "domain2x2,data_parallel=fsdp"),
    (VOLUMES, "domain2xtp2"),
]


@pytest.mark.parametrize(
    ("settings", "layout"), slow_rows_but([0, 1], TASKS, "other layouts of both"), ids=lambda value: str(value)[-60:]
)
def test_classes_and_volumes_train_and_validate_as_on_one_device(ranks, tiny_config, settings, layout):
    settings, (size, own) = {"limit_nsamples_val": 10} | settings, ranks_and_options(layout)
    expected, scores = ranks(1, train_and_validate, tiny_config(**settings))[0]
    rounding, accuracy = (2e-2, 0.1) if "amp_mode" in settings else (1e-5, 1e-6)
    for losses, found in ranks(size, train_and_validate, tiny_config(**settings, **own)):
        torch.testing.assert_close(losses, expected, rtol=rounding, atol=0)
        assert found.keys() == scores.keys()
        for name, score in scores.items():
            assert found[name] == pytest.approx(score, rel=rounding, abs=accuracy), name


def made_images(tiny_config, img_size, window, device):
    config = tiny_config(**CLASSES | {"num_classes": 9, "img_size": img_size, "n_in_channels": 2})
    return WaveLoader(task_of(config), 9, [slice(*part) for part in window], 1, 4, torch.device(device))


def test_an_image_and_its_tiles_are_the_same_points(tiny_config):
    windows = [(0, 8), (0, 12)], [(4, 8), (3, 7)]
    (images, labels), (parts, same) = (
        made_images(tiny_config, [8, 12], window, "cpu").batch(range(9)) for window in windows
    )
    assert torch.equal(labels, same) and torch.equal(parts, images[:, :, 4:8, 3:7])
    assert len(set(labels.tolist())) > 3
