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
    check_mixed_precision,
    check_training,
)
from tests.support.marks import needs_torch, slow_but
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


LAYOUTS = {
    "domain2": (2, {"domain_parallel": 2}),
    "domain3": (3, {"domain_parallel": 3}),
    "domain4": (4, {"domain_parallel": 4}),
    "domain1x3": (3, {"domain_parallel": "1x3"}),
    "domain2x2": (4, {"domain_parallel": "2x2"}),
    "domain3 ring": (3, {"domain_parallel": 3, "domain_method": "ring"}),
    "domain2x2 ring": (4, {"domain_parallel": "2x2", "domain_method": "ring"}),
    "domain2 all-to-all": (2, {"domain_parallel": 2, "domain_method": "all_to_all"}),
    "domain2x2 all-to-all": (4, {"domain_parallel": "2x2", "domain_method": "all_to_all"}),
    "domain2 x ddp": (4, {"domain_parallel": 2}),
    "domain2 x zero1": (4, {"domain_parallel": 2, "data_parallel": "zero1"}),
    "domain2 x zero2": (4, {"domain_parallel": 2, "data_parallel": "zero2"}),
    "domain2 x fsdp": (4, {"domain_parallel": 2, "data_parallel": "fsdp"}),
    "domain2x2 fsdp": (4, {"domain_parallel": "2x2", "data_parallel": "fsdp"}),
    "domain2 x hsdp": (4, {"domain_parallel": 2, "data_parallel": "hsdp", "dp_shard": 1}),
    "domain2 x tp2": (4, {"domain_parallel": 2, "tensor_parallel": 2}),
    "domain2 x tp2 adjacent": (4, {"domain_parallel": 2, "tensor_parallel": 2, "parallel_order": "domain-tp"}),
    "domain2 x dp2 x tp2": (8, {"domain_parallel": 2, "tensor_parallel": 2}),
    "domain2 x fsdp x tp2": (8, {"domain_parallel": 2, "tensor_parallel": 2, "data_parallel": "fsdp"}),
}

OTHERS = {
    "serial": (1, {}),
    "dp4": (4, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "cp3": (3, {"context_parallel": 3}),
}


# Bands and tiles, each method, each kind of parallelism beside the domain's.
QUICK = [
    "domain2", "domain2x2", "domain3 ring", "domain2 all-to-all", "domain2 x ddp", "domain2 x fsdp", "domain2 x tp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other combinations of the same, up to eight ranks"))
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, LAYOUTS[layout], SIZES)


SEVERAL = ["domain2x2", "domain3 ring", "domain2 x tp2", "domain2 x fsdp"]


@pytest.mark.parametrize("layout", SEVERAL)
def test_recomputed_activations_change_no_number(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, LAYOUTS[layout], SIZES, **RECOMPUTED)


@needs_torch((2, 13), "cannot trace the rules of ShardTensor in a block")
def test_a_compiled_block_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, LAYOUTS["domain2"], SIZES | {"depth": 1}, 4, TRACED, **COMPILED)


@pytest.mark.slow("compiled layers in other layouts: tiles, the ring, tensor parallelism and sharded weights")
@pytest.mark.parametrize("extra", [COMPILED, RECOMPUTED | COMPILED], ids=["compiled", "recomputed, compiled"])
@pytest.mark.parametrize("layout", SEVERAL)
def test_compiled_layers_change_no_number(ranks, tiny_config, layout, extra):
    check_training(ranks, tiny_config, LAYOUTS[layout], SIZES, backend=TRACED, **extra)


@pytest.mark.slow("the code that is generated for layers of split images")
def test_generated_code_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, LAYOUTS["domain2"], SIZES | {"depth": 1}, **COMPILED)


def test_a_fused_optimizer_takes_split_and_sharded_parameters(ranks, tiny_config):
    check_training(ranks, tiny_config, LAYOUTS["domain2 x fsdp"], SIZES, enable_fused=True)


MIXED = ["domain3", "domain2x2 ring", "domain2 x fsdp", "domain2 x tp2"]


