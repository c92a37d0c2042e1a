"""Rungs 1 and 2 of the ladder: train the forecasting ViT on one device, or data parallel on many.

    python train.py --config=quick
    torchrun --nproc_per_node 2 train.py --config=quick

Exit status: 0 finished, 1 the loss became non-finite, 2 settings or input cannot be used, 75 stopped by a signal
after saving a checkpoint (the same command continues).
"""

import torch

from distributed.data_parallel import data_parallel
from training.model import build_model, initial_weights
from training.optimizer import build_optimizer
from training.profiling import restart_under_nsys
from training.run import train
from training.speed_options import apply_compute_options
from utils import comm
from utils.config import load_config
from utils.data_loader import build_loaders
from utils.launch import read_launch


def main(argv: list[str] | None = None) -> int | None:
    """Train as the words of a command line say (sys.argv's, if none are given); returns the exit status."""
    launch = read_launch()
    config = load_config(argv, __doc__, launch.world_size)
    layout = config.layout(launch.world_size, launch.ranks_per_node)
    restart_under_nsys()
    device = comm.init(config.device, config.comm_timeout)
    comm.build_mesh(device, layout)

    model = build_model(config)  # names and shapes; memory comes when it is known who holds what
    apply_compute_options(config, device, model)
    loaders = comm.agree(lambda: build_loaders(config, device))
    parallel = data_parallel(model, config, device, initial_weights(config))
    optimizer = build_optimizer(config, model, device)
    torch.manual_seed(config.seed + comm.dropout_stream())

    return train(config, device, parallel, optimizer, loaders)


if __name__ == "__main__":
    comm.run_ranks(main)
