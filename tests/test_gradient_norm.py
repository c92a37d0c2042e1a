"""The norm of the gradient is that of one device, whatever torch's way to share a parameter out."""

import pytest
import torch

from tests.support.layout_parity import build, own_part, ranks_and_options
from tests.support.marks import slow_but
from training.tasks import build_task
from utils import comm

SIZES = {"img_size": [16, 32], "depth": 2, "num_heads": 4, "global_batch_size": 4}


def norm_of_the_first_step(config):
    step = build(config)
    batch = build_task(config).random_batch(torch.Generator().manual_seed(1))
    x, y = (own_part(part, config) for part in batch)
    output = step(0, x, y, log_norm=True)
    return comm.all_reduce(output.grad_norm_squared.clone()).sqrt().item()


@pytest.mark.parametrize("strategy", slow_but(["fsdp"], ["zero2", "fsdp"], "the norm under zero2"))
def test_a_parameter_that_tp_and_fsdp_cut_along_one_dimension_counts_once(ranks, tiny_config, strategy):
    size, own = ranks_and_options(f"tp2xdp2,tp_backend=dtensor,data_parallel={strategy}")
    one = norm_of_the_first_step(tiny_config(**SIZES))
    for norm in ranks(size, norm_of_the_first_step, tiny_config(**SIZES, **own)):
        assert norm == pytest.approx(one, rel=1e-6)
