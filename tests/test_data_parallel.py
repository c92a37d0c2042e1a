"""Every data-parallel strategy trains as one device does with the whole batch."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from distributed.data_parallel import data_parallel, shard_size, sharded_units
from utils import comm
from utils.compute import apply_compute_options
from utils.layout import Layout
from utils.model import build_model, initial_weights
from utils.optim import build_optimizer
from utils.training_step import TrainingStep

CPU = torch.device("cpu")
STEPS = 10
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp"]


def build(config):
    comm.build_mesh(CPU, Layout(comm.world_size(), shard=shard_size(config, comm.world_size())))
    model = build_model(config)
    apply_compute_options(config, CPU, model)
    parallel = data_parallel(model, config, CPU, initial_weights(config))
    return model, TrainingStep(config, CPU, parallel, build_optimizer(config, model, CPU))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(config, steps=STEPS):
    """Losses, averaged over the ranks, and the whole weights after some steps over the same global batches."""
    model, step = build(config)
    random, losses = torch.Generator().manual_seed(1), []
    for i in range(steps):
        x, y = torch.randn(2, config.global_batch_size, 20, *config.img_size, generator=random)
        own = slice(comm.get_rank("dp"), None, comm.get_size("dp"))
        losses.append(step(i, x[own], y[own]))
    losses = comm.all_reduce(torch.stack(losses)) / comm.world_size()
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return losses, weights


def assert_same_training(results, serial, tolerance=1e-5):
    """The update of every weight, relative to the largest one of its tensor, is that of the serial run."""
    for losses, weights in results:
        torch.testing.assert_close(losses, serial[0], rtol=tolerance, atol=0)
        for name, expected in serial[1].items():
            error = (weights[name] - expected).norm() / expected.norm().clamp_min(1e-3)
            assert error < tolerance, (name, error)


# Adam divides by the root of a gradient's square: where a gradient is rounding noise alone, its sign decides.
PARITY = {"global_batch_size": 12, "depth": 3, "optimizer": "AdamW", "num_iters": 50}
VARIANTS = {
    "plain": {},
    "accumulation": {"gradient_accumulation": 3},
    "clipping": {"clip_grad_norm": 0.1},
    "recomputation": {"activation_checkpointing": "full"},
    "selective recomputation of every 2nd block": {
        "activation_checkpointing": "selective",
        "checkpointing_interval": 2,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 4])
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, size, strategy, variant):
    options = PARITY | VARIANTS[variant]
    serial = train(tiny_config(**options))
    config = tiny_config(**options, data_parallel=strategy, dp_shard=size // 2 if strategy == "hsdp" else None)
    assert_same_training(ranks(size, train, config), serial)