@pytest.mark.parametrize("amp_mode", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", slow_but(["domain2 x fsdp"], MIXED, "half precision in other layouts"))
def test_mixed_precision_trains_as_on_one_device(ranks, tiny_config, layout, amp_mode):
    check_mixed_precision(ranks, tiny_config, LAYOUTS[layout], SIZES, amp_mode)


CLIPPED = ["domain3", "domain2x2", "domain2 x fsdp", "domain2 x tp2", "domain2 x zero1"]


@pytest.mark.parametrize("layout", slow_but(["domain2x2", "domain2 x fsdp"], CLIPPED, "the norm in other layouts"))
def test_clipping_is_by_the_norm_of_the_whole_gradient(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, LAYOUTS[layout], SIZES | {"clip_grad_norm": 0.05}, steps=4)


CHAINS = {
    "serial -> domain3 -> domain2 x fsdp -> tp2": ["serial", "domain3", "domain2 x fsdp", "tp2"],
    "domain2x2 -> dp4 -> domain2 x tp2 -> serial": ["domain2x2", "dp4", "domain2 x tp2", "serial"],
    "domain2 x zero1 -> cp3 -> domain2x2 fsdp": ["domain2 x zero1", "cp3", "domain2x2 fsdp", "serial"],
}


@pytest.mark.parametrize("chain", slow_but(list(CHAINS)[:1], CHAINS, "other layouts before and after a checkpoint"))
def test_a_checkpoint_goes_on_under_any_other_layout(ranks, tiny_config, tmp_path, chain):
    layouts = LAYOUTS | OTHERS
    check_chain(ranks, tiny_config, [layouts[name] for name in CHAINS[chain]], SIZES, tmp_path)


CLASSES = {
    "task": "classify", "model": "classifier", "num_classes": 7, "img_size": [36, 40], "n_in_channels": 3,
    "num_heads": 4, "depth": 2, "global_batch_size": 4, "optimizer": "AdamW", "num_iters": 50, "patch_size": 4,
}  # fmt: skip


def train_and_validate(config, steps=6):
    """Losses of a model, on its own images, and the scores of a validation."""
    step, task = build(config), build_task(config)
    train_loader, valid_loader = task.build_loaders(CPU)
    losses = torch.stack([step(i, x, y) for i, (x, y) in enumerate(train_loader.train(0, 0, steps))])
    return comm.all_reduce(losses) / comm.world_size(), task.build_validator(valid_loader).run(step.parallel)


VOLUMES = CLASSES | {
    "task": "transport", "model": "vit", "img_size": [20, 12, 8], "n_in_channels": 2, "n_out_channels": 2,
}  # fmt: skip
TASKS = [
    (CLASSES, 2, {"domain_parallel": 2}),
    (CLASSES, 4, {"domain_parallel": "2x2", "data_parallel": "fsdp"}),
    (CLASSES | {"amp_mode": "bf16"}, 4, {"domain_parallel": 2}),
    (CLASSES, 4, {"domain_parallel": 2, "tensor_parallel": 2}),
    (CLASSES | {"limit_nsamples_val": 5}, 3, {"domain_parallel": 3, "domain_method": "ring"}),
    (CLASSES | {"img_size": [8, 12, 8]}, 2, {"domain_parallel": "1x2", "data_parallel": "zero1"}),
    (VOLUMES, 2, {"data_parallel": "fsdp"}),
    (VOLUMES, 3, {"domain_parallel": 3, "domain_method": "ring"}),
    (VOLUMES, 4, {"domain_parallel": "2x2", "data_parallel": "fsdp"}),
    (VOLUMES, 4, {"domain_parallel": 2, "tensor_parallel": 2}),
]


@pytest.mark.parametrize(("settings", "size", "layout"), TASKS, ids=lambda value: str(value)[-60:])
def test_classes_and_volumes_train_and_validate_as_on_one_device(ranks, tiny_config, settings, size, layout):
    settings = {"limit_nsamples_val": 10} | settings
    expected, scores = ranks(1, train_and_validate, tiny_config(**settings))[0]
    rounding, accuracy = (2e-2, 0.1) if "amp_mode" in settings else (1e-5, 1e-6)
    for losses, found in ranks(size, train_and_validate, tiny_config(**settings, **layout)):
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
