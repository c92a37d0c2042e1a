"""Every layout of rung 3 trains as one device does with the whole batch."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed.collectives import shard
from distributed.context_parallel import latitude_band
from distributed.data_parallel import data_parallel
from distributed.model_parallel import split_model
from tests.test_data_parallel import assert_same_training
from tests.test_data_parallel import train as train_data_parallel
from utils import comm
from utils.compute import apply_compute_options
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
    split = split_model(model, config)
    apply_compute_options(config, CPU, model)
    parallel = data_parallel(model, config, CPU, initial_weights(config), split)
    torch.manual_seed(comm.dropout_stream(config.sequence_parallel))
    return TrainingStep(config, CPU, parallel, build_optimizer(config, model, CPU))


def own_part(batch, config):
    """This rank's samples and rows of a global batch."""
    rows = latitude_band(config.img_size, config.patch_size, comm.get_rank("cp"), comm.get_size("cp"))
    return batch[comm.get_rank("dp") :: comm.get_size("dp"), :, rows]


def train(config, steps=10):
    """Losses, and this rank's part of the weights: {name: (value, dim that is split over tp or None)}."""
    step, random, losses = build(config), torch.Generator().manual_seed(1), []
    for i in range(steps):
        x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
        losses.append(step(i, own_part(x, config), own_part(y, config)))
    losses = comm.all_reduce(torch.stack(losses)) / comm.world_size()
    whole = {}
    for name, p in step.parallel.model.named_parameters():
        value = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        whole[name] = value.clone(), step.parallel.split.dims.get(name)
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
