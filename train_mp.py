"""Rung 3 of the ladder: one model over several devices, by tensor, context and pipeline parallelism.

    torchrun --nproc_per_node 2 train_mp.py --config=mp_quick --tensor_parallel 2
    torchrun --nproc_per_node 4 train_mp.py --config=mp_quick --context_parallel 2 --data_parallel fsdp

The ranks that are left are data parallel, with any strategy of rung 2. `python -m utils.comm` shows the groups of a
layout. Exit status: as train.py.
"""

import torch

from distributed.data_parallel import data_parallel
from distributed.model_parallel import split_model
from training.model import build_model, initial_weights
from training.optimizer import build_optimizer
from training.profiling import restart_under_nsys
from training.run import train
from training.speed_options import apply_compute_options
from utils import comm
from utils.config import load_config
from utils.data_loader import build_loaders
from utils.errors import reported_as_usage_error
from utils.launch import read_launch

SPLITS = ("tensor_parallel", "context_parallel", "pipeline_parallel")


def main(argv: list[str] | None = None) -> int | None:
    """Train as the words of a command line say (sys.argv's, if none are given); returns the exit status."""
    launch = read_launch()
    config = load_config(argv, __doc__, launch.world_size, "config/mp.yaml", SPLITS)
    layout = config.layout(launch.world_size, launch.ranks_per_node)
    restart_under_nsys()
    device = comm.init(config.device, config.comm_timeout)
    comm.build_mesh(device, layout)

    model = build_model(config)  # names and shapes; memory comes when it is known who holds what
    with reported_as_usage_error(ValueError, config.config):
        split = split_model(model, config)
    apply_compute_options(config, device, model)
    loaders = comm.agree(lambda: build_loaders(config, device))
    parallel = data_parallel(model, config, device, initial_weights(config), split)
    optimizer = build_optimizer(config, model, device)
    torch.manual_seed(config.seed + comm.dropout_stream(config.sequence_parallel))

    return train(config, device, parallel, optimizer, loaders)


if __name__ == "__main__":
    comm.run_ranks(main)
