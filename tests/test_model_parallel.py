"""Every layout of rung 3 trains as one device does with the whole batch."""

import math
import unittest.mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed.collectives import shard
from distributed.counting import CollectiveCounter
from distributed.data_parallel import data_parallel
from distributed.domain_parallel import split_images
from distributed.global_view import global_view, take_parts
from distributed.model_parallel import split_model
from distributed.shard_tensor import wrap
from distributed.tiles import own_window
from tests.test_data_parallel import assert_same_training
from tests.test_data_parallel import train as train_data_parallel
from utils import comm
from utils.checkpoint import CheckpointFolder, collect_state, restore_state
from utils.compute import apply_compute_options
from utils.data_loader import build_loaders
from utils.dataset import FieldDataset
from utils.model import build_model, initial_weights
from utils.optim import build_optimizer
from utils.training_step import TrainingStep

CPU = torch.device("cpu")
# 9 x 10 patches: rows that no number of ranks divides.
SIZES = {
    "img_size": [36, 40],
    "num_heads": 4,
    "depth": 4,
    "global_batch_size": 8,
    "optimizer": "AdamW",
    "num_iters": 50,
}


def build(config):
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    model = build_model(config)
    split = split_model(model, config) if config.domain_parallel == 1 else split_images(model, config)
    apply_compute_options(config, CPU, model)
    parallel = data_parallel(model, config, CPU, initial_weights(config), split)
    torch.manual_seed(comm.dropout_stream(config.sequence_parallel))
    return TrainingStep(config, CPU, parallel, build_optimizer(config, model, CPU))


def own_part(batch, config):
    """This rank's samples of a global batch, and its part of them."""
    rows, columns = own_window(config.img_size, config.patch_size)
    return batch[comm.get_rank("dp") :: comm.get_size("dp"), :, rows, columns]


def train(config, steps=10):
    """Losses, and this rank's part of the weights: {name: (value, dim that is split over tp or None)}."""
    step, random, losses = build(config), torch.Generator().manual_seed(1), []
    for i in range(steps):
        x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
        losses.append(step(i, own_part(x, config), own_part(y, config)))
    losses = comm.all_reduce(torch.stack(losses)) / comm.world_size()
    split, whole = step.parallel.split, {}
    for name, p in step.parallel.model.named_parameters():
        value = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        if name in split.specs:
            value = wrap(value, split.specs[name]).full_tensor()
        whole[name] = value.clone(), split.dims.get(name)
    return losses, whole, comm.get_rank("tp"), comm.get_size("tp")


def assert_serial(results, serial, check=assert_same_training, **kwargs):
    """Every rank holds the serial run's weights, or its part of them, and together they hold all."""
    seen = set()
    for losses, weights, rank, size in results:
        seen |= set(weights)
        for name, (value, dim) in weights.items():
            expected = serial[1][name] if dim is None else shard(serial[1][name], dim, rank, size)
            error = (value - expected).norm() / expected.norm().clamp_min(1e-3)
            assert error < kwargs.get("tolerance", 1e-5), (name, error)
        torch.testing.assert_close(losses, serial[0], rtol=kwargs.get("tolerance", 1e-5), atol=0)
    assert seen == set(serial[1])


