"""Rungs 1 and 2 of the ladder: train the forecasting ViT on one device, or data parallel on many.

    python train.py --config=quick
    torchrun --nproc_per_node 2 train.py --config=quick

Exit status: 0 finished, 1 the loss became non-finite, 2 settings or input cannot be used, 75 stopped by a signal
after saving a checkpoint (the same command continues).
"""

import torch

from networks.vit import ViT
from utils import comm
from utils.compute import apply_compute_options
from utils.config import load_config
from utils.data_loader import build_loaders
from utils.errors import STOPPED_STATUS, reported_as_usage_error
from utils.optim import build_optimizer
from utils.profiling import restart_under_nsys
from utils.report import print_result
from utils.run_folder import RunFolder
from utils.trainer import Trainer


def main(argv=None):
    config = load_config(argv, __doc__, comm.read_launch().world_size)
    restart_under_nsys()
    device = comm.init(config.device, config.comm_timeout)

    train_loader, valid_loader = comm.agree(lambda: build_loaders(config, device))

    torch.manual_seed(config.seed)
    with reported_as_usage_error(ValueError, config.config):
        model = ViT(
            config.img_size,
            config.patch_size,
            config.n_in_channels,
            config.n_out_channels,
            config.embed_dim,
            config.depth,
            config.num_heads,
            config.mlp_ratio,
            config.dropout,
        ).to(device)
    apply_compute_options(config, device, model)
    optimizer = build_optimizer(config, model, device)
    torch.manual_seed(config.seed + comm.rank())  # dropout: every rank its own

    run = RunFolder(config)
    summary = run.summary()
    if summary and comm.is_main():
        print(f"{run.path} is a finished run; its result:")
    if not summary:
        summary = Trainer(config, device, model, optimizer, train_loader, valid_loader, run).fit()
        if summary is None:
            return STOPPED_STATUS
        run.write_summary(summary)
    print_result(summary, config)


if __name__ == "__main__":
    comm.run_ranks(main)