LAYOUTS = {
    "tp2": (2, {"tensor_parallel": 2}),
    "tp4": (4, {"tensor_parallel": 4}),
    "tp2 sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "tp2 dtensor": (2, {"tensor_parallel": 2, "tp_backend": "dtensor"}),
    "cp2": (2, {"context_parallel": 2}),
    "cp3": (3, {"context_parallel": 3}),
    "cp4": (4, {"context_parallel": 4}),
    "cp3 ring": (3, {"context_parallel": 3, "cp_method": "ring"}),
    "cp2 all-to-all": (2, {"context_parallel": 2, "cp_method": "all_to_all"}),
    "tp2 x cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
    "tp2 x cp2 sequence ring": (
        4, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True, "cp_method": "ring"},
    ),
    "tp2 x dp2": (4, {"tensor_parallel": 2}),
    "tp2 x dp2, dp adjacent": (4, {"tensor_parallel": 2, "parallel_order": "dp-tp"}),
    "tp2 x zero1": (4, {"tensor_parallel": 2, "data_parallel": "zero1"}),
    "tp2 x fsdp": (4, {"tensor_parallel": 2, "data_parallel": "fsdp"}),
    "tp2 sequence x fsdp": (4, {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel": "fsdp"}),
    "tp2 dtensor x fsdp": (4, {"tensor_parallel": 2, "tp_backend": "dtensor", "data_parallel": "fsdp"}),
    "cp2 x dp2": (4, {"context_parallel": 2}),
    "cp2 x fsdp": (4, {"context_parallel": 2, "data_parallel": "fsdp"}),
    "cp2 x zero2": (4, {"context_parallel": 2, "data_parallel": "zero2"}),
    "pp2 gpipe": (2, {"pipeline_parallel": 2, "pp_schedule": "gpipe", "gradient_accumulation": 4}),
    "pp2": (2, {"pipeline_parallel": 2, "gradient_accumulation": 4}),
    "pp2 interleaved": (2, {"pipeline_parallel": 2, "pp_schedule": "interleaved", "gradient_accumulation": 4}),
    "pp4": (4, {"pipeline_parallel": 4, "gradient_accumulation": 4}),
    "pp2 x dp2": (4, {"pipeline_parallel": 2, "gradient_accumulation": 2}),
    "pp2 x fsdp": (4, {"pipeline_parallel": 2, "gradient_accumulation": 2, "data_parallel": "fsdp"}),
    "tp2 x pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "gradient_accumulation": 2}),
    "pp2 interleaved x dp2": (4, {"pipeline_parallel": 2, "pp_schedule": "interleaved", "gradient_accumulation": 2}),
    "pp2 interleaved x fsdp": (
        4,
        {"pipeline_parallel": 2, "pp_schedule": "interleaved", "gradient_accumulation": 2, "data_parallel": "fsdp"},
    ),
    "pp2 x fsdp by size": (
        4,
        {"pipeline_parallel": 2, "gradient_accumulation": 2, "data_parallel": "fsdp", "wrap_policy": "size",
         "wrap_min_params": 20_000},
    ),
    "tp2 x hsdp": (4, {"tensor_parallel": 2, "data_parallel": "hsdp", "dp_shard": 1}),
    "cp2 x hsdp": (4, {"context_parallel": 2, "data_parallel": "hsdp", "dp_shard": 1}),
    "tp2 x pp2 sequence": (
        4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "gradient_accumulation": 2},
    ),
    "cp2 x pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2, "gradient_accumulation": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def serial_runs():
    return {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, serial_runs, layout):
    size, options = LAYOUTS[layout]
    if not serial_runs:
        serial_runs["plain"] = train_data_parallel(tiny_config(**SIZES))
    assert_serial(ranks(size, train, tiny_config(**SIZES, **options)), serial_runs["plain"])


@pytest.mark.parametrize(
    "layout",
    ["tp2", "tp2 sequence", "tp2 dtensor", "tp2 dtensor x fsdp", "cp2", "tp2 x fsdp", "pp2", "tp2 x pp2", "pp2 x fsdp"],
)
def test_clipping_is_by_the_norm_of_the_whole_gradient(ranks, tiny_config, layout):
    size, options = LAYOUTS[layout]
    clipped = SIZES | {"clip_grad_norm": 0.05}
    serial = train_data_parallel(tiny_config(**clipped), steps=4)
    assert_serial(ranks(size, train, tiny_config(**clipped, **options), steps=4), serial)


@pytest.mark.parametrize("amp_mode", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["tp2", "tp2 sequence", "cp3", "cp3 ring", "cp2 all-to-all", "tp2 x fsdp", "pp2"])
def test_mixed_precision_trains_as_on_one_device(ranks, tiny_config, layout, amp_mode):
    size, options = LAYOUTS[layout]
    mixed = SIZES | {"amp_mode": amp_mode}
    serial = train_data_parallel(tiny_config(**mixed), steps=4)
    whole_precision = train_data_parallel(tiny_config(**SIZES), steps=4)
    for losses, *_ in ranks(size, train, tiny_config(**mixed, **options), steps=4):
        torch.testing.assert_close(losses, serial[0], rtol=2e-4, atol=0)
        if amp_mode == "bf16":
            assert (losses - whole_precision[0]).abs().max() > 1e-6  # it is on


RECOMPUTED = {"activation_checkpointing": "selective"}
COMPILED = {"enable_jit": True}


@pytest.mark.parametrize("extra", [RECOMPUTED, COMPILED], ids=["recomputed", "compiled"])
@pytest.mark.parametrize("layout", ["tp2", "tp2 sequence", "cp3", "tp2 x fsdp", "pp2"])
def test_compute_options_change_no_number(ranks, tiny_config, serial_runs, layout, extra):
    size, options = LAYOUTS[layout]
    if not serial_runs:
        serial_runs["plain"] = train_data_parallel(tiny_config(**SIZES))
    assert_serial(ranks(size, train, tiny_config(**SIZES, **options, **extra)), serial_runs["plain"])


def batches_read(config):
    """Input and target of two training steps on this rank, and the bytes that it has read from files for them."""
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    read, mapped = [0], FieldDataset.mapped

    def counted(self, index):
        read[0] += 4 * math.prod(self.shape)
        return mapped(self, index)

    with unittest.mock.patch.object(FieldDataset, "mapped", counted):
        loader, valid = build_loaders(config, CPU)
        batches = [(x.clone(), y.clone()) for x, y in loader.train(config.seed, 0, 2)]
    loader.close()
    valid.close()
    return torch.stack([torch.stack(batch) for batch in batches]), read[0]


def test_a_sample_is_read_once_by_the_ranks_that_share_it_and_each_band_by_its_rank(ranks, tiny_config):
    [(whole, size)] = ranks(1, batches_read, tiny_config())
    for options in ({"tensor_parallel": 2}, {"pipeline_parallel": 2, "gradient_accumulation": 2}):
        (first, read), (second, nothing) = ranks(2, batches_read, tiny_config(**options))
        assert torch.equal(first, whole) and torch.equal(second, whole)
        assert (read, nothing) == (size, 0)
    bands = ranks(3, batches_read, tiny_config(context_parallel=3))
    assert torch.equal(torch.cat([band for band, _ in bands], dim=4), whole)
    assert [read for _, read in bands] == [size // 2, size // 4, size // 4]  # 4 rows of patches: 2, 1, 1


def overflow_on_the_last_rank(config):
    """Whether this rank's weights change in a step in which only the last rank's gradient overflows; its loss scale."""
    step = build(config)
    before = [p.detach().clone() for p in step.parallel.model.parameters()]
    unscale = step.scaler.unscale_

    def overflow(optimizer):
        if comm.rank() == comm.world_size() - 1:
            step.parallel.model.blocks[0].mlp.fc1.weight.grad[0, 0] = torch.inf
        unscale(optimizer)

    step.scaler.unscale_ = overflow
    batch = torch.randn(2, config.global_batch_size, 20, *config.img_size)
    step(0, *(own_part(part, config) for part in batch))
    unchanged = all(map(torch.equal, before, step.parallel.model.parameters()))
    return unchanged, step.scaler.get_scale()


def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(ranks, tiny_config):
    config = tiny_config(**SIZES, tensor_parallel=2, amp_mode="fp16")
    assert ranks(2, overflow_on_the_last_rank, config) == [(True, 2.0**15)] * 2


def collectives_of_a_step(config):
    step = build(config)
    x, y = (own_part(t, config) for t in torch.randn(2, config.global_batch_size, 20, *config.img_size))
    for i in range(4):
        step(i, x, y)
    with CollectiveCounter() as counted:
        step(4, x, y)
    return dict(counted.calls)


def test_collectives_of_a_whole_step(ranks, tiny_config):
    depth = SIZES["depth"]

    def counted(size, **options):
        return ranks(size, collectives_of_a_step, tiny_config(**SIZES, **options))[0]

    assert counted(2, tensor_parallel=2) == {"all_reduce": 4 * depth}
    # Context: keys and values, the gradients once, and the norms of the loss.
    assert counted(2, context_parallel=2) == {"all_gather": depth, "reduce_scatter": depth, "all_reduce": 1 + 1}
    # Gradients are reduced once over dp and cp together.
    assert counted(4, context_parallel=2) == {"all_gather": depth, "reduce_scatter": depth, "all_reduce": 1 + 1}
    assert counted(4, tensor_parallel=2) == {"all_reduce": 4 * depth + 1}


def shared_weights_after(config, steps):
    torch.set_num_threads(1)
    _, weights, *_ = train(config, steps)
    return {name: value for name, (value, dim) in weights.items() if dim is None}


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["whole tokens", "sequence parallel"])
def test_shared_weights_stay_equal_to_the_bit(ranks, tiny_config, options):
    config = tiny_config(**SIZES | {"num_iters": 200, "img_size": [16, 32]}, tensor_parallel=2, **options)
    one, other = ranks(2, shared_weights_after, config, 200)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def dropout_run(config, steps):
    """Losses with dropout, whole model."""
    step = build(config)
    random, losses = torch.Generator().manual_seed(1), []
    for i in range(steps):
        x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
        losses.append(step(i, own_part(x, config), own_part(y, config)))
    return comm.all_reduce(torch.stack(losses)) / comm.world_size(), shared_weights(step)


def shared_weights(step):
    return {
        n: p.detach().clone() for n, p in step.parallel.model.named_parameters() if n not in step.parallel.split.dims
    }


@pytest.mark.parametrize("layout", ["tp2", "tp2 sequence", "cp2", "tp2 x cp2"])
def test_dropout_replays_and_keeps_shared_weights_equal(ranks, tiny_config, layout):
    size, options = LAYOUTS[layout]
    config = tiny_config(**SIZES, **options, dropout=0.2, activation_checkpointing="full")
    first, again = (ranks(size, dropout_run, config, 5) for _ in range(2))
    without = ranks(size, dropout_run, tiny_config(**SIZES, **options), 5)
    for (losses, weights), (same, _) in zip(first, again, strict=True):
        assert torch.equal(losses, same)
        assert not torch.equal(losses, without[0][0])
        for name, value in weights.items():
            assert torch.equal(value, first[0][1][name]), name


def train_from(config, folder, start, stop):
    """Resume at step `start`, from the checkpoint that another layout left, train to `stop` and save."""
    step = build(config)
    checkpoints, split = CheckpointFolder(folder, keep=9), step.parallel.split
    if start:
        tensors = collect_state(step.parallel.model, step.optimizer)
        view = global_view(tensors, split)
        assert checkpoints.load_newest(view)["iteration"] == start
        take_parts(tensors, view, split)
        restore_state(tensors | {"random": {}}, step.parallel.model, step.optimizer)
    random, losses = torch.Generator().manual_seed(1), []
    for i in range(stop):
        x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
        if i >= start:
            losses.append(step(i, own_part(x, config), own_part(y, config)))
    tensors = global_view(collect_state(step.parallel.model, step.optimizer), split)
    checkpoints.save(stop, tensors, {}, wait=True)
    return comm.all_reduce(torch.stack(losses)) / comm.world_size()


SERIAL = (1, {})
CHAINS = {
    "tp2 x cp2 -> dp4 -> tp4 -> serial": ["tp2 x cp2", "dp4", "tp4", "serial"],
    "serial -> tp2 x fsdp -> tp4 -> cp3": ["serial", "tp2 x fsdp", "tp4", "cp3"],
    "pp2 x fsdp -> tp2 x pp2 -> fsdp4 -> tp2 dtensor x fsdp": [
        "pp2 x fsdp",
        "tp2 x pp2",
        "fsdp4",
        "tp2 dtensor x fsdp",
    ],
    "tp2 x zero1 -> pp2 interleaved -> tp2 x fsdp": ["tp2 x zero1", "pp2 interleaved", "tp2 x fsdp", "serial"],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_goes_on_under_any_other_layout(ranks, tiny_config, tmp_path, chain):
    serial, _ = train_data_parallel(tiny_config(**SIZES), steps=12)
    layouts = LAYOUTS | {"serial": SERIAL, "dp4": (4, {}), "fsdp4": (4, {"data_parallel": "fsdp"})}
    losses = []
    for part, layout in enumerate(CHAINS[chain]):
        size, options = layouts[layout]
        losses.append(ranks(size, train_from, tiny_config(**SIZES, **options), tmp_path, 3 * part, 3 * part + 3)[0])
    torch.testing.assert_close(torch.cat(losses), serial, rtol=1e-5, atol=0)
